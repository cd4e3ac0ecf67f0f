"""The kernels of an engine's steps, which need Triton: prompts and tokens of many sequences.

`step` is one token of one sequence in one launch; `blocks` are all blocks for the tokens of any
step, made of `routed` (few rows), `places` (many) and `chunks` (attention). `draw` draws tokens.
None of them knows a model: they take stacked tensors and numbers, see `plan`.
"""
