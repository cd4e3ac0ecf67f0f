"""A Mixture-of-Depths model against its dense twin, each behind `depthmix serve`.

    python benchmarks/serving.py --json out.json            # the 1.3B shape on one GPU
    python benchmarks/serving.py --shape smoke --cpu        # does it run at all

The models are those of engine.py: random weights, predictors calibrated to 12.5 %, an untied head.
Prompts are token ids of mixed lengths, answers are sampled at temperature 0.8 and of equal length.
For each model, one at a time on the device:

engine      `Engine.generate` of all requests in one process, without a server: tokens per second
saturated   the same requests over HTTP, all at once
streamed    the same again, as streams
curve       streams that arrive at random (Poisson), at fractions of the dense model's saturated
            rate, the same for both: how long each took from its sending to its first token, to its
            end, and for each token between

The knee is the highest rate at which the dense model's mean latency is at most KNEE times that at
the lowest one. Every answer must come, and be whole. `--json FILE.json` also writes the tables and
the figure of a page of results/ beside it, as FILE.md and FILE.png.
"""

import argparse
import asyncio
import gc
import json
import platform
import random
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import engine as bench
import tokenizers
import torch
from decode_models import SHAPES
from meters import name_device
from results import write_table
from served import serve
from tokenizers import decoders, models

from depthmix.config import Recipe, RunConfig
from depthmix.infer import SamplingParams
from depthmix.models import open_model
from depthmix.models.write import write_run
from depthmix.report.figures import Chart, Panel, Point, Series, save_image
from depthmix.serve.server import load_engine

MODELS = ("dense", "mod")
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
KNEE = 2.0
TEMPERATURE = 0.8
NUM_CALLS = 3
# at the end of an answer, or in the last piece of a stream
USAGE = re.compile(rb'"usage":(\{.*?\}\})')


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--requests", type=int, help="in one go; default 1024, and 24 for smoke")
    parser.add_argument("--seconds", type=float, help="of each rate; default 15, and 3 for smoke")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    is_small = args.shape == "smoke"
    args.requests = args.requests or (24 if is_small else 1024)
    args.seconds = args.seconds or (3.0 if is_small else 15.0)
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


class Answer(NamedTuple):
    """What a client saw of one answer; seconds are counted from its sending."""

    seconds: float
    first_seconds: float
    """Until the first token came; the whole answer's where it is not streamed."""
    share_of_blocks: float


