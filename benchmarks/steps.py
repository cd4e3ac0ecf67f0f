"""The device's time for a decoding step, by rows: Mixture-of-Depths and its dense twin.

    python benchmarks/steps.py                        # large and small
    python benchmarks/steps.py --shapes long --rows 1 # width 1536, contexts of 8,192

Rows have contexts of 128 to 1,088 tokens, routed blocks an eighth of that. Weights are random, in
bf16; every replay of a step has new tokens, and predictors are calibrated to 12.5 %. Times are
medians of replays of a recorded step without drawing. "separate" is the same step without the
kernels of `stream.cu` and `prefetch.cu`; both must agree. Bandwidth counts what a step has to read:
the weights of blocks that any row takes, keys and values. Needs a GPU.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from decode_models import ROUTING, make_model
from meters import name_device, require_gpu
from torch import Tensor

from depthmix import ModelConfig
from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.infer.paths.layout import make_rules, stack_weights
from depthmix.kernels.decode.blocks import Blocks, Pools, Tokens
from depthmix.kernels.recording import record_graph

SHAPES = {
    "large": ({"width": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 32768}, (128, 1088)),
    "small": ({"width": 1024, "num_layers": 16, "num_heads": 8, "vocab_size": 32768}, (128, 1088)),
    "long": (
        {"width": 1536, "num_layers": 20, "num_heads": 12, "num_kv_heads": 4, "vocab_size": 32768},
        (8192, 8192),
    ),
}
PEAK = 4.8e12
"""Bytes per second, by the data sheet of an H200."""


class Found(NamedTuple):
    """What a step took and returned."""

    seconds: float
    logits: Tensor
    taken: Tensor


class Bench:
    """A model whose rows hold random keys and values."""

    def __init__(self, shape: str, name: str, most_rows: int) -> None:
        fields, (shortest, longest) = SHAPES[shape]
        config = ModelConfig(**fields, max_seq_len=longest + 64, routing=ROUTING[name])
        self.config = config
        self.model = make_model(config, "cuda", torch.bfloat16, 1024)
        selector = "predictor" if config.routed_layers else None
        page_size, num_layers = 16, config.num_layers
        num_pages = most_rows * -(-(longest + 64) // page_size) * num_layers
        pages = Pages(num_pages, page_size, num_layers, most_rows, longest=longest + 64)
        device = torch.device("cuda")
        self.cache = PagedCache(config, pages, device=device, dtype=torch.bfloat16, by_page=True)
        for row in range(most_rows):
            assert pages.reserve(row, longest + 64)
        self.cache.send_tables()
        self.cache.key.normal_(std=0.5)
        self.cache.value.normal_(std=0.5)
        generator = torch.Generator().manual_seed(3)
        self.contexts = torch.randint(
            shortest, longest + 1, (most_rows,), generator=generator, dtype=torch.int32
        )
        self.lengths = self.contexts.repeat(num_layers, 1)
        self.lengths[list(config.routed_layers)] //= 8
        cache = self.cache
        self.blocks = Blocks(
            stack_weights(self.model),
            make_rules(config, selector),
            Pools(cache.key, cache.value, cache.tables, cache.lengths),
            config.capacities,
            most_tokens=most_rows,
            most_sampled=most_rows,
            newest=torch.zeros(most_rows, device="cuda", dtype=torch.int64),
        )

    def time_step(self, num_rows: int, num_replays: int) -> Found:
        def send(values: object) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32, device="cuda").clone()

        order = torch.arange(num_rows)
        tokens = Tokens(
            given=send(order),
            row=send(order),
            position=send(self.contexts[:num_rows]),
            chunk=send(order),
            begin=send(torch.arange(num_rows + 1)),
            chunk_row=send(order),
            num_tokens=send([num_rows]),
            sampled=send(order),
            num_sampled=send([num_rows]),
        )
        routes = len(self.config.routed_layers)
        taken = torch.zeros((routes, num_rows), device="cuda", dtype=torch.uint8)

        def work() -> Tensor:
            return self.blocks.run(tokens, taken, num_alone=num_rows, num_chunks=0)

        def restore() -> None:
            self.cache.lengths.copy_(self.lengths)

        restore()
        graph, logits = record_graph(work, restore)
        times, all_logits, all_taken = [], [], []
        generator = torch.Generator(device="cuda").manual_seed(5)
        for _ in range(num_replays):
            tokens.given.random_(self.config.vocab_size, generator=generator)
            restore()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
            all_logits.append(logits[:num_rows].float().clone())
            all_taken.append(taken.clone())
        return Found(statistics.median(times), torch.stack(all_logits), torch.stack(all_taken))

    def count_bytes(self, num_rows: int, taken: Tensor) -> float:
        """Bytes that a step has to read on average."""
        weights, config = self.blocks.weights, self.config
        block = sum(
            t[0].numel()
            for t in (weights.w_qkv, weights.w_attn_out, weights.w_in, weights.w_mlp_out)
        )
        pair = 2 * config.shape.num_kv_heads * config.shape.head_width
        num_keys = int(self.contexts[:num_rows].sum())
        routes = len(config.routed_layers)
        total = weights.head.numel() + (config.num_layers - routes) * (block + pair * num_keys)
        if routes:
            total += routes * float(taken.any(dim=2).float().mean()) * block
            total += routes * float(taken.float().mean()) * pair * num_keys / 8
            assert weights.predictor_in is not None
            total += weights.predictor_in.numel()
        return 2 * total


def compare(new: Found, old: Found) -> str:
    """How far two ways of computing the same steps differ."""
    same = (new.taken == old.taken).all(dim=1)
    differs = 1 - float((new.taken == old.taken).float().mean()) if new.taken.numel() else 0.0
    error = (new.logits - old.logits)[same].norm() / old.logits[same].norm()
    note = f"{float(error):.1e}, decisions {100 * differs:.2f}%"
    return note if float(error) < 0.03 and differs < 0.02 else f"DIFFERS: {note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["large", "small"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--models", nargs="+", choices=tuple(ROUTING), default=tuple(ROUTING))
    parser.add_argument("--replays", type=int, default=30)
    args = parser.parse_args()
    require_gpu(parser)
    for shape in args.shapes:
        print(f"\n### {shape}\n")
        print(
            "| rows | model | µs | of 4.8 TB/s | separate | difference |\n|---|---|---|---|---|---|"
        )
        for name in args.models:
            bench = Bench(shape, name, max(args.rows))
            blocks = bench.blocks
            used = blocks.most_streamed, blocks.few.prefetched
            for num_rows in args.rows:
                blocks.most_streamed, blocks.few.prefetched = used
                new = bench.time_step(num_rows, args.replays)
                blocks.most_streamed, blocks.few.prefetched = 0, None
                old = bench.time_step(num_rows, args.replays)
                share = bench.count_bytes(num_rows, new.taken) / new.seconds / PEAK
                print(
                    f"| {num_rows} | {name} | {1e6 * new.seconds:,.0f} | {share:.0%} "
                    f"| {1e6 * old.seconds:,.0f} | {compare(new, old)} |",
                    flush=True,
                )
            del bench
    print(f"\n{name_device('cuda')}, torch {torch.__version__}")
    print(f"`python benchmarks/{Path(__file__).name} {' '.join(sys.argv[1:])}`")


if __name__ == "__main__":
    main()
