"""The commands that wait for a GPU: each is understood, and refused where there is none."""

import runpy
import shlex
import sys
from pathlib import Path

import engine
import meters
import pending
import pytest


@pytest.mark.parametrize(
    "name", [name for name, m in pending.MEASUREMENTS.items() if m.command.startswith("engine.py")]
)
def test_engine_understands_every_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shlex.split(pending.MEASUREMENTS[name].command)
    script, *tiny = pending.list_words(name, [], Path("out"), tiny=True)
    assert Path(script).exists()
    for words in ([*full, "--cpu"], ["engine.py", *tiny]):
        monkeypatch.setattr(sys, "argv", words)
        args = engine.parse_arguments()
        assert set(args.parts) <= set(engine.PARTS)
    assert args.shape == "smoke"
    assert args.json == Path("out") / f"{name}.json"


def test_every_script_is_there() -> None:
    for name in pending.MEASUREMENTS:
        script, *words = pending.list_words(name, [Path("run")], Path("out"), tiny=False)
        assert Path(script).exists()
        assert "--cpu" not in words


def test_vocabulary_and_calls_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "engine.py --cpu --requests 2 --vocab-size 500 --calls generate"
    monkeypatch.setattr(sys, "argv", words.split())
    bench = engine.Bench(engine.parse_arguments())
    assert bench.choose_config("mod").vocab_size == bench.about["vocab_size"] == 500
    assert (bench.batches, bench.calls) == ((2,), ["generate"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["enrgy"], "there is no 'enrgy': use energy-large, "),
        (["trained"], "trained needs finished runs: add --runs RUN TWIN"),
    ],
)
def test_mistakes_are_refused(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pending.py", *words])
    with pytest.raises(SystemExit) as caught:
        pending.main()
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


class Meter:
    """A counter that goes up by a Joule at each reading."""

    def __init__(self) -> None:
        self.joules = 0.0

    def read_joules(self) -> float:
        self.joules += 1
        return self.joules


def test_energy_is_shared_by_the_new_tokens_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["engine.py", "--cpu", "--parts", "energy", "--dense-only"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(engine, "open_meter", lambda device: Meter())
    monkeypatch.setattr(meters, "ENERGY_SECONDS", 0.0)
    monkeypatch.setattr(engine.torch.cuda, "synchronize", lambda: None)
    bench = engine.Bench(engine.parse_arguments())
    bench.run()
    assert bench.failed == []
    single, batch = (row for row in bench.rows if row["part"] == "energy")
    # a Joule passed in the two calls of each
    assert (single["requests"], single["calls"]) == (1, 2)
    assert single["joules_per_token"] == 1 / 2 / bench.sizes.single[1]
    assert batch["joules_per_token"] == 1 / 2 / (bench.sizes.many * bench.sizes.num_new)


@pytest.mark.parametrize(
    "words",
    [
        *(["decode.py"], ["engine.py"], ["shapes.py"], ["train_step.py"], ["trained.py", "run"]),
        *(["train_loop.py", "--data", "data"], ["steps.py"], ["draw.py"], ["chunks.py"]),
        *(["places.py"], ["kernels.py"], ["decode_kernel.py"], ["serving.py"]),
        ["presets.py", "--data", "data"],
    ],
    ids=lambda words: words[0],
)
def test_without_a_gpu_a_script_says_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(engine.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(pending.FOLDER / words[0]), run_name="__main__")
    assert caught.value.code == 2
    assert "no CUDA device is visible to torch: run it on a GPU" in capsys.readouterr().err
