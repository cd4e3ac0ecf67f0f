"""The cost of training and sampling trained models: for the best dense and the best routed one.

    python benchmarks/trained.py runs/isoflop/4e15/{dense/w224-l8-s0,mod/w224-l14-s0}
    python benchmarks/trained.py RUN RUN --cpu --batch 1 --tokens 64 --json out.json

For each run: milliseconds of a training step with its own batch, alone on the device (on a GPU
compiled, in bf16 and as a CUDA graph). Then, with its weights, microseconds per token through the
whole engine at temperature 1 from the beginning of a document, the fraction of blocks run, the peak
bytes of keys and values in use, and Joules per token if the driver reports them. On a GPU also the
time on the device alone: its recorded step over the same documents, which only draws the best
tokens, without the host.
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

import torch
from decode_step import prepare_decode
from meters import name_device, open_meter, require_gpu, time_call, time_steps

from depthmix import flops
from depthmix.config import RunConfig
from depthmix.infer import Engine, SamplingParams
from depthmix.models import open_model
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir
from depthmix.sample.sampler import place_network
from depthmix.train.energy import EnergyCounter
from depthmix.train.optim import make_optimizers
from depthmix.train.parallel import compile_layers
from depthmix.train.step import TrainStep

NUM_STEPS = 60


def time_training(recipe: RunConfig, device: str) -> float:
    """Milliseconds of a step of the run's own shape, with its own optimiser."""
    config, on_gpu = recipe.model, device == "cuda"
    size = (recipe.train.batch_size, recipe.seq_len + 1)
    tokens = torch.randint(config.vocab_size, size, device=device)
    with torch.device(device):
        network = Transformer(config)
    if on_gpu:
        # layer by layer: equal layers share their code, which compiles in seconds
        compile_layers(network)
    optimizers = make_optimizers(network, recipe.train, capturable=on_gpu)
    precision = torch.bfloat16 if on_gpu else None
    step = TrainStep(network, optimizers, precision=precision, cuda_graph=on_gpu)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if on_gpu:
        return statistics.median(time_steps(lambda: step(*batch), device, NUM_STEPS)) / 1e3
    return 1e3 * min(time_call(lambda: step(*batch), device) for _ in range(2))


def measure_sampling(
    path: Path, device: str, batch: int, num_tokens: int, meter: EnergyCounter | None
) -> dict[str, float | int]:
    """Sample a batch of new documents, each exactly as long as requested."""
    model = open_model(path)
    engine = Engine(place_network(model, device), max_batch=batch)
    prompts = [model.vocabulary.encode("")] * batch
    params = [SamplingParams(max_tokens=num_tokens, temperature=1, seed=n) for n in range(batch)]
    # the first calls build what later ones reuse
    engine.generate(prompts, params)
    engine.generate(prompts, params)
    before = 0.0 if meter is None else meter.read_joules()
    results = []
    seconds = time_call(lambda: results.extend(engine.generate(prompts, params)), device)
    samples = [sample for result in results for sample in result.samples]
    documents = [list(result.prompt) + list(result.samples[0].tokens) for result in results]
    count = sum(len(sample.tokens) for sample in samples)
    measured = {
        "batch": batch,
        "us_per_token": 1e6 * seconds / count,
        "share_executed": statistics.fmean(s.depth.share_executed for s in samples),
        "share_saved": statistics.fmean(s.depth.share_saved for s in samples),
        "cache_bytes": engine.stats().cache_bytes_peak,
    }
    if meter is not None:
        measured["joules_per_token"] = (meter.read_joules() - before) / count
    if device == "cuda":
        step = prepare_decode(engine.model, batch, num_tokens // 2, documents=documents)
        times = time_steps(step, device, num_tokens // 4)
        measured["us_on_device"] = statistics.median(times) / batch
    return measured


def print_table(rows: list[dict]) -> None:
    print("| run | parameters | forward MFLOP a token | ms a training step |", end="")
    print(" batch | µs a token | on the device | blocks run | cache MiB | mJ a token |")
    print("|---" * 10 + "|")
    for row in rows:
        joules, alone = row.get("joules_per_token"), row.get("us_on_device")
        cells = [
            row["run"],
            f"{row['parameters']:,}",
            f"{row['forward_flops'] / 1e6:.2f}",
            f"{row['ms_per_step']:.2f}",
            str(row["batch"]),
            f"{row['us_per_token']:.1f}",
            "" if alone is None else f"{alone:.1f}",
            f"{row['share_executed']:.1%}",
            f"{row['cache_bytes'] / 2**20:.2f}",
            "" if joules is None else f"{1e3 * joules:.2f}",
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="+", type=Path, help="finished runs")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="documents at a time")
    parser.add_argument("--tokens", type=int, default=512, help="length of each document")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    require_gpu(parser, cpu=args.cpu)
    device = "cpu" if args.cpu else "cuda"
    meter, rows = open_meter(device), []
    for path in args.run:
        recipe = RunConfig.from_dict(RunDir.open(path).read_config())
        config = recipe.model
        about = {
            "run": "/".join(path.parts[-3:]),
            "parameters": flops.num_parameters(config).total,
            "forward_flops": flops.forward_flops(config, seq_len=recipe.seq_len) / recipe.seq_len,
            "ms_per_step": time_training(recipe, device),
        }
        print(f"{path}: a step takes {about['ms_per_step']:.2f} ms", file=sys.stderr, flush=True)
        for batch in args.batch:
            rows.append(about | measure_sampling(path, device, batch, args.tokens, meter))
            text = f"{rows[-1]['us_per_token']:.1f} µs a token, {batch} at a time"
            print(f"{path}: {text}", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print_table(rows)
    name = name_device(device)
    print(f"\n{name}, torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
