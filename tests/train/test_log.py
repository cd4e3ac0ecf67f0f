"""Numbers reach every place they are sent to, and the display does not get in their way."""

import io
import math
import re
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from depthmix.runs.folder import RunDir
from depthmix.train.log import (
    NUM_BINS,
    PLAIN_SECONDS,
    REFRESH_SECONDS,
    Logger,
    SilentLogger,
    list_fields,
)


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class CountsReads:
    """A number that tells how often it was looked at, as one on a GPU would make the CPU wait."""

    num_reads = 0

    def __float__(self) -> float:
        self.num_reads += 1
        return 2.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", '[model]\nwidth = 8\n[train]\ntitle = "x"\n', {})


def make_logger(run: RunDir, *, terminal: bool = False, **settings: Any) -> tuple[Logger, Any]:
    file = io.StringIO()
    # TERM may be dumb where the tests run
    console = Console(
        file=file,
        force_terminal=terminal,
        width=100,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    chosen: dict[str, Any] = {"num_steps": 100, "tensorboard": False, **settings}
    return Logger(run, console=console, **chosen), file


def read_board(run: RunDir) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run.tensorboard))
    board.Reload()
    return board


def test_a_record_reaches_the_file_and_the_board(run: RunDir) -> None:
    logger, _ = make_logger(run, tensorboard=True)
    records = [
        {"step": 1, "kind": "train", "loss": 3.5, "note": "text", "none": None},
        {"step": 1, "kind": "router", "gates": [0.5, 0.25], "depth": {"mean": 2}},
        {"step": 2, "kind": "train", "loss": 3.25},
    ]
    with logger:
        for record in records:
            logger.log(record)
    assert run.read_metrics() == records
    board = read_board(run)
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 3.5), (2, 3.25)]
    assert {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]} == {
        "train/loss": 3.5,
        "router/gates/0": 0.5,
        "router/gates/1": 0.25,
        "router/depth/mean": 2.0,
    }


def test_a_resumed_run_hides_records_after_its_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the files' names hold the second they were made in, and are read in that order
    seconds = iter(range(1_700_000_000, 1_700_001_000))
    monkeypatch.setattr("time.time", lambda: next(seconds))
    first, _ = make_logger(run, tensorboard=True)
    with first:
        for step in range(1, 7):
            first.log({"step": step, "kind": "train", "loss": float(step)})
    run.truncate_metrics(4)
    second, _ = make_logger(run, tensorboard=True, start_step=4)
    with second:
        second.log({"step": 5, "kind": "train", "loss": 50.0})
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert [(e.step, e.value) for e in read_board(run).Scalars("train/loss")] == expected
    assert [(r["step"], r["loss"]) for r in run.read_metrics()] == expected


