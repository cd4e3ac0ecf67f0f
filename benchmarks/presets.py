"""What a preset's recipe is worth, and how long a run takes to its first step.

    depthmix prepare … --out data
    python benchmarks/presets.py --data data --seconds 240                # 60m and 220m, one GPU
    python benchmarks/presets.py --data data --flops 2e16 --kinds mod dense --json out.json
    python benchmarks/presets.py --data data --startup                    # the time before step 1
    python benchmarks/presets.py --data data --presets tiny --flops 1e10 --cpu    # does it run

Three recipes for each model: `now` is the preset, `before` what it was in development versions
(AdamW, a raw gate, queries and keys as they are), and `paper` is the preset's `-paper` variant,
whose routers also score the residual stream without a norm. Each is trained from the same seed on
the same batches, for the same time (--seconds: as many steps as fit, by its own measured speed) or
the same counted compute (--flops), and judged on the validation split: a routed model under causal
decisions, as it samples. Models have as many ids as the data.

--startup compares the two ways to compile, the model as a whole and block by block, each in a
process of its own: first with an empty compiler cache, then with what that one left. `first step`
is from an imported torch to the end of step 1: model, optimiser, compilation and CUDA graph.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TIMED_STEPS = 40
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("-paper", {}),
    "before": ("-paper", {"routing.normalize_input": True}),
    "now": ("", {}),
}
"""Name → the suffix of its preset, and the fields that differ from it."""


def make_run(preset: str, kind: str, recipe: str, corpus: Any, fields: dict[str, Any]) -> Any:
    """The run's configuration, without a budget."""
    from depthmix.config import make_run_config

    suffix, changes = RECIPES[recipe]
    # a dense model has no router to change
    changes = {} if kind == "dense" else changes
    given = {"vocab_size": corpus.vocab_size, "train.val_tokens": 1 << 20, **changes, **fields}
    return make_run_config(f"{preset}{suffix}-{kind}", given)


class Training:
    """A model that is stepped as `depthmix train` steps it, without its folder."""

    def __init__(self, run: Any, corpus: Any, device: str) -> None:
        import torch

        from depthmix.budget import make_schedule
        from depthmix.train.loop import Trainer
        from depthmix.world import World

        self.torch, self.run, self.device = torch, run, device
        # a budget is part of a schedule; how many steps there are is decided later
        self.trainer = Trainer(
            make_schedule(run.override({"train.steps": 1})),
            corpus,
            World(0, 1, torch.device(device)),
        )

    def step(self, batch: Any, number: int, num_steps: int) -> None:
        """One step by the schedule of a run of `num_steps`."""
        from depthmix.train.optim import set_rates

        trainer = self.trainer
        set_rates(trainer.optimizers, self.run.train, number, num_steps)
        trainer.step(*trainer._move(batch))

    def run_steps(self, num_steps: int) -> list[float]:
        """Seconds of each of a run's steps, from its first batch."""
        from depthmix.data.loader import prefetch

        self.trainer.loader.load_state_dict(self.start)
        marks = [time.perf_counter()]
        with prefetch(self.trainer.loader) as batches:
            for number in range(num_steps):
                self.step(batches.next(), number, num_steps)
                if self.device == "cuda":
                    self.torch.cuda.synchronize()
                marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]

    @contextmanager
    def undo_after(self) -> Iterator[None]:
        """Forget what is learned inside, in place: a recorded step keeps its memory."""
        torch, trainer = self.torch, self.trainer
        saved = [(p, p.detach().clone()) for p in trainer.model.parameters()]
        yield
        with torch.no_grad():
            for parameter, copy in saved:
                parameter.copy_(copy)
            states = (s for o in trainer.optimizers for s in o.state.values())
            for tensor in (t for state in states for t in state.values()):
                if torch.is_tensor(tensor):
                    tensor.zero_()

    @property
    def start(self) -> dict[str, Any]:
        """Where the data begins."""
        if not hasattr(self, "_start"):
            self._start = self.trainer.loader.state_dict()
        return self._start

    def validate(self) -> dict[str, float]:
        """Losses on the validation split."""
        from depthmix.train.log import SilentLogger

        return self.trainer._validate(SilentLogger(), 0)


