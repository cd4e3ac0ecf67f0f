"""A Mixture-of-Depths model against its dense twin, each behind `depthmix serve`.

    python benchmarks/serving.py --json out.json            # the 1.3B shape on one GPU
    python benchmarks/serving.py --shape smoke --cpu        # does it run at all

The models are those of engine.py: random weights, predictors calibrated to 12.5 %, an untied head.
Prompts are token ids of mixed lengths, answers are sampled at temperature 0.8 and of equal length.
For each model, one at a time on the device:

engine      `Engine.generate` of all requests in one process, without a server: tokens per second
saturated   the same requests over HTTP, all at once
curve       requests that arrive at random (Poisson), at fractions of the dense model's saturated
            rate, the same for both: how long each took from its sending to its end

The knee is the highest rate at which the dense model's mean latency is at most KNEE times that at
the lowest one. Every answer must come, and be whole.
"""

import argparse
import asyncio
import gc
import json
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine as bench
import httpx
import tokenizers
import torch
from decode_models import SHAPES
from meters import name_device
from served import serve
from tokenizers import decoders, models

from depthmix.config import Recipe, RunConfig
from depthmix.infer import SamplingParams
from depthmix.models import open_model
from depthmix.models.write import write_run
from depthmix.serve.server import load_engine

MODELS = ("dense", "mod")
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
KNEE = 2.0
TEMPERATURE = 0.8
NUM_CALLS = 3


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--requests", type=int, help="in one go; default 1024, and 24 for smoke")
    parser.add_argument("--seconds", type=float, help="of each rate; default 60, and 3 for smoke")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    is_small = args.shape == "smoke"
    args.requests = args.requests or (24 if is_small else 1024)
    args.seconds = args.seconds or (3.0 if is_small else 60.0)
    if not args.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible to torch: run it on a GPU, or add --cpu")
    return args


def write_model(model: str, folder: Path, args: argparse.Namespace) -> Path:
    """A run with the model's weights, and a tokenizer whose tokens are numbers."""
    sizes = bench.SMOKE if args.shape == "smoke" else bench.REAL
    config = bench.choose_config(model, args.shape, sizes)
    device, dtype = ("cpu", torch.float32) if args.cpu else ("cuda", torch.bfloat16)
    # float32 holds what bfloat16 does
    network = bench.make_network(config, device, dtype).float()
    words = {f"{number} ": number for number in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="0 "))
    tokenizer.decoder = decoders.Fuse()
    source = folder / f"{model}-tokenizer"
    source.mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    weights = {name: weight.detach().cpu() for name, weight in network.named_parameters()}
    run = RunConfig(model=config, train=Recipe())
    write_run(
        folder / model,
        run,
        weights,
        source=source,
        end_token=None,
        chat=None,
        reason="random weights for a benchmark",
    )
    return folder / model


def draw_prompts(path: Path, count: int, shape: str, call: int) -> list[list[int]]:
    sizes = bench.SMOKE if shape == "smoke" else bench.REAL
    lengths = bench.draw_lengths(count, sizes)
    return bench.draw_tokens(open_model(path).config, lengths, call)


def time_engine(path: Path, args: argparse.Namespace, num_new: int) -> dict[str, float]:
    """All requests by `Engine.generate`, after one call that is not counted."""
    made = load_engine(open_model(path), device="cpu" if args.cpu else "cuda")
    seconds = []
    for call in range(1 + NUM_CALLS):
        prompts = draw_prompts(path, args.requests, args.shape, call)
        params = [
            SamplingParams(max_tokens=num_new, temperature=TEMPERATURE, seed=n)
            for n in range(args.requests)
        ]
        start = time.perf_counter()
        results = made.generate(prompts, params)
        seconds.append(time.perf_counter() - start)
        assert all(len(result.samples[0].tokens) == num_new for result in results)
    del made
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = statistics.median(seconds[1:])
    return {"seconds": middle, "tokens_per_second": args.requests * num_new / middle}