@pytest.mark.parametrize("kind", ["tensor", "bfloat16", "array", "list"])
def test_a_histogram_is_kept_small_and_whole(kind: str, run: RunDir) -> None:
    values = torch.tensor([0.0, 1.0, 1.0, 4.0, math.nan, math.inf], requires_grad=kind == "tensor")
    given = {
        "tensor": values.reshape(2, 3),
        "bfloat16": values.bfloat16(),
        "array": values.detach().numpy(),
        "list": values.tolist(),
    }[kind]
    logger, _ = make_logger(run, tensorboard=True)
    with logger:
        logger.histogram("block3/score", given, step=7)
    (record,) = run.read_metrics("router")
    assert (record["step"], record["name"]) == (7, "block3/score")
    assert (record["low"], record["high"], record["mean"]) == (0.0, 4.0, 1.5)
    assert record["std"] == pytest.approx(1.5)
    assert (record["num_values"], record["num_not_finite"]) == (4, 2)
    counts = [0] * NUM_BINS
    counts[0], counts[NUM_BINS // 4], counts[-1] = 1, 2, 1
    assert record["counts"] == counts
    board = read_board(run)
    # compressed by the reader: what is left says where the values lie
    (event,) = board.Histograms("router/block3/score")
    found = event.histogram_value
    assert (found.min, found.max, found.num, found.sum) == (0.0, 4.0, 4, 6.0)


def test_a_histogram_may_have_no_value_or_one(run: RunDir) -> None:
    logger, _ = make_logger(run, tensorboard=True)
    with logger:
        logger.histogram("nothing", torch.full((3,), math.nan), step=1)
        logger.histogram("empty", [], step=1)
        logger.histogram("one", torch.ones(5), step=1)
    nothing, empty, one = run.read_metrics("router")
    assert (sum(nothing["counts"]), nothing["num_not_finite"]) == (0, 3)
    assert sum(empty["counts"]) == 0
    assert (sum(one["counts"]), one["mean"], one["std"]) == (5, 1.0, 0.0)
    assert one["low"] < 1.0 < one["high"]


def test_plain_lines_are_few_and_plain(run: RunDir) -> None:
    clock = Clock()
    logger, file = make_logger(run, clock=clock, description="demo-mod", num_steps=1000)
    with logger:
        for step in range(1, 401):
            clock.now += 0.1
            logger.show(step, {"loss": 3.0})
            if step == 200:
                logger.say("validation [bold]loss[/bold] 2.9")
    lines = file.getvalue().splitlines()
    assert "validation [bold]loss[/bold] 2.9" in lines
    steps = [int(n) for n in re.findall(r"step (\d+)/1000", file.getvalue())]
    # the first, one every 10 seconds, and the last
    assert steps[0] == 1
    assert steps[-1] == 400
    assert len(steps) == 2 + int(400 * 0.1 / PLAIN_SECONDS) - 1
    assert all(b - a <= 10 * PLAIN_SECONDS + 1 for a, b in pairwise(steps))
    assert re.match(r"demo-mod  step 1/1000  loss 3\.000  ppl 20\.09  0:00:00$", lines[0])
    assert re.search(r"  0:00:40  0:01:00 left, ends (\w+ \d+ \w+ )?\d\d:\d\d$", lines[-1])
    assert all(ord(character) >= 32 for line in lines for character in line)


def test_a_long_plain_line_is_one_line(run: RunDir) -> None:
    logger, file = make_logger(run)
    with logger:
        logger.show(1, {"phase": "p" * 150})
        logger.say("s" * 150)
    assert [len(line) > 149 for line in file.getvalue().splitlines()] == [True, True]


def test_a_plain_line_leaves_out_less_important_parts(run: RunDir) -> None:
    clock = Clock()
    fields = {"loss": 3.0, "tokens_per_second": 1e6, "flops_per_second": 3.1e14}
    fields |= {"share_of_peak": 0.4, "routed": 0.125, "flops": 1.25e18, "flops_budget": 2.5e18}
    logger, file = make_logger(run, clock=clock, description="60m-20261115", num_steps=20000)
    with logger:
        logger.show(10000, {"loss": 3.0})
        # about a day is left, which ends on another one
        clock.now += 100
        logger.show(10010, fields)
    short, full = file.getvalue().splitlines()
    assert short.startswith("60m-20261115  step 10000/20000  loss 3.000  ppl ")
    assert len(full) <= 100
    assert full.startswith("step 10010/20000  loss 3.000  1.00 M tokens/s  ")
    assert "  0:01:40  1 day, 3:45:00 left, ends " in full


def test_the_estimate_leaves_out_the_first_step(run: RunDir) -> None:
    clock = Clock()
    logger, file = make_logger(run, clock=clock, num_steps=100)
    with logger:
        # a compilation
        clock.now += 3600
        logger.show(1, {})
        assert "left" not in file.getvalue()
        clock.now += 20
        logger.show(11, {})
    # 2 seconds a step, 89 steps
    assert "1:00:20  0:02:58 left, ends" in file.getvalue().splitlines()[-1]


def test_the_live_line_is_drawn_seldom_and_reads_numbers_only_then(run: RunDir) -> None:
    clock, loss = Clock(), CountsReads()
    logger, file = make_logger(run, terminal=True, clock=clock, description="demo", num_steps=64)
    with logger:
        for step in range(1, 65):
            clock.now += REFRESH_SECONDS / 8
            logger.show(step, {"loss": loss})
        assert loss.num_reads == 8
        logger.say("a sentence above")
    # the last step was not yet drawn
    assert loss.num_reads == 9
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "a sentence above" in plain
    assert re.findall(r"(\d+)/64", plain)[-1] == "64"
    assert "loss 2.000" in plain
    assert "\x1b[?25l" in file.getvalue()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l"), "cursor shown"


def test_the_live_display_fits_a_narrow_terminal(run: RunDir) -> None:
    clock = Clock()
    logger, file = make_logger(run, terminal=True, clock=clock, description="d" * 30, num_steps=9)
    logger.console.width = 60
    fields = {"loss": 2.0, "tokens_per_second": 1e5, "flops_per_second": 1e12, "flops": 1e15}
    with logger:
        for step in (1, 2):
            clock.now += 10
            logger.show(step, {**fields, "flops_budget": 1e16, "routed": 0.125})
    # colours stay on their line; what moves the cursor begins another
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", plain)
    shown = [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]
    # two lines each time that it is drawn
    assert len(shown) >= 4
    assert max(map(len, shown)) <= 60
    assert all(line.startswith("ddd") for line in shown[::2])
    assert all(re.match(r"loss 2\.000  ppl 7\.389  .*…$", line) for line in shown[1::2])
    # the name makes room for the times
    assert re.match(r"d+…  .*  2/9  0:00:20  0:01:10 left, ends", shown[-2])


def test_after_a_failure_the_display_ends_and_numbers_are_left_alone(run: RunDir) -> None:
    clock, loss = Clock(), CountsReads()
    logger, file = make_logger(run, terminal=True, clock=clock)

    def fail() -> None:
        with logger:
            logger.show(1, {"loss": 1.0})
            logger.show(2, {"loss": loss})
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        fail()
    assert loss.num_reads == 0
    assert "\x1b[?25h" in file.getvalue()


def test_every_field_has_its_unit() -> None:
    fields = {
        "lr": 3e-4,
        "flops": 1.25e18,
        "flops_budget": 2e18,
        "routed": torch.tensor(0.125),
        "share_of_peak": 0.314,
        "flops_per_second": 3.1e14,
        "tokens_per_second": 1_230_000,
        "loss": 2.0,
        "phase": "decay",
        "absent": None,
    }
    assert "  ".join(list_fields(fields).values()) == (
        "loss 2.000  ppl 7.389  1.23 M tokens/s  310 TFLOP/s  31.4% of peak  routed 12.5%  "
        "1.25e18 of 2e18 FLOP  lr 0.0003  phase decay"
    )
    assert list_fields({"flops": 1e15, "share_of_peak": None}) == {"flops": "1e15 FLOP"}
    assert list_fields({}) == {}
    for loss in (math.nan, math.inf, 1e6):
        assert list_fields({"loss": loss})["loss"].startswith("loss ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_stops_training_with_the_file(run: RunDir) -> None:
    run.metrics.symlink_to("/dev/full")
    logger, _ = make_logger(run)
    with pytest.raises(OSError, match="No space left") as caught, logger:
        logger.log({"step": 1, "kind": "train", "loss": 1.0})
    assert caught.value.filename == str(run.metrics)


def fill_board(logger: Logger, *, when: str) -> None:
    """Make the board fail as a full disk does."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    setattr(logger._board, when, fail)


@pytest.mark.parametrize("when", ["add_scalar", "add_histogram_raw", "flush"])
def test_a_failure_of_tensorboard_is_reported(when: str, run: RunDir) -> None:
    logger, _ = make_logger(run, tensorboard=True)
    told = "TensorBoard's files cannot be written: No space left"

    def write() -> None:
        with logger:
            fill_board(logger, when=when)
            logger.log({"step": 1, "kind": "train", "loss": 1.0})
            logger.histogram("h", [1.0, 2.0], step=1)

    with pytest.raises(OSError, match=told) as caught:
        write()
    assert caught.value.filename == str(run.tensorboard)
    assert caught.value.errno == 28


def test_a_board_that_cannot_close_does_not_hide_the_failure(run: RunDir) -> None:
    logger, _ = make_logger(run, tensorboard=True)

    def fail() -> None:
        with logger:
            fill_board(logger, when="flush")
            raise RuntimeError("first")

    with pytest.raises(RuntimeError, match="first"):
        fail()


def test_a_file_in_place_of_the_board_is_reported(run: RunDir) -> None:
    run.tensorboard.write_text("x")
    logger, _ = make_logger(run, tensorboard=True)
    with pytest.raises(OSError, match="TensorBoard's files cannot be written"):
        logger.__enter__()


def test_a_missing_tensorboard_is_reported_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an empty entry makes an import fail
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    logger, file = make_logger(run, tensorboard=True)
    with logger:
        for step in range(3):
            logger.log({"step": step, "kind": "train", "loss": 1.0})
        logger.histogram("h", [1.0], step=1)
    assert file.getvalue().count("TensorBoard is not installed") == 1
    assert len(run.read_metrics()) == 4


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What a run does with W&B, whose place a record of the calls takes."""
    calls: list[tuple[str, Any]] = []
    module = types.ModuleType("wandb")
    fake = types.SimpleNamespace(calls=calls, module=module)
    module.__dict__.update(
        Error=type("Error", (Exception,), {}),
        init=lambda **settings: calls.append(("init", settings)),
        log=lambda values, step: calls.append(("log", (values, step))),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
        Histogram=lambda np_histogram: ("histogram", np_histogram[0].sum()),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def test_wandb_gets_the_same_numbers_and_one_id(run: RunDir, wandb: types.SimpleNamespace) -> None:
    for step in (1, 2):
        logger, _ = make_logger(run, wandb=True, start_step=step - 1)
        with logger:
            logger.log({"step": step, "kind": "train", "loss": 3.5})
            logger.histogram("h", [1.0, 2.0], step=step)
    names = [name for name, _ in wandb.calls]
    assert names == ["init", "log", "log", "finish"] * 2
    first, again = (call for name, call in wandb.calls if name == "init")
    assert first == again
    assert (first["project"], first["name"], first["resume"]) == ("depthmix", "run", "allow")
    assert len(first["id"]) == 12
    assert first["config"] == {"model": {"width": 8}, "train": {"title": "x"}}
    assert wandb.calls[1:4] == [
        ("log", ({"train/loss": 3.5}, 1)),
        ("log", ({"router/h": ("histogram", 2)}, 1)),
        ("finish", 0),
    ]


def test_a_failed_start_of_wandb_is_reported(run: RunDir, wandb: types.SimpleNamespace) -> None:
    def fail(**settings: Any) -> None:
        raise wandb.module.Error("no API key")

    wandb.module.init = fail
    logger, _ = make_logger(run, wandb=True)
    with pytest.raises(ValueError, match=r"W&B did not start \(no API key\): .*wandb login"):
        logger.__enter__()


def test_a_missing_wandb_is_reported(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    logger, _ = make_logger(run, wandb=True)
    with pytest.raises(ValueError, match=r"W&B is not installed: pip install 'depthmix\[wandb\]'"):
        logger.__enter__()


def test_the_silent_logger_takes_the_same_calls(capsys: pytest.CaptureFixture[str]) -> None:
    import inspect

    for name in ("log", "histogram", "show", "say", "__exit__"):
        silent, loud = getattr(SilentLogger, name), getattr(Logger, name)
        assert inspect.signature(silent) == inspect.signature(loud)
    with SilentLogger() as logger:
        logger.log({"step": 1, "kind": "train"})
        logger.histogram("h", torch.ones(2), 1)
        logger.show(1, {"loss": 1.0})
        logger.say("x")
    assert capsys.readouterr() == ("", "")
