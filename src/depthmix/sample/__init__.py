"""Text in, text out: the sampler, and samples (`show`) and chats (`talk`) on a terminal.

Joins `infer`, which reads no tokenizer files, and `models`, which has no engine.
"""

from depthmix.sample.sampler import Sampler, TextModel, open_model, start_sampler

__all__ = ["Sampler", "TextModel", "open_model", "start_sampler"]