class Client:
    """Requests to one server, over plain sockets: a client must not be slower than the server."""

    def __init__(self, address: str, num_new: int) -> None:
        found = urlsplit(address)
        self.host, self.port, self.num_new = found.hostname, found.port, num_new

    async def ask(self, prompt: Sequence[int], seed: int, *, stream: bool) -> Answer:
        wish: dict[str, Any] = {"prompt": prompt, "max_tokens": self.num_new, "seed": seed}
        wish |= {"temperature": TEMPERATURE, "ignore_eos": True, "stream": stream}
        if stream:
            wish["stream_options"] = {"include_usage": True}
        body = json.dumps(wish).encode()
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        parts, first = [], None
        while part := await reader.read(1 << 16):
            if first is None and b"data: " in part:
                first = time.perf_counter() - start
            parts.append(part)
        seconds = time.perf_counter() - start
        writer.close()
        answer = b"".join(parts)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        # a whole answer, or the last piece of a stream
        assert answer.rstrip().endswith(b"}") or b"data: [DONE]" in answer, answer[-1000:]
        usage = json.loads(USAGE.findall(answer)[-1])
        assert usage["completion_tokens"] == self.num_new
        share = usage["depth"]["blocks_executed"] / usage["depth"]["blocks"]
        return Answer(seconds, seconds if first is None else first, share)

    async def saturate(self, prompts: Sequence[Sequence[int]], *, stream: bool) -> dict[str, float]:
        start = time.perf_counter()
        asked = [self.ask(prompt, seed, stream=stream) for seed, prompt in enumerate(prompts)]
        found = await asyncio.gather(*asked)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "requests_per_second": len(prompts) / seconds,
            "tokens_per_second": len(prompts) * self.num_new / seconds,
            "share_of_blocks": statistics.mean(answer.share_of_blocks for answer in found),
        }

    async def arrive(
        self, prompts: Sequence[Sequence[int]], rate: float, seconds: float
    ) -> dict[str, float]:
        """Streams at a mean rate; the same times and prompts for every model."""
        rng = random.Random(round(1e6 * rate))
        tasks, start, due = [], time.perf_counter(), 0.0
        while (due := due + rng.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            prompt = prompts[len(tasks) % len(prompts)]
            tasks.append(asyncio.ensure_future(self.ask(prompt, len(tasks), stream=True)))
        found = await asyncio.gather(*tasks)
        if not found:
            raise SystemExit(f"no request came in {seconds} s: choose more --seconds")
        later = max(1, self.num_new - 1)
        return {
            "rate": rate,
            "requests": len(found),
            **summarize("", [answer.seconds for answer in found]),
            **summarize("first_", [answer.first_seconds for answer in found]),
            **summarize("token_", [(a.seconds - a.first_seconds) / later for a in found]),
        }


def summarize(name: str, times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        f"{name}mean_seconds": statistics.mean(ordered),
        f"{name}p50_seconds": statistics.median(ordered),
        f"{name}p99_seconds": ordered[int(0.99 * (len(ordered) - 1))],
    }


async def measure_server(
    address: str, path: Path, args: argparse.Namespace, num_new: int, full: float | None
) -> dict[str, Any]:
    """`full` is the rate that fractions are of; None takes this model's own."""
    client, found = Client(address, num_new), {}
    for name, stream in (("saturated", False), ("streamed", True)):
        turns = [
            await client.saturate(
                draw_prompts(path, args.requests, args.shape, call), stream=stream
            )
            for call in range(1 + NUM_CALLS)
        ]
        # the first warms up
        found[name] = sorted(turns[1:], key=lambda turn: turn["seconds"])[NUM_CALLS // 2]
    rate = full or found["saturated"]["requests_per_second"]
    prompts = draw_prompts(path, args.requests, args.shape, 1 + NUM_CALLS)
    curve = [await client.arrive(prompts, fraction * rate, args.seconds) for fraction in FRACTIONS]
    return {**found, "curve": curve}


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
            # nothing is refused, however far the server falls behind
            limits = ("--max-queue", 1 << 20, "--max-connections", 1 << 20)
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
    print(tables := write_tables(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        args.json.with_suffix(".md").write_text(tables)
        save_image(chart_curves(result), args.json.with_suffix(".png"))
    return 0


def write_tables(result: dict[str, Any]) -> str:
    """What was found, as a page of results/ has it."""
    models = result["models"]
    whole = [
        [
            name,
            *(
                f"{each[way]['tokens_per_second']:,.0f}"
                for way in ("engine", "saturated", "streamed")
            ),
            f"{100 * (each['saturated']['seconds'] / each['engine']['seconds'] - 1):+.1f} %",
            f"{100 * (each['streamed']['seconds'] / each['engine']['seconds'] - 1):+.1f} %",
            f"{100 * each['saturated']['share_of_blocks']:.1f} %",
        ]
        for name, each in models.items()
    ]
    tokens = ("`Engine.generate`, tokens/s", "server, tokens/s", "streamed, tokens/s")
    head = ["", *tokens, "server's cost", "streamed", "blocks run"]
    curves = [
        [
            f"{point['rate']:.2f}",
            name,
            *(
                f"{1000 * point[f'{what}{place}_seconds']:,.1f}"
                for what in ("", "first_", "token_")
                for place in ("p50", "p99")
            ),
        ]
        for place in range(len(FRACTIONS))
        for name, point in ((name, each["curve"][place]) for name, each in models.items())
    ]
    times = [f"{what}, {place}" for what in ("whole", "first", "later") for place in ("p50", "p99")]
    lowest, highest = result["prompt_tokens"]
    return (
        f"{result['device']}, torch {result['torch']}, shape `{result['shape']}`: "
        f"{result['requests']:,} requests, prompts of {lowest} to {highest} tokens, "
        f"{result['new_tokens']} new ones.\n\n"
        f"{write_table(head, whole)}\n"
        f"The routed model has {result['throughput_over_dense']:.2f} times the throughput, and at "
        f"the dense model's knee ({result['knee_requests_per_second']:.2f} requests a second) "
        f"{100 * result['latency_saved_at_knee']:.0f} % less mean latency.\n\n"
        f"Milliseconds of streams at each rate: the whole answer, its first token, and each later "
        f"one.\n\n"
        f"{write_table(['requests/s', '', *times], curves)}"
    )


def chart_curves(result: dict[str, Any]) -> Chart:
    """Latency against load, whole answers and first tokens."""
    panels = [
        Panel(
            title,
            "requests a second",
            "seconds, median",
            [
                Series(
                    name,
                    color,
                    "line",
                    [Point(each["rate"], each[f"{what}p50_seconds"]) for each in found["curve"]],
                )
                for color, (name, found) in enumerate(result["models"].items())
            ],
        )
        for title, what in (("whole answer", ""), ("first token", "first_"))
    ]
    return Chart("serving", f"Latency behind the server: {result['shape']}", "", panels)


if __name__ == "__main__":
    sys.exit(main())
