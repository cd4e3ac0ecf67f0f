"""Draw tokens in fixed shapes, so that a GPU needs a single launch.

`sampling.sample` is about fifty small kernels, and launching them takes the host longer than the
GPU needs to decode a token. Knows nothing of requests.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthmix.infer.sampling import SamplingParams, pack_settings, sample, unpack_settings
from depthmix.kernels.recording import record_graph


class TorchDrawer:
    """Draws for any number of rows. `record` keeps one step per size, as a graph on a GPU."""

    def __init__(self, vocab_size: int, device: torch.device, *, record: bool) -> None:
        self.vocab_size, self.device, self.record = vocab_size, device, record
        self.steps: dict[tuple[int, bool, bool], DrawStep] = {}

    def draw(
        self,
        logits: Sequence[Float[Tensor, " V"]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        steps: Sequence[int],
        seen: Sequence[Int[Tensor, " V"] | None],
    ) -> tuple[list[int], list[float]]:
        """Return each row's token and its log-probability; see `Settings` and `sample`."""
        filtered = any(wish.filters for wish in params)
        penalized = any(marks is not None for marks in seen)
        # rounded up to powers of two if steps are kept, so that there are few sizes
        size = 1 << (len(logits) - 1).bit_length() if self.record else len(logits)
        kind = (size, filtered, penalized)
        step = self.steps.get(kind)
        if step is None:
            shape = (size, self.vocab_size, self.device)
            step = DrawStep(*shape, filtered=filtered, penalized=penalized)
        if self.record:
            self.steps[kind] = step
        return step.run(logits, params, seeds, steps, seen)


class DrawStep:
    """`sample` for up to `num_rows` rows; on a GPU it is recorded at the first call."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        filtered: bool,
        penalized: bool,
    ) -> None:
        """`filtered` as in `sample`; `penalized` if a row may have penalties."""
        self.filtered = filtered
        self.logits = torch.zeros((num_rows, vocab_size), device=device)
        self.seen = torch.zeros_like(self.logits, dtype=torch.int32) if penalized else None
        self.shares = torch.ones((6, num_rows), dtype=torch.float64, device=device)
        self.counts = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.drawn: Float[Tensor, "2 B"] | None = None

    def run(
        self,
        logits: Sequence[Float[Tensor, " V"]],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        steps: Sequence[int],
        seen: Sequence[Int[Tensor, " V"] | None],
    ) -> tuple[list[int], list[float]]:
        """Return tokens and their log-probabilities; draws of spare rows are discarded."""
        count = len(logits)
        self.logits[:count].copy_(torch.stack(list(logits)))
        for row, marks in enumerate(seen):
            # rows without penalties ignore it
            if marks is not None:
                assert self.seen is not None
                self.seen[row].copy_(marks)
        packed = pack_settings(params, seeds, steps)
        for static, new in zip((self.shares, self.counts), packed, strict=True):
            # with pinned memory the host need not wait
            new = new.pin_memory() if static.is_cuda else new
            static[:, :count].copy_(new, non_blocking=True)
        if not self.logits.is_cuda:
            drawn = self._draw()
        else:
            if self.graph is None:
                self.graph, self.drawn = record_graph(self._draw)
            assert self.drawn is not None
            self.graph.replay()
            drawn = self.drawn
        tokens, logprobs = drawn[:, :count].tolist()
        return [int(token) for token in tokens], logprobs

    def _draw(self) -> Float[Tensor, "2 B"]:
        settings = unpack_settings(self.shares, self.counts)
        drawn = sample(self.logits, settings, self.seen, filtered=self.filtered)
        # one tensor: ids up to 2^53 and float32 values are both exact in float64
        return torch.stack([drawn.token.double(), drawn.logprob.double()])
