"""Sequences whose tokens a model's blocks compute step by step, and what must come out.

For the tests of the kernels that run blocks: of a step of any kind, and of few tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.infer.paths import layout
from depthmix.kernels.decode import blocks as blocks_module
from depthmix.nn import Transformer
from variants import make_config, make_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# buffers that a step leaves unchanged, or resets itself
LASTING = ("arrivals", "ones", "order", "route_of_layer", "newest", "counters")


def make(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Transformer:
    sizes = {"width": 32, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 40, "vocab_size": 32}
    config = make_config(name, **{**sizes, **overrides})
    model = make_model(config, dtype=torch.float32).requires_grad_(False)
    for place, parameter in model.named_parameters():
        if place.endswith(("w_qk.bias", "w_value.bias")):
            parameter.normal_(std=0.5)
    return model.to(DEVICE, dtype)


class Part(NamedTuple):
    """Tokens of one row that a step computes."""

    row: int
    count: int


class Room(NamedTuple):
    """The sizes that a step is padded to."""

    num_tokens: int
    num_alone: int
    num_chunks: int


class Bench:
    """Sequences whose tokens are known, computed part by part."""

    def __init__(self, model: Transformer, selector: str | None, num_rows: int, most: int) -> None:
        config, dtype = model.config, model.embedding.weight.dtype
        self.model, self.selector, self.config = model, selector, config
        page_size, longest = 4, config.max_seq_len
        num_pages = num_rows * -(-longest // page_size) * config.num_layers
        pages = Pages(num_pages, page_size, config.num_layers, num_rows, longest=longest)
        self.cache = PagedCache(config, pages, device=DEVICE, dtype=dtype, by_page=True)
        for row in range(num_rows):
            assert pages.reserve(row, longest)
        self.cache.send_tables()
        self.cache.key.fill_(float("nan"))
        self.cache.value.fill_(float("nan"))
        # left by an earlier sequence: a new one must start empty
        self.cache.lengths.fill_(3)
        generator = torch.Generator().manual_seed(2)
        shape = (num_rows, longest)
        self.tokens = torch.randint(config.vocab_size, shape, generator=generator)
        self.done = [0] * num_rows
        self.newest = torch.full((num_rows,), -7, device=DEVICE, dtype=torch.int64)
        cache = self.cache
        self.blocks = blocks_module.Blocks(
            layout.stack_weights(model),
            layout.make_rules(config, selector),
            blocks_module.Pools(cache.key, cache.value, cache.tables, cache.lengths),
            config.capacities,
            most_tokens=most,
            most_sampled=most,
            newest=self.newest,
        )
        self.taken: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self.logits: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def poison(self) -> None:
        owners = [vars(self.blocks), vars(self.blocks.few)]
        if self.blocks.stream is not None:
            owners += [vars(self.blocks.stream), self.blocks.stream.scratch]
        for owner in owners:
            for name, value in owner.items():
                if isinstance(value, Tensor) and name not in LASTING:
                    value.fill_(float("nan") if value.is_floating_point() else 3)

    def step(
        self,
        alone: Sequence[Part],
        chunks: Sequence[Part],
        room: Room,
        most_asked: int | None = None,
    ) -> None:
        """Compute the next tokens of these rows, with logits for all of them.

        Or, with room for `most_asked`, for the last tokens only.
        """
        given: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        begin: list[int] = []
        chunk_row: list[int] = []
        for parts, size in ((alone, room.num_alone), (chunks, room.num_chunks)):
            for row, count in parts:
                start = self.done[row]
                own = self.tokens[row, start : start + count].tolist()
                begin.append(len(given))
                if parts is alone and start:
                    # the device already knows the token
                    self.newest[row], own = own[0], [-1]
                given += own
                rows += [row] * count
                positions += range(start, start + count)
                numbers += [len(chunk_row)] * count
                chunk_row.append(row)
            begin += [len(given)] * (size - len(parts))
            chunk_row += [-1] * (size - len(parts))
        num_real, rest = len(given), room.num_tokens - len(given)

        def send(values: list[int]) -> Tensor:
            return torch.tensor(values, device=DEVICE, dtype=torch.int32)

        num_tokens = send([num_real])
        asked = list(range(num_real))[-(most_asked or num_real) :]
        tokens = blocks_module.Tokens(
            given=send(given + [0] * rest),
            row=send(rows + [-1] * rest),
            position=send(positions + [0] * rest),
            chunk=send(numbers + [0] * rest),
            begin=send([*begin, num_real]),
            chunk_row=send(chunk_row),
            num_tokens=num_tokens,
            sampled=send([*asked, *[0] * (rest if most_asked is None else 0)]),
            num_sampled=send([len(asked)]),
        )
        num_routes = len(self.config.routed_layers)
        taken = torch.full((num_routes, room.num_tokens), 7, device=DEVICE, dtype=torch.uint8)
        self.poison()
        logits = self.blocks.run(
            tokens, taken, num_alone=room.num_alone, num_chunks=room.num_chunks
        )
        assert logits[: len(asked)].isfinite().all()
        if most_asked is not None:
            # as if the others had been requested too
            missing = torch.full((num_real - len(asked), logits.shape[1]), torch.nan)
            logits = torch.cat([missing.to(logits), logits])
        at = 0
        for row, count in (*alone, *chunks):
            self.logits[row].append(logits[at : at + count].float().clone())
            self.taken[row].append(taken[:, at : at + count].clone())
            at += count
            self.done[row] += count

    def compare(self, tolerance: float) -> None:
        """Compare everything computed so far with the forward pass."""
        for row, count in enumerate(self.done):
            if not count:
                continue
            tokens = self.tokens[row : row + 1, :count].to(DEVICE)
            truth = self.model(tokens, selector=self.selector)
            lengths = torch.full((self.config.num_layers,), count)
            if truth.routings:
                kept = torch.stack([r.slot[0] >= 0 for r in truth.routings])
                found = torch.cat(self.taken[row], dim=1)
                assert torch.equal(found, kept.to(torch.uint8))
                lengths[list(self.config.routed_layers)] = kept.sum(dim=1).cpu()
            # what each layer has stored
            assert self.cache.lengths[:, row].tolist() == lengths.tolist()
            found, expected = torch.cat(self.logits[row]), truth.logits[0].float()
            # logits that were not requested
            expected[found.isnan()] = torch.nan
            scale = float(expected.nan_to_num().abs().max())
            atol = tolerance * scale
            torch.testing.assert_close(found, expected, rtol=0, atol=atol, equal_nan=True)
