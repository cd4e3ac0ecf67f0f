"""End-to-end wall-clock time of `Engine.generate`: Mixture-of-Depths and its dense twin.

    python benchmarks/engine.py --json out.json               # all parts, large, one GPU
    python benchmarks/engine.py --shape small --parts single batch
    python benchmarks/engine.py --parts batch --requests 8 64 --vocab-size 50257
    python benchmarks/engine.py --shape smoke --cpu           # does it run at all

A time covers the whole call, with a default engine: `Engine(model)`. After its `warm_up`, if it has
one, the first call of a kind is reported apart from the warm ones, whose median counts. Every call
has new prompts of the same lengths, so that no earlier work can be reused.

Weights are random, in bf16 on a GPU. The predictors are calibrated to 12.5 %; the fraction actually
taken is read from the results. The head is not tied, and logits have the spread LOGIT_SPREAD: with
a tied head, random weights repeat one token forever, which leaves nothing to draw and gives each
request a single, constant decision. What a step reads and computes is the same.

single        one request: microseconds per token, greedy and sampled
batch         8, 64 and 256 requests of mixed lengths: tokens per second, and the bandwidth limit
prompt        one long prompt and one token: milliseconds, and the fraction of the matrix peak
energy        Joules per token, from the GPU's own counter
memory        the same cache for both models: how many requests run at once
transformers  a Llama of the dense shape: generate() and generate_batch()
first         a fresh process with empty disk caches, then another one: seconds until it is warm,
              and the time of `single` on the device alone

If one part fails, the others still run.
"""

import argparse
import gc
import inspect
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from baselines import make_llama
from decode_models import ROUTING, SHAPES, make_config, make_model
from decode_tables import find_row, print_line
from meters import (
    measure_energy,
    name_device,
    open_meter,
    require_gpu,
    synchronize,
    time_call,
)

from depthmix import ModelConfig, flops
from depthmix.infer import Engine, Result, SamplingParams
from depthmix.nn import Transformer

PARTS = ("single", "batch", "prompt", "energy", "memory", "transformers", "first")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}
"""Sampling settings."""
LOGIT_SPREAD = 2.8
"""Standard deviation of the logits: a few dozen tokens are likely, as in real text."""
CALIBRATION_LENGTH = 1024
MIN_CALLS, MAX_CALLS, LONG_CALL = 3, 9, 20.0
"""Warm calls: minimum, maximum; a call of LONG_CALL seconds is not repeated."""
FRESH_CALLS, FRESH_SECONDS = 10, 10.0
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 600e12
"""Approximate peak rates that kernels reach on an H200."""


class Sizes(NamedTuple):
    """Workload sizes."""

    max_seq_len: int = 8448
    single: tuple[int, int] = (64, 256)
    """Prompt tokens and new tokens."""
    batches: tuple[int, ...] = (8, 64, 256)
    lengths: tuple[int, int] = (64, 1024)
    """Lengths of a batch's shortest and longest prompt."""
    num_new: int = 128
    prompts: tuple[int, ...] = (2048, 8192)
    many: int = 64
    """Requests in parts with a single batch."""
    equal: int = 512
    """Tokens per prompt in the part `memory`."""
    room: int = 16
    """Requests that fit into the dense model's cache in that part."""
    square: int = 8192
    """Size of the matrix product that measures the peak."""
    warm_seconds: float = 2.0
    """Repeat warm calls for this long, up to MAX_CALLS."""


REAL = Sizes()
SMOKE = Sizes(128, (8, 8), (2, 4), (4, 16), 8, (32, 96), 4, 24, 2, 256, 0.0)


class Timed(NamedTuple):
    """One kind of call, repeated."""

    first: float
    """Seconds of the first call."""
    warm: list[float]
    """Seconds of each later call."""
    shares: dict[str, float]
    """Fraction of routed blocks taken by the warm calls, see `count_taken`."""

    @property
    def seconds(self) -> float:
        return statistics.median(self.warm)


class Subject:
    """A model under test with a default engine, created at first use."""

    def __init__(self, name: str, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        self.name, self.config = name, config
        self.network = make_network(config, device, dtype)
        self.warm_up_seconds: float | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self.network)
            self.warm_up_seconds = warm_up(self._engine)
            if self.warm_up_seconds is not None:
                print(f"{self.name}: warmed up in {self.warm_up_seconds:.1f} s", flush=True)
        return self._engine

    def drop_engine(self) -> None:
        """Free the engine's memory for other uses."""
        self._engine = None
        collect()


