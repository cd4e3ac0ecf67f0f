"""guidellm against `depthmix serve`: from one request at a time to saturation, none may fail.

It is not one of the project's tools: install it anywhere (`pip install guidellm`) and name its
command. It needs no network.

    python benchmarks/guidellm_sweep.py runs/first
    python benchmarks/guidellm_sweep.py runs/first --guidellm elsewhere/bin/guidellm --seconds 30

Exports the run, because guidellm reads a tokenizer by transformers, serves the export, and prints
for each rate of requests what was answered and how fast. Requests that are cut off by the end of a
rate's time are incomplete, and not failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from served import serve

from depthmix.hf.export import export_model
from depthmix.models import open_model

COLUMNS = ("strategy", "requests/s", "tokens/s", "latency s", "first token ms", "between ms")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--guidellm", default="guidellm", help="its command")
    parser.add_argument("--steps", type=int, default=6, help="rates, with one and all at a time")
    parser.add_argument("--seconds", type=int, default=20, help="time of each")
    parser.add_argument("--connections", type=int, default=256, help="most requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def summarise(benchmark: dict[str, Any]) -> dict[str, Any]:
    metrics = benchmark["metrics"]

    def mean(name: str) -> float:
        return round(metrics[name]["successful"]["mean"], 3)

    strategy = benchmark["config"]["strategy"]
    rate = strategy.get("rate")
    totals = metrics["request_totals"]
    return {
        "strategy": strategy["type_"] if rate is None else f"{strategy['type_']} {rate:.2f}",
        "requests/s": mean("requests_per_second"),
        "tokens/s": mean("output_tokens_per_second"),
        "latency s": mean("request_latency"),
        "first token ms": mean("time_to_first_token_ms"),
        "between ms": mean("inter_token_latency_ms"),
        "answered": totals["successful"],
        "incomplete": totals["incomplete"],
        "failed": totals["errored"],
    }


def main() -> int:
    args = read_arguments()
    stored = open_model(args.run)
    tool = Path(args.guidellm)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exported, report = folder / "exported", folder / "report.json"
        tokenizer, end_token = stored.vocabulary
        export_model(stored.network, exported, tokenizer=tokenizer, end_token=end_token)
        limits = ("--max-queue", args.connections, "--max-connections", 2 * args.connections)
        with serve([exported], *limits) as (address, _):
            backend = f"kind=openai_http,target={address},model=exported"
            tokens = f"prompt_tokens={args.prompt_tokens},output_tokens={args.output_tokens}"
            sweep = f"sweep_size={args.steps},max_concurrency={args.connections}"
            command = [str(tool.resolve()) if tool.exists() else args.guidellm, "run"]
            command += ["--backend", f"{backend},request_format=/v1/completions"]
            command += ["--profile", f"kind=sweep,{sweep}"]
            command += ["--constraint", f"kind=max_duration,seconds={args.seconds}"]
            command += ["--tokenizer", f"kind=huggingface_auto,model={exported}"]
            command += ["--data", f"kind=synthetic_text,{tokens}"]
            command += ["--output", f"kind=json,path={report}", "--disable-console"]
            # our own packages are none of its business
            alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
            subprocess.run(command, cwd=folder, check=True, env={**alone, "HF_HUB_OFFLINE": "1"})
        found = [summarise(each) for each in json.loads(report.read_text())["benchmarks"]]
    columns = [*COLUMNS, "answered", "incomplete", "failed"]
    print(" | ".join(columns))
    for row in found:
        print(" | ".join(str(row[column]) for column in columns))
    if args.json is not None:
        args.json.write_text(json.dumps({"model": str(args.run), "rates": found}, indent=2) + "\n")
    failed = sum(row["failed"] for row in found)
    print(f"{failed} requests failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
