"""The whole training loop against its bare step: what data, logging and clipping cost.

    depthmix prepare … --out data
    python benchmarks/train_loop.py --data data            # 220m and its dense twin on one GPU
    python benchmarks/train_loop.py --preset tiny --steps 20 --cpu vocab_size=4096  # does it run

For each model, first the step alone on random tokens, as timed by `benchmarks/train_step.py`, then
`depthmix train` as a user runs it, with documents, metrics, validation and checkpoints. Its time is
the median of the metrics' own seconds per step, which exclude validation and saving; `all` is the
wall-clock time from the first line of metrics to the last, including everything.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from meters import name_device, require_gpu

from depthmix import Transformer, flops, load_preset
from depthmix.config import RunConfig
from depthmix.train.optim import make_optimizers, set_rates
from depthmix.train.step import TrainStep


def time_bare(run: RunConfig, device: str, num_steps: int) -> float:
    """Median milliseconds of a bare step."""
    torch.manual_seed(0)
    on_gpu = device == "cuda"
    model = Transformer(run.model).to(device)
    optimizers = make_optimizers(model, run.train, capturable=on_gpu)
    set_rates(optimizers, run.train, 0, num_steps)
    precision = torch.bfloat16 if on_gpu else None
    step = TrainStep(model, optimizers, precision=precision, compile=on_gpu, cuda_graph=on_gpu)
    size = (run.train.batch_size, run.seq_len + 1)
    tokens = torch.randint(run.model.vocab_size, size, device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for _ in range(5):
        step(*batch)
    if not on_gpu:
        marks = [time.perf_counter()]
        for _ in range(num_steps):
            step(*batch)
            marks.append(time.perf_counter())
        return 1e3 * statistics.median(b - a for a, b in pairwise(marks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(*batch)
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    # the first half warms the GPU up to its steady temperature
    return statistics.median(times[num_steps // 2 :])


def time_loop(preset: str, args: argparse.Namespace, device: str) -> dict:
    """Measurements from the metrics of `depthmix train`."""
    with tempfile.TemporaryDirectory() as folder:
        out = (args.runs or Path(folder)) / preset
        command = [sys.executable, "-m", "depthmix", "train", "--preset", preset, "--out", str(out)]
        command += ["--steps", str(args.steps), "--device", device, *args.fields]
        command += ["--data", str(args.data)] if args.data else []
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    rest = train[len(train) // 2 :]
    whole = (train[-1]["time"] - train[0]["time"]) / (train[-1]["step"] - train[0]["step"])
    return {
        "ms": 1e3 * statistics.median(line["seconds_per_step"] for line in rest),
        "ms_all": 1e3 * whole,
        "memory_gib": train[-1]["memory_bytes"] / 2**30,
        "loss": train[-1]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="220m")
    parser.add_argument("--data", type=Path, help="a prepared folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--runs", type=Path, help="keep the two runs in this folder")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    parser.add_argument("fields", nargs="*", help="FIELD=VALUE for both")
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    device = "cpu" if args.cpu else "cuda"
    overrides = dict(field.split("=", 1) for field in args.fields)
    rows = []
    for name in (f"{args.preset}-dense", f"{args.preset}-mod"):
        run = RunConfig.from_overrides(load_preset(name), overrides)
        shape = {"seq_len": run.seq_len, "batch_size": run.train.batch_size}
        row = {"model": name, "bare_ms": time_bare(run, device, args.steps)}
        if device == "cuda":
            torch.cuda.empty_cache()
        row |= time_loop(name, args, device)
        row["tokens_per_second"] = 1e3 * run.tokens_per_step / row["ms"]
        row["tflops"] = flops.training_flops(run.model, **shape, causal_half=True) / row["ms"] / 1e9
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(
        "| model | bare step, ms | loop, ms | share | all, ms | tokens/s | TFLOP/s | ratio | GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['bare_ms']:.2f} | {row['ms']:.2f} "
            f"| {row['bare_ms'] / row['ms']:.1%} | {row['ms_all']:.2f} "
            f"| {row['tokens_per_second']:,.0f} | {row['tflops']:.0f} "
            f"| {rows[0]['ms'] / row['ms']:.3f} | {row['memory_gib']:.1f} |"
        )
    where = name_device(device)
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
