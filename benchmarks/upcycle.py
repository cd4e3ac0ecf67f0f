"""The cost of upcycling: one dense model made cheaper in several ways, each healed, compared.

    python benchmarks/upcycle.py models/SmolLM2-135M --data data --out runs/upcycle --steps 1000
    python benchmarks/upcycle.py MODEL --data data --out OUT --steps 300 --only dense,least-10

The variants are in a file (`upcycle.toml` beside this one). Each is an ordinary run of `depthmix
upcycle` and `depthmix train --from`, `--jobs` of them at a time; finished runs are kept, and
interrupted ones are resumed. A variant that learns from another (`train.teacher`) waits for it.
Then the original and every run are evaluated on the same validation text under top-k and causal
decisions.
"""

import argparse
import json
import platform
import subprocess
import sys
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from depthmix.config.fields import flatten
from depthmix.sweep.folders import is_finished

DEPTHMIX = (sys.executable, "-m", "depthmix")


def heal(args: argparse.Namespace, name: str, fields: dict[str, Any]) -> Path:
    """A variant's finished run; raises CalledProcessError if it failed (its log says why)."""
    run, source = args.out / name, args.model
    if run.exists() and is_finished(run, args.steps):
        return run
    with (args.out / f"{name}.log").open("a") as log:

        def call(*words: object) -> None:
            command = [*DEPTHMIX, *map(str, words)]
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)

        if run.exists():
            call("train", "--resume", run)
            return run
        routing = [f"{k}={v}" for k, v in fields.items() if k.startswith("routing.")]
        if routing:
            source = args.out / f"{name}-untrained"
            if not source.exists():
                call("upcycle", args.model, "--out", source, *routing)
        common = [f"train.seq_len={args.seq_len}", "train.val_every=1000000", *args.field]
        given = [f"{k}={v}" for k, v in fields.items() if k.startswith("train.")]
        about = ("--data", args.data, "--steps", args.steps, "--out", run)
        call("train", "--from", source, *about, *common, *given)
    return run


def measure(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """The output of `depthmix eval` for a model."""
    words = ("eval", path, "--data", args.data, "--seq-len", args.seq_len, "--json")
    limit = () if args.val_tokens is None else ("--max-tokens", args.val_tokens)
    command = [*DEPTHMIX, *map(str, (*words, *limit))]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def pick(answer: dict[str, Any]) -> dict[str, Any]:
    """Select the table's columns."""
    text = answer["text"]
    rules = text["rules"]
    # a dense model has a single rule
    trained, used = rules.get("topk") or rules["dense"], rules.get("causal") or rules["dense"]
    return {
        "share": text["flops_of_dense"],
        "loss_topk": trained["loss"],
        "loss": used["loss"],
        "bits_per_byte": used["bits_per_byte"],
        "kept": used.get("share_routed"),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    fair = next((row["loss"] for row in rows if row["name"] == "dense"), None)
    print("| | forward FLOPs | top-k | causal | kept | against dense |")
    print("|---" * 6 + "|")
    for row in rows:
        kept = "" if row["kept"] is None else f"{row['kept']:.1%}"
        behind = "" if fair is None else f"{row['loss'] / fair - 1:+.2%}"
        cells = (f"{row['share']:.1%}", f"{row['loss_topk']:.4f}", f"{row['loss']:.4f}", kept)
        print(f"| {' | '.join((row['name'], *cells, behind))} |")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot loss against forward FLOPs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in rows:
        place = (100 * row["share"], row["loss"])
        axes.plot(*place, "o", color="tab:orange" if row["share"] < 1 else "tab:blue")
        axes.annotate(row["name"], place, xytext=(5, 3), textcoords="offset points", fontsize=8)
    # room for the names on the right
    axes.margins(x=0.18, y=0.08)
    axes.set(xlabel="forward FLOPs, % of dense", ylabel="validation loss, causal")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a dense model's folder")
    parser.add_argument("--data", type=Path, required=True, help="made with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--val-tokens", type=int, help="of the validation text; all if empty")
    parser.add_argument("--ways", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--only", metavar="WAYS", help="these ways, commas between them")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("field", nargs="*", help="fields of every run, such as train.batch_size=16")
    args = parser.parse_intermixed_args()
    ways = {name: flatten(tree) for name, tree in tomllib.loads(args.ways.read_text()).items()}
    chosen = args.only.split(",") if args.only else list(ways)
    if unknown := set(chosen) - set(ways):
        sys.exit(f"there is no way '{min(unknown)}' in {args.ways}: use {', '.join(ways)}")
    args.out.mkdir(parents=True, exist_ok=True)
    started: dict[str, Future[Path]] = {}

    def work(name: str) -> Path:
        fields = dict(ways[name])
        if teacher := fields.get("train.teacher"):
            # the teacher may have been healed in an earlier run
            run = started[teacher].result() if teacher in started else args.out / teacher
            fields["train.teacher"] = str(run)
        print(f"{name}: healing, see {args.out / name}.log", flush=True)
        run = heal(args, name, fields)
        measure_way(name, run)
        return run

    def measure_way(name: str, path: Path) -> None:
        rows[name] = {"name": name, **pick(measure(args, path))}
        print(json.dumps(rows[name]), flush=True)

    rows: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for name in chosen:
            started[name] = pool.submit(work, name)
        measure_way("original", args.model)
    table = [rows[name] for name in ("original", *chosen) if name in rows]
    (args.out / "results.json").write_text(json.dumps(table, indent=1))
    draw(table, args.out / "loss.png")
    print_table(table)
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"\n{place}, torch {torch.__version__}, {args.steps} steps")
    for name, future in started.items():
        if future.exception() is not None:
            print(f"{name} failed: {args.out / name}.log says why", file=sys.stderr)


if __name__ == "__main__":
    main()
