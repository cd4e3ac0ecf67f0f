"""`depthmix eval` on runs and on folders, as lines and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from depthmix.cli import main
from depthmix.models import open_model
from depthmix.models.upcycle import upcycle
from depthmix.report.load import load_runs
from depthmix.runs import RunDir
from foreign_models import write_foreign
from text_runs import write_text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("eval"))


def evaluate(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *map(str, args), "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


def write_exported(run: Path, folder: Path) -> Path:
    """A run as an exported folder has it."""
    model = open_model(run, checkpoint="best").network
    folder.mkdir()
    tree = {**model.config.to_dict(), "model_type": "depthmix", "selector": None, "dtype": "x"}
    (folder / "config.json").write_text(json.dumps(tree))
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    del weights["model.head.weight"]
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    return folder


def test_a_run_on_its_own_data_and_on_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = evaluate(capsys, run)
    assert own["text"]["rules"].keys() == {"topk", "causal"}
    assert evaluate(capsys, run, "--data", run.with_name("data")) == own
    text = run.with_name("text.txt")
    short = evaluate(capsys, run, "--text", text, "--max-tokens", 40, "--seq-len", 16)
    assert short["text"]["num_tokens"] == 40
    assert short["text"]["seq_len"] == 16
    assert main(["eval", str(run), "--text", str(text), "--text", str(text)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "in windows of 32; forward FLOPs" in lines[0]
    assert lines[1].startswith("  topk    loss ")
    assert "bits per byte" in lines[2]
    assert "routed" in lines[2]


def test_the_test_split_is_measured_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_text_run(tmp_path, test_fraction=0.2)
    before = (run / "metrics.jsonl").read_text()
    found = evaluate(capsys, run, "--test")
    assert found["test"]["rules"].keys() == {"topk", "causal"}
    assert found["test"]["num_tokens"] != found["text"]["num_tokens"]
    assert (run / "metrics.jsonl").read_text() == before
    kept = evaluate(capsys, run, "--test", "--keep")
    (record,) = RunDir.open(run).read_metrics("test")
    rules = kept["test"]["rules"]
    losses = {"loss_topk": rules["topk"]["loss"], "loss_causal": rules["causal"]["loss"]}
    assert record == {"step": 4, "kind": "test", **losses}
    (row,) = load_runs(run).rows
    assert (row.test_loss, row.judged_test) == (losses["loss_topk"], losses["loss_causal"])
    assert main(["eval", str(run), "--test"]) == 0
    assert f"{run}, test split: " in capsys.readouterr().out


def test_missing_test_split_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in (
        (["--test"], "has no test split: prepare the text again"),
        (["--test", "--text", "a.txt"], "--test is for data with a test split"),
        (["--keep"], "--keep keeps the loss of the whole test split of a run's own data"),
        (["--test", "--keep", "--max-tokens", "9"], "neither --data, --max-tokens nor --seq-len"),
    ):
        assert main(["eval", str(run), *options]) == 2
        printed, errors = capsys.readouterr()
        assert (printed, told in errors) == ("", True)
    checkpoint = next((run / "checkpoints").glob("step-*"))
    assert main(["eval", str(checkpoint), "--test", "--keep"]) == 2
    assert "--keep is for a run" in capsys.readouterr().err


def test_an_exported_folder_gives_the_same_numbers(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_exported(run, tmp_path / "exported")
    text = ("--text", run.with_name("text.txt"), "--max-tokens", 100)
    found = evaluate(capsys, folder, *text)
    assert found["text"] == evaluate(capsys, run, *text)["text"]
    pytest.importorskip("lm_eval")
    tasks = ("--tasks", "python_syntax", "--limit", 5)
    found = evaluate(capsys, folder, *tasks)
    assert found["selector"] == "predictor"
    assert found["tasks"] == evaluate(capsys, run, *tasks)["tasks"]
    assert "text" not in found


def test_tasks_never_look_ahead(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a head that was trained to decide, nothing is guessed: the selector is asked for."""
    pytest.importorskip("lm_eval")
    folder = write_exported(run, tmp_path / "exported")
    config, weights = folder / "config.json", folder / "model.safetensors"
    tree = json.loads(config.read_text())
    tree["routing"]["predictor"] = False
    config.write_text(json.dumps(tree))
    save_file({n: v for n, v in load_file(weights).items() if "predictor" not in n}, weights)
    tasks = ("--tasks", "python_syntax", "--limit", "5")
    assert main(["eval", str(folder), *tasks]) == 2
    told = "trained for causal routing, so name a selector: use 'router' or 'all'"
    assert told in capsys.readouterr().err
    assert evaluate(capsys, folder, *tasks, "--selector", "router")["selector"] == "router"


def test_topk_is_refused_where_a_task_generates(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = pytest.importorskip("depthmix.eval.tasks", exc_type=ImportError)
    own = tasks.list_own_tasks()["python_syntax"]
    (tmp_path / own.with_suffix(".jsonl").name).write_text(own.with_suffix(".jsonl").read_text())
    path = tmp_path / "writes.yaml"
    text = own.read_text().replace("multiple_choice", "generate_until")
    path.write_text(text.replace("task: python_syntax", "task: writes"))
    assert main(["eval", str(run), "--tasks", str(path), "--selector", "topk"]) == 2
    errors = capsys.readouterr().err
    assert "--selector topk needs tokens that are not generated yet" in errors
    assert "'writes' generates" in errors


def test_dense_and_upcycled_agree_where_nothing_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_foreign(tmp_path / "dense")
    upcycle(open_model(dense), tmp_path / "run", {"routing.predictor_width": 8})
    text = tmp_path / "text.txt"
    text.write_text("line 3 says 9 and no more, line 4 says 16 and so on " * 5)
    original = evaluate(capsys, dense, "--text", text)["text"]
    routed = evaluate(capsys, tmp_path / "run", "--text", text)["text"]
    assert original["rules"].keys() == {"dense"}
    wanted = original["rules"]["dense"]["loss"]
    assert routed["rules"]["causal"]["loss"] == pytest.approx(wanted, abs=1e-4)
    assert routed["rules"]["causal"]["share_routed"] == 1
    assert routed["rules"]["topk"]["loss"] != pytest.approx(wanted, abs=1e-2)
    assert routed["rules"]["topk"]["share_routed"] < 0.2
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert "has no data of its own: name some with --text or --data" in capsys.readouterr().err


def test_mistakes_end_in_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(run.with_name("text.txt"))
    for args, told in (
        ((str(tmp_path),), "is not a model"),
        ((str(run), "--text", text, "--data", "data"), "not both"),
        ((str(run), "--text", text, "--batch", "0"), "--batch 0 must be at least 1"),
        ((str(run), "--text", text, "--device", "tpu"), "neither cpu nor cuda"),
        ((str(run), "--tasks", "x", "--selector", "magic"), "--selector magic: unknown selector"),
        ((str(run), "--text", text, "--limit", "3"), "--limit is for --tasks: name some"),
        ((str(run), "--fewshot", "1", "--selector", "all"), "--fewshot, --selector is for"),
        ((str(run), "--chat"), "--chat is for --tasks"),
        ((str(run), "--tasks", " , "), "--tasks ' , ' names no task"),
        ((str(run), "--tasks", "python_syntax", "--chat"), "has no chat template: leave out"),
        ((str(run), "--tasks", "x", "--seq-len", "8"), "--seq-len is for --text or --data"),
        ((str(run), "--text", text, "--max-tokens", "0"), "--max-tokens 0 must be"),
    ):
        assert main(["eval", *args]) == 2
        assert told in capsys.readouterr().err
