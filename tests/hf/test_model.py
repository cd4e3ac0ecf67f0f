"""The model as transformers opens, saves and calls it: the same numbers, and no weight made up."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import hub

from depthmix.hf import DepthmixConfig, DepthmixForCausalLM
from depthmix.nn import Transformer
from depthmix.nn.losses import IGNORE, language_model_loss, routing_loss
from hf_models import make_hf_model, pad_left
from variants import NAMES, gradients_of, make_config, make_model, make_tokens, pad_rows

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nPath('ran').touch()\n"


# each model once with the checks of shapes at run time, and once without
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_saved_model_are_the_native_ones(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_hf_model(name, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, output_loading_info=True
    )
    assert isinstance(loaded, DepthmixForCausalLM)
    assert not loaded.training
    assert not any(info.values())
    native, config = make_model(name, dtype=dtype).eval(), make_config(name)
    tokens = make_tokens(config, 3, 15)
    selector = config.choose_selector(loaded.config.selector)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, native(tokens, selector=selector).logits)
    assert loaded.config.tie_word_embeddings == config.tied_head
    assert (loaded.model.head.weight is loaded.model.embedding.weight) == config.tied_head
    # nothing is drawn again
    assert all(torch.equal(a, b) for a, b in zip(*map(_list_weights, (loaded, model)), strict=True))


def _list_weights(model: DepthmixForCausalLM) -> list[Tensor]:
    return list(model.state_dict().values())


def test_a_new_model_has_the_networks_own_first_weights() -> None:
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(DepthmixConfig.from_model_config(make_config("mod")))
    torch.manual_seed(3)
    native = Transformer(make_config("mod"))
    for name, value in native.state_dict().items():
        assert torch.equal(value, made.model.state_dict()[name]), name
    assert torch.equal(native.phase_table, made.model.phase_table)


def test_half_precision_keeps_the_rotary_table(tmp_path: Path) -> None:
    make_hf_model("mod", dtype=torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    table = make_model("mod", dtype=torch.float32).phase_table
    assert torch.equal(model.model.phase_table, table)


def lose_one(weights: dict[str, Tensor]) -> None:
    del weights["model.layers.1.decider.router.weight"]


def add_one(weights: dict[str, Tensor]) -> None:
    weights["model.layers.9.extra"] = torch.zeros(2)


def reshape_one(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(31)


@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lose_one, "missing: model.layers.1.decider.router.weight"),
        (add_one, "not the model's: model.layers.9.extra"),
        (
            reshape_one,
            "of another shape: model.norm.weight ((31,) for (32,))",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], None],
    told: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    make_hf_model("mod").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="the weights do not fit the configuration") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert told in str(caught.value)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    make_hf_model("mod").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, tied_head=False)
    with pytest.raises(ValueError, match=r"missing: model\.head\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = make_hf_model("mod")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_folder_runs_nothing_unless_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_hf_model("mod").save_pretrained(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved" / "modeling_depthmix.py").write_text(EVIL)
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    AutoConfig.from_pretrained(tmp_path / "saved")
    assert not list(tmp_path.rglob("ran"))


def test_the_stub_opens_a_folder_for_those_who_trust_it(tmp_path: Path) -> None:
    model = make_hf_model("mod_tanh1", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    script = f"""
import os, torch
os.environ["HF_MODULES_CACHE"] = {str(tmp_path / "modules")!r}
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import AutoModelForCausalLM
folder = {str(tmp_path / "saved")!r}
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error) or "depthmix" in str(error), error
else:
    raise SystemExit("opened without trust")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__ == "depthmix.hf.model", type(model)
model.save_pretrained(folder + "-again")
torch.save(model(torch.arange(12)[None]).logits, folder + "-logits")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    again = {path.name for path in (tmp_path / "saved-again").iterdir()}
    assert again == {path.name for path in (tmp_path / "saved").iterdir()}
    logits = torch.load(tmp_path / "saved-logits")
    with torch.no_grad():
        assert torch.equal(logits, model(torch.arange(12)[None]).logits)


