"""`depthmix upcycle` makes a run that the other verbs open."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from depthmix.checkpoint import load_weights
from depthmix.cli import app, main
from depthmix.eval.blocks import find_least_blocks
from depthmix.eval.stream import read_texts
from depthmix.models import foreign, open_model
from depthmix.models.chat import Chat, read_chat, write_chat
from depthmix.models.upcycle import DEFAULTS
from depthmix.runs.folder import RunDir
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
    assert "it still equals the dense model" in told
    assert f"depthmix train --from {run} --data DATA" in told
    assert f"train.teacher={dense}" in told
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
    out, short = ("--out", str(tmp_path / "run")), tmp_path / "short.txt"
    short.write_text("line 3")
    for args, told in (
        ((str(dense), *out, "--capacity", "2"), "--capacity 2.0 must lie in"),
        ((str(dense), *out, "--gate", "soft"), "--gate 'soft' does not fit"),
        ((str(dense), *out, "word"), "'word' is not a field"),
        ((str(tmp_path), *out), "is not a model"),
        ((str(dense), *out, "--text", "a.txt"), "--text needs --least"),
        ((str(dense), *out, "--device", "cpu"), "--device needs --least"),
        ((str(dense), *out, "--least", "2"), "--least needs --text"),
        ((str(dense), *out, "--least", "0", "--text", "a.txt"), "--least 0 must be at least 1"),
        ((str(dense), *out, "--least", "5", "--text", "a.txt"), "--least 5 is more than"),
        # before the text is read
        ((str(dense), *out, "--least", "2", "--text", "a.txt", "--gate", "soft"), "--gate 'soft'"),
        ((str(dense), *out, "--least", "2", "--text", "a.txt", "norm_eps=0.1"), "norm_eps = 0.1"),
        (
            (str(dense), *out, "--least", "2", "--text", "a.txt", "routing.layers=[1]"),
            "--least or routing.layers, not both",
        ),
        (
            (str(dense), *out, "--least", "2", "--text", str(tmp_path / "none.txt")),
            "none.txt",
        ),
        ((str(dense), *out, "--least", "2", "--text", str(short)), "give 64 or more, better 2,048"),
    ):
        assert main(["upcycle", *args]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_least_blocks_are_routed(
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[Path] = []
    read_weights = foreign.read_weights

    def count_reads(folder: Path, *rest: Any) -> Any:
        reads.append(folder)
        return read_weights(folder, *rest)

    monkeypatch.setattr(foreign, "read_weights", count_reads)
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("line 3 says 9 and no more\n" * 20)
    options = ("--out", str(run), "--least", "2", "--text", str(text), "--device", "cpu")
    assert main(["upcycle", str(dense), *options, *SMALL]) == 0
    told = capsys.readouterr().out
    # to measure the blocks, and to convert them
    assert reads == [dense]
    assert "2 of 4 blocks route" in told
    model = open_model(dense).network
    stream = read_texts([text.read_text()], open_model(dense).vocabulary, 2048)
    least = find_least_blocks(model, stream, 2)
    chosen = sorted(each.layer for each in least.found)
    assert list(open_model(run).config.routed_layers) == chosen
    assert f"rises from {least.whole:.3f} to {least.found[0].loss:.3f} (block" in told


def test_upcycle_then_heal(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    out = ("--out", str(run), "--first-dense", "0", "--capacity", "0.25")
    assert main(["upcycle", str(dense), *out, *SMALL]) == 0
    write_chat(run, Chat("{{ messages }}", (7,)))
    assert main(["train", "--resume", str(run)]) == 2
    assert "has not been trained yet: start with --from" in capsys.readouterr().err
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"line {i} says {i * i}\n" for i in range(400)))
    command = ["prepare", str(text), "--out", str(data), "--workers", "1"]
    assert main([*command, "--tokenizer", str(run)]) == 0
    recipe = ("train.batch_size=2", "train.val_tokens=64", "train.seq_len=32", "--steps", "6")
    recipe = (*recipe, "train.start_capacity=1.0", f"train.teacher={dense}", "--device", "cpu")
    place = ("--data", str(data), "--out", str(tmp_path / "healed"))
    assert main(["train", "--from", str(run), *place, *recipe]) == 0
    told = capsys.readouterr().out
    assert f"starting from the weights of {run}" in told
    healed = RunDir.open(tmp_path / "healed")
    config = healed.read_config()
    assert config["model"]["routing"]["gate"] == "tanh1"
    # rates for weights that know something
    assert config["train"]["learning_rate"] == 3e-4
    assert config["train"]["router_rate_factor"] == 10
    assert config["train"]["scale_by_width"] is False
    assert healed.read_metrics("train")[-1]["capacity"] == 0.25
    # its chat template is kept
    assert read_chat(healed.path) == read_chat(run) == Chat("{{ messages }}", (7,))
    assert main(["export", str(healed.path), "--out", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == "{{ messages }}"
    capsys.readouterr()
    # a folder of others too, routed by its fields
    place = ("--data", str(data), "--out", str(tmp_path / "direct"), "--device", "cpu")
    fields = ("routing.strategy=expert_choice", "max_seq_len=32", "train.batch_size=2")
    fields = (*fields, "train.learning_rate=2e-3", "train.scale_by_width=true")
    command = ["train", "--from", str(dense), *place, *fields, *SMALL, "--steps", "2"]
    assert main(command) == 0
    assert "tensors of routers and predictors are new" in capsys.readouterr().out
    config = RunDir.open(tmp_path / "direct").read_config()
    assert (config["train"]["learning_rate"], config["train"]["scale_by_width"]) == (2e-3, True)
    assert main(["train", "--from", str(run), "--preset", "tiny"]) == 2
    assert "leave out --preset tiny" in capsys.readouterr().err
    assert main(["train", "--from", str(run), "--data", str(data), "width=64"]) == 2
    assert "only fields of routing may be changed" in capsys.readouterr().err


def test_heal_by_adapters_then_use_it_as_any_run(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, healed = (tmp_path / name for name in ("run", "data", "healed"))
    assert main(["upcycle", str(dense), "--out", str(run), "--first-dense", "0", *SMALL]) == 0
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(f"line {i} says {i * i}\n" for i in range(400)))
    command = ["prepare", str(text), "--out", str(data), "--workers", "1"]
    assert main([*command, "--tokenizer", str(run)]) == 0
    common = ("--data", str(data), "--device", "cpu", "--steps", "2", "train.batch_size=2")
    common = (*common, "train.val_tokens=64", "train.seq_len=32", "train.tensorboard=false")
    lora = ("train.trainable=lora", "train.lora_rank=4")
    capsys.readouterr()
    for fields, told in (
        ((*lora, "train.lora_rank=0"), "train.lora_rank = 0 must be greater than 0"),
        ((*lora, "train.lora_rank=33"), "train.lora_rank = 33 is more than the model's width 32"),
        ((*lora, "train.lora_alpha=-1"), "train.lora_alpha = -1.0 must be greater than 0"),
        ((*lora, "train.lora_blocks=some"), "must be one of 'routed', 'all'"),
        (
            (*lora, "train.optimizer=muon"),
            "needs train.optimizer = adamw: muon updates whole matrices",
        ),
        ((*lora, "routing.strategy=none"), "needs routed blocks: use train.lora_blocks=all"),
    ):
        place = ("--out", str(tmp_path / "wrong"))
        assert main(["train", "--from", str(run), *place, *common, *fields]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "wrong").exists()
    assert main(["train", "--from", str(run), "--out", str(healed), *common, *lora]) == 0
    # two blocks of 4 · (in + out) for each matrix, and what decides
    widths = (32 + 48, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32)
    learn = 2 * (4 * sum(widths) + 32 + 8 * 32 + 8 + 1)
    assert f"parameters ({learn / 1000:.2f} K trained), 2 steps" in capsys.readouterr().out

    assert main(["sample", str(healed), "--prompt", "line", "--max-tokens", "5", "--json"]) == 0
    assert main(["eval", str(healed), "--text", str(text), "--device", "cpu"]) == 0
    small = tmp_path / "small.txt"
    small.write_text("line 3 says 9 and no more")
    trace = ("--text", str(small), "--out", str(tmp_path / "t.json"))
    assert main(["trace", str(healed), *trace]) == 0
    assert main(["export", str(healed), "--out", str(tmp_path / "hf")]) == 0
    assert main(["train", "--from", str(healed), "--out", str(tmp_path / "on"), *common]) == 0
    weights = load_weights(healed)
    assert weights.keys() == load_weights(run).keys()
    assert weights.keys() == load_weights(tmp_path / "on").keys()


def test_the_defaults_in_the_help_are_the_ones_that_count() -> None:
    shown = {
        parameter.name: parameter.show_default
        for parameter in typer.main.get_command(app).commands["upcycle"].params  # pyrefly: ignore
    }
    for name in ("capacity", "every", "first_dense", "gate"):
        assert shown[name] == str(DEFAULTS[f"routing.{name}"])
