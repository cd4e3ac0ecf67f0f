"""Whatever folder is named, one door opens it: configuration first, the rest when asked for."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from depthmix.checkpoint import load_weights
from depthmix.checkpoint.weights import build_model, choose_checkpoint, read_config
from depthmix.hf.export import export_model
from depthmix.models import Chat, StoredModel, open_model
from depthmix.models.chat import write_chat
from depthmix.models.open import find_checkpoint
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir
from foreign_models import make_foreign, write_foreign
from text_runs import write_text_run

TOKENS = torch.arange(12)[None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_run(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    opened, out = open_model(run), tmp_path_factory.mktemp("exported") / "model"
    tokenizer, end_token = opened.vocabulary
    export_model(opened.network, out, tokenizer=tokenizer, end_token=end_token)
    return out


def load_by_hand(checkpoint: Path) -> Transformer:
    return build_model(read_config(checkpoint), load_weights(checkpoint), checkpoint)


def test_a_run_and_its_checkpoint(run: Path) -> None:
    for path in (run, run / "checkpoints" / "step-00000002"):
        opened = open_model(path)
        assert (opened.path, opened.kind, opened.home) == (path, "depthmix", run)
        wanted = load_by_hand(choose_checkpoint(path))
        assert opened.config == wanted.config
        assert torch.equal(opened.network(TOKENS).logits, wanted(TOKENS).logits)
        assert not opened.network.training
        # a checkpoint's tokenizer is its run's
        assert opened.vocabulary.decode(opened.vocabulary.encode("line 1")) == "<|endoftext|>line 1"
        assert opened.vocabulary.end_token == 0
        assert opened.chat is None
    assert open_model(run, max_seq_len=16).network.phase_table.shape[0] == 16


def test_an_exported_folder_is_its_run(run: Path, exported: Path) -> None:
    mine, theirs = open_model(run), open_model(exported)
    assert (theirs.kind, theirs.run, theirs.checkpoint) == ("depthmix", None, None)
    assert torch.equal(theirs.network(TOKENS).logits, mine.network(TOKENS).logits)
    assert theirs.vocabulary.encode("line 1") == mine.vocabulary.encode("line 1")
    assert open_model(exported, max_seq_len=8).config.max_seq_len == 8


def test_a_dense_folder(tmp_path: Path) -> None:
    folder = write_foreign(tmp_path / "llama")
    opened = open_model(folder)
    assert opened.kind == "llama"
    with torch.no_grad():
        wanted = make_foreign("llama").float()(TOKENS).logits
        torch.testing.assert_close(opened.network(TOKENS).logits, wanted, rtol=0, atol=1e-4)
    assert opened.vocabulary.end_token == 0
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: name .* with --tokenizer"):
        _ = open_model(folder).vocabulary


def test_end_token_of_any_name_round_trips(run: Path, tmp_path: Path) -> None:
    """Which an export notes, as no tokenizer says it."""
    opened = open_model(run)
    out = tmp_path / "out"
    export_model(opened.network, out, tokenizer=opened.vocabulary.tokenizer, end_token=7)
    assert open_model(out).vocabulary.end_token == 7
    (out / "generation_config.json").unlink()
    assert open_model(out).vocabulary.end_token == 0


def test_weights_are_read_when_they_are_asked_for(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for path in copy.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:-9])
    # and parts that are not used may be damaged
    (copy / "chat.json").write_text("{")
    opened = open_model(copy)
    assert opened.config.num_layers == 4
    with pytest.raises(ValueError, match=r"model\.safetensors has \d+ bytes instead of"):
        _ = opened.network
    with pytest.raises(ValueError, match=r"chat\.json is damaged"):
        _ = opened.chat
    asked = []

    def load() -> dict[str, torch.Tensor]:
        asked.append(1)
        return load_weights(run)

    lazy = StoredModel(run, opened.config, "depthmix", load)
    assert lazy.network is lazy.network
    assert len(asked) == 1


def test_checkpoint_uses_chat_of_run(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    write_chat(copy, Chat("{{ messages }}", (2,)))
    assert open_model(copy / "checkpoints" / "step-00000004").chat == Chat("{{ messages }}", (2,))


def test_checkpoints_have_names(run: Path) -> None:
    folder = RunDir.open(run)
    second, fourth = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    assert find_checkpoint(folder, "newest") == fourth
    for name in ("2", "step-00000002", str(second)):
        assert find_checkpoint(folder, name) == second
        assert open_model(run, checkpoint=name).checkpoint == second
    assert find_checkpoint(folder, None) == find_checkpoint(folder, "best")
    early, late = (open_model(run, checkpoint=name).network for name in ("2", "4"))
    assert not torch.equal(early.embedding.weight, late.embedding.weight)
    with pytest.raises(ValueError, match="choose from best, newest, step-00000002"):
        find_checkpoint(folder, "step-3")


def test_a_checkpoint_that_was_moved_needs_a_tokenizer(run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "a" / "b" / "c")
    opened = open_model(moved)
    assert opened.run is None
    assert opened.chat is None
    assert opened.network.config == opened.config
    with pytest.raises(ValueError, match=r"is not in a run .* give one with --tokenizer"):
        _ = opened.vocabulary
    given = open_model(moved, tokenizer=str(run / "tokenizer.json"))
    assert given.vocabulary.encode("") == [0]


def test_a_run_without_its_configuration_has_its_checkpoints(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "config.toml").unlink()
    assert open_model(copy).config == open_model(run).config


def test_path_that_is_not_a_model_is_reported(run: Path, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for path, told in (
        (tmp_path / "nowhere", "^there is no run or model at .*nowhere': name the folder of a run"),
        (tmp_path / "emty", "there is no run or model at .*: .* Did you mean 'empty'"),
        (tmp_path / "file", "is a file: name the folder of a run, of one of its checkpoints"),
        (
            tmp_path / "empty",
            r"is not a model: it has neither a run's config\.toml nor a config\.json",
        ),
        (run.parent, "is not a run, but contains 1: choose one"),
        (run / "checkpoints", "is part of the run .*: give that folder instead"),
        (run / "checkpoints" / "step-00000009", "is part of the run"),
    ):
        with pytest.raises(ValueError, match=told):
            open_model(path)
    with pytest.raises(ValueError, match="is already a checkpoint: leave out --checkpoint"):
        open_model(run / "checkpoints" / "step-00000004", checkpoint="2")
    with pytest.raises(ValueError, match="which has no checkpoints: leave out --checkpoint"):
        open_model(exported, checkpoint="2")
    with pytest.raises(ValueError, match="has no checkpoint '9': choose from best"):
        open_model(run, checkpoint="9")


def test_damaged_checkpoints_are_reported(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    place = copy / "checkpoints" / "step-00000004"
    (place / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json has 1 bytes .*with --checkpoint 2"):
        open_model(place)
    (place / "state.json").unlink()
    with pytest.raises(ValueError, match=r"state\.json is missing: .*with --checkpoint 2"):
        open_model(place)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        open_model(tmp_path)


def test_no_folder_needs_transformers(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = write_foreign(tmp_path / "llama")
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)
    for path in (run, exported, dense):
        assert open_model(path).network.config.vocab_size == 300
        assert open_model(path).vocabulary.end_token == 0
