"""`depthmix chat`: through a pipe, and in a terminal, where Ctrl-C stops an answer."""

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import depthmix
from depthmix.cli import main
from served_models import write_served_run
from test_architecture import modules_loaded_by

Refuse = Callable[[list[str], str], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_run(tmp_path_factory.mktemp("talking"))


def feed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    rest = iter(lines)

    def read(prompt: str) -> str:
        assert prompt == ""
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_lines_and_commands(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--max-tokens", "5", "--seed", "1"]
    lines = ["hi \\", "there", "/settings max_tokens=3", "/nope", "//path", "/quit", "never"]
    feed(monkeypatch, *lines)
    assert main(["chat", str(run), *options]) == 0
    printed, told = capsys.readouterr()
    # the answers alone
    assert printed.endswith("\n")
    first, five, settings, nope, three = told.splitlines()
    assert first.startswith("Using the model's chat template.")
    assert re.match(r"\d tokens?, .*% of blocks executed", five)
    assert settings.startswith("max_tokens=3")
    assert nope == "depthmix: unknown command /nope: /help lists the commands"
    assert re.match(r"[123] tokens?", three)
    # the end of what comes through a pipe is the end
    feed(monkeypatch, "hi \\", "there")
    assert main(["chat", str(run), *options]) == 0
    assert printed.startswith(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temperature", "-1"], "--temperature -1"),
        (["--device", "tpu"], "--device tpu is neither cpu nor cuda"),
        (["--selector", "magic", "--device", "cpu"], "--selector magic: unknown selector"),
    ],
)
def test_mistakes_are_refused_early(
    run: Path, refuse: Refuse, arguments: list[str], sentence: str
) -> None:
    refuse(["chat", str(run), *arguments], sentence)


def test_help_loads_no_torch() -> None:
    loaded = modules_loaded_by(
        "import sys; sys.argv = ['depthmix', 'chat', '--help'];"
        "from depthmix.cli import main; main()"
    )
    assert "torch" not in loaded


class Terminal:
    """The other side of a pseudo-terminal."""

    def __init__(self, file: int, process: "subprocess.Popen[bytes]") -> None:
        self.file, self.process, self.seen = file, process, ""

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def wait(self, pattern: str, *, again: str | None = None) -> re.Match[str]:
        """Until a pattern is on the screen; what was before it is forgotten.

        Every 5 seconds types something `again`: a Ctrl-C can strike just before Python's own
        reading of a line begins to wait, and is only seen with the next key.
        """
        patience = 12
        while (found := re.search(pattern, self.seen)) is None:
            if not select.select([self.file], [], [], 5)[0]:
                patience -= 1
                assert patience, f"{pattern} in {self.seen!r}"
                self.type(again or "")
                continue
            self.seen += os.read(self.file, 65536).decode(errors="replace").replace("\r", "")
        self.seen = self.seen[found.end() :]
        return found


@contextmanager
def open_terminal(program: str, *arguments: str) -> Iterator[Terminal]:
    """Run a program with a terminal of its own, as a session of its own."""
    ours, theirs = os.openpty()
    # whoever opens a terminal in a session of its own is who its Ctrl-C is for
    start = "import os, signal, sys; os.open(sys.argv[1], os.O_RDWR);"
    start += "signal.signal(signal.SIGINT, signal.default_int_handler);" + program
    source = str(Path(depthmix.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    variables.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", start, os.ttyname(theirs), *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# a step takes so long that no answer is over before it is stopped
SLOWLY = """
import time
from depthmix.cli import main
from depthmix.infer import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.05), step(self))[1]
sys.exit(main(sys.argv[2:]))
"""


def test_ctrl_c_stops_the_answer_and_not_the_program(run: Path) -> None:
    options = ["--device", "cpu", "--max-tokens", "400", "--seed", "1"]
    with open_terminal(SLOWLY, "chat", str(run), *options) as terminal:
        terminal.wait(r"Ctrl-D quits\.\n")
        terminal.wait("> ")
        terminal.type("first\n")
        terminal.wait(r"first\n.*\S")
        terminal.type("\x03")
        told = terminal.wait(r"(\d+) tokens?[^\n]*% of blocks executed")
        assert int(told[1]) < 400
        # at the prompt it takes back what was typed
        terminal.wait("> ")
        terminal.type("a mistake")
        terminal.wait("a mistake")
        terminal.type("\x03")
        terminal.wait("Ctrl-D quits", again="\x03")
        # what was said before comes back with an arrow
        terminal.wait("> ")
        terminal.type("\x1b[A")
        terminal.wait("first")
        terminal.type("\n")
        terminal.wait(r"\S")
        terminal.type("\x03")
        terminal.wait("tokens?[^\n]*% of blocks executed")
        terminal.wait("> ")
        terminal.type("/depth\n")
        terminal.wait("routed blocks used")
        terminal.wait("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0


def test_sample_offers_a_conversation(run: Path) -> None:
    program = "from depthmix.cli import main; sys.exit(main(sys.argv[2:]))"
    options = ["--device", "cpu", "--max-tokens", "2"]
    with open_terminal(program, "sample", str(run), *options) as terminal:
        terminal.wait(f"to talk with it: depthmix chat {re.escape(str(run))}")
        terminal.wait("of blocks executed")
        assert terminal.process.wait(60) == 0
