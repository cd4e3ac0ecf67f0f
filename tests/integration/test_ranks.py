"""Two processes train as one does: the same curve, checkpoints for each other, one end for all."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor

from depthmix.checkpoint import collect_tensors
from depthmix.checkpoint.folder import find_damage
from depthmix.config import RunConfig
from depthmix.models import open_model
from depthmix.nn.block import Block
from depthmix.nn.router import Router
from depthmix.runs.folder import RunDir
from depthmix.train import loop
from depthmix.train.launch import Launch, launch
from depthmix.train.loop import Trainer
from depthmix.train.parallel import compile_layers
from depthmix.train.start import load_start
from depthmix.train.step import TrainStep
from hand_corpora import write_folder
from variants import make_config, make_model, make_tokens

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_RANKS = 2
NUM_STEPS = 6
RECIPE: dict[str, Any] = {
    "train.steps": NUM_STEPS,
    "train.batch_size": 4,
    "train.seq_len": 32,
    "train.log_every": 1,
    "train.val_every": 3,
    "train.val_tokens": 128,
    "train.checkpoint_every": 3,
    "train.tensorboard": False,
}

# name → variant, fields of its model and of the recipe
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"train.optimizer": "adamw"}),
    "mod": ("mod", {}),
    # three cannot be shared by two: each is cut
    "experts": ("mode_staged", {"experts.num_experts": 3}),
    "bias": ("token_choice_bias", {}),
    "mixed": ("mod_mix_values", {"train.checkpoint_activations": True}),
    "replicas": ("mod", {"train.optimizer": "adamw", "train.shard_size": 1}),
    "recomputed": ("mod", {"train.checkpoint_activations": True, "train.num_micro_batches": 2}),
    # as on a GPU, see `fuse`; every gradient is clipped
    "fused": ("mod", {"train.optimizer": "adamw", "train.max_grad_norm": 0.1}),
    "muon": ("mod", {"train.optimizer": "muon"}),
    "muon replicas": ("mod", {"train.optimizer": "muon", "train.shard_size": 1}),
}
LAUNCHES = (*CURVES, "resumed", "started", "bfloat16", "stopped", "broken")

# longer than anything here takes: what is not over by then hangs
HANGING_SECONDS = 300


def write_corpus(folder: Path) -> Path:
    """Documents of counting numbers, of many lengths."""
    random = np.random.default_rng(0)

    def count() -> list[int]:
        first, step, length = random.integers((1, 1, 3), (60, 4, 60))
        return (1 + (first + step * np.arange(length)) % 63).tolist()

    documents, val = ([count() for _ in range(number)] for number in (60, 20))
    return write_folder(folder, documents, val=val, vocab_size=64)


def train(root: Path, name: str, variant: str, **fields: Any) -> tuple[str, int]:
    """A run in `root / name`; returns how and where it ended."""
    run = RunConfig.from_overrides(make_config(variant), {**RECIPE, **fields})
    plan = Launch(run=run, data=root / "data", out=root / name, device="cpu")
    outcome, _ = launch(plan, Console(quiet=True))
    return outcome.state, outcome.step


def resume(folder: Path) -> tuple[str, int]:
    outcome, _ = launch(Launch(resume=folder, device="cpu"), Console(quiet=True))
    return outcome.state, outcome.step


def start(root: Path, name: str) -> list[str]:
    """A run from the weights of a dense one; returns what this process's own weights began as."""
    begun: list[str] = []

    def load(model: Any, *args: Any) -> str:
        sentence = load_start(model, *args)
        digest = hashlib.sha256()
        for _, weight in sorted(collect_tensors(model, [])["model"].items()):
            # of a replica that is all of it
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            digest.update(local.numpy().tobytes())
        begun.append(digest.hexdigest())
        return sentence

    fields = {**RECIPE, "train.steps": 1, "train.shard_size": 1}
    run = RunConfig.from_overrides(make_config("mod"), fields)
    source = open_model(root / "one-dense")
    plan = Launch(run=run, data=root / "data", out=root / name, device="cpu", start=source)
    with patch.object(loop, "load_start", load):
        launch(plan, Console(quiet=True))
    return begun