def make_network(config: ModelConfig, device: str, dtype: torch.dtype) -> Transformer:
    """Random weights that route at the capacity's rate and do not generate loops."""
    length = min(CALIBRATION_LENGTH, config.max_seq_len)
    network = make_model(config, device, dtype, length)
    with torch.no_grad():
        # the norm before the head scales its input to an rms of 1
        spread = network.head.weight.float().std().item() * math.sqrt(config.width)
        network.norm.weight.mul_(LOGIT_SPREAD / spread)
    return network


def choose_config(
    model: str, shape: str, sizes: Sizes, vocab_size: int | None = None
) -> ModelConfig:
    fields: dict[str, Any] = {"max_seq_len": sizes.max_seq_len, "tied_head": False}
    if vocab_size is not None:
        fields["vocab_size"] = vocab_size
    return make_config(model, SHAPES[shape]).override(fields)


def warm_up(engine: Engine) -> float | None:
    """Seconds to compile ahead; None for an engine that does not, or that failed."""
    if not hasattr(engine, "warm_up"):
        return None
    start = time.perf_counter()
    try:
        engine.warm_up()
    except Exception:
        print(f"warm_up failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return None
    return time.perf_counter() - start


def collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def draw_tokens(config: ModelConfig, lengths: Sequence[int], call: int) -> list[list[int]]:
    """Random prompts, different for each call but the same for each model."""
    generator = torch.Generator().manual_seed(1000 + call)
    drawn = torch.randint(config.vocab_size, (sum(lengths),), generator=generator)
    return [part.tolist() for part in drawn.split(list(lengths))]


def draw_lengths(number: int, sizes: Sizes) -> list[int]:
    """Uniformly distributed lengths, always the same for a given number."""
    low, high = sizes.lengths
    generator = torch.Generator().manual_seed(2)
    return torch.randint(low, high + 1, (number,), generator=generator).tolist()


def list_params(way: str, number: int, num_new: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=num_new, seed=n, **WAYS[way]) for n in range(number)]


def time_generate(
    engine: Engine,
    lengths: Sequence[int],
    params: Sequence[SamplingParams],
    device: str,
    warm_seconds: float,
) -> Timed:
    """Time the whole call several times; check that outputs have exactly the requested length."""
    times: list[float] = []
    taken: Counter[str] = Counter()
    offered: Counter[str] = Counter()
    while not is_enough(times[1:], warm_seconds):
        prompts, made = draw_tokens(engine.config, lengths, len(times)), []
        call = partial(keep_results, made, engine.generate, prompts, params)
        times.append(time_call(call, device))
        counts = [len(result.samples[0].tokens) for result in made]
        assert counts == [wish.max_tokens for wish in params], "a request ended early"
        if len(times) > 1:
            # immediately: kept results would be scanned by the garbage collector in the next call
            count_taken(made, taken, offered)
    shares = {name: taken[name] / count for name, count in offered.items() if count}
    return Timed(times[0], times[1:], shares)


def keep_results(made: list, call: Callable[..., Any], *arguments: Any) -> None:
    made.extend(call(*arguments))


def is_enough(warm: Sequence[float], warm_seconds: float) -> bool:
    if not warm:
        return False
    if max(warm) > LONG_CALL or len(warm) >= MAX_CALLS:
        return True
    return len(warm) >= MIN_CALLS and sum(warm) > warm_seconds


def count_taken(results: Sequence[Result], taken: Counter[str], offered: Counter[str]) -> None:
    """Count routed blocks taken, separately for prompt tokens and new ones."""
    for result in results:
        for sample in result.samples:
            blocks, cut = sample.depth.blocks, len(result.prompt)
            for name, paths in (("share_prompt", blocks[:cut]), ("share_new", blocks[cut:])):
                taken[name] += sum(map(sum, paths))
                offered[name] += sum(map(len, paths))


def count_prompt_flops(config: ModelConfig, num_tokens: int) -> float:
    """FLOPs that a prompt executes: causally visible pairs only, and logits of one token."""
    parts = flops.count_parts(config, num_tokens, causal_half=True)
    return sum(parts.values()) - parts["head"] * (num_tokens - 1) / num_tokens


