"""Decoding speed: Mixture-of-Depths, its dense twin, and common alternatives, on one GPU.

    python benchmarks/decode.py --json out.json           # both shapes, all parts, tables
    python benchmarks/decode.py --shape small --profile   # where the time of a step goes
    python benchmarks/decode.py --cpu                     # the CPU's figure
    python benchmarks/decode.py --shape smoke --cpu       # does it run at all

Weights are random; the predictors' biases are set so that tokens are kept at the capacity's rate
(`calibrate`). A time is the median over the steps of one lap, from the prompt to the last new
token, measured with CUDA events. The time of a MoD step varies with the blocks that it runs, and
its median is below its mean, so both are reported, with the fraction of routed blocks taken.

`compile` is a plain decoder with a static cache under torch.compile(mode="reduce-overhead"), and is
compiled before anything is timed. `transformers` is a Llama's generate(), from the difference of
two lengths, so that prefill cancels; both lengths are run once before timing. "by bytes" is the
time to read the weights and cache that a step needs, once, at the bandwidth in an H200's datasheet.
If one part fails, the others still run.
"""

import argparse
import gc
import json
import math
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from baselines import compile_decoder, make_llama
from decode_models import (
    ROUTING,
    SHAPES,
    correct_biases,
    count_bytes,
    draw_prompts,
    keep_biases,
    make_config,
    make_model,
)
from decode_step import prepare_decode
from decode_tables import print_tables
from meters import (
    measure_energy,
    name_device,
    open_meter,
    profile_step,
    require_gpu,
    time_call,
    time_steps,
)
from torch import Tensor

from depthmix import flops
from depthmix.infer import Engine, SamplingParams
from depthmix.nn import Transformer

PARTS = ("compile", "transformers", "batch", "prefill", "energy", "generate")
MIN_STEPS, MIN_LAPS = 200, 3
MAX_CORRECTIONS, SHARE_TOLERANCE = 1, 0.015
BYTES_PER_SECOND = 4.8e12


def summarize(microseconds: list[float]) -> dict[str, object]:
    low, us, high = statistics.quantiles(microseconds, n=4)
    return {"us": us, "us_mean": statistics.fmean(microseconds), "us_quartiles": [low, high]}


def measure_shares(step: Callable[[], Tensor | None], num_steps: int) -> Tensor | None:
    """Fraction of rows that took each routed block; None if the step does not report it."""
    shares = []
    for _ in range(num_steps):
        taken = step()
        if taken is None:
            return None
        # on the device, and immediately: the next step may overwrite the same tensor
        shares.append(taken.float().mean(dim=1))
    return torch.stack(shares).mean(dim=0)


