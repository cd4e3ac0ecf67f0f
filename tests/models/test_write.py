"""A folder that is written is there whole or not at all, and a command can be given again."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from depthmix.checkpoint import Checkpoints
from depthmix.hf.export import export_model
from depthmix.hf.model import DepthmixForCausalLM
from depthmix.models import open_model
from depthmix.models.upcycle import upcycle
from depthmix.models.write import fill_folder, import_model
from foreign_models import write_foreign
from variants import make_model


def fill_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("there", [False, True])
def test_failure_leaves_nothing_behind(there: bool, tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    if there:
        out.mkdir(parents=True)
    for number in (1, 2):
        with pytest.raises(KeyboardInterrupt), fill_folder(out, "mark") as new:  # noqa: PT012
            (new / "part").write_text(str(number))
            stop()
        assert out.exists() == there
    # a kill has no time to clear up
    (out / ".new").mkdir(parents=True)
    (out / ".new" / "part").write_text("old")
    with fill_folder(out, "mark") as new:
        assert not list(new.iterdir())
        (new / "mark").write_text("whole")
        (new / "more").mkdir()
        assert not (out / "mark").exists()
    assert {path.name for path in out.iterdir()} == {"mark", "more"}


def test_retry_after_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model = write_foreign(tmp_path / "dense"), make_model("mod", dtype=torch.float32)
    with monkeypatch.context() as full:
        full.setattr(Checkpoints, "save", fill_disk)
        with pytest.raises(OSError, match=r"run' could not be written \(No space left on device\)"):
            upcycle(open_model(dense), tmp_path / "run", {})

        def fail(self: object, folder: Path, *_: object, **__: object) -> None:
            (folder / "config.json").touch()
            raise SafetensorError("Error while serializing: I/O error: No space left on device")

        full.setattr(DepthmixForCausalLM, "save_pretrained", fail)
        with pytest.raises(OSError, match=r"exported' could not be written .*No space left"):
            export_model(model, tmp_path / "exported")
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
    upcycle(open_model(dense), tmp_path / "run", {})
    assert open_model(tmp_path / "run").network.config.routed_layers
    export_model(model, tmp_path / "exported")
    assert not list((tmp_path / "exported").glob(".*"))
    assert open_model(tmp_path / "exported").network.config.routed_layers


def test_damaged_files_are_refused_by_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    export_model(make_model("mod", dtype=torch.float32), folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="exported' has a damaged file of weights"):
        import_model(open_model(folder), tmp_path / "run")
    weights = load(whole)
    weights["model.norm.weight"] = torch.ones(31)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"'norm\.weight' is \(31,\) and should be"):
        import_model(open_model(folder), tmp_path / "run")
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "tokenizer.json").touch()
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        import_model(open_model(folder), tmp_path / "run")
    dense = write_foreign(tmp_path / "dense")
    (dense / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        upcycle(open_model(dense), tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
