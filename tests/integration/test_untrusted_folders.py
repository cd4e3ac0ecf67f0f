"""Folders from anywhere: what is wrong with them is one sentence, and nothing outside is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthmix.cli import main
from depthmix.data.tokenizer import train_tokenizer
from depthmix.models import open_model
from foreign_models import write_foreign
from variants import make_config, make_model

export_model = pytest.importorskip("depthmix.hf.export").export_model

WEIGHTS, INDEX, DEEP = "model.safetensors", "model.safetensors.index.json", "[" * 100_000

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model for `upcycle`, and an exported one for `import`; both can be sampled."""
    folder = tmp_path_factory.mktemp("sound")
    tokenizer = train_tokenizer(["one and two and three " * 9], 300, parallel=False)
    model = make_model(make_config("mod", vocab_size=300), dtype=torch.float32)
    export_model(model, folder / "import", tokenizer=tokenizer, end_token=0)
    return {"upcycle": write_foreign(folder / "upcycle"), "import": folder / "import"}


def copy_model(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def change_json(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | changes))


def change_config(**changes: Any) -> Spoil:
    return lambda folder: change_json(folder / "config.json", **changes)


def change_weight(value: float) -> Spoil:
    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        name = next(name for name in weights if name.endswith("w_up.weight") or "up_proj" in name)
        weights[name][1, 2] = value
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def lead_out(absolute: bool) -> Spoil:
    """Move the weights out of the folder, and let an index lead to them."""

    def move(folder: Path) -> None:
        outside = folder.parent / "outside.safetensors"
        (folder / WEIGHTS).rename(outside)
        place = str(outside) if absolute else "../outside.safetensors"
        names = load_file(outside)
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)})
        )
        # a folder without any file of weights is refused before
        save_file({"x": torch.ones(1)}, folder / "other.safetensors")

    return move


def quantize(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    name = next(name for name in weights if name.endswith("w_up.weight") or "up_proj" in name)
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


BOTH: dict[str, tuple[Spoil, str]] = {
    "index_up": (lead_out(False), "names '../outside.safetensors', which is not there"),
    "index_absolute": (lead_out(True), "outside.safetensors', which is not there"),
    "index_deep": (write(INDEX, DEEP), "index.json is damaged: it is nested too deeply"),
    "adapter": (write("adapter_config.json", "{}"), "merge the adapter into its model with peft"),
    "nan": (change_weight(float("nan")), "has weights that are NaN or infinite"),
    "inf": (change_weight(float("-inf")), "has weights that are NaN or infinite"),
    "quantization": (
        change_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "has quantised weights (quantization_config): use the original ones",
    ),
    "quantized": (quantize, "is torch.int8: quantised weights cannot be read"),
    "config_deep": (write("config.json", '{"a":' + DEEP), "it is nested too deeply"),
    "config_list": (write("config.json", "[]"), "is not a JSON object"),
    "positions": (
        change_config(max_position_embeddings=30_000_000, max_seq_len=30_000_000),
        "claims 30,000,000 positions, whose rotary phases alone would take",
    ),
    "cache": (
        change_config(max_position_embeddings=2_000_000, max_seq_len=2_000_000),
        "claims 2,000,000 positions, whose cache for a single text alone would take",
    ),
    "layers": (
        change_config(num_hidden_layers=9_999, num_layers=9_999),
        "do not fit its config",
    ),
    "tokenizer_deep": (write("tokenizer.json", DEEP), "is not a tokenizer"),
}


@pytest.mark.parametrize("verb", ["import", "upcycle"])
@pytest.mark.parametrize("name", BOTH)
def test_a_spoiled_folder_is_one_sentence(
    name: str,
    verb: str,
    sound: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil, sentence = BOTH[name]
    folder = copy_model(sound[verb], tmp_path / "model")
    spoil(folder)
    capsys.readouterr()
    assert main([verb, str(folder), "--out", str(tmp_path / "run")]) == 2
    printed, errors = capsys.readouterr()
    assert sentence in errors
    assert errors.count("\n") == 1
    assert printed == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["import", "upcycle"])
@pytest.mark.parametrize("name", ["nan", "quantized", "positions", "cache", "layers", "adapter"])
def test_a_spoiled_folder_is_not_sampled(
    name: str,
    verb: str,
    sound: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil, sentence = BOTH[name]
    folder = copy_model(sound[verb], tmp_path / "model")
    spoil(folder)
    assert main(["sample", str(folder), "--prompt", "one", "--max-tokens", "2"]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "template",
    [["a"], [{"name": ["x"], "template": 3}], [[]], [{"template": "x"}], 3, {"default": "x"}],
    ids=str,
)
def test_templates_that_are_not_text_are_left_out(
    template: Any, sound: dict[str, Path], tmp_path: Path
) -> None:
    for verb, source in sound.items():
        folder = copy_model(source, tmp_path / verb)
        change_json(folder / "tokenizer_config.json", chat_template=template)
        assert open_model(folder).chat is None
        assert main([verb, str(folder), "--out", str(tmp_path / f"{verb}-run")]) == 0
        assert open_model(tmp_path / f"{verb}-run").chat is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_other_files_that_are_nested_too_deeply(
    name: str, sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb, source in sound.items():
        folder = copy_model(source, tmp_path / verb)
        (folder / name).write_text(DEEP)
        # neither is needed to read a model
        assert main([verb, str(folder), "--out", str(tmp_path / f"{verb}-run")]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": 3}, "config.json is damaged"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "config.json is damaged"),
        ({"rope_theta": [1], "rope_parameters": None}, "rope_theta"),
        ({"max_position_embeddings": 1e3}, "does not say max_position_embeddings"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind(
    changes: dict[str, Any],
    sentence: str,
    sound: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copy_model(sound["upcycle"], tmp_path / "model")
    change_json(folder / "config.json", **changes)
    assert main(["upcycle", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err


def test_an_adapter_alone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["sample", str(tmp_path)]) == 2
    assert "has only an adapter: merge it into its model" in capsys.readouterr().err