def compute_ideal(
    config: ModelConfig, lengths: Sequence[int], num_new: int, itemsize: int
) -> dict[str, float]:
    """Seconds that a batch would take if only bytes and FLOPs mattered.

    All requests run at once, however many the engine admits. Prompts cost the FLOPs that they
    execute, at FLOPS_PER_SECOND, and give each request its first token. Each of the other
    num_new - 1 steps reads the weights once, and the keys and values of all tokens so far, at
    BYTES_PER_SECOND; its FLOPs, activations and writes are free. A routed block keeps its
    capacity's share of tokens, independently for each row: its weights are read if any of B rows
    takes it, 1 - (1 - share)^B of the time. Its cache holds that share of tokens. Predictors and
    routers are always read. Launches and waiting cost nothing, and prompts and steps do not
    overlap.
    """
    batch, read = len(lengths), config
    if config.routed_layers:
        share = 1 - (1 - config.capacities[0]) ** batch
        read = config.override({"routing.capacity": share})
    # only a few rows of an untied embedding are read
    num_weights = flops.num_parameters(read).active
    if not config.tied_head:
        num_weights -= flops.matrix_sizes(config).head
    longest = config.max_seq_len
    each = flops.kv_cache_bytes(config, seq_len=longest, bytes_per_element=itemsize) / longest
    # a step's own token is read too
    num_read = sum(length + step for length in lengths for step in range(1, num_new))
    num_bytes = (num_new - 1) * num_weights * itemsize + each * num_read
    prompt_flops = sum(count_prompt_flops(config, length) for length in lengths)
    seconds = {
        "prompt_s": prompt_flops / FLOPS_PER_SECOND,
        "decode_s": num_bytes / BYTES_PER_SECOND,
    }
    return {
        **seconds,
        "seconds": sum(seconds.values()),
        "prompt_flops": prompt_flops,
        "decode_bytes": num_bytes,
    }


def measure_device(engine: Engine, sizes: Sizes) -> float | None:
    """Microseconds per token in the kernels and copies of one greedy request, without the host.

    This is the sum of their times. None if the profiler does not work.
    """
    length, num_new = sizes.single
    prompts, params = draw_tokens(engine.config, [length], 0), list_params("greedy", 1, num_new)
    try:
        for _ in range(2):
            # the first run includes the profiler's startup
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                engine.generate(prompts, params)
                torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in profile.key_averages()) / num_new
    except Exception as error:
        print(f"the device's own time is not known: {error}", file=sys.stderr, flush=True)
        return None