class Client:
    """Requests to one server."""

    def __init__(self, address: str, num_new: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=address, timeout=None, limits=limits)
        self.num_new = num_new

    async def ask(self, prompt: Sequence[int], seed: int) -> tuple[float, float]:
        """Seconds from the sending to the end, and the share of blocks that were run."""
        wish = {"prompt": prompt, "max_tokens": self.num_new, "seed": seed}
        wish |= {"temperature": TEMPERATURE, "ignore_eos": True}
        start = time.perf_counter()
        answer = await self.http.post("/v1/completions", json=wish)
        seconds = time.perf_counter() - start
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == self.num_new
        return seconds, usage["depth"]["blocks_executed"] / usage["depth"]["blocks"]

    async def saturate(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        start = time.perf_counter()
        asked = [self.ask(prompt, seed) for seed, prompt in enumerate(prompts)]
        found = await asyncio.gather(*asked)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "requests_per_second": len(prompts) / seconds,
            "tokens_per_second": len(prompts) * self.num_new / seconds,
            "share_of_blocks": statistics.mean(share for _, share in found),
        }

    async def arrive(
        self, prompts: Sequence[Sequence[int]], rate: float, seconds: float
    ) -> dict[str, float]:
        """Requests at a mean rate; the same times and prompts for every model."""
        rng = random.Random(round(1e6 * rate))
        tasks, start, due = [], time.perf_counter(), 0.0
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            prompt = prompts[len(tasks) % len(prompts)]
            tasks.append(asyncio.ensure_future(self.ask(prompt, len(tasks))))
        times = sorted(took for took, _ in await asyncio.gather(*tasks))
        if not times:
            raise SystemExit(f"no request came in {seconds} s: choose more --seconds")
        return {
            "rate": rate,
            "requests": len(times),
            "mean_seconds": statistics.mean(times),
            "p50_seconds": statistics.median(times),
            "p99_seconds": times[int(0.99 * (len(times) - 1))],
        }


async def measure_server(
    address: str, path: Path, args: argparse.Namespace, num_new: int, full: float | None
) -> dict[str, Any]:
    """`full` is the rate that fractions are of; None takes this model's own."""
    client = Client(address, num_new)
    async with client.http:
        turns = [
            await client.saturate(draw_prompts(path, args.requests, args.shape, call))
            for call in range(1 + NUM_CALLS)
        ]
        # the first warms up
        saturated = sorted(turns[1:], key=lambda turn: turn["seconds"])[NUM_CALLS // 2]
        rate = full or saturated["requests_per_second"]
        prompts = draw_prompts(path, args.requests, args.shape, 1 + NUM_CALLS)
        curve = [
            await client.arrive(prompts, fraction * rate, args.seconds) for fraction in FRACTIONS
        ]
    return {"saturated": saturated, "curve": curve}


def find_knee(curve: Sequence[dict[str, float]]) -> int:
    most = KNEE * curve[0]["mean_seconds"]
    return max(n for n, point in enumerate(curve) if point["mean_seconds"] <= most)


def main() -> int:
    args = read_arguments()
    # a connection is an open file, here and in the server
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sizes = bench.SMOKE if args.shape == "smoke" else bench.REAL
    device, found = "cpu" if args.cpu else "cuda", {}
    full = None
    with tempfile.TemporaryDirectory() as name:
        for model in MODELS:
            path = write_model(model, Path(name), args)
            alone = time_engine(path, args, sizes.num_new)
            limits = ("--max-queue", args.requests, "--max-connections", 2 * args.requests)
            with serve([path], "--device", device, *limits) as (address, _):
                told = asyncio.run(measure_server(address, path, args, sizes.num_new, full))
            found[model] = {"engine": alone, **told}
            full = full or told["saturated"]["requests_per_second"]
            print(model, json.dumps(found[model], indent=1), flush=True)
    dense, mod = found["dense"], found["mod"]
    knee = find_knee(dense["curve"])
    at_knee = [each["curve"][knee]["mean_seconds"] for each in (dense, mod)]
    per_second = [each["saturated"]["tokens_per_second"] for each in (dense, mod)]
    result = {
        "device": name_device(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "shape": args.shape,
        "prompt_tokens": sizes.lengths,
        "new_tokens": sizes.num_new,
        "requests": args.requests,
        "seconds_of_each_rate": args.seconds,
        "throughput_over_dense": per_second[1] / per_second[0],
        "knee_requests_per_second": dense["curve"][knee]["rate"],
        "latency_saved_at_knee": 1 - at_knee[1] / at_knee[0],
        "server_over_engine": {
            model: each["saturated"]["seconds"] / each["engine"]["seconds"]
            for model, each in found.items()
        },
        "models": found,
    }
    print(json.dumps({k: v for k, v in result.items() if k != "models"}, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
