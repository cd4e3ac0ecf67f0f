"""Text → tokens → shards → batches, without torch.

`prepare` makes a data folder, `Corpus.open` checks and maps it, `Loader` reads batches from it.
`tokenizers` is imported only to convert between text and ids.
"""

from depthmix.data.default import prepare_default
from depthmix.data.loader import Batch, Loader, Prefetcher, prefetch
from depthmix.data.manifest import Manifest
from depthmix.data.prepare import Progress, prepare, show_progress
from depthmix.data.shards import Corpus, Split
from depthmix.data.tokenizer import find_end_token, load_tokenizer, train_tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "Loader",
    "Manifest",
    "Prefetcher",
    "Progress",
    "Split",
    "find_end_token",
    "load_tokenizer",
    "prefetch",
    "prepare",
    "prepare_default",
    "show_progress",
    "train_tokenizer",
]
