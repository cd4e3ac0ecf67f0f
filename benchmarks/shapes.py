"""Time of a training step at untuned shapes: odd vocabularies, lengths and widths.

    python benchmarks/shapes.py                         # all shapes on one GPU, a table
    python benchmarks/shapes.py --shape gpt2 gpt2-even  # what a vocabulary of 50,257 costs
    python benchmarks/shapes.py --shape smoke --cpu     # does it run at all

Steps, processes and turns are those of train_step.py; here all shapes take turns with each other,
so that any two rows of the table can be compared. `× even` is the time relative to the same model
with the vocabulary rounded up to a multiple of 64. `FLOPs allow` is dense FLOPs over the model's,
with causal attention counted as the half that is computed.

All models are on the GPU at the same time, about 100 GiB for the default ones: on a smaller GPU,
select a few.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import train_step
from meters import name_device, require_gpu
from train_step import Remote

MODELS = ("dense", "mod")
ALIKE = {"gpt2": "gpt2-even", "smoke-odd": "smoke"}
"""Shapes that differ only in their vocabulary."""

_GPT2 = {"width": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "max_seq_len": 4096}
_SMOKE = {"width": 64, "num_layers": 2, "num_heads": 2, "max_seq_len": 50}

# name: fields of the model, vocabulary, batch
SHAPES: dict[str, tuple[dict[str, int], int, int]] = {
    "gpt2": (_GPT2, 50257, 8),
    "gpt2-even": (_GPT2, 50304, 8),
    "odd-length": (
        {"width": 640, "num_layers": 10, "num_heads": 10, "max_seq_len": 1000},
        32768,
        7,
    ),
    "wide": (
        {"width": 2048, "num_layers": 16, "num_heads": 16, "max_seq_len": 2048},
        32768,
        4,
    ),
    "smoke": (_SMOKE, 320, 3),
    "smoke-odd": (_SMOKE, 257, 3),
}
DEFAULT = [name for name in SHAPES if not name.startswith("smoke")]
WARM_ROUNDS, ROUNDS = 1, 3

# here and not in main(): a model's process imports this file again before creating its model
for _name, (_fields, _vocabulary, _batch) in SHAPES.items():
    train_step.SHAPES[_name] = _fields
    train_step.VOCABULARY[_name], train_step.BATCH[_name] = _vocabulary, _batch


def describe_shape(shape: str) -> str:
    fields, vocabulary, batch = SHAPES[shape]
    return (
        f"{fields['width']} × {fields['num_layers']}, {batch} × {fields['max_seq_len']}, "
        f"{vocabulary:,} ids"
    )


def measure(names: list[tuple[str, str]], device: str, graph: bool) -> list[dict]:
    """Rows of the table; every model stays loaded from beginning to end."""
    remotes = {(s, m): Remote(m, s, device, graph) for s, m in names}
    for name, remote in remotes.items():
        # a process that dies closes its end of the pipe
        try:
            assert remote.pipe.recv() == "ready"
        except EOFError:
            sys.exit(f"{' '.join(name)} could not be made: what it said stands above")
        print(*name, "is compiled", flush=True)
    for number in range(WARM_ROUNDS + ROUNDS):
        for remote in remotes.values():
            times = remote.ask("take_turn")
            if number >= WARM_ROUNDS:
                assert isinstance(times, list)
                remote.times += times
    rows = [train_step.summarize(m, s, remote) for (s, m), remote in remotes.items()]
    for remote in remotes.values():
        remote.pipe.send("stop")
        remote.process.join()
    return rows


def print_table(rows: list[dict], device: str) -> None:
    print("| shape | model | step, ms | quartiles | × even | × dense | FLOPs allow | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    found = {(row["shape"], row["model"]): row for row in rows}
    for (shape, model), row in found.items():
        even, dense = found.get((ALIKE.get(shape, ""), model)), found[shape, "dense"]
        low, high = row["ms_quartiles"]
        print(
            f"| {describe_shape(shape)} | {model} | {row['ms']:.2f} | {low:.2f}-{high:.2f} "
            f"| {'' if even is None else format(row['ms'] / even['ms'], '.3f')} "
            f"| {dense['ms'] / row['ms']:.3f} | {dense['flops_half'] / row['flops_half']:.3f} "
            f"| {row['peak_gib']:.1f} |"
        )
    name = name_device(device)
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=DEFAULT)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    device, graph = ("cpu", False) if args.cpu else ("cuda", not args.no_graph)
    rows = measure([(shape, model) for shape in args.shape for model in MODELS], device, graph)
    print_table(rows, device)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