def measure_peak(size: int, device: str, dtype: torch.dtype) -> float:
    """FLOPs per second of a square matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    seconds = [time_call(lambda: [torch.mm(a, b) for _ in range(5)], device) / 5 for _ in range(5)]
    return 2 * size**3 / statistics.median(seconds)


class Bench:
    """The run: its options, and the measured rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.parts, self.path, self.shape = list(args.parts), args.json, args.shape
        self.device = "cpu" if args.cpu else "cuda"
        self.dtype = torch.float32 if args.cpu else torch.bfloat16
        self.sizes = SMOKE if self.shape == "smoke" else REAL
        self.batches = tuple(args.requests or self.sizes.batches)
        self.calls, self.vocab_size = list(args.calls), args.vocab_size
        self.models = [m for m in ROUTING if args.only in (None, m)]
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.about = {
            "command": shlex.join(["python", *sys.argv]),
            "device": name_device(self.device),
            "torch": torch.__version__,
            "triton": find_version("triton"),
            "transformers": find_version("transformers"),
            "python": platform.python_version(),
            "shape": self.shape,
            "vocab_size": self.choose_config("dense").vocab_size,
        }

    def choose_config(self, model: str) -> ModelConfig:
        return choose_config(model, self.shape, self.sizes, self.vocab_size)

    @contextmanager
    def attempt(self, part: str, model: str | None = None) -> Iterator[None]:
        """Run a part; report and record a failure, and continue."""
        start, name = time.perf_counter(), part if model is None else f"{part}, {model}"
        try:
            yield
        except Exception:
            self.failed.append(name)
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        print(f"[{name}: {time.perf_counter() - start:.1f} s]", flush=True)
        self.write()

    def add(self, line: str, **row: Any) -> None:
        """Record a measurement, and print it."""
        self.rows.append(row)
        print(line, flush=True)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            tree = {**self.about, "failed": self.failed, "rows": self.rows}
            self.path.write_text(json.dumps(tree, indent=1))

    def run(self) -> None:
        if "prompt" in self.parts:
            with self.attempt("peak"):
                self.measure_matrix()
        for model in self.models:
            self.run_model(model)
        if "transformers" in self.parts:
            with self.attempt("transformers"):
                self.measure_transformers()
            collect()
        for model in self.models if "first" in self.parts else ():
            with self.attempt("first", model):
                self.measure_first(model)

    def run_model(self, model: str) -> None:
        """Run the parts that need a model in this process, one model at a time."""
        measures = {
            "single": self.measure_single,
            "batch": self.measure_batch,
            "prompt": self.measure_prompt,
            "energy": self.measure_energy,
            "memory": self.measure_memory,
        }
        chosen = [part for part in measures if part in self.parts]
        if not chosen:
            return
        subject = None
        with self.attempt("model", model):
            config = self.choose_config(model)
            subject = Subject(model, config, self.device, self.dtype)
        if subject is not None:
            for part in chosen:
                with self.attempt(part, model):
                    measures[part](subject)
            if subject.warm_up_seconds is not None:
                seconds = subject.warm_up_seconds
                text = f"warm_up, {model}: {seconds:.1f} s"
                self.add(text, part="warm_up", model=model, seconds=seconds)
        del subject
        collect()

    def measure_matrix(self) -> None:
        size = self.sizes.square
        peak = measure_peak(size, self.device, self.dtype)
        text = f"peak: {peak / 1e12:,.1f} TFLOP/s of a product of {size}³"
        self.add(text, part="peak", size=size, flops_per_second=peak)

    def time_case(self, subject: Subject, lengths: Sequence[int], way: str, num_new: int) -> dict:
        """One kind of call, as the fields of a row."""
        params = list_params(way, len(lengths), num_new)
        seconds = self.sizes.warm_seconds
        timed = time_generate(subject.engine, lengths, params, self.device, seconds)
        count = num_new * len(lengths)
        return {
            "model": subject.name,
            "way": way,
            "requests": len(lengths),
            "prompt_tokens": sum(lengths),
            "new_tokens": count,
            "first_s": timed.first,
            "warm_s": timed.seconds,
            "warm_calls_s": timed.warm,
            "us_per_token": 1e6 * timed.seconds / count,
            "tokens_per_second": count / timed.seconds,
            **timed.shares,
        }

    def measure_single(self, subject: Subject) -> None:
        length, num_new = self.sizes.single
        for way in WAYS:
            row = self.time_case(subject, [length], way, num_new)
            row["ideal"] = compute_ideal(subject.config, [length], num_new, self.dtype.itemsize)
            first = 1e6 * row["first_s"] / num_new
            text = f"{row['us_per_token']:,.1f} µs a token (first call {first:,.1f})"
            text = f"single, {subject.name}, {way}: {text}{format_shares(row)}"
            self.add(text, part="single", **row)

    def measure_batch(self, subject: Subject) -> None:
        num_new = self.sizes.num_new
        for number in self.batches:
            lengths = draw_lengths(number, self.sizes)
            ideal = compute_ideal(subject.config, lengths, num_new, self.dtype.itemsize)
            for way in ("greedy", "top-p 0.95"):
                row = self.time_case(subject, lengths, way, num_new)
                # since the engine was created: earlier batches were smaller
                row["cache_bytes_peak"] = subject.engine.stats().cache_bytes_peak
                row["ideal"] = ideal
                text = f"{row['tokens_per_second']:,.0f} new tokens/s, {row['warm_s']:.2f} s "
                text += f"(first call {row['first_s']:.2f}; ideally {ideal['seconds']:.3f}), "
                text += f"cache {row['cache_bytes_peak'] / 2**20:,.0f} MiB{format_shares(row)}"
                self.add(f"batch {number}, {subject.name}, {way}: {text}", part="batch", **row)

    def measure_prompt(self, subject: Subject) -> None:
        peak = find_row(self.rows, part="peak")
        for length in self.sizes.prompts:
            row = self.time_case(subject, [length], "greedy", 1)
            row["flops"] = count_prompt_flops(subject.config, length)
            row["flops_per_second"] = row["flops"] / row["warm_s"]
            text = f"{1e3 * row['warm_s']:.2f} ms (first call {1e3 * row['first_s']:.1f}), "
            text += f"{row['flops_per_second'] / 1e12:,.1f} TFLOP/s"
            if peak is not None:
                row["share_of_peak"] = row["flops_per_second"] / peak["flops_per_second"]
                text += f", {row['share_of_peak']:.1%} of the peak"
            text = f"prompt of {length:,}, {subject.name}: {text}{format_shares(row)}"
            self.add(text, part="prompt", **row)

    def measure_energy(self, subject: Subject) -> None:
        meter = open_meter(self.device)
        if meter is None:
            print("energy: there is no meter", flush=True)
            return
        (length, num_new), sizes = self.sizes.single, self.sizes
        cases = {
            "single": ([length], "greedy", num_new),
            "batch": (draw_lengths(sizes.many, sizes), "top-p 0.95", sizes.num_new),
        }
        for case, (lengths, way, count) in cases.items():
            params = list_params(way, len(lengths), count)

            def call(number: int, lengths: list[int] = lengths, params: Any = params) -> None:
                subject.engine.generate(draw_tokens(subject.config, lengths, number), params)

            joules, calls = measure_energy(call, meter)
            each = joules / (count * len(lengths))
            text = f"{1e3 * each:.2f} mJ a new token, of {calls} calls"
            about = {"model": subject.name, "case": case, "way": way, "requests": len(lengths)}
            text = f"energy, {subject.name}, {len(lengths)} requests, {way}: {text}"
            self.add(text, part="energy", **about, joules_per_token=each, calls=calls)

    def measure_memory(self, subject: Subject) -> None:
        sizes = self.sizes
        subject.drop_engine()
        length, num_new = sizes.equal, sizes.num_new
        engine = Engine(
            subject.network, max_batch=sizes.many, cache_tokens=sizes.room * (length + num_new)
        )
        warm_up(engine)
        params = list_params("top-p 0.95", sizes.many, num_new)
        prompts = draw_tokens(subject.config, [length] * sizes.many, 0)
        running: list[int] = []
        synchronize(self.device)
        start = time.perf_counter()
        for prompt, wish in zip(prompts, params, strict=True):
            engine.add(prompt, wish)
        while engine.has_work:
            engine.step()
            running.append(engine.stats().num_running)
        synchronize(self.device)
        seconds, stats = time.perf_counter() - start, engine.stats()
        row = {
            "model": subject.name,
            "requests": sizes.many,
            "most_running": max(running),
            "mean_running": statistics.fmean(running),
            "steps": len(running),
            "preempted": stats.num_preempted,
            "cache_bytes_total": stats.cache_bytes_total,
            "cache_bytes_peak": stats.cache_bytes_peak,
            "seconds": seconds,
        }
        text = (
            f"{row['most_running']} of {sizes.many} requests at once, {row['mean_running']:.1f} on "
        )
        text += f"average, {row['preempted']} preemptions, {seconds:.2f} s, cache of "
        text += f"{stats.cache_bytes_total / 2**20:,.0f} MiB"
        self.add(f"memory, {subject.name}: {text}", part="memory", **row)

    def measure_transformers(self) -> None:
        """Greedy, without an end token: every request makes all of its tokens."""
        sizes, config = self.sizes, self.choose_config("dense")
        number, num_new = sizes.many, sizes.num_new
        lengths = draw_lengths(number, sizes)
        fields = {"eos_token_id": None, "bos_token_id": None, "attn_implementation": "sdpa"}
        with torch.device(self.device):
            model = make_llama(config, **fields).to(self.dtype).eval()
        for what in self.calls:
            if what == "generate_batch" and self.device == "cpu":
                # designed for GPUs: its cache would take most of a machine's memory
                print("transformers, generate_batch: measured on a GPU only", flush=True)
                continue
            call = CALLS[what]
            try:
                times = []
                for n in range(2):
                    prompts, made = draw_tokens(config, lengths, n), []
                    work = partial(keep_results, made, call, model, prompts, num_new)
                    times.append(time_call(work, self.device))
                    # immediately: the next call may be cut off
                    print(f"transformers, {what}: {times[-1]:.2f} s", flush=True)
                    count = sum(map(len, made))
                    if count != number * num_new:
                        raise RuntimeError(f"{count} tokens came, not {number * num_new}")
            except Exception as error:
                traceback.print_exc()
                text = f"transformers, {what}: not available: {type(error).__name__}: {error}"
                self.add(text, part="transformers", what=what, error=f"{error!r:.300}")
                continue
            speed, ratio = number * num_new / times[1], None
            ours = find_row(self.rows, part="batch", model="dense", requests=number, way="greedy")
            text = f"transformers, {what}: {speed:,.0f} new tokens/s, {times[1]:.2f} s "
            text += f"(first call {times[0]:.2f})"
            if ours is not None:
                ratio = ours["tokens_per_second"] / speed
                text += f"; our dense is {ratio:.2f} times as fast"
            row = {"requests": number, "first_s": times[0], "warm_s": times[1]}
            row |= {"tokens_per_second": speed, "dense_over_it": ratio}
            self.add(text, part="transformers", what=what, **row)
        if hasattr(model, "destroy_cached_continuous_batching_manager"):
            model.destroy_cached_continuous_batching_manager()

    def measure_first(self, model: str) -> None:
        """Two fresh processes; the disk caches are empty for the first one."""
        with tempfile.TemporaryDirectory() as folder:
            # nothing is compiled for a CPU, so a second process would only repeat the first
            states = ("empty",) if self.device == "cpu" else ("empty", "filled")
            for number, caches in enumerate(states):
                start = time.perf_counter()
                found = run_fresh(model, self.shape, self.device, Path(folder))
                row = {"model": model, "process": number, "caches": caches, **found}
                row["process_s"] = time.perf_counter() - start
                ahead = row["warm_up_s"]
                text = "no warm_up" if ahead is None else f"warm_up {ahead:.1f} s"
                text += f", first call {row['first_s']:.2f}, second {row['second_s']:.2f}, "
                text += f"number {row['calls']} {row['last_s']:.2f}; process {row['process_s']:.1f}"
                alone = row["device_us_per_token"]
                text += "" if alone is None else f"; single on the device {alone:,.1f} µs a token"
                self.add(f"first, {model}, caches {caches}: {text}", part="first", **row)