def rewind(run: Path, copy: Path) -> Path:
    """A copy of a finished run that was stopped half-way."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-{NUM_STEPS:08d}")
    RunDir(copy).write_status("interrupted", step=3, num_steps=NUM_STEPS, loss=None)
    return copy


def at_step(number: int, act: Callable[[], None]) -> AbstractContextManager[object]:
    """While entered, `act` is called before the training's step of that number."""
    original, count = TrainStep.__call__, 0

    def call(self: TrainStep, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act()
        return original(self, *args)

    return patch.object(TrainStep, "__call__", call)


def spy(
    kind: type, look: Callable[..., set[str]], seen: set[str]
) -> AbstractContextManager[object]:
    """While entered, what `look` finds in calls of a module's `forward` is added to `seen`."""
    original = kind.forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        seen.update(look(self, *args))
        return original(self, *args, **options)

    return patch.object(kind, "forward", forward)


def look_at_router(router: Router, x: torch.Tensor) -> set[str]:
    return {f"router {router.weight.dtype}"}


def look_at_block(block: Block, x: torch.Tensor, place: Any) -> set[str]:
    weight = block.attention.w_out.weight
    return {f"weights {weight.dtype}", f"stream {x.dtype}", f"phases {place.phase.dtype}"}


def fuse(wanted: bool) -> AbstractContextManager[object]:
    """While entered, optimisers are fused, and lines of metrics are written a step later."""
    make, begin = loop.make_optimizers, Trainer.train

    def make_fused(*args: Any, **options: Any) -> Any:
        optimizers = make(*args, **options)
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["fused"] = True
        return optimizers

    def train_later(self: Trainer, console: Console) -> Any:
        assert self.step.divisor is not None
        self.log_later = True
        return begin(self, console)

    stack = ExitStack()
    if wanted:
        stack.enter_context(patch.object(loop, "make_optimizers", make_fused))
        stack.enter_context(patch.object(Trainer, "train", train_later))
    return stack


def break_down() -> None:
    raise RuntimeError("this rank breaks")


def work(rank: int, root: Path, ports: dict[str, int]) -> None:
    """What each of the two ranks does, in order; ends in an error of one of them."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1"}
    # as under torchrun: who started the ranks serves the port, and no rank has to win it
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def enter(name: str) -> str:
        os.environ["MASTER_PORT"] = str(ports[name])
        return name

    told: dict[str, Any] = {}
    for name, (variant, fields) in CURVES.items():
        with fuse(name == "fused"):
            told[name] = train(root, f"two-{enter(name)}", variant, **fields)
    told["resumed"] = resume(root / enter("resumed"))

    told["started"] = start(root, enter("started"))

    seen: set[str] = set()
    enter("bfloat16")
    with spy(Router, look_at_router, seen), spy(Block, look_at_block, seen):
        train(root, "bfloat16", "mod", **{"train.precision": "bfloat16", "train.steps": 1})
    told["dtypes"] = sorted(seen)

    enter("stopped")
    only_second = rank == 1
    stop = at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with stop if only_second else nullcontext():
        told["stopped"] = train(root, "stopped", "mod")
    (root / f"told-{rank}.json").write_text(json.dumps(told))

    enter("broken")
    with at_step(2, break_down) if only_second else nullcontext():
        train(root, "broken", "dense")


class Pair(NamedTuple):
    """What two ranks left behind."""

    root: Path
    told: list[dict[str, Any]]
    exit_codes: list[int | None]


def serve_ports() -> dict[str, dist.TCPStore]:
    """A meeting place for each launch, open from now on: a port that is found and let go is lost
    to whoever asks next."""
    return {
        name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for name in LAUNCHES
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One process, then two, train the same; starting processes is what takes time."""
    root = tmp_path_factory.mktemp("ranks")
    write_corpus(root / "data")
    for name, (variant, fields) in CURVES.items():
        train(root, f"one-{name}", variant, **fields)
    rewind(root / "one-mod", root / "resumed")
    stores, context = serve_ports(), mp.get_context("spawn")
    ports = {name: store.port for name, store in stores.items()}
    with pytest.MonkeyPatch.context() as patched:
        # where there is a GPU, FSDP2 would move the CPU's model to it
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        ranks = [context.Process(target=work, args=(r, root, ports)) for r in range(NUM_RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(HANGING_SECONDS)
    exit_codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    files = [root / f"told-{rank}.json" for rank in range(NUM_RANKS)]
    assert all(file.exists() for file in files), "a rank did not come to its last launch"
    return Pair(root, [json.loads(file.read_text()) for file in files], exit_codes)


def read_curve(run: Path, kind: str = "train") -> dict[int, float]:
    records = RunDir.open(run).read_metrics(kind)
    name = (
        "loss" if kind == "train" else next(n for n in ("loss_causal", "loss") if n in records[0])
    )
    return {record["step"]: record[name] for record in records}


def assert_same_curve(run: Path, other: Path) -> None:
    for kind, steps in (("train", range(1, NUM_STEPS + 1)), ("val", (3, 6))):
        curve, wanted = read_curve(run, kind), read_curve(other, kind)
        assert list(wanted) == list(steps)
        assert curve == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize("name", CURVES)
def test_two_ranks_have_the_curve_of_one(pair: Pair, name: str) -> None:
    assert [told[name] for told in pair.told] == [["finished", NUM_STEPS]] * NUM_RANKS
    assert_same_curve(pair.root / f"two-{name}", pair.root / f"one-{name}")


def test_the_curves_differ_between_models(pair: Pair) -> None:
    # else the comparison above would say little
    dense, routed = (read_curve(pair.root / f"one-{name}") for name in ("dense", "mod"))
    assert dense != pytest.approx(routed, rel=2e-5)


def test_a_checkpoint_of_one_rank_goes_on_in_two(pair: Pair) -> None:
    assert [told["resumed"] for told in pair.told] == [["finished", NUM_STEPS]] * NUM_RANKS
    starts = RunDir.open(pair.root / "resumed").read_json("provenance.json")["starts"]
    assert [start["device"]["processes"] for start in starts] == [1, 2]
    assert_same_curve(pair.root / "resumed", pair.root / "one-mod")


def test_two_ranks_begin_with_the_same_weights_of_another_run(pair: Pair, tmp_path: Path) -> None:
    for name in ("one-dense", "data"):
        (tmp_path / name).symlink_to(pair.root / name)
    alone = start(tmp_path, "started")
    assert len(alone) == 1
    # also where routers are new
    assert [told["started"] for told in pair.told] == [alone] * NUM_RANKS


@pytest.mark.parametrize("name", ["mod", "experts", "replicas", "muon"])
def test_a_checkpoint_of_two_ranks_goes_on_in_one(pair: Pair, name: str, tmp_path: Path) -> None:
    run = rewind(pair.root / f"two-{name}", tmp_path / "run")
    assert resume(run) == ("finished", NUM_STEPS)
    assert_same_curve(run, pair.root / f"one-{name}")


def test_only_the_weights_of_blocks_are_bfloat16(pair: Pair) -> None:
    for told in pair.told:
        assert told["dtypes"] == [
            "phases torch.float32",
            "router torch.float32",
            "stream torch.bfloat16",
            "weights torch.bfloat16",
        ]


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(pair: Pair) -> None:
    assert [told["stopped"] for told in pair.told] == [["interrupted", 2]] * NUM_RANKS
    run = RunDir.open(pair.root / "stopped")
    assert run.read_json("status.json")["state"] == "interrupted"
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    assert find_damage(run.checkpoints / "step-00000002") is None


def test_an_error_of_one_rank_ends_the_other(pair: Pair) -> None:
    # a rank that hangs has none
    assert pair.exit_codes == [1, 1]
    assert RunDir.open(pair.root / "broken").read_json("status.json")["state"] == "failed"


@pytest.mark.compile
def test_every_layer_is_compiled_once() -> None:
    # more layers of different capacities than torch compiles one piece of code for
    model = make_model(make_config("mod_linear", num_layers=10), dtype=torch.float32)
    counter, tokens = CompileCounter(), make_tokens(model.config, 2, 16)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_layers(model, counter)
        model(tokens).logits.sum().backward()
        assert counter.frame_count == 10
        model(tokens).logits.sum().backward()
        assert counter.frame_count == 10