def test_pushing_uploads_what_saving_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, bytes] = {}

    class Api:
        repo_id = "me/tiny"

        def create_repo(self, *args: Any, **options: Any) -> "Api":
            return self

        def create_commit(self, *args: Any, operations: Any, **options: Any) -> None:
            for step in operations:
                content = step.path_or_fileobj
                sent[step.path_in_repo] = (
                    content if isinstance(content, bytes) else Path(content).read_bytes()
                )

    monkeypatch.setattr(hub, "hf_api", Api)
    # else the hub is asked whether there is one
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: ModelCard("a card"))
    make_hf_model("mod").push_to_hub("me/tiny", token="none")
    wanted = {"config.json", "model.safetensors", "generation_config.json", "modeling_depthmix.py"}
    assert wanted <= sent.keys()
    assert json.loads(sent["config.json"])["model_type"] == "depthmix"
    assert b"from depthmix.hf import" in sent["modeling_depthmix.py"]


def test_the_configuration_may_name_another_selector() -> None:
    model, tokens = make_hf_model("mod"), make_tokens(make_config("mod"), 2, 12)
    with torch.no_grad():
        found: dict[str | None, Tensor] = {None: model(tokens).logits}
        for selector in ("predictor", "router", "topk", "all"):
            model.config.selector = selector
            found[selector] = model(tokens).logits
            expected = model.model(tokens, selector=selector).logits
            assert torch.equal(found[selector], expected)
        assert torch.equal(found[None], found["predictor"])
        assert not torch.equal(found["topk"], found["predictor"])
        model.config.selector = "topk"
        with pytest.raises(ValueError, match="tokens that are not generated yet"):
            model(tokens, use_cache=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "stochastic"])
