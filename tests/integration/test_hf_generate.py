"""Every mode of `generate()` matches generation without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, pipeline

from depthmix.data.tokenizer import train_tokenizer
from depthmix.hf import DepthmixForCausalLM
from depthmix.hf.cache import DynamicPastLayer
from depthmix.hf.export import export_model
from depthmix.nn.depth import MixtureOfDepths
from hf_models import make_hf_model, pad_left
from variants import NAMES, make_config, make_model, make_tokens

FEW = ("dense", "mod", "mod_tanh1", "token_choice", "early_exit", "mode_staged", "mod_kv")


def make_writer(name: str) -> DepthmixForCausalLM:
    """A model with a head of its own: with a tied one, a random model repeats its last token."""
    return make_hf_model(name, tied_head=False)


MODELS = {name: make_writer(name) for name in FEW}

# the padding's id is a real token's, and no token ends a text
PLAIN: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 7, "eos_token_id": None}
GREEDY: dict[str, Any] = {**PLAIN, "do_sample": False}
BEAMS: dict[str, Any] = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
SAMPLE: dict[str, Any] = {
    **PLAIN,
    "do_sample": True,
    "temperature": 1.3,
    "top_k": 20,
    "top_p": 0.95,
}

STATIC: dict[str, Any] = {"cache_implementation": "static"}
CHUNKS: dict[str, Any] = {"prefill_chunk_size": 5}


def make_batch(model: DepthmixForCausalLM) -> dict[str, Tensor]:
    ids, mask = pad_left([make_tokens(model.model.config, n, seed=n) for n in (12, 7, 3)])
    return {"input_ids": ids, "attention_mask": mask}


def write(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(**batch, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [GREEDY, BEAMS, SAMPLE], ids=["greedy", "beams", "sample"])
@pytest.mark.parametrize("name", FEW)
def test_with_a_cache_as_without(name: str, rule: dict[str, Any]) -> None:
    model = MODELS[name]
    batch = make_batch(model)
    expected = write(model, batch, **rule, use_cache=False)
    for ways in ({}, STATIC, CHUNKS, {**STATIC, **CHUNKS}):
        assert torch.equal(write(model, batch, **rule, **ways), expected), ways
    # a text that repeats itself would show nothing
    assert len(expected[:, -9:].unique()) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_are_written_as_if_alone(name: str) -> None:
    model = make_writer(name)
    batch = make_batch(model)
    together = write(model, batch, **GREEDY)
    for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], together, strict=True):
        alone = write(model, {"input_ids": ids[mask.bool()][None]}, **GREEDY, use_cache=False)
        assert torch.equal(row[-9:], alone[0, -9:])


@pytest.fixture
def taken_back(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each layer was asked to forget, each time."""
    numbers: list[int] = []
    crop = DynamicPastLayer.crop

    def note(self: DynamicPastLayer, tokens_to_remove: Any) -> None:
        numbers.append(int(tokens_to_remove))
        crop(self, tokens_to_remove)

    monkeypatch.setattr(DynamicPastLayer, "crop", note)
    return numbers


@pytest.mark.parametrize("name", FEW)
def test_guessing_from_the_prompt_changes_nothing(name: str, taken_back: list[int]) -> None:
    model = MODELS[name]
    prompt = {"input_ids": make_tokens(model.model.config, 6).repeat(3)[None]}
    expected = write(model, prompt, **GREEDY, use_cache=False)
    assert torch.equal(write(model, prompt, **GREEDY, prompt_lookup_num_tokens=4), expected)
    assert any(taken_back)


@pytest.mark.parametrize("name", FEW)
def test_an_assistant_changes_nothing(name: str, taken_back: list[int]) -> None:
    model, helper = MODELS[name], make_writer(name)
    with torch.no_grad():
        # right now and then
        helper.model.norm.weight.mul_(torch.linspace(0.1, 3, 32))
    prompt = {"input_ids": make_tokens(model.model.config, 1, 8)}
    expected = write(model, prompt, **GREEDY, use_cache=False)
    assert torch.equal(write(model, prompt, **GREEDY, assistant_model=helper), expected)
    assert any(taken_back)


def test_a_conversation_goes_on_from_its_cache() -> None:
    model = MODELS["mod"]
    first = make_batch(model)
    out = write(model, first, **GREEDY, return_dict_in_generate=True)
    more = make_tokens(model.model.config, 3, 4, seed=5)
    ids = torch.cat([out.sequences, more], dim=1)
    mask = torch.cat(
        [first["attention_mask"], torch.ones(3, ids.shape[1] - 12, dtype=torch.long)], dim=1
    )
    batch = {"input_ids": ids, "attention_mask": mask}
    expected = write(model, batch, **GREEDY, use_cache=False)
    assert torch.equal(write(model, batch, **GREEDY, past_key_values=out.past_key_values), expected)


def test_it_skips_blocks() -> None:
    model = make_writer("mod")
    calls = {"ran": 0, "asked": 0}
    for layer in model.model.layers:
        if isinstance(layer, MixtureOfDepths):
            layer.register_forward_hook(lambda *_: calls.update(asked=calls["asked"] + 1))
            layer.block.register_forward_hook(lambda *_: calls.update(ran=calls["ran"] + 1))
    write(
        model,
        {"input_ids": make_tokens(model.model.config, 1, 4)},
        **{**GREEDY, "max_new_tokens": 30},
    )
    assert 0 < calls["ran"] < 0.9 * calls["asked"]


def test_a_model_in_training_generates_causally_too() -> None:
    model = make_writer("mod")
    batch = make_batch(model)
    expected = write(model, batch, **GREEDY)
    assert torch.equal(write(model.train(), batch, **GREEDY), expected)


def test_too_long_a_text_is_refused() -> None:
    model = MODELS["mod"]
    prompt = {"input_ids": make_tokens(model.model.config, 1, 60)}
    with pytest.raises(ValueError, match="more than max_position_embeddings = 64"):
        write(model, prompt, **GREEDY)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["mod", "mode_staged_token_choice"])
def test_compiled_decoding_as_without(name: str) -> None:
    model = make_writer(name)
    batch = make_batch(model)
    expected = write(model, batch, **GREEDY, use_cache=False)
    options: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager", "mode": None}
    config = CompileConfig(**options)
    # else a CPU is left out
    config._compile_all_devices = True
    torch._dynamo.reset()
    compiled = write(model, batch, **GREEDY, **STATIC, compile_config=config)
    assert torch.equal(compiled, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()


def test_a_pipeline_takes_the_model(tmp_path: Path) -> None:
    config = make_config("mod", vocab_size=300)
    tokenizer = train_tokenizer(["one and two and three " * 9], 300, parallel=False)
    model = make_model(config, dtype=torch.float32).eval()
    export_model(model, tmp_path / "out", tokenizer=tokenizer, end_token=0)
    write_on = pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    (told,) = write_on("one and", do_sample=False, max_new_tokens=5)
    assert told["generated_text"].startswith("one and")
