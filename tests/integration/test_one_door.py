"""Every verb opens every kind of model: a run, its checkpoint, and what was exported of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from depthmix.cli import main
from depthmix.models import open_model
from depthmix.report.traces import read_trace
from depthmix.runs.folder import RunDir
from foreign_models import write_foreign
from text_runs import write_text_run

WORDS = "line 12 says 144\nand no more\n"


class Models:
    """One model in three places, and a file of words."""

    def __init__(self, folder: Path) -> None:
        run = write_text_run(folder)
        assert main(["export", str(run), "--out", str(folder / "exported")]) == 0
        self.folder, self.words = folder, folder / "words.txt"
        self.words.write_text(WORDS)
        checkpoint = open_model(run).checkpoint
        assert checkpoint is not None
        self.places = {"run": run, "checkpoint": checkpoint, "exported": folder / "exported"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("door"))


def ask(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, args), "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["checkpoint", "exported"])
def test_all_verbs_do_the_same_with_it(
    kind: str, models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = models.places["run"], models.places[kind]
    wish = ("--prompt", "line 3", "--seed", 3, "--max-tokens", 12)
    assert ask(capsys, "sample", other, *wish) == ask(capsys, "sample", run, *wish)

    text = ("--text", models.words)
    told = [ask(capsys, "eval", path, *text)["text"] for path in (run, other)]
    assert told[0] == told[1]

    traces = []
    for path in (run, other):
        out = tmp_path / "trace.json"
        assert (
            main(["trace", str(path), *map(str, text), "--out", str(out), "--device", "cpu"]) == 0
        )
        traces.append(read_trace(out))
        # an exported configuration has numbers where ours may leave them open
        del traces[-1]["origin"], traces[-1]["model"]["config"]
    assert traces[0] == traces[1]
    page = tmp_path / "page.html"
    assert main(["view", str(other), *map(str, text), "--out", str(page), "--device", "cpu"]) == 0
    data = page.read_text().partition('id="trace">')[2].partition("</script>")[0]
    assert "".join(json.loads(data)["texts"]) == WORDS

    assert main(["export", str(other), "--out", str(tmp_path / "out")]) == 0
    for path in models.places["exported"].iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name

    losses = []
    fixed = ("train.batch_size=2", "train.tensorboard=false", "--steps", "2", "--device", "cpu")
    for number, path in enumerate((run, other)):
        place = ("--data", str(models.folder / "data"), "--out", str(tmp_path / f"on{number}"))
        assert main(["train", "--from", str(path), *place, *fixed]) == 0
        metrics = RunDir.open(tmp_path / f"on{number}").read_metrics("train")
        losses.append([line["loss"] for line in metrics])
    assert losses[0] == losses[1]


def test_a_checkpoint_is_judged_on_the_data_of_its_run(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [ask(capsys, "eval", models.places[kind])["text"] for kind in ("run", "checkpoint")]
    assert told[0] == told[1]


def test_a_checkpoints_tokenizer_is_checked_as_its_runs(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("quite another text, with quite other words\n" * 99)
    data = str(tmp_path / "data")
    assert main(["prepare", str(other), "--out", data, "--vocab-size", "270"]) == 0
    for path in models.places.values():
        place = ("--data", data, "--out", str(tmp_path / "on"), "--device", "cpu")
        assert main(["train", "--from", str(path), *place, "train.batch_size=2"]) == 2
        assert "was prepared with another tokenizer than" in capsys.readouterr().err


def test_a_dense_folder_is_a_model_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, words = write_foreign(tmp_path / "llama"), tmp_path / "words.txt"
    words.write_text(WORDS)
    wish = ("--prompt", "line 3", "--temperature", 0, "--max-tokens", 8)
    told = ask(capsys, "sample", dense, *wish)
    assert told["depth"]["share_executed"] == 1
    assert ask(capsys, "eval", dense, "--text", words)["text"]["rules"].keys() == {"dense"}
    assert main(["export", str(dense), "--out", str(tmp_path / "out")]) == 0
    assert ask(capsys, "sample", tmp_path / "out", *wish) == told
    for verb in ("trace", "view"):
        out = ("--out", str(tmp_path / "page"))
        assert main([verb, str(dense), "--text", str(words), *out]) == 2
        assert "has no routed blocks" in capsys.readouterr().err


def test_what_is_no_model_is_told_alike(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    verbs = {
        "sample": (),
        "eval": ("--text", str(models.words)),
        "trace": ("--text", str(models.words), "--out", str(tmp_path / "t.json")),
        "export": ("--out", str(tmp_path / "out")),
        "upcycle": ("--out", str(tmp_path / "up")),
    }
    for verb, options in verbs.items():
        for path, told in (
            (tmp_path / "nowhere", "there is no run or model at"),
            (tmp_path / "empty", "is not a model: it has neither"),
            (tmp_path / "file", "is a file: name the folder of a run"),
        ):
            assert main([verb, str(path), *options]) == 2
            err = capsys.readouterr().err
            assert told in err, verb
            assert err.count("\n") == 1
    assert main(["train", "--from", str(tmp_path / "empty")]) == 2
    assert "is not a model: it has neither" in capsys.readouterr().err
