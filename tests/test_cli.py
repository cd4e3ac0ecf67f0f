"""The command line: what it prints, how it fails, and what it does not load."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import depthmix
from depthmix.cli import main
from depthmix.cli.arguments import SECTIONS
from depthmix.cli.demo import demo
from depthmix.config import ModelConfig, Recipe, RunConfig, load_preset, preset_names
from depthmix.config.fields import document_fields
from depthmix.report import describe
from depthmix.runs.folder import RunDir
from depthmix.units import format_power
from text_runs import write_text_run
from tiny_runs import MODEL, RECIPE, read_tree, write_data


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # PYTHONUNBUFFERED would hide what is left in a buffer when a pipe closes
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR", "PYTHONIOENCODING", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def start(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # pyrefly: ignore[no-matching-overload]
        [sys.executable, "-m", "depthmix", *args],
        **{"capture_output": True, "text": True, "check": False, **options},
    )


def squeeze(text: str) -> str:
    return " ".join(text.split())


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    helped = capsys.readouterr().out
    verbs = re.findall(r"^  ([a-z][a-z-]+)  ", helped, re.MULTILINE)
    # in the order of use
    assert verbs[:7] == ["demo", "presets", "describe", "prepare", "train", "runs", "sample"]
    assert len(verbs) == len(set(verbs)) == 18
    headings = re.findall(r"^([A-Z].*):$", helped, re.MULTILINE)
    assert headings == ["Options", *SECTIONS]
    # no line is cut
    assert "..." not in helped.split("Options:")[1]
    # without arguments it says the same, and that is not an error
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


def test_describe_reads_models_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_text_run(tmp_path)
    config = depthmix.open_model(run).config
    capsys.readouterr()
    assert main(["describe", str(run), "routing.capacity=0.5", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)
    assert ModelConfig.from_dict(model["config"]) == config.override({"routing.capacity": 0.5})
    assert main(["describe", str(tmp_path / "data")]) == 2
    assert "is not a model" in capsys.readouterr().err


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
        (["describe", "tiny", "--seq-len", "0"], "--seq-len 0 must be at least 1"),
        (["describe", "tiny", "--seq-len", "9" * 30], "is longer than max_seq_len = 64"),
        (["describe", "tiny", "--seq-len", "x"], "Invalid value for '--seq-len'"),
        (["describe", "tiny", "width=1e300"], "tiny is too large to count"),
        (["describe", "tiny", "--routing.capacity", "0.25"], "as routing.capacity=0.25"),
        (["describe", "tiny", "--routing.capacity"], "as routing.capacity=VALUE"),
        (["describe", "tiny", "--routing.capacty", "1"], "Did you mean 'routing.capacity'?"),
        (["describe", "tiny", "--seqlen=3"], "Did you mean '--seq-len'?"),
        (["describe", "tiny", "-x"], "there is no option '-x'"),
        (["demo", "--flops", "0"], "--flops 0.0 must be greater than 0"),
        (["demo", "--preset", "tiny-dense"], "has no routed blocks to compare"),
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


NO_MEMORY = "out of memory: use a smaller model or batch"


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


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a defect"),
        RuntimeError("another"),
        # it names memory, and is not about its size
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("cli") / "data")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = ("train", *MODEL, *RECIPE, "--steps", "4", "train.tensorboard=false")


@pytest.mark.parametrize("verb", ["prepare", "train", "runs", "upcycle", "eval"])
def test_help_fits_a_narrow_terminal(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    helped = capsys.readouterr().out
    assert max(map(len, helped.splitlines())) <= 80
    assert "list[" not in helped
    # commands can be copied
    examples = [line for line in helped.splitlines() if line.startswith("    depthmix")]
    counts = {"prepare": 1, "train": 4, "runs": 0, "upcycle": 3, "eval": 3}
    assert len(examples) == counts[verb]


def test_the_demos_budget_is_written_as_a_power(capsys: pytest.CaptureFixture[str]) -> None:
    flops = inspect.signature(demo).parameters["flops"].default
    assert main(["demo", "--help"]) == 0
    assert f"Default: {format_power(flops)}." in squeeze(capsys.readouterr().out)


def test_train_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    helped = squeeze(capsys.readouterr().out).replace("- ", "-")
    for name, text in {**document_fields(Recipe, "train."), **document_fields(ModelConfig)}.items():
        assert f"{name} {text}".replace("- ", "-") in helped
    for line in ("Number of blocks. [default: 12]", "as the output head. [default: true]"):
        assert line in helped
    # what a run of a preset really uses
    for line in ("[default: raw; in presets: tanh1]", "[default: false; in presets: true]"):
        assert line in helped
    # what has no default shows none
    assert "Default: num_heads. head_width" in helped


def test_from_text_to_a_finished_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my texts").mkdir()
    for i in range(40):
        Path("my texts", f"{i}.txt").write_text(f"the {i}th text counts from {i} to {i * i}\n" * 9)
    assert main(["prepare", "my texts", "--out", "my data", "--vocab-size", "300"]) == 0
    *_, counted, told = capsys.readouterr().out.splitlines()
    assert re.match(r"my data: train: [0-9.]+ K tokens in \d+ documents; val: ", counted)
    assert told == "next: depthmix train --data 'my data'"
    assert main([*SHORT, "vocab_size=300", *shlex.split(told)[3:]]) == 0
    (run,) = Path("runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", run.name)
    printed, errors = capsys.readouterr()
    assert errors == ""
    # plain lines where there is no terminal
    assert "\x1b" not in printed
    assert re.search(rf"^{run.name}  step 4/4  loss \d", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("finished, validation loss ")
    assert main(["train", "--resume", str(run)]) == 0
    assert "already finished (4 steps); a larger --steps extends it" in capsys.readouterr().out
    assert main(["runs"]) == 0
    assert re.search(rf"^runs/{run.name}\s.* 4/4 +finished ", capsys.readouterr().out, re.MULTILINE)
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "finished"


def test_a_finished_run_is_extended(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--data", str(data), "--out", "run"]) == 0
    for args, sentence in (
        (("--steps", "0"), "--steps 0 must be greater than 0"),
        (
            ("--steps", "4"),
            "'run' has already done 4 steps, but this budget allows 4: give a larger",
        ),
        (("train.seed=3",), "--resume takes the model, its fields and the folder from the run"),
    ):
        before = read_tree(here)
        capsys.readouterr()
        assert main(["train", "--resume", "run", *args]) == 2
        assert sentence in capsys.readouterr().err
        assert read_tree(here) == before
    assert main(["train", "--resume", "run", "--steps", "6"]) == 0
    assert "resuming at step 4" in capsys.readouterr().out
    status = RunDir.open("run").read_json("status.json")
    assert (status["state"], status["step"], status["num_steps"]) == ("finished", 6, 6)
    # the field is the same budget
    assert main(["train", "--resume", "run", "train.steps=7"]) == 0


def test_what_prepare_accepts_can_be_trained_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("two.txt").write_text("ab")
    assert main(["prepare", "two.txt", "--out", "data"]) == 0
    *_, counted, told = capsys.readouterr().out.splitlines()
    assert "fewer tokens than one sequence of" in counted
    assert told == "next: depthmix train --data data train.seq_len=1"
    small = ("--preset", "tiny", "--steps", "1", "--device", "cpu", "train.tensorboard=false")
    assert main([*shlex.split(told)[2:], *small]) == 0
    assert "1 step of 16 x 1 tokens" in capsys.readouterr().out
    assert main(["train", "--data", "data", *small]) == 2
    assert "lower train.seq_len to 1, or prepare more data" in capsys.readouterr().err


def test_a_preset_takes_the_vocabulary_of_the_data(here: Path, data: Path) -> None:
    model = ("width=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "max_seq_len=16")
    common = ("--data", str(data), "--steps", "1", "train.tensorboard=false", "--device", "cpu")

    def train(out: str, *args: str) -> int:
        assert main(["train", *args, *model, *common, "--out", out]) == 0
        return RunConfig.from_dict(RunDir.open(out).read_config()).model.vocab_size

    assert train("tiny", "--preset", "tiny") == 64
    assert train("default") == 64
    # what is asked for counts, on the command line and in a file
    assert train("large", "--preset", "tiny", "vocab_size=99") == 99
    for name, text, size in (("own", "vocab_size = 77\n", 77), ("open", "", 64)):
        Path(f"{name}.toml").write_text(f"{text}qk_norm = true\n")
        assert train(name, "--preset", f"{name}.toml") == size
    assert train("again", "--config", "large/config.toml") == 99
    assert train("from", "--from", "large") == 99


def test_a_configuration_trains_again(
    here: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--data", str(data), "--out")
    assert main([*SHORT, *common, "first"]) == 0
    given = ("train", "--config", "first/config.toml")
    assert main([*given, *common, "same"]) == 0
    assert main([*given, *common, "other", "train.seed=7", "--tokens", "100", "width=32"]) == 0
    first, same, other = (
        RunConfig.from_dict(RunDir.open(Path(name)).read_config())
        for name in ("first", "same", "other")
    )
    assert same == first
    assert other == first.override({"train.seed": 7, "train.tokens": 100, "width": 32})
    assert (other.train.steps, other.train.tokens) == (None, 100)
    for name, text, sentence in (
        ("nothing.toml", None, "cannot read 'nothing.toml': No such file"),
        ("bad.toml", "[model", "in 'bad.toml': "),
        ("typo.toml", "[train]\nstpes = 3\n", "in 'typo.toml': there is no configuration field"),
    ):
        if text is not None:
            Path(name).write_text(text)
        capsys.readouterr()
        assert main(["train", "--config", name]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("train --steps 0", "--steps 0 must be greater than 0"),
        ("train --flops 1", "--flops 1 is less than one step"),
        ("train --steps 1 --tokens 5", "give only one of --steps and --tokens: a run has one"),
        ("train --lr 3", "there is no option '--lr'. Fields are written FIELD=VALUE"),
        ("train --tokens nan", "--tokens nan must be a finite number"),
        ("train --steps x", "Invalid value for '--steps'"),
        ("train --preset tinny", "there is no preset 'tinny'. Did you mean 'tiny'?"),
        ("train --preset none.toml", "cannot read 'none.toml'"),
        ("train widht=3", "Did you mean 'width'?"),
        ("train train.bach_size=3", "Did you mean 'train.batch_size'?"),
        ("train --train.seed 3", "write '--train.seed 3' as train.seed=3"),
        ("train --chekpoint-every 3", "Did you mean '--checkpoint-every'?"),
        ("train tiny", "'tiny' is not a field: write FIELD=VALUE, and name a model with --preset"),
        ("train --device gpu", "--device gpu is neither cpu nor cuda"),
        ("train --device mps", "not been tested on Apple's GPUs; use --device cpu"),
        ("demo --device mps", "not been tested on Apple's GPUs; use --device cpu"),
        ("view trace.json --device mps", "not been tested on Apple's GPUs; use --device"),
        ("train --data none", "there is no data folder none: make one with `depthmix prepare"),
        ("train --data empty", "empty is not a data folder (it has no manifest.json)"),
        ("train --data file", "file is not a data folder"),
        ("train --data DATA --out file", "'file' is a file: choose another --out"),
        ("train --data DATA --out file/run", "file/run: Not a directory"),
        ("train --data DATA vocab_size=60", "the model's vocab_size is 60: add vocab_size=64"),
        ("train --data DATA train.seq_len=99", "train.seq_len = 99 is more than the model's"),
        ("train --data DATA max_seq_len=6000", "fewer than one row of 6000 + 1"),
        ("train --data DATA train.batch_size=10000000000", "of memory and there are"),
        ("train --data DATA width=1000000", "of memory and there are"),
        ("train --data DATA train.wandb=true", "pip install 'depthmix[wandb]'"),
        ("train --resume none", "there is no run 'none': give a folder made by training"),
        ("train --resume file", "'file' is a file: give a run's folder"),
        ("train --resume empty", "'empty' is not a run: it has no config.toml"),
        ("train --resume none --steps 5", "there is no run 'none'"),
        ("train --resume none --checkpoint-every 5", "--resume takes the model, its fields"),
        ("train --resume none width=5", "--resume takes the model, its fields"),
        ("train --resume none --config c", "--resume takes the model, its fields"),
        ("train --config file", "--config file already sets the model: leave out --preset"),
        ("train --resume none --out b", "--resume takes the model, its fields"),
        ("runs", "there is no run in 'runs': make one with 'depthmix train'"),
        ("runs file", "there is no run in 'file'"),
        ("prepare none --out data", "there is no file or folder none"),
        (
            "prepare file --out file",
            "cannot write file (File exists): it is a file or is below one; choose",
        ),
        ("prepare file", "Missing option '--out'"),
        ("prepare file --out empty/data --workers 0", "--workers 0 must be at least 1"),
        ("prepare file --out empty/data --val-fraction 1", "--val-fraction 1.0 must lie in [0, 1)"),
    ],
)
def test_mistakes_leave_nothing(
    args: str,
    sentence: str,
    here: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("empty").mkdir()
    Path("file").write_text("mine")
    given = [str(data) if arg == "DATA" else arg for arg in args.split()]
    if given[0] == "train" and "--resume" not in given:
        # what is given last counts; a budget is given only once
        small = [arg for arg in SHORT if arg not in ("--steps", "4")]
        budget = [] if {"--steps", "--flops", "--tokens"} & set(given) else ["--steps", "4"]
        given = [*small, *budget, *given[1:]]
    assert main(given) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("depthmix: ")
    assert errors.count("\n") == 1
    assert sentence in errors
    assert sorted(path.name for path in here.rglob("*")) == ["empty", "file"]
    assert Path("file").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--data", str(data), "--device", "cuda"]) == 2
    assert "no CUDA device is visible to torch" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_run_stands_in_the_way_of_another(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SHORT, "--data", str(data), "--out", "run"]
    assert main(command) == 0
    before = read_tree(here)
    capsys.readouterr()
    assert main(command) == 2
    assert (
        "'run' already contains a run: resume it with 'depthmix train --resume run'"
        in capsys.readouterr().err
    )
    assert read_tree(here) == before


def test_runs_that_ended_in_other_ways_are_listed(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--data", str(data), "--out", "runs/good"]) == 0
    rate = "train.learning_rate=1e30"
    assert main([*SHORT, "--data", str(data), "--out", "runs/bad", rate]) == 2
    assert "training diverged: " in capsys.readouterr().err
    for state in ("interrupted", "running"):
        shutil.copytree("runs/good", f"runs/{state}")
        RunDir.open(f"runs/{state}").write_status(state, step=2, num_steps=4, loss=1.0)
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    # the run whose status is running has no lock: it was killed
    for name, state in {
        "good": "finished",
        "bad": "failed",
        "interrupted": "interrupted",
        "running": "stopped",
    }.items():
        assert re.search(rf"^runs/{name}\s.* \d/4 +{state} ", listed, re.MULTILINE)
    assert "runs/bad: training diverged: " in listed
