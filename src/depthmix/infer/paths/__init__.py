"""The ways to compute a step, behind the one interface of `infer.steps`.

`plain` runs the model's own forward pass, anywhere; while all decode on a GPU it replays `decode`.
`fused` keeps a step on the device, by kernels for which `layout` lays the weights out. `draw` draws
tokens for whoever has no kernel for it.
"""