def measure(options: dict[str, Any], pipe: Any) -> None:
    """A process: one recipe of one model, or one way to compile."""
    import torch

    from depthmix import flops
    from depthmix.data.shards import Corpus

    corpus = Corpus.open(options["data"])
    run = make_run(options["preset"], options["kind"], options["recipe"], corpus, options["fields"])
    started = time.perf_counter()
    training = Training(run, corpus, options["device"])
    with training.undo_after():
        training.run_steps(1)
        first = time.perf_counter() - started
        times = training.run_steps(TIMED_STEPS)
    seconds = statistics.median(times[TIMED_STEPS // 2 :])
    row = {"preset": options["preset"], "kind": options["kind"], "recipe": options["recipe"]}
    row |= {"first_step_s": first, "step_ms": 1e3 * seconds, "optimizer": run.train.optimizer}
    if options["startup"]:
        pipe.send(row | {"compile": options["compile"], "cache": options["cache"]})
        return
    per_step = flops.training_flops(run.model, batch_size=run.train.batch_size, seq_len=run.seq_len)
    budget = options["flops"]
    num_steps = int(budget / per_step if budget else options["seconds"] / seconds)
    spent = sum(training.run_steps(max(1, num_steps)))
    found = training.validate()
    row |= {"num_steps": num_steps, "tokens": num_steps * run.tokens_per_step, "seconds": spent}
    row |= {"flops": num_steps * per_step, "loss": found.get("loss", found.get("loss_causal"))}
    row |= {"loss_topk": found.get("loss_topk"), "torch": torch.__version__}
    pipe.send(row)


def start(options: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own; its caches are where `cache_dir` says."""
    # as the command line has it: threads that spin take the core from the one they wait for
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    os.environ.pop("TRITON_CACHE_DIR", None)
    if options.get("cache_dir"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{options['cache_dir']}/inductor"
        os.environ["TRITON_CACHE_DIR"] = f"{options['cache_dir']}/triton"
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(options, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise SystemExit(f"{options['preset']} {options['recipe']} failed, see above") from None
    finally:
        process.join()


def print_losses(rows: list[dict[str, Any]]) -> None:
    print("| preset | recipe | optimiser | steps | tokens | FLOPs | seconds | step, ms | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['preset']}-{row['kind']} | {row['recipe']} | {row['optimizer']} "
            f"| {row['num_steps']:,} | {row['tokens'] / 1e6:.1f} M | {row['flops']:.2e} "
            f"| {row['seconds']:.0f} | {row['step_ms']:.1f} | {row['loss']:.4f} |",
            flush=True,
        )


def print_startup(rows: list[dict[str, Any]]) -> None:
    print("| preset | compiled | cache | first step, s | step, ms |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['preset']}-{row['kind']} | {row['compile']} | {row['cache']} "
            f"| {row['first_step_s']:.1f} | {row['step_ms']:.2f} |",
            flush=True,
        )


def list_work(args: argparse.Namespace, folder: str) -> Iterator[dict[str, Any]]:
    from depthmix.config.fields import parse_override

    device = "cpu" if args.cpu else "cuda"
    shared = {"data": str(args.data), "device": device, "startup": args.startup}
    shared |= {"seconds": args.seconds, "flops": args.flops}
    fields: dict[str, Any] = dict(map(parse_override, args.fields))
    for preset in args.presets:
        for kind in args.kinds:
            each = {**shared, "preset": preset, "kind": kind}
            if not args.startup:
                for recipe in args.recipes:
                    yield {**each, "recipe": recipe, "fields": fields}
                continue
            for way, blocks in (("whole", False), ("blocks", True)):
                chosen = {"train.compile": True, "train.compile_blocks": blocks, **fields}
                place = {"cache_dir": f"{folder}/{preset}-{kind}-{way}", "compile": way}
                for cache in ("empty", "kept"):
                    yield {**each, "recipe": "now", "fields": chosen, "cache": cache, **place}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="fields of all runs")
    parser.add_argument("--data", type=Path, required=True, help="a folder made by prepare")
    parser.add_argument("--presets", nargs="+", default=["60m", "220m"])
    parser.add_argument("--kinds", nargs="+", default=["mod"], choices=["mod", "dense"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seconds", type=float, default=180, help="time of each run's steps")
    parser.add_argument("--flops", type=float, help="compute of each run, instead of a time")
    parser.add_argument("--startup", action="store_true", help="time the first step instead")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    # it imports torch, which --help does not wait for
    from meters import require_gpu

    require_gpu(parser, cpu=args.cpu)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for options in list_work(args, folder):
            rows.append(start(options))
            print(rows[-1], flush=True)
    print(f"\nPython {platform.python_version()}")
    (print_startup if args.startup else print_losses)(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
