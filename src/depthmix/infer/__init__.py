"""Inference: causal routing decisions, a cache of routed tokens only, and continuous batching."""

from depthmix.infer.depth import Depth
from depthmix.infer.engine import Engine
from depthmix.infer.results import Event, Result, Sample, TokenScore
from depthmix.infer.sampling import SamplingParams

__all__ = ["Depth", "Engine", "Event", "Result", "Sample", "SamplingParams", "TokenScore"]
