"""`depthmix trace` and `depthmix view`: what they write, what they refuse."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from depthmix.cli import main, view
from depthmix.progress import Bar
from depthmix.report.traces import read_trace
from depthmix.report.view import write_page
from hand_traces import make_trace
from test_architecture import modules_loaded_by
from text_runs import write_text_run


class Told(NamedTuple):
    code: int
    out: str
    err: str


Ask = Callable[..., Told]
TEXT = "line 12 says 144\nand no more\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*args: object) -> Told:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Told(code, *capsys.readouterr())

    return ask


def test_trace_is_written_and_summarized(run: Path, words: Path, tmp_path: Path, ask: Ask) -> None:
    out = tmp_path / "found.json"
    told = ask("trace", run, "--text", words, "--out", out, "--device", "cpu", "--checkpoint", 2)
    assert (told.code, told.err) == (0, "")
    trace = read_trace(out)
    assert "".join(trace["texts"]) == TEXT
    assert told.out.startswith(f"{out}: {len(trace['tokens'])} tokens in 1 window; top-k routes 1")
    assert "causal routes" in told.out
    origin = trace["origin"]
    assert (origin["run"], origin["text"]) == (str(run), str(words))
    assert (origin["checkpoint"], origin["device"]) == ("step-00000002", "cpu")
    assert {"depthmix", "python", "torch"} <= origin["versions"].keys()
    assert origin["command"] == sys.argv
    short = ask("trace", run, "--text", words, "--out", out, "--max-tokens", 5, "--device", "cpu")
    assert "6 tokens" in short.out
    assert read_trace(out)["origin"]["checkpoint"] == "step-00000004"


def test_a_page_of_a_run_is_that_of_its_trace(
    run: Path, words: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask("trace", run, "--text", words, "--device", "cpu").code == 0
    told = ask("view", "trace.json")
    assert told.code == 0
    assert told.out.startswith("trace.html: ")
    page = Path("trace.html").read_text()
    assert page == write_page(read_trace(Path("trace.json")))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert ask("view", run, "--text", "-", "--out", "direct.html", "--device", "cpu").code == 0
    for name in ("trace.html", "direct.html"):
        data = Path(name).read_text().partition('id="trace">')[2].partition("</script>")[0]
        assert "".join(json.loads(data)["texts"]) == TEXT


def test_a_long_text_shows_progress_and_is_cut(
    run: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, told = tmp_path / "long.txt", []
    text.write_text(TEXT * 20)
    monkeypatch.setattr(view, "MAX_SHOWN", 40)
    monkeypatch.setattr(Bar, "update", lambda self, *words: told.append(words))
    command = ("view", run, "--text", text, "--out", tmp_path / "page.html", "--device", "cpu")
    answer = ask(*command)
    assert answer.code == 0
    assert answer.out.endswith("; only the first 40 tokens are shown, --max-tokens shows more\n")
    # windows of 32 tokens, under both rules
    assert told[0] == ("reading", 32, 82, "32 of 82 tokens")
    assert told[-1] == ("reading", 82, 82, "82 of 82 tokens")
    assert "only the first" not in ask(*command, "--max-tokens", 50).out
    assert '"tokens":[0,' in (tmp_path / "page.html").read_text()


def test_a_long_trace_is_cut_too(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    path, page = tmp_path / "long.json", tmp_path / "long.html"
    path.write_text(json.dumps(make_trace()))
    monkeypatch.setattr(view, "MAX_SHOWN", 5)
    assert ask("view", path).out.endswith(
        "; only the first 5 tokens are shown, --max-tokens shows more\n"
    )
    # the one that was added does not count
    assert '"tokens":[0,1,2,3,4,5],' in page.read_text()
    assert "only the first" not in ask("view", path, "--max-tokens", 10).out
    assert '"tokens":[0,1,2,3,4,5,6,7,8,9,10],' in page.read_text()


def test_mistakes_are_reported(run: Path, words: Path, tmp_path: Path, ask: Ask) -> None:
    trace, empty, binary = (tmp_path / name for name in ("t.json", "empty.txt", "binary"))
    trace.write_text(json.dumps(make_trace()))
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    cases = [
        (("trace", tmp_path / "none", "--text", words), "there is no run"),
        (("trace", run, "--text", empty), "empty.txt is empty: give a file"),
        (("trace", run, "--text", binary), "binary is not text in UTF-8"),
        (
            ("trace", run, "--text", tmp_path / "no.txt"),
            f"cannot read --text {tmp_path}/no.txt: No such file",
        ),
        (("trace", run, "--text", words, "--device", "tpu"), "--device tpu is neither"),
        (("trace", run, "--text", words, "--max-tokens", 0), "--max-tokens 0 must be"),
        (("trace", run, "--text", words, "--checkpoint", 3), "has no checkpoint '3'"),
        (("trace", run, "--text", words, "--out", tmp_path), "is a folder: name a file"),
        (
            ("trace", run, "--text", words, "--out", "-"),
            "cannot write to the terminal: name a file",
        ),
        (("trace", run, "--text", words, "--out", tmp_path / "a/b"), "there is no folder"),
        (("trace", run), "Missing option '--text'"),
        (("view", run), "give its model a text with --text FILE"),
        (("view", tmp_path / "none.json"), "there is no trace"),
        (("view", tmp_path / "none", "--text", words), "there is no run"),
        (("view", words), "words.txt is not a trace"),
        (("view", trace, "--text", words), "is already a trace: leave out --text"),
        (("view", trace, "--text", words, "--device", "cpu"), "leave out --text, --device"),
        (("view", trace, "--max-tokens", 0), "--max-tokens 0 must be"),
    ]
    for args, sentence in cases:
        place = () if "--out" in args else ("--out", tmp_path / "out")
        told = ask(*args, *place)
        assert told.code == 2, args
        assert sentence in told.err
        assert len(told.err.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_a_dense_run_has_nothing_to_trace(tmp_path: Path, words: Path, ask: Ask) -> None:
    run = write_text_run(tmp_path, "routing.strategy=none")
    told = ask("trace", run, "--text", words, "--out", tmp_path / "out", "--device", "cpu")
    assert told.code == 2
    assert "has no routed blocks" in told.err


def test_a_page_of_a_trace_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(make_trace()))
    loaded = modules_loaded_by(f"from depthmix.cli import main; main(['view', {str(path)!r}])")
    assert "depthmix.report.view" in loaded
    assert "torch" not in loaded
    assert path.with_suffix(".html").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 5},
        {"origin": None},
        {"rules": {"topk": None}},
        {"rules": {"topk": {**make_trace()["rules"]["topk"], "blocks": 3}}},
        {"rules": {"topk": {**make_trace()["rules"]["topk"], "entropy": ["a"] * 11}}},
    ],
)
def test_edited_trace_is_refused(change: dict[str, object], tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**make_trace(), **change}))
    told = ask("view", path)
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"depthmix: {path} is damaged")
    assert "Traceback" not in told.err
    assert not path.with_suffix(".html").exists()
