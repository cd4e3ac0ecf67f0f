"""Text in, text out: a model that writes (`sampler`), and what of it is seen on a terminal.

Samples are shown by `show`, a conversation is had by `talk`.

Stands above `infer`, which knows no tokenizer files, and above `models`, which knows no engine.
"""

from depthmix.sample.sampler import Sampler, TextModel, open_model, start_sampler

__all__ = ["Sampler", "TextModel", "open_model", "start_sampler"]
