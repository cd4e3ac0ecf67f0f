"""`depthmix plan-memory`: what it prints, what it takes, what it refuses."""

import json
import re
from collections.abc import Callable

import pytest

from depthmix import flops
from depthmix.cli import main
from depthmix.cli.plan_memory import split_counts
from depthmix.config import load_preset

SMALL = ["plan-memory", "tiny", "train.batch_size=64"]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_a_column_for_each_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--gpus", "8", "64"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert re.search(r"tiny +8 GPUs +64 GPUs", printed)
    assert re.search(r"sequences at a time +8 +1 ", printed)
    assert re.search(r"fits 80 GB +yes +yes", printed)
    # a table says at once that nothing in it was measured
    assert "64 x 64 tokens per step; nothing here was measured on GPUs" in printed
    assert "Assumed: 400 TFLOP/s per GPU, nodes of 8, 450 GB/s inside, 50 GB/s" in printed
    assert max(map(len, printed.splitlines()[1:-1])) <= 80


def test_json_has_raw_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seq-len", "32", "--network", "100", "--nvlink", "800", "--gpus-per-node", "4"]
    fields = ["train.shard_size=4", "--train.num_micro_batches=2", "routing.strategy=none"]
    assert main([*SMALL, *options, *fields, "--gpus", "8,16", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["model"] == "tiny"
    assert tree["run"]["train"]["seq_len"] == 32
    assert [estimate["cluster"]["num_gpus"] for estimate in tree["estimates"]] == [8, 16]
    first = tree["estimates"][0]
    assert first["cluster"]["network_bytes_per_second"] == 100e9 / 8
    assert first["cluster"]["nvlink_bytes_per_second"] == 800e9 / 8
    assert (first["cluster"]["gpus_per_node"], first["shard_size"], first["num_rows"]) == (4, 4, 4)
    model = load_preset("tiny-dense")
    total = flops.num_parameters(model).total
    # float32 weights and AdamW's two moments; the blocks' matrices have Muon's one
    norms = (2 * model.num_layers + 1) * model.width + 2 * model.num_layers * model.shape.head_width
    matrices = total - norms - model.vocab_size * model.width
    assert first["checkpoint_bytes"] == 12 * total - 4 * matrices


def test_recomputing_is_shown_beside_keeping(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for recompute, other in (("false", "with"), ("true", "without")):
        assert main([*SMALL, f"train.checkpoint_activations={recompute}"]) == 0
        printed = capsys.readouterr().out
        size = r" +(\S+ \S+)"
        total = re.search(rf"total of one GPU{size}", printed)
        shown = re.search(rf" {other} checkpointing{size}", printed)
        assert total is not None
        assert shown is not None
        totals.append((total[1], shown[1]))
    assert totals[0] == totals[1][::-1]


def test_numbers_after_an_option_are_its_own() -> None:
    assert split_counts(["8"], ["1b", "64", "512", "width=64"]) == (
        [8, 64, 512],
        ["1b", "width=64"],
    )
    assert split_counts(["8,64"], ["1b"]) == ([8, 64], ["1b"])
    assert split_counts(None, ["1b"]) == ([8], ["1b"])
    # without the option a number is no number of GPUs
    assert split_counts(None, ["1b", "64"]) == ([8], ["1b", "64"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan-memory", "--gpus", "8"], "Missing argument"),
        (["plan-memory", "width=64"], "name one model to plan for"),
        (["plan-memory", "tiny", "demo"], "name one model to plan for"),
        (["plan-memory", "tinny"], "there is no preset 'tinny'. Did you mean 'tiny'?"),
        ([*SMALL, "--gpus", "many"], "--gpus many must be whole numbers of GPUs, such as 8 64"),
        ([*SMALL, "--gpus", "0"], "--gpus 0 must be whole numbers of GPUs"),
        ([*SMALL, "--gpus", "512"], "use a multiple of 512"),
        ([*SMALL, "train.shard_sise=8"], "no configuration field 'train.shard_sise'. Did you mean"),
        ([*SMALL, "--seq-len", "65"], "is more than the model's max_seq_len = 64"),
        ([*SMALL, "--flops-per-second", "0"], "--flops-per-second 0.0 must be greater than 0"),
        ([*SMALL, "--gpus-per-node", "0"], "--gpus-per-node 0 must be at least 1"),
        ([*SMALL, "--network", "-1"], "--network -1.0 must be greater than 0"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], sentence: str, refuse: Callable[[list[str], str], None]
) -> None:
    refuse(arguments, sentence)


def test_help_lists_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--help"]) == 0
    helped = capsys.readouterr().out
    for text in ("train.shard_size", "routing.capacity", "--gpus-per-node", "--gpus 8 64 512"):
        assert text in helped
