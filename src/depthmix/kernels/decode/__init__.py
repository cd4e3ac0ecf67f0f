"""Triton kernels for an engine's steps: prefill and decoding of many sequences.

`step` decodes one token of one sequence in one launch; `blocks` runs all blocks for the tokens of
any step, using `routed` (few rows), `places` (many) and `chunks` (attention). `draw` draws tokens.
None of them depends on a model class: they take stacked tensors and numbers, see `plan`.
"""
