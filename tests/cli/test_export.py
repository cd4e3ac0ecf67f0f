"""`depthmix export` and `depthmix import`: from a run to transformers and back."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from depthmix.checkpoint import load_weights
from depthmix.cli import main
from depthmix.models import open_model
from text_runs import write_text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("exchange"))


def test_export_and_import_round_trip(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--checkpoint", "4"]) == 0
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "modeling_depthmix.py"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "run")]) == 0
    before = load_weights(run / "checkpoints" / "step-00000004")
    after = load_weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())

    # logits of all three are the same, to the bit
    native = open_model(run / "checkpoints" / "step-00000004").network
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        logits = native(tokens, selector="predictor").logits
        assert torch.equal(exported(tokens).logits, logits)
        assert torch.equal(
            open_model(tmp_path / "run").network(tokens, selector="predictor").logits, logits
        )

    # and so is the text, which the other verbs write and read
    capsys.readouterr()
    told = []
    for folder in (run, tmp_path / "run"):
        options = ["--prompt", "line 3", "--temperature", "0", "--max-tokens", "8", "--json"]
        assert main(["sample", str(folder), *options, "--checkpoint", "newest"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["text"] == told[1]["text"]
    (tmp_path / "text.txt").write_text("line 7 says 49 and no more\n")
    trace = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "trace.json")]
    assert main(["trace", str(tmp_path / "run"), *trace]) == 0
    assert (tmp_path / "trace.json").is_file()
    assert main(["runs", str(tmp_path)]) == 0


def test_selector_is_saved(run: Path, tmp_path: Path) -> None:
    options = ["--selector", "router", "--no-tokenizer", "--out", str(tmp_path / "out")]
    assert main(["export", str(run), *options]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["selector"] == "router"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_mistakes_end_in_a_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for args, told in (
        (["export", str(tmp_path / "none"), "--out", str(tmp_path / "out")], "there is no run"),
        (["export", str(run), "--out", str(run)], "already exists"),
        (
            ["export", str(run), "--out", str(tmp_path / "o"), "--selector", "best"],
            "--selector best: unknown selector",
        ),
        (["import", str(tmp_path), "--out", str(tmp_path / "run")], "config.json"),
    ):
        assert main(args) == 2
        assert told in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == set()