def prepare_at_rate(
    model: Transformer, batch: int, context: int, num_steps: int
) -> Callable[[], Tensor | None]:
    """A decode step that takes routed blocks at or near the capacity's rate.

    Calibration over many sequences is not enough: decisions within a sequence are correlated, and
    single sequences were observed to take between 4 and 23 % although the average was right.
    """
    # with many rows, few steps suffice to estimate the rate
    num_steps = max(num_steps // batch, 8)
    for left in reversed(range(MAX_CORRECTIONS + 1)):
        # the same prompt each time, if it is random
        torch.manual_seed(0)
        step = prepare_decode(model, batch, context)
        shares = measure_shares(step, num_steps)
        if shares is None:
            return step
        capacity, mean = model.config.capacities[0], shares.mean().item()
        print(f"{mean:.1%} of the routed blocks are taken", flush=True)
        if abs(mean - capacity) <= SHARE_TOLERANCE or not left:
            return step
        correct_biases(model, shares, capacity, batch * num_steps)
    raise AssertionError("the last one is taken as it is")


class Bench:
    """The run: its options, and the measured rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.skip, self.profile, self.path = set(args.skip), args.profile, args.json
        self.device = "cpu" if args.cpu else "cuda"
        self.dtype = torch.float32 if args.cpu else torch.bfloat16
        self.rows: list[dict] = []
        self.num_failed = 0
        self.meter = None if "energy" in self.skip else open_meter(self.device)

    def attempt(self, part: str, measure: Callable[..., object], *arguments: object) -> object:
        """Run one part unless it is skipped; report a failure and continue."""
        if part in self.skip:
            return None
        start = time.perf_counter()
        try:
            return measure(*arguments)
        except Exception:
            self.num_failed += 1
            print(f"{part} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return None
        finally:
            print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def add(self, part: str, shape: str, **measured: object) -> None:
        self.rows.append({"part": part, "shape": shape, **measured})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.path:
            self.path.write_text(json.dumps(self.rows, indent=1))

    def prepare_compiled(self, name: str) -> Callable[[], None]:
        shape = SHAPES[name]
        batch, context = shape.cases[0]
        config = make_config("dense", shape)
        step = compile_decoder(config, batch, context, shape.num_new, self.device, self.dtype)
        time_steps(step, self.device, 1)
        return step

    def measure_compiled(self, name: str, step: Callable[[], None]) -> None:
        batch = SHAPES[name].cases[0][0]
        self.add("decode", name, what="compile", batch=batch, **self.time_decode(name, step))

    def time_decode(self, name: str, step: Callable[[], object]) -> dict[str, object]:
        # whole laps, so that the mean length is the same for all
        num_new = SHAPES[name].num_new
        num_steps = math.ceil(MIN_STEPS / num_new) * num_new
        return summarize(time_steps(step, self.device, num_steps))

    def measure_transformers(self, name: str) -> None:
        shape = SHAPES[name]
        batch, context = shape.cases[0]
        try:
            with torch.device(self.device):
                config = make_config("dense", shape)
                model = make_llama(config, attn_implementation="sdpa").to(self.dtype).eval()
        except ImportError:
            print("transformers is not measured, because it is not installed")
            return
        tokens = torch.randint(config.vocab_size, (batch, context), device=self.device)

        def generate(count: int) -> None:
            length = {"max_new_tokens": count, "min_new_tokens": count}
            mask = torch.ones_like(tokens)
            model.generate(tokens, attention_mask=mask, do_sample=False, pad_token_id=0, **length)

        few, many = max(1, shape.num_new // 32), shape.num_new // 8 + 1
        # both lengths: the first call of each is slower, and otherwise only one would include that
        for count in (few, many):
            generate(count)
        seconds = [time_call(lambda n=count: generate(n), self.device) for count in (few, many)]
        mean = 1e6 * (seconds[1] - seconds[0]) / (many - few)
        self.add("decode", name, what="transformers", batch=batch, us=mean, us_mean=mean)

    def measure_ideals(self, name: str) -> None:
        shape = SHAPES[name]
        for batch, context in shape.cases:
            for model in ROUTING:
                config = make_config(model, shape)
                middle = context + shape.num_new // 2
                num_bytes = count_bytes(config, batch, middle, self.dtype)
                us = 1e6 * num_bytes / BYTES_PER_SECOND
                what = {"what": f"{model}, by bytes", "batch": batch, "num_bytes": num_bytes}
                self.add("decode", name, **what, us=us, us_mean=us)

    def measure_decode(self, name: str, model: str, network: Transformer, case: int) -> None:
        shape = SHAPES[name]
        batch, context = shape.cases[case]
        # the step may read the biases whenever it runs, so all of it is inside
        with keep_biases(network):
            step = prepare_at_rate(network, batch, context, shape.num_new)
            measured = self.time_decode(name, step)
            # from a separate lap: the one that ended the search was selected for its share
            shares = measure_shares(step, shape.num_new)
            measured["share"] = None if shares is None else shares.mean().item()
            if self.meter is not None:
                joules, _ = measure_energy(lambda _: step(), self.meter, num_queued=50)
                measured["joules_per_token"] = joules / batch
            self.add("decode", name, what=model, batch=batch, **measured)
            if self.profile:
                print(f"{name}, batch {batch}, {model}\n{profile_step(step, self.device)}")

    def measure_in_turn(self, name: str) -> None:
        """Decode on a CPU, alternating between the models every quarter of a lap.

        Other load on the machine then slows down both alike.
        """
        shape = SHAPES[name]
        batch, context = shape.cases[0]
        times: dict[str, list[float]] = {model: [] for model in ROUTING}
        steps, shares = {}, []
        for model in ROUTING:
            network = make_model(make_config(model, shape), self.device, self.dtype, context)
            steps[model] = prepare_at_rate(network, batch, context, shape.num_new)
        for _ in range(4 * MIN_LAPS):
            for model, step in steps.items():
                for number in range(shape.num_new // 4):
                    start = time.perf_counter()
                    taken = step()
                    # during the first step, the CPU caches still hold the other model
                    if number:
                        times[model].append(1e6 * (time.perf_counter() - start))
                    if taken is not None:
                        shares.append(taken.float().mean().item())
        for model, us in times.items():
            share = statistics.fmean(shares) if model == "mod" else None
            self.add("decode", name, what=model, batch=batch, **summarize(us), share=share)

    def measure_prefill(self, name: str, model: str, network: Transformer) -> None:
        num_tokens, config = SHAPES[name].prefill_tokens, network.config
        engine = Engine(network, max_batch=1, chunk_tokens=num_tokens)
        prompt, params = draw_prompts(config, 1, num_tokens), SamplingParams(max_tokens=1)
        times = [time_call(lambda: engine.generate(prompt, params), self.device) for _ in range(8)]
        # the first calls build what later ones reuse
        ms = 1e3 * statistics.median(times[3:])
        count = flops.forward_flops(config, seq_len=num_tokens, causal_half=True)
        measured = {"num_tokens": num_tokens, "ms": ms, "flops": count}
        self.add("prefill", name, what=model, **measured)

    def measure_generate(self, name: str, model: str, network: Transformer, number: int) -> None:
        shape, config = SHAPES[name], network.config
        engine = Engine(network, max_batch=number)
        prompts = draw_prompts(config, number, shape.cases[0][1])
        engine.generate(prompts, SamplingParams(max_tokens=4))
        results = []
        params = SamplingParams(max_tokens=shape.num_new)
        seconds = time_call(lambda: results.extend(engine.generate(prompts, params)), self.device)
        samples = [sample for result in results for sample in result.samples]
        num_tokens = sum(len(sample.tokens) for sample in samples)
        taken = [flag for sample in samples for token in sample.depth.blocks for flag in token]
        self.add(
            "generate",
            name,
            what=model,
            num_prompts=number,
            tokens_per_second=num_tokens / seconds,
            share=statistics.fmean(taken) if taken else None,
            cache_bytes=engine.stats().cache_bytes_peak,
        )

    def measure_model(self, name: str, model: str) -> None:
        shape = SHAPES[name]
        config = make_config(model, shape)
        network = make_model(config, self.device, self.dtype, shape.cases[0][1])
        for case in range(len(shape.cases) if self.device == "cuda" else 0):
            part = "batch" if case else "decode"
            self.attempt(part, self.measure_decode, name, model, network, case)
        self.attempt("prefill", self.measure_prefill, name, model, network)
        for number in shape.num_prompts:
            self.attempt("generate", self.measure_generate, name, model, network, number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, in float32")
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="leave these out")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument(
        "--wait-for", type=Path, help="compile, then wait for this file before timing anything"
    )
    parser.add_argument("--json", type=Path, help="also write the measurements here")
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    names = args.shape or (["cpu"] if args.cpu else ["large", "small"])
    bench = Bench(args)
    compiled = {name: bench.attempt("compile", bench.prepare_compiled, name) for name in names}
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.5)
    for name in names:
        step = compiled.pop(name)
        if step is not None:
            bench.attempt("compile", bench.measure_compiled, name, step)
        # free the compiled model before making the next one
        del step
        bench.attempt("transformers", bench.measure_transformers, name)
        if args.cpu:
            bench.attempt("decode", bench.measure_in_turn, name)
        for model in ROUTING:
            bench.attempt("model", bench.measure_model, name, model)
        if not args.cpu:
            bench.measure_ideals(name)
    print_tables(bench.rows)
    text = f", {torch.get_num_threads()} threads" if args.cpu else ""
    text += f", torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{name_device(bench.device)}{text}")
    sys.exit(f"{bench.num_failed} parts failed" if bench.num_failed else 0)


if __name__ == "__main__":
    main()
