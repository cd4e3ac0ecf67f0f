"""Time of one training step: Mixture-of-Depths, its dense twin, and common alternatives.

    python benchmarks/train_step.py                          # both shapes on one GPU, a table
    python benchmarks/train_step.py --models dense mod plain hf-llama --json out.json
    python benchmarks/train_step.py --shape small --profile  # where the time goes
    python benchmarks/train_step.py --shape smoke --cpu      # does it run at all

A step is forward, backward and fused AdamW, in bf16 with float32 master weights, compiled. depthmix
replays whole steps as CUDA graphs unless --no-graph; the baselines run as torch.compile made them.

Every model has its own process, so that all compile in parallel. A GPU at its power limit slows
down as it warms up, so the models then take turns, a few steps each, with only one running at a
time; a time is the median over all turns.
"""

import argparse
import json
import platform
import statistics
import time
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from baselines import BASELINES, BaselineStep
from meters import name_device, require_gpu

from depthmix import ModelConfig, RoutingConfig, flops
from depthmix.nn import Transformer
from depthmix.train.step import TrainStep

SHAPES = {
    "large": {"width": 1024, "num_layers": 16, "num_heads": 8, "max_seq_len": 2048},
    "small": {"width": 512, "num_layers": 12, "num_heads": 4, "max_seq_len": 1024},
    "smoke": {"width": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 64},
}
VOCABULARY = {"large": 32768, "small": 16384, "smoke": 256}
BATCH = {"large": 16, "small": 32, "smoke": 2}
ROUTING = {"dense": RoutingConfig(), "mod": RoutingConfig(strategy="expert_choice")}
WARM_ROUNDS, ROUNDS, STEPS_A_TURN = 2, 6, 10


def make_config(model: str, shape: str) -> ModelConfig:
    routing = ROUTING.get(model, RoutingConfig())
    return ModelConfig(**SHAPES[shape], vocab_size=VOCABULARY[shape], routing=routing)


class Runner:
    """One model, its step and its batch."""

    def __init__(self, model: str, shape: str, device: str, graph: bool) -> None:
        torch.manual_seed(0)
        config = make_config(model, shape)
        size = (BATCH[shape], config.max_seq_len + 1)
        tokens = torch.randint(config.vocab_size, size, device=device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.device = device
        self.step = self._make_step(model, config, graph)
        for _ in range(5):
            self.step(*self.batch)
        self.synchronize()

    def _make_step(self, model: str, config: ModelConfig, graph: bool) -> TrainStep | BaselineStep:
        if model in BASELINES:
            return BaselineStep(model, config, self.device)
        with torch.device(self.device):
            network = Transformer(config)
        optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True, capturable=graph)
        return TrainStep(
            network, optimizer, precision=torch.bfloat16, compile=True, cuda_graph=graph
        )

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def take_turn(self) -> list[float]:
        """Milliseconds of each step of a turn."""
        # the first step of a turn includes the cost of switching models
        self.step(*self.batch)
        if self.device == "cpu":
            marks = [time.perf_counter()]
            for _ in range(STEPS_A_TURN):
                self.step(*self.batch)
                marks.append(time.perf_counter())
            return [1e3 * (end - start) for start, end in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS_A_TURN + 1)]
        events[0].record()
        for event in events[1:]:
            self.step(*self.batch)
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    def measure_memory(self) -> float:
        """Peak GiB so far."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0

    def profile(self) -> str:
        """A table of the kernels of one step."""
        activity = getattr(torch.profiler.ProfilerActivity, self.device.upper())
        with torch.profiler.profile(activities=[activity]) as profile:
            self.step(*self.batch)
            self.synchronize()
        return profile.key_averages().table(
            sort_by=f"{self.device}_time_total", row_limit=60, max_name_column_width=80
        )


def serve(pipe: Connection, *what: object) -> None:
    """A model's process: executes commands, one word each."""
    runner = Runner(*what)
    pipe.send("ready")
    while (word := pipe.recv()) != "stop":
        pipe.send(getattr(runner, word)())


class Remote:
    """The parent's handle on a model's process."""

    def __init__(self, *what: object) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *what), daemon=True)
        self.process.start()
        theirs.close()
        self.times: list[float] = []

    def ask(self, word: str) -> object:
        self.pipe.send(word)
        return self.pipe.recv()


def summarize(model: str, shape: str, remote: Remote) -> dict:
    milliseconds = statistics.median(remote.times)
    row = {"shape": shape, "model": model, "ms": milliseconds}
    low, _, high = statistics.quantiles(remote.times, n=4)
    row["ms_quartiles"] = [low, high]
    for count, half in (("half", True), ("full", False)):
        config = make_config(model, shape)
        total = flops.training_flops(config, batch_size=BATCH[shape], causal_half=half)
        row |= {f"flops_{count}": total, f"tflops_{count}": total / milliseconds / 1e9}
    return row | {"peak_gib": remote.ask("measure_memory")}


def print_table(rows: list[dict], device: str) -> None:
    print("| shape | model | step, ms | quartiles | TFLOP/s | × dense | FLOPs allow | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        dense = next((r for r in rows if (r["shape"], r["model"]) == (row["shape"], "dense")), row)
        low, high = row["ms_quartiles"]
        print(
            f"| {row['shape']} | {row['model']} | {row['ms']:.2f} | {low:.2f}-{high:.2f} "
            f"| {row['tflops_half']:.0f} | {dense['ms'] / row['ms']:.3f} "
            f"| {dense['flops_half'] / row['flops_half']:.3f} | {row['peak_gib']:.1f} |"
        )
    name = name_device(device)
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["large", "small"])
    parser.add_argument(
        "--models", nargs="+", choices=[*ROUTING, *BASELINES], default=["dense", "mod", "plain"]
    )
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument(
        "--wait-for", type=Path, help="compile, then wait for this file before timing anything"
    )
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    device, graph = ("cpu", False) if args.cpu else ("cuda", not args.no_graph)
    names = [(shape, model) for shape in args.shape for model in args.models]
    remotes = {(s, m): Remote(m, s, device, graph) for s, m in names}
    for name, remote in remotes.items():
        assert remote.pipe.recv() == "ready"
        print(*name, "is compiled", flush=True)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.5)
    rows = []
    for shape in args.shape:
        for number in range(WARM_ROUNDS + ROUNDS):
            for model in args.models:
                times = remotes[shape, model].ask("take_turn")
                if number >= WARM_ROUNDS:
                    remotes[shape, model].times += times
        rows += [summarize(model, shape, remotes[shape, model]) for model in args.models]
        print_table(rows, device)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.profile:
        for name, remote in remotes.items():
            print(*name)
            print(remote.ask("profile"))
    for remote in remotes.values():
        remote.pipe.send("stop")
        remote.process.join()


if __name__ == "__main__":
    main()
