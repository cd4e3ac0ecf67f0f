"""`depthmix upcycle` makes a run that the other verbs open."""

import json
from pathlib import Path

import pytest

from depthmix.cli import main
from depthmix.rundir import RunDir
from foreign_models import write_foreign

SMALL = ("routing.predictor_width=8",)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreign(tmp_path_factory.mktemp("dense") / "llama", "llama_tied")


def test_upcycle_then_sample_and_trace(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ("--out", str(run), "--capacity", "0.25", "--first-dense", "1", "--every", "1")
    assert main(["upcycle", str(dense), *options, *SMALL]) == 0
    told = capsys.readouterr().out
    assert "3 of 4 blocks route: capacity 0.25, gate tanh1" in told
    assert "computes what the dense model does" in told
    assert f"depthmix train --from {run} --data DATA" in told
    assert f"--tokenizer {run}" in told

    assert main(["sample", str(run), "--prompt", "line", "--max-tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "line"
    text = tmp_path / "text.txt"
    text.write_text("line 3 says 9 and no more")
    assert main(["trace", str(run), "--text", str(text), "--out", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["model"]["routed_layers"] == [1, 2, 3]
    assert main(["runs", str(tmp_path)]) == 0
    assert "not trained: heal it with" in " ".join(capsys.readouterr().out.split())


def test_mistakes_end_in_a_sentence(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "run"))
    for args, told in (
        ((str(dense), *out, "--capacity", "2"), "routing.capacity = 2.0 must lie in"),
        ((str(dense), *out, "--gate", "soft"), "routing.gate = 'soft' does not fit"),
        ((str(dense), *out, "word"), "'word' is no field"),
        ((str(tmp_path), *out), "is no model"),
    ):
        assert main(["upcycle", *args]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_upcycle_then_heal(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    out = ("--out", str(run), "--first-dense", "0", "--capacity", "0.25")
    assert main(["upcycle", str(dense), *out, *SMALL]) == 0
    assert main(["train", "--resume", str(run)]) == 2
    assert "was upcycled, not trained: begin with --from" in capsys.readouterr().err
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"line {i} says {i * i}\n" for i in range(400)))
    command = ["prepare", str(text), "--out", str(data), "--workers", "1"]
    assert main([*command, "--tokenizer", str(run)]) == 0
    recipe = ("train.batch_size=2", "train.val_tokens=64", "train.seq_len=32", "--steps", "6")
    recipe = (*recipe, "train.capacity_from=1.0", f"train.distill={dense}", "--device", "cpu")
    place = ("--data", str(data), "--out", str(tmp_path / "healed"))
    assert main(["train", "--from", str(run), *place, *recipe]) == 0
    told = capsys.readouterr().out
    assert f"starting from the weights of {run}" in told
    healed = RunDir.open(tmp_path / "healed")
    assert healed.read_config()["model"]["routing"]["gate"] == "tanh1"
    assert healed.read_metrics("train")[-1]["capacity"] == 0.25
    # a folder of others too, routed by its fields
    place = ("--data", str(data), "--out", str(tmp_path / "direct"), "--device", "cpu")
    fields = ("routing.strategy=expert_choice", "max_seq_len=32", "train.batch_size=2")
    command = ["train", "--from", str(dense), *place, *fields, *SMALL, "--steps", "2"]
    assert main(command) == 0
    assert "tensors of routers and predictors are new" in capsys.readouterr().out
    assert main(["train", "--from", str(run), "--preset", "tiny"]) == 2
    assert "leave out --preset tiny" in capsys.readouterr().err
    assert main(["train", "--from", str(run), "--data", str(data), "width=64"]) == 2
    assert "only fields of routing may be changed" in capsys.readouterr().err
