"""The command line: what it prints, how it fails, and what it does not load."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import depthmix
from depthmix import describe
from depthmix.cli import main
from depthmix.config import ModelConfig
from depthmix.fields import document_fields
from depthmix.presets import load_preset, preset_names


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # PYTHONUNBUFFERED would hide what is left in a buffer when a pipe closes
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR", "PYTHONIOENCODING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def start(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # pyrefly: ignore[no-matching-overload]
        [sys.executable, "-m", "depthmix.cli", *args],
        **{"capture_output": True, "text": True, "check": False, **options},
    )


def squeeze(text: str) -> str:
    return " ".join(text.split())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    helped = capsys.readouterr().out
    for command in ("describe", "presets", "demo"):
        assert re.search(rf"^  {command} ", helped, re.MULTILINE)
    # without arguments it says the same, and that is no mistake
    assert main([]) == 0
    assert capsys.readouterr().out == helped


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"depthmix {depthmix.__version__}\n"


def test_describe_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "--help"]) == 0
    helped = squeeze(capsys.readouterr().out)
    fields = document_fields(ModelConfig)
    assert len(fields) > 30
    for name, text in fields.items():
        # a break at a hyphen keeps the hyphen
        assert f"{name} {text}".replace("- ", "-") in helped.replace("- ", "-")


def test_describe_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "60m-dense", "60m-mod"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert re.search(r"60m-dense +60m-mod", printed)
    assert re.search(r"sequence length +2048 tokens +2048 tokens", printed)


def test_describe_overrides_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    fields = ["routing.capacity=0.25", "--routing.gate=tanh1", "--width=128"]
    assert (
        main(["describe", *fields[:2], "tiny", "demo", fields[2], "--json", "--seq-len", "9"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in found] == ["tiny", "demo"]
    for name, model in zip(("tiny", "demo"), found, strict=True):
        changed = {"routing.capacity": 0.25, "routing.gate": "tanh1", "width": 128}
        assert ModelConfig.from_dict(model["config"]) == load_preset(name).override(changed)
        assert model["seq_len"] == 9


def test_describe_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a sweep's folders carry such names; the file is still a file
    folder = tmp_path / "width=96"
    folder.mkdir()
    path = folder / "model.toml"
    path.write_text(load_preset("tiny", width=96).to_toml(), encoding="utf-8")
    assert main(["describe", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["config"]["width"] == 96


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", printed, re.MULTILINE) for name in preset_names())


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["describe"], "name at least one model to describe"),
        (["describe", "width=3"], "name at least one model to describe"),
        (["describe", "61m"], "there is no preset '61m'"),
        (["describe", "none.toml"], "cannot read 'none.toml': No such file"),
        (["describe", "tiny", "width=abc"], "width = 'abc' does not fit"),
        (["describe", "tiny", "widht=64"], "Did you mean 'width'?"),
        (["describe", "tiny", "=64"], "'=64' is not an override"),
        (["describe", "tiny", "routing.capacity=2"], "routing.capacity = 2.0 must lie in (0, 1]"),
        (["describe", "tiny", "--seq-len", "0"], "seq_len = 0 must be at least 1"),
        (["describe", "tiny", "--seq-len", "9" * 30], "is longer than max_seq_len = 64"),
        (["describe", "tiny", "--seq-len", "x"], "Invalid value for '--seq-len'"),
        (["describe", "tiny", "width=1e300"], "tiny is too large to count"),
        (["describe", "tiny", "--routing.capacity", "0.25"], "as routing.capacity=0.25"),
        (["describe", "tiny", "--routing.capacity"], "as routing.capacity=VALUE"),
        (["describe", "tiny", "--routing.capacty", "1"], "Did you mean 'routing.capacity'?"),
        (["describe", "tiny", "--seqlen=3"], "Did you mean '--seq-len'?"),
        (["describe", "tiny", "-x"], "there is no option '-x'"),
        (["demo", "--steps", "0"], "--steps 0 must be at least 1"),
        (["demo", "--batch-size", "-1"], "--batch-size -1 must be at least 1"),
        (["presets", "more"], "unexpected extra argument"),
        (["describ"], "No such command 'describ'"),
    ],
)
def test_mistakes_end_in_a_sentence(
    args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.startswith("depthmix: ")
    assert sentence in errors
    assert "Traceback" not in errors


def fail_with(error: BaseException) -> object:
    def fail() -> None:
        raise error

    return fail


NO_MEMORY = "there is not enough memory for this: take a smaller model or batch"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device"), 2, "depthmix: No space left on device\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "depthmix: x: Permission denied\n"),
        (MemoryError(), 2, f"depthmix: {NO_MEMORY}\n"),
        (RuntimeError("alloc_cpu: can't allocate memory"), 2, f"depthmix: {NO_MEMORY}\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_interruptions_are_short(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(describe, "list_presets", fail_with(error))
    assert main(["presets"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [KeyError("a defect"), RuntimeError("another")])
def test_defects_are_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "list_presets", fail_with(error))
    with pytest.raises(type(error)):
        main(["presets"])


@pytest.mark.parametrize("args", [["presets"], ["describe", "60m"], ["describe", "--help"]])
def test_a_closed_pipe_is_silent(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*args, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_exit_codes_reach_the_shell() -> None:
    assert start("presets").returncode == 0
    failed = start("describe", "61m")
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1


def test_piped_tables_are_whole() -> None:
    done = start("describe", *preset_names())
    assert "…" not in done.stdout
    assert all(name in done.stdout for name in preset_names())


@pytest.mark.parametrize(
    "args", [["--version"], ["presets"], ["describe", "60m"], ["describe", "60m", "--json"]]
)
def test_counting_loads_no_torch(args: list[str]) -> None:
    code = (
        f"import sys; from depthmix.cli import main; code = main({args!r});"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