def test_in_training_the_loss_holds_the_routing_losses(name: str) -> None:
    model, native = make_hf_model(name).train(), make_model(name)
    config = native.config
    tokens, documents = pad_rows([make_tokens(config, n, seed=n) for n in (14, 9)], "right")
    labels = tokens.where(documents >= 0, IGNORE)
    found = model(tokens, attention_mask=documents + 1, labels=labels)
    out = native(tokens, document_ids=documents)
    targets = torch.cat([labels[:, 1:], torch.full((2, 1), IGNORE)], dim=1)
    extra = routing_loss(config, out.routings, out.expert_routings).loss
    loss = language_model_loss(out.logits, targets) + extra
    torch.testing.assert_close(found.loss, loss.to(found.loss.dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.routing_loss, extra.to(found.routing_loss.dtype))
    balanced = name.startswith(("mod", "early", "token", "causal", "moe"))
    assert (found.routing_loss > 0) == (balanced and name != "token_choice_bias")
    assert found.past_key_values is None
    found.loss.backward()
    loss.backward()
    for weight, gradient in gradients_of(native).items():
        torch.testing.assert_close(
            gradients_of(model.model)[weight], gradient, rtol=1e-4, atol=1e-7
        )


def test_in_evaluation_the_loss_is_the_language_models_alone() -> None:
    model, tokens = make_hf_model("mod"), make_tokens(make_config("mod"), 2, 12)
    with torch.no_grad():
        found = model(tokens, labels=tokens)
        targets = torch.cat([tokens[:, 1:], torch.full((2, 1), IGNORE)], dim=1)
        loss = language_model_loss(model.model(tokens, selector="predictor").logits, targets)
    torch.testing.assert_close(found.loss.double(), loss.double(), rtol=1e-6, atol=0)
    assert found.routing_loss is None


def test_an_accumulated_batch_has_the_loss_of_its_parts() -> None:
    model, tokens = make_hf_model("mod").train(), make_tokens(make_config("mod"), 4, 12)
    labels = tokens.clone()
    labels[0, :8] = IGNORE
    num_items = int((labels[:, 1:] != IGNORE).sum())
    parts = [
        model(tokens[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=num_items)
        for i in range(4)
    ]
    apart = [model(tokens[i : i + 1], labels=labels[i : i + 1]) for i in range(4)]
    shares = [(labels[i, 1:] != IGNORE).sum() / num_items for i in range(4)]
    expected = sum(share * part.loss for share, part in zip(shares, apart, strict=True))
    torch.testing.assert_close(sum(part.loss for part in parts), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["dense", "mod", "mod_kv", "mode_staged", "early_exit"])
def test_gradients_are_the_same_with_checkpointing(name: str) -> None:
    tokens = make_tokens(make_config(name), 2, 12)
    found = []
    for every in (None, 1):
        model = make_hf_model(name).train()
        if every:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
            # a copy computes with its own weights
            model, first = copy.deepcopy(model), model
            with torch.no_grad():
                first.model.norm.weight.zero_()
                find_blocks(first)[0].norm_mlp.weight.zero_()
        counts = count_forwards(model)
        model(tokens, labels=tokens).loss.backward()
        assert set(counts) == {2 if every else 1}
        found.append(gradients_of(model.model))
    for weight, gradient in found[0].items():
        assert gradient is not None, weight
        torch.testing.assert_close(found[1][weight], gradient, rtol=0, atol=1e-12)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    counts = count_forwards(model)
    model(tokens, labels=tokens).loss.backward()
    assert set(counts) == {1}


def find_blocks(model: DepthmixForCausalLM) -> list[Any]:
    return [getattr(layer, "block", layer) for layer in model.model.layers]


def count_forwards(model: DepthmixForCausalLM) -> list[int]:
    """How often each block is computed, counted as it goes."""
    norms = [block.norm_mlp for block in find_blocks(model)]
    counts = [0] * len(norms)

    def count(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[index] += 1

        return hook

    for index, norm in enumerate(norms):
        norm.register_forward_hook(count(index))
    return counts


@torch.no_grad()
def test_positions_that_begin_again_begin_a_document() -> None:
    model = make_hf_model("mod")
    parts = [make_tokens(model.model.config, n, seed=n) for n in (7, 5, 4)]
    row = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    packed = model(row, position_ids=positions).logits[0]
    alone = torch.cat([model(part[None]).logits[0] for part in parts])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    assert torch.equal(model(row, position_ids=torch.arange(16)[None]).logits, model(row).logits)


@torch.no_grad()
def test_a_new_token_can_be_added() -> None:
    model = make_hf_model("mod")
    tokens = make_tokens(model.model.config, 1, 8)
    before = model(tokens).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocab_size == 70
    assert torch.equal(model(tokens).logits[..., :64], before)
    assert model.model.head.weight is model.model.embedding.weight


@torch.no_grad()
def test_only_the_logits_asked_for_are_computed() -> None:
    model = make_hf_model("mod")
    tokens = make_tokens(model.model.config, 2, 8)
    whole = model(tokens).logits
    last = model(tokens, logits_to_keep=2).logits
    assert last.shape[1] == 2
    torch.testing.assert_close(last, whole[:, -2:], rtol=0, atol=1e-12)
    picked = model(tokens, logits_to_keep=torch.tensor([1, 4])).logits
    torch.testing.assert_close(picked, whole[:, [1, 4]], rtol=0, atol=1e-12)
    (logits,) = model(tokens, return_dict=False)
    assert torch.equal(logits, whole)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 6, 32)}, "give input_ids"),
        ({"output_attentions": True}, "not returned"),
        ({"output_hidden_states": True}, "not returned"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"\(2, 1, 6, 6\)"),
        ({"attention_mask": {"full_attention": None}}, "not dict"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]] * 2)}, "padding between tokens"),
    ],
)
def test_refuses_what_it_cannot_do(options: dict[str, Any], told: str) -> None:
    model = make_hf_model("mod")
    ids, _ = pad_left([make_tokens(model.model.config, 6)] * 2)
    with pytest.raises(ValueError, match=told):
        model(**{"input_ids": ids, **options})


def test_a_model_with_value_embedding_keeps_its_vocabulary() -> None:
    with pytest.raises(ValueError, match="cannot change its vocabulary"):
        make_hf_model("mod_mix_values").resize_token_embeddings(80)


def test_random_routing_has_no_causal_head() -> None:
    model = make_hf_model("stochastic")
    model.config.selector = None
    with pytest.raises(ValueError, match="use 'all'"):
        model(make_tokens(model.model.config, 1, 6))
