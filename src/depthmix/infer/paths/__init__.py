"""The ways to compute a step, all behind the interface of `infer.steps`.

`plain` runs the model's own forward pass on any device; for one-token decoding on a GPU it replays
`decode`. `fused` keeps a step on the device, with kernels whose weights `layout` lays out. `draw`
draws tokens for runners without a kernel for it.
"""
