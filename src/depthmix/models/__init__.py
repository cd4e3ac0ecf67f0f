"""Models on disk, from any source: opened, converted, and written as runs.

    open         the one door: a run, a checkpoint, or a Hugging Face folder
    vocabulary   tokenizer and end token, and how a document begins
    chat         the chat template, and what ends an answer
    foreign      dense families and exported folders: configurations and weights
    hub          a name on the Hugging Face hub → a folder
    upcycle      a dense model → a run whose blocks route
    write        weights that came from elsewhere → a run

Needs no transformers, and knows nothing of training or sampling.
"""

from depthmix.models.chat import Chat
from depthmix.models.open import StoredModel, open_model
from depthmix.models.vocabulary import Vocabulary, begin_document

__all__ = ["Chat", "StoredModel", "Vocabulary", "begin_document", "open_model"]
