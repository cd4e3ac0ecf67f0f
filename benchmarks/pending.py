"""What has not been measured on a GPU yet: each measurement is one command.

    python benchmarks/pending.py                              # the list
    python benchmarks/pending.py energy prompts               # run these, on a GPU
    python benchmarks/pending.py trained --runs RUN TWIN      # of trained models
    python benchmarks/pending.py --tiny                       # does each run at all, on a CPU

What a command prints goes to `NAME.txt` in --out, its numbers to `NAME.json` where it has any.
`engine-large.json` and `engine-small.json` of results/ are such files. Results that are published
leave this list.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Measurement(NamedTuple):
    """A command for a GPU, without `python benchmarks/`."""

    what: str
    command: str
    has_json: bool = True


MEASUREMENTS = {
    "energy-large": Measurement(
        "Joules per token of decoding, width 2048", "engine.py --shape large --parts energy"
    ),
    "energy-small": Measurement(
        "Joules per token of decoding, width 1024", "engine.py --shape small --parts energy"
    ),
    "decode-transformers": Measurement(
        "a decoding step against a warm generate() of transformers, and torch.compile",
        "decode.py --skip batch prefill generate energy",
    ),
    "trained": Measurement(
        "trained models, sampled: a MoD and its dense twin (--runs, of the plan isoflop)",
        "trained.py",
    ),
    "long": Measurement(
        "share of the bandwidth at width 1536 and contexts of 8,192 tokens",
        "steps.py --shapes long --rows 1 2 4 8",
        has_json=False,
    ),
    "vocabulary": Measurement(
        "decoding with 50,257 ids, width 2048",
        "engine.py --shape large --parts single batch --requests 8 64 --vocab-size 50257",
    ),
    "host": Measurement(
        "what the host and drawing add to the device's own time, one request",
        "engine.py --shape large --parts single first",
    ),
    "serving": Measurement(
        "throughput and latency behind the server, MoD and dense twin", "serving.py"
    ),
}


def list_words(name: str, runs: list[Path], out: Path, *, tiny: bool) -> list[str]:
    """A measurement's command, or its smallest version for a CPU."""
    measurement = MEASUREMENTS[name]
    script, *words = measurement.command.split()
    if tiny:
        if "--shape" in words:
            words[words.index("--shape") + 1] = "smoke"
        elif name == "trained":
            words += ["--batch", "1", "2", "--tokens", "8"]
        else:
            words += ["--shape", "smoke"]
        if "--requests" in words:
            start = words.index("--requests") + 1
            words[start:] = [{"8": "2", "64": "4"}.get(word, word) for word in words[start:]]
        words.append("--cpu")
    json = ["--json", str(out / f"{name}.json")] if measurement.has_json else []
    # a list of runs would swallow what follows it
    return [str(FOLDER / script), *(map(str, runs) if name == "trained" else ()), *words, *json]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure")
    parser.add_argument(
        "--runs", nargs="+", type=Path, default=[], help="finished runs, for trained"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/pending"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU, to try commands")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in MEASUREMENTS]:
        parser.error(f"there is no '{unknown[0]}': use {', '.join(MEASUREMENTS)}")
    if "trained" in args.names and not args.runs:
        parser.error("trained needs finished runs: add --runs RUN TWIN")
    if not args.names and not args.tiny:
        for name, measurement in MEASUREMENTS.items():
            print(f"{name:15} {measurement.what}\n{'':15} benchmarks/{measurement.command}")
        return
    names = args.names or [
        name
        for name, each in MEASUREMENTS.items()
        # recorded steps need a GPU, and trained models a run
        if each.has_json and (name != "trained" or args.runs)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        words = list_words(name, args.runs, args.out, tiny=args.tiny)
        print(f"{name}: python {' '.join(words)}", flush=True)
        with open(args.out / f"{name}.txt", "w", encoding="utf-8") as log:
            done = subprocess.run([sys.executable, *words], stdout=log, stderr=log, check=False)
        if done.returncode:
            failed.append(name)
            print(f"{name} failed: {log.name} says why", flush=True)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
