"""A folder for transformers and back: the same weights, the same tokens, the same text."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthmix.checkpoint import load_weights
from depthmix.data.tokenizer import load_tokenizer, train_tokenizer
from depthmix.hf.export import export_model
from depthmix.infer import Engine, SamplingParams
from depthmix.models import open_model
from depthmix.models.vocabulary import Vocabulary, find_vocabulary
from depthmix.models.write import import_model
from depthmix.runs.folder import RunDir
from foreign_models import write_foreign
from hf_models import make_hf_model
from variants import NAMES, make_config, make_model

TEXTS = ["one and two and three", "def f(x):", "ünï → ×"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    config = make_config("mod", vocab_size=300)
    tokenizer = train_tokenizer(["and one and two and three, " * 9], 300, parallel=False)
    model = make_model(config, dtype=torch.float32)
    export_model(model.eval(), out, tokenizer=tokenizer, end_token=0)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_model_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = make_model(name, dtype=torch.float32)
    export_model(model, tmp_path / "out")
    import_model(open_model(tmp_path / "out"), tmp_path / "run")
    back = open_model(tmp_path / "run").network
    assert back.config.shape == model.config.shape
    assert back.config.routing == model.config.routing
    assert back.config.experts == model.config.experts
    found = back.state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    # a tied head is stored once
    stored = load_weights(tmp_path / "run")
    assert ("head.weight" in stored) != model.config.tied_head


def test_the_type_of_the_weights_is_kept(tmp_path: Path) -> None:
    export_model(make_model("mod", dtype=torch.float64), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float64"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype == torch.float64


def test_every_file_can_be_read_by_others(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_model(make_model("mod", dtype=torch.float32), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes) >= {"model.safetensors", "config.json"}
    assert set(modes.values()) == {0o640}


def test_the_tokenizer_begins_a_document_as_sampling_does(exported: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    native = load_tokenizer(exported)
    vocabulary = Vocabulary(native, 0)
    for text in TEXTS:
        assert tokenizer(text).input_ids == vocabulary.encode(text)
        plain = tokenizer(text, add_special_tokens=False).input_ids
        assert plain == vocabulary.tokenize(text)
        assert tokenizer.decode(plain) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 64)


def test_transformers_writes_what_the_engine_writes(exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    assert model.generation_config.eos_token_id == 0
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert (batch.attention_mask == 0).any()
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    written = model.generate(**batch, **options)[:, batch.input_ids.shape[1] :]
    engine = Engine(model.model)
    for text, row in zip(TEXTS, written, strict=True):
        prompt = tokenizer(text).input_ids
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
        assert row.tolist() == list(result.samples[0].tokens)


def test_a_run_has_its_tokenizer_and_says_where_it_is_from(exported: Path, tmp_path: Path) -> None:
    run = import_model(open_model(exported), tmp_path / "run")
    vocabulary = find_vocabulary(run)
    assert vocabulary.end_token == 0
    assert vocabulary.tokenizer.to_str() == load_tokenizer(exported).to_str()
    assert RunDir.open(tmp_path / "run").read_json("status.json")["state"] == "finished"
    # another tokenizer in its place is noticed
    (tmp_path / "run" / "tokenizer.json").write_text(
        train_tokenizer(["x"], 257, parallel=False).to_str()
    )
    with pytest.raises(ValueError, match="not the tokenizer that the run was trained with"):
        find_vocabulary(run)


def test_what_transformers_saves_can_be_imported(tmp_path: Path) -> None:
    model = make_hf_model("mod_tanh1", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    import_model(open_model(tmp_path / "saved"), tmp_path / "run")
    found = open_model(tmp_path / "run").network.state_dict()
    assert all(torch.equal(found[key], value) for key, value in model.model.state_dict().items())


def test_refuses_folders_that_are_no_exported_models(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="already exists"):
        export_model(make_model("mod"), exported)
    with pytest.raises(ValueError, match=r"neither a run's config\.toml nor a config\.json"):
        import_model(open_model(tmp_path), tmp_path / "run")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match="is not valid JSON"):
        import_model(open_model(tmp_path), tmp_path / "run")
    (tmp_path / "config.json").write_text((exported / "config.json").read_text())
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        import_model(open_model(tmp_path), tmp_path / "run")
    dense = write_foreign(tmp_path / "dense")
    with pytest.raises(ValueError, match="type 'llama', not a depthmix model"):
        import_model(open_model(dense), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_model(open_model(exported), tmp_path / "run")
    with pytest.raises(ValueError, match="already contains a run"):
        import_model(open_model(exported), tmp_path / "run")
    with pytest.raises(ValueError, match="is not an exported folder: 'depthmix train --from'"):
        import_model(open_model(tmp_path / "run"), tmp_path / "again")
