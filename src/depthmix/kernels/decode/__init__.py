"""Kernels for an engine's steps: prefill and decoding of many sequences.

`step` decodes one token of one sequence in one launch; `blocks` runs all blocks for the tokens of
any step, using `stream` (few rows in one launch, in CUDA C++), `routed` (few rows), `places` (many)
and `chunks` (attention). `draw` draws tokens. All but `stream` are written in Triton.
None of them depends on a model class: they take stacked tensors and numbers, see `plan`.
"""