def call_padded(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """`generate` of transformers, with prompts padded on the left; returns the new tokens."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    tokens, mask = (torch.tensor(rows, device=model.device) for rows in (padded, masks))
    length = {"max_new_tokens": num_new, "min_new_tokens": num_new}
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    made = model.generate(tokens, attention_mask=mask, **length, **options)
    return made[:, longest:].tolist()


def call_continuous(model: Any, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Continuous batching of transformers; its manager is kept for the next call if possible."""
    from transformers import GenerationConfig

    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    wish = GenerationConfig(max_new_tokens=num_new, **options)
    known = inspect.signature(model.generate_batch).parameters
    kept = {"persistent_manager": True} if "persistent_manager" in known else {}
    made = model.generate_batch(prompts, generation_config=wish, **kept)
    return [output.generated_tokens for output in made.values()]


CALLS = {"generate": call_padded, "generate_batch": call_continuous}


def run_fresh(model: str, shape: str, device: str, caches: Path) -> dict[str, Any]:
    """Run `measure_fresh` in a new process."""
    command = [sys.executable, __file__, "--fresh", model, "--shape", shape]
    command += ["--cpu"] if device == "cpu" else []
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
    environment = os.environ | {name: str(caches / name.lower()) for name in names}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_fresh(model: str, shape: str, device: str) -> dict[str, Any]:
    """Seconds of a mixed batch from the first call on, in a fresh process."""
    sizes = SMOKE if shape == "smoke" else REAL
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    network = make_network(choose_config(model, shape, sizes), device, dtype)
    synchronize(device)
    start = time.perf_counter()
    engine = Engine(network)
    engine_s = time.perf_counter() - start
    warm_up_s = warm_up(engine)
    lengths = draw_lengths(sizes.many, sizes)
    params = list_params("top-p 0.95", sizes.many, sizes.num_new)
    times: list[float] = []
    most = FRESH_CALLS if sizes.warm_seconds else 3
    while len(times) < 3 or (len(times) < most and sum(times[1:]) < FRESH_SECONDS):
        prompts = draw_tokens(network.config, lengths, len(times))
        times.append(time_call(lambda p=prompts: engine.generate(p, params), device))
    # last, in a process that ends here: a profiler slows down everything after it
    device_us = measure_device(engine, sizes) if device == "cuda" else None
    return {
        "device_us_per_token": device_us,
        "engine_s": engine_s,
        "warm_up_s": warm_up_s,
        "first_s": times[0],
        "second_s": times[1],
        "last_s": times[-1],
        "calls": len(times),
    }


def find_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def format_shares(row: dict[str, Any]) -> str:
    """Format the fractions of routed blocks taken, if there are any."""
    names = {"share_prompt": "of prompts", "share_new": "of new tokens"}
    parts = [f"{row[name]:.1%} {what}" for name, what in names.items() if name in row]
    return f"; routed {', '.join(parts)}" if parts else ""


def print_table(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    if lines:
        print(f"\n### {title}\n")
        print_line(list(names))
        print("|---" * len(names) + "|")
        for line in lines:
            print_line(list(line))


def pair_rows(rows: list[dict], part: str, *keys: str) -> Iterator[tuple[dict, dict]]:
    """Each case's dense row and MoD row; empty if not measured."""
    seen: list[dict[str, Any]] = []
    for row in rows:
        key = {"part": part, **{name: row.get(name) for name in keys}}
        if row["part"] != part or key in seen:
            continue
        seen.append(key)
        dense, mod = (find_row(rows, **key, model=model) or {} for model in ("dense", "mod"))
        yield dense, mod


def format_value(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(scale * value, form)


def format_ratio(a: float | None, b: float | None) -> str:
    return "" if not a or not b else f"{a / b:.2f}"


def format_share(mod: dict) -> str:
    return format_value(mod.get("share_new", mod.get("share_prompt")), ".1%")


def print_summary(rows: list[dict]) -> None:
    """Print all parts as Markdown; ratios are the factor by which MoD is better."""
    names = ["request", "dense µs a token", "MoD", "ratio", "over greedy: dense", "MoD"]
    names += ["first call: dense", "MoD", "on the device: dense", "MoD", "routed"]
    lines = []
    greedy = [find_row(rows, part="single", way="greedy", model=m) or {} for m in ROUTING]
    fresh = [find_row(rows, part="first", model=m) or {} for m in ROUTING]
    for pair in pair_rows(rows, "single", "way"):
        us = [row.get("us_per_token") for row in pair]
        line = [
            (pair[0] or pair[1])["way"],
            *(format_value(x, ",.1f") for x in us),
            format_ratio(*us),
        ]
        line += [format_ratio(x, g.get("us_per_token")) for x, g in zip(us, greedy, strict=True)]
        firsts = [row["first_s"] / row["new_tokens"] if row else None for row in pair]
        line += [format_value(x, ",.1f", 1e6) for x in firsts]
        if (pair[0] or pair[1])["way"] == "greedy":
            line += [format_value(row.get("device_us_per_token"), ",.1f") for row in fresh]
        else:
            line += ["", ""]
        lines.append([*line, format_share(pair[1])])
    print_table("One request", names, lines)

    names = ["requests", "drawn", "dense new tokens/s", "MoD", "ratio", "ideally", "of the ideal"]
    names += ["MoD's", "first call, s: dense", "MoD", "cache, MiB: dense", "MoD", "routed"]
    lines = []
    for dense, mod in pair_rows(rows, "batch", "requests", "way"):
        known = dense or mod
        speeds = [row.get("tokens_per_second") for row in (mod, dense)]
        line = [
            str(known["requests"]),
            known["way"],
            format_value(speeds[1], ",.0f"),
            format_value(speeds[0], ",.0f"),
        ]
        ideals = [row["ideal"]["seconds"] if row else None for row in (dense, mod)]
        line += [format_ratio(*speeds), format_ratio(*ideals)]
        pairs = zip(ideals, (dense, mod), strict=True)
        line += [format_value(i / row["warm_s"], ".0%") if i else "" for i, row in pairs]
        line += [format_value(row.get("first_s"), ".2f") for row in (dense, mod)]
        line += [format_value(row.get("cache_bytes_peak"), ",.0f", 2**-20) for row in (dense, mod)]
        lines.append([*line, format_share(mod)])
    print_table("Batches", names, lines)

    names = ["prompt", "dense ms", "MoD", "ratio", "FLOPs allow", "first call: dense", "MoD"]
    names += ["dense TFLOP/s", "of the peak", "routed"]
    lines = []
    for dense, mod in pair_rows(rows, "prompt", "prompt_tokens"):
        times = [row.get("warm_s") for row in (dense, mod)]
        line = [
            f"{(dense or mod)['prompt_tokens']:,}",
            *(format_value(x, ".2f", 1e3) for x in times),
        ]
        line += [format_ratio(*times), format_ratio(dense.get("flops"), mod.get("flops"))]
        line += [format_value(row.get("first_s"), ",.1f", 1e3) for row in (dense, mod)]
        line += [format_value(dense.get("flops_per_second"), ",.0f", 1e-12)]
        lines.append([*line, format_value(dense.get("share_of_peak"), ".1%"), format_share(mod)])
    print_table("Prompts", names, lines)

    names = ["requests", "drawn", "dense mJ a new token", "MoD", "ratio"]
    lines = []
    for dense, mod in pair_rows(rows, "energy", "case"):
        known, joules = dense or mod, [row.get("joules_per_token") for row in (dense, mod)]
        line = [
            str(known["requests"]),
            known["way"],
            *(format_value(x, ".2f", 1e3) for x in joules),
        ]
        lines.append([*line, format_ratio(*joules)])
    print_table("Energy", names, lines)

    names = ["the same cache", "dense", "MoD", "ratio"]
    lines = []
    for dense, mod in pair_rows(rows, "memory"):
        wanted = {"most_running": "most at once", "mean_running": "at once on average"}
        wanted |= {"preempted": "preemptions", "seconds": "seconds", "steps": "steps"}
        for field, name in wanted.items():
            form = ".2f" if field in ("mean_running", "seconds") else ",d"
            values = [row.get(field) for row in (dense, mod)]
            cells = [format(x, form) if x is not None else "" for x in values]
            lines.append([name, *cells, format_ratio(*reversed(values))])
    print_table("Memory", names, lines)

    found = [row for row in rows if row["part"] == "transformers"]
    names = ["transformers", "new tokens/s", "our dense is so many times as fast", "first call, s"]
    lines = [
        [row["what"], row["error"], "", ""]
        if "error" in row
        else [
            f"{row['what']}, {row['requests']} requests",
            format_value(row["tokens_per_second"], ",.0f"),
            format_value(row["dense_over_it"], ".2f"),
            format_value(row["first_s"], ".2f"),
        ]
        for row in found
    ]
    print_table("Transformers", names, lines)

    fields = ("engine_s", "warm_up_s", "first_s", "second_s", "last_s", "process_s")
    names = ["fresh process, s", "caches on disk", "engine", "warm_up", "first call", "second"]
    lines = [
        [row["model"], row["caches"], *(format_value(row[field], ".2f") for field in fields)]
        for row in rows
        if row["part"] == "first"
    ]
    print_table("First use", [*names, "last", "whole process"], lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--shape", choices=("large", "small", "smoke"), help="large, or smoke on a CPU"
    )
    parser.add_argument("--requests", nargs="+", type=int, help="of the part batch")
    parser.add_argument(
        "--calls", nargs="+", choices=CALLS, default=tuple(CALLS), help="of the part transformers"
    )
    parser.add_argument("--vocab-size", type=int, help="ids; not for the part first")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, in float32")
    only = parser.add_mutually_exclusive_group()
    for model in ROUTING:
        option = {"action": "store_const", "const": model, "dest": "only"}
        only.add_argument(f"--{model}-only", **option)
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    # for the part `first`, which runs this file again
    parser.add_argument("--fresh", choices=tuple(ROUTING), help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    args.shape = args.shape or ("smoke" if args.cpu else "large")
    return args


def main() -> None:
    args = parse_arguments()
    if args.cpu and args.shape == "smoke":
        # with a model this small, a second thread only adds waiting
        torch.set_num_threads(1)
    if args.fresh:
        found = measure_fresh(args.fresh, args.shape, "cpu" if args.cpu else "cuda")
        print(json.dumps(found), flush=True)
        return
    start = time.perf_counter()
    bench = Bench(args)
    bench.run()
    print_summary(bench.rows)
    about = bench.about
    versions = [f"{name} {about[name]}" for name in ("torch", "triton", "transformers", "python")]
    print(f"\n{about['device']}, {', '.join(versions)}, shape {about['shape']}")
    print(f"`{about['command']}`: {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(f"failed: {'; '.join(bench.failed)}" if bench.failed else 0)


if __name__ == "__main__":
    main()
