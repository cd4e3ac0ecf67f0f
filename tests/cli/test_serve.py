"""`depthmix serve`: what it refuses, before a model is loaded and after."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from depthmix.cli import main
from depthmix.serve import server
from depthmix.serve.server import Offer
from served_models import make_config, write_served_run
from test_architecture import modules_loaded_by

Refuse = Callable[[list[str], str], None]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEPTHMIX_API_KEY", raising=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_run(tmp_path_factory.mktemp("serving"))


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_it_says_what_to_install(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refuse(["serve", "x"], "pip install 'depthmix[serve]'")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "there is no run or model at 'nowhere'"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to others: give a key"),
        (["--port", "70000"], "--port 70000 must lie between 0 and 65535"),
        (["--device", "tpu"], "--device tpu is neither cpu nor cuda"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--cache-tokens", "0"], "--cache-tokens 0 must be at least 1"),
        (["--max-queue", "-1"], "--max-queue -1 must be 0 or more"),
        (["--idle-seconds", "0"], "--idle-seconds 0.0 must be greater than 0"),
        (["--api-key-file", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--selector", "magic"], "--selector magic: unknown selector 'magic'"),
        (["--selector", "topk"], "--selector topk: "),
        (["--name", "a", "--name", "b"], "--name is given 2 times for 1 model:"),
    ],
)
def test_mistakes_are_refused_early(
    run: Path, refuse: Refuse, arguments: list[str], sentence: str
) -> None:
    place = [] if arguments[0] == "nowhere" else [str(run)]
    refuse(["serve", *place, *arguments], sentence)


def test_a_key_and_no_auth_do_not_go_together(
    run: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEPTHMIX_API_KEY", "secret")
    refuse(["serve", str(run), "--no-auth"], "leave out one of the two")


def test_two_models_have_two_names(run: Path, refuse: Refuse) -> None:
    refuse(["serve", str(run), str(run)], "two models are called 'run': name each of them")
    refuse(["serve", str(run), str(run), "--name", "a"], "--name is given 1 time for 2 models:")
    refuse(["serve", str(run), "nowhere"], "there is no run or model at 'nowhere'")


def test_the_selector_is_for_both_models(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model that routes only to experts has a use for it, too."""
    offered: list[Offer] = []
    monkeypatch.setattr(server, "serve_models", lambda offers, **_: offered.extend(offers))
    fields = {"routing.strategy": "none", "experts.strategy": "expert_choice"}
    experts = write_served_run(run.parent, "experts", make_config().override(fields))
    command = ["serve", str(run), str(experts), "--selector", "router", "--device", "cpu"]
    assert main(command) == 0
    assert [offer.model.name for offer in offered] == ["run", "experts"]
    assert [offer.load().selector for offer in offered] == ["router", "router"]


def test_weights_that_cannot_be_read_end_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_served_run(tmp_path)
    for weights in run.rglob("model.safetensors"):
        weights.write_bytes(b"nothing")
    assert main(["serve", str(run), "--port", "0", "--device", "cpu"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.endswith("(loading)")
    assert "damaged" in last or "model.safetensors" in last


def test_help_loads_neither_torch_nor_the_extra() -> None:
    loaded = modules_loaded_by(
        "import sys; sys.argv = ['depthmix', 'serve', '--help'];"
        "from depthmix.cli import main; main()"
    )
    assert not loaded & {"torch", "fastapi", "uvicorn", "prometheus_client"}
