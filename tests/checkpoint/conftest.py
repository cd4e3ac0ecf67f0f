"""A small training that can be saved, for the tests of checkpoints."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from depthmix.checkpoint import collect_tensors
from depthmix.config import load_preset
from depthmix.nn import Transformer


class Training:
    """The `tiny` preset, its optimisers, and steps over data that depends on the step alone."""

    def __init__(self, kind: str = "adamw", device: str = "cpu", **overrides: object) -> None:
        self.model = Transformer(load_preset("tiny", **overrides)).to(device)
        params = list(self.model.parameters())
        matrices = [p for p in self.model.layers.parameters() if p.ndim == 2]
        others = [p for p in params if not any(p is m for m in matrices)]
        made: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
            "adamw": lambda: [torch.optim.AdamW(params, lr=1e-2)],
            "fused": lambda: [torch.optim.AdamW(params, lr=1e-2, fused=True)],
            "capturable": lambda: [torch.optim.AdamW(params, lr=1e-2, capturable=True)],
            "muon": lambda: [
                torch.optim.Muon(matrices, lr=1e-2),
                torch.optim.AdamW(others, lr=1e-2),
            ],
        }
        self.optimizers = made[kind]()
        self.step = 0

    def run(self, num_steps: int) -> None:
        config = self.model.config
        for _ in range(num_steps):
            source = torch.Generator().manual_seed(self.step)
            tokens = torch.randint(config.vocab_size, (2, 17), generator=source)
            tokens = tokens.to(self.model.embedding.weight.device)
            logits = self.model(tokens[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:]).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1

    def collect(self) -> dict[str, dict[str, Tensor]]:
        return collect_tensors(self.model, self.optimizers)

    def copy(self) -> dict[str, dict[str, Tensor]]:
        return {p: {n: t.clone() for n, t in named.items()} for p, named in self.collect().items()}

    @property
    def state(self) -> dict[str, object]:
        return {"config": {"model": self.model.config.to_dict()}}


@pytest.fixture
def make_training() -> type[Training]:
    return Training
