"""Text in, text out: a model that writes (`sampler`), and its samples on a terminal (`show`).

Stands above `infer`, which knows no tokenizer files, and above `models`, which knows no engine.
"""

from depthmix.sample.sampler import Sampler, TextModel, open_model, start_sampler

__all__ = ["Sampler", "TextModel", "open_model", "start_sampler"]
