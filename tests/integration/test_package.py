"""What `import depthmix` offers."""

import doctest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix
from depthmix import infer, nn
from depthmix.config import ModelConfig
from depthmix.data.tokenizer import train_tokenizer
from depthmix.eval.trace import trace_tokens
from depthmix.models import StoredModel, Vocabulary
from depthmix.train.step import TrainStep
from test_architecture import modules_loaded_by
from text_runs import write_text_run


def test_every_exported_name_exists() -> None:
    for name in depthmix.__all__:
        assert getattr(depthmix, name) is not None
    assert depthmix.Transformer is nn.Transformer
    assert depthmix.Cache is nn.Cache
    assert depthmix.ModelConfig is ModelConfig
    assert depthmix.Engine is infer.Engine
    assert depthmix.SamplingParams is infer.SamplingParams
    assert depthmix.TrainStep is TrainStep


def test_unknown_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Transfomer'"):
        _ = depthmix.Transfomer


def test_exports_load_only_what_they_need() -> None:
    assert "torch" not in modules_loaded_by("import depthmix; depthmix.load_preset('tiny')")
    loaded = modules_loaded_by("import depthmix; depthmix.Engine")
    assert "depthmix.infer" in loaded
    assert not {"depthmix.train", "depthmix.models", "depthmix.sample"} & loaded
    assert "transformers" not in modules_loaded_by("import depthmix; depthmix.open_model")


def test_names_are_listed_before_they_are_loaded() -> None:
    loaded = modules_loaded_by("import depthmix; assert {*depthmix.__all__} <= {*dir(depthmix)}")
    assert "depthmix" in loaded
    assert "torch" not in loaded


# as a user has it: without the types being checked, which would refuse most of it before
@pytest.mark.compile
def test_text_in_place_of_ids_is_refused() -> None:
    model: Any = nn.Transformer(depthmix.load_preset("tiny"))
    step: Any = TrainStep(model, torch.optim.SGD(model.parameters()))
    engine: Any = infer.Engine(model, selector="predictor")
    vocabulary: Any = Vocabulary(train_tokenizer(["ab"], 260, parallel=False), None)
    trace: Any = trace_tokens
    engine_type: Any = infer.Engine
    opened = StoredModel(Path("there"), model.config, "depthmix", dict)
    ids = torch.zeros(1, 4, dtype=torch.long)
    refused: dict[str, list[Callable[[], object]]] = {
        "must be a tensor of ids, not str: encode text first": [
            *(partial(call, "text") for call in (model, model.compute_hidden)),
            *(partial(step, *batch) for batch in (("text", ids), (ids, "text"))),
        ],
        "must be a tensor of ids, not list": [partial(model, ["text"]), partial(model, [[1, 2]])],
        "must be a tensor of ids, not torch.float32": [partial(model, torch.rand(1, 4))],
        "list of token ids, not text: encode it first": [
            partial(call, "text") for call in (engine.add, engine.generate)
        ],
        "'text' is not one": [partial(engine.add, ["text"])],
        "takes a list of prompts": [partial(engine.generate, [1, 2])],
        "decode takes token ids": [partial(vocabulary.decode, "text")],
        "only text has tokens": [partial(vocabulary.encode, [1, 2])],
        "use trace_model for text": [partial(trace, model, "text")],
        "for a model folder, pass": [partial(engine_type, opened)],
    }
    for sentence, calls in refused.items():
        for call in calls:
            with pytest.raises(ValueError, match=sentence):
                call()


@pytest.mark.parametrize("name", depthmix.__all__)
def test_the_example_of_a_docstring_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = getattr(depthmix, name).__doc__
    known = {each: getattr(depthmix, each) for each in depthmix.__all__}
    known |= {"depthmix": depthmix, "torch": torch}
    example = doctest.DocTestParser().get_doctest(text, known, name, None, None)
    assert example.examples
    if name == "open_model":
        run = write_text_run(tmp_path)
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "demo-20261115-142233").symlink_to(run)
        monkeypatch.chdir(tmp_path)
    found = doctest.DocTestRunner().run(example)
    assert found.failed == 0
    assert found.attempted == len(example.examples)
