"""`depthmix train` is killed, interrupted, out of disk, with damaged files: nothing is lost."""

import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from depthmix.checkpoint import folder as disk
from depthmix.cli import main
from depthmix.runs import list_runs
from depthmix.runs.folder import RunDir
from tiny_runs import (
    MODEL,
    RECIPE,
    Server,
    count_growth,
    flip_byte,
    read_result,
    wait_until,
    write_data,
)

pytestmark = pytest.mark.slow

LONG = (*MODEL, *RECIPE, "--steps", 100)
ENDLESS = (*MODEL, *RECIPE, "--steps", 10**6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data")


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.tmp-*"))


def wait_for_moment(server: Server, run: Path, dice: random.Random) -> bool:
    """Wait for a random moment: of the start, of a few steps, or of writing a checkpoint."""
    kind = dice.choice(("start", "step", "save", "save"))
    if kind == "start":
        time.sleep(dice.uniform(0, 0.4))
        return server.is_alive()
    look, wanted = count_growth(run / "metrics.jsonl"), dice.randint(1, 5)
    if not wait_until(server, lambda: look() >= wanted):
        return False
    if kind == "save" and not wait_until(server, lambda: is_saving(run)):
        return False
    time.sleep(dice.choice((0, 0.01, dice.uniform(0, 0.05))))
    return server.is_alive()


def assert_sound(run: Path) -> None:
    """A killed run can be read, and all that has a checkpoint's name is one."""
    for path in disk.list_checkpoints(run / "checkpoints").values():
        assert disk.find_damage(path) is None
    if (run / "config.toml").exists():
        RunDir.open(run).read_metrics()


@pytest.mark.parametrize(
    ("num_kills", "options"),
    [(8, ()), (5, ("routing.strategy=stochastic", "train.optimizer=muon"))],
    ids=["expert_choice", "stochastic"],
)
def test_kills_change_nothing(
    server: Server, data: Path, tmp_path: Path, num_kills: int, options: tuple[str, ...]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = (*MODEL, *RECIPE, *options, "--data", data, "--steps", 14 * num_kills)
    # saved only once: saving must leave no trace either
    assert server.run("train", *settings, "--out", whole).code == 0

    dice, num_killed, num_torn = random.Random(0), 0, 0
    begin = ("train", *settings, "--checkpoint-every", 4, "--out", run)
    while num_killed < num_kills:
        known = (run / "provenance.json").exists() and (run / "config.toml").exists()
        server.start(*(("train", "--resume", run) if known else begin))
        if wait_for_moment(server, run, dice):
            server.send(signal.SIGKILL)
        ended = server.wait()
        assert ended.code in (-signal.SIGKILL, 0), ended.err
        if ended.code == 0:
            break
        num_killed += 1
        num_torn += is_saving(run)
        assert_sound(run)
    assert num_killed > 0.8 * num_kills, "the run was quicker than its killer"
    assert num_torn > 0
    assert server.run("train", "--resume", run).code == 0
    assert not is_saving(run)
    assert read_result(run) == read_result(whole)


class Pair(NamedTuple):
    """A run that was stopped on its way, and what it must come to."""

    stopped: Path
    result: dict[str, Any]


def start_long(server: Server, data: Path, run: Path, settings: Sequence[object] = LONG) -> None:
    """Start a run that saves often, and return when it is in its midst."""
    server.start("train", *settings, "--data", data, "--checkpoint-every", 5, "--out", run)
    look = count_growth(run / "metrics.jsonl")
    assert wait_until(server, lambda: look() > 4)


@pytest.fixture(scope="module")
def pair(server: Server, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("runs")
    assert server.run("train", *LONG, "--data", data, "--out", folder / "whole").code == 0
    start_long(server, data, folder / "stopped")
    server.send(signal.SIGTERM)
    assert server.wait().code == 128 + signal.SIGTERM
    return Pair(folder / "stopped", read_result(folder / "whole"))


@pytest.fixture
def stopped(pair: Pair, tmp_path: Path) -> Path:
    return shutil.copytree(pair.stopped, tmp_path / "stopped")


def assert_goes_on(server: Server, run: Path, pair: Pair) -> None:
    ended = server.run("train", "--resume", run)
    assert (ended.code, ended.err) == (0, "")
    assert read_result(run) == pair.result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves(
    server: Server, data: Path, pair: Pair, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "a run"
    start_long(server, data, run)
    server.send(number)
    ended = server.wait()
    status = RunDir.open(run).read_json("status.json")
    assert ended.code == 128 + number
    assert ended.err == (
        f"stopped at step {status['step']} of 100, saved; resume with: depthmix train --resume "
        f"'{run}'\n"
    )
    assert status["state"] == "interrupted"
    assert max(disk.list_checkpoints(run / "checkpoints")) == status["step"]
    assert_goes_on(server, run, pair)


def test_a_second_ctrl_c_stops_at_once(server: Server, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # a batch that takes a while, so that both fall into the second step
    settings = ("--data", data, "--steps", 9, "train.batch_size=32768", "train.log_every=1")
    server.start("train", *MODEL, *settings, "train.val_every=9", "--out", run)
    assert wait_until(server, (run / "metrics.jsonl").exists)
    # the second one well after the first: two that come during one operation count as one
    for pause in (0.1, 0.5):
        time.sleep(pause)
        server.send(signal.SIGINT)
    ended = server.wait()
    assert ended.code == 130
    assert ended.err == (
        "stopped at once; to continue from the last checkpoint, resume with: "
        f"depthmix train --resume {run}\n"
    )
    status = RunDir.open(run).read_json("status.json")
    assert (status["state"], "Ctrl-C" in status["reason"]) == ("interrupted", True)
    assert disk.list_checkpoints(run / "checkpoints") == {}


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_loses_nothing(server: Server, pair: Pair, stopped: Path, what: str) -> None:
    """Files that may not grow stand for a disk that is full."""
    metrics = (stopped / "metrics.jsonl").stat().st_size
    weights = next(stopped.glob("checkpoints/*/model.safetensors")).stat().st_size
    assert metrics + 3000 < weights
    limit_bytes = weights - 1 if what == "checkpoint" else metrics + 100
    if what == "metrics":
        # no checkpoint may come before them
        config = stopped / "config.toml"
        config.write_text(config.read_text().replace("point_every = 5", "point_every = 99"))
    ended = server.run("train", "--resume", stopped, limit_bytes=limit_bytes)
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "File too large" in ended.err
    assert f"resume with: depthmix train --resume {stopped}" in ended.err
    assert ("earlier checkpoints are intact" in ended.err) == (what == "checkpoint")
    assert RunDir.open(stopped).read_json("status.json")["state"] == "failed"
    assert_sound(stopped)
    assert_goes_on(server, stopped, pair)


@pytest.mark.parametrize("how", ["flipped", "shortened", "removed"])
def test_data_that_changes_while_training(
    server: Server, data: Path, pair: Pair, tmp_path: Path, how: str
) -> None:
    mine = shutil.copytree(data, tmp_path / "data")
    shard, run = mine / "train-00000.bin", tmp_path / "run"
    start_long(server, mine, run)
    if how == "flipped":
        flip_byte(shard, 100)
    else:
        # in a file of its own: the one that is in use stays as it is
        shard.rename(mine / "kept")
        if how == "shortened":
            shard.write_bytes((mine / "kept").read_bytes()[:-2])
    ended = server.wait()
    assert ended.code == 2
    assert ended.err.startswith(f"depthmix: {shard} ")
    assert ended.err.count("\n") == 1
    assert_sound(run)
    # the same before it is resumed
    again = server.run("train", "--resume", run)
    assert (again.code, again.err) == (2, ended.err)
    shutil.copy(data / shard.name, shard)
    assert_goes_on(server, run, pair)


def test_two_processes_cannot_train_in_one_run(
    server: Server, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    start_long(server, data, run, ENDLESS)
    assert main(["train", "--resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"depthmix: another process ({server.process_id} on ")
    assert told.endswith(f"is training in '{run}': wait for it to end, or choose another --out\n")
    assert [found.state for found in list_runs(run)] == ["running"]
    server.send(signal.SIGKILL)
    server.wait()
    assert [found.state for found in list_runs(run)] == ["stopped"]


def make_command(data: Path, run: Path) -> list[str]:
    """The command of a run without end."""
    args = ("train", *ENDLESS, "--data", data, "--out", run)
    return [sys.executable, "-m", "depthmix", *map(str, args)]


def test_a_reader_that_is_gone_ends_nothing(data: Path, tmp_path: Path) -> None:
    """As `depthmix train 2>&1 | tee log` at Ctrl-C, which also ends `tee`."""
    run = tmp_path / "run"
    reader, writer = os.pipe()
    process = subprocess.Popen(make_command(data, run), stdout=writer, stderr=writer)
    os.close(writer)
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(reader)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    status = RunDir.open(run).read_json("status.json")
    assert status["state"] == "interrupted"
    assert list(disk.list_checkpoints(run / "checkpoints")) == [status["step"]]


def test_a_terminal_shows_a_bar_and_takes_ctrl_c(data: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    # whoever opens a terminal in a session of its own is who its Ctrl-C is for
    program = "import os, sys; os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, os.ttyname(theirs), *make_command(data, tmp_path / "run")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    shown = b""
    # drawn over and over, in one place
    while shown.count(b"\x1b[2K") < 3:
        shown += os.read(ours, 4096)
    os.write(ours, b"\x03")
    # a terminal that nobody writes to any more is an error to its reader
    with suppress(OSError):
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 130
    text = shown.decode()
    assert "━" in text
    assert re.search(r"run .*\d+/1000000", text)
    assert re.search(r"stopped at step \d+ of 1000000, saved; resume with: ", text)
    assert "Traceback" not in text
