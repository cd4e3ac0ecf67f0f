"""bf16 autocast around every variant: routers stay in float32, results stay close."""

import pytest
import torch

from depthmix.nn import MixtureOfDepths
from depthmix.nn.losses import language_model_loss, routing_loss
from variants import NAMES, gradients_of, make_config, make_model, make_tokens


@pytest.mark.parametrize("name", NAMES)
def test_autocast_trains_every_variant(name: str) -> None:
    config = make_config(name)
    model = make_model(config, dtype=torch.float32)
    tokens = make_tokens(config, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens)
        loss = language_model_loss(output.logits, tokens)
        losses = routing_loss(config, output.routings, output.expert_routings)
    assert output.logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    for routing in output.routings:
        for part in (routing, routing.memory):
            if part is None:
                continue
            assert part.logits.dtype == part.weight.dtype == torch.float32
            if part.predictor_logits is not None:
                assert part.predictor_logits.dtype == torch.float32
    for routing in output.expert_routings:
        assert routing.logits.dtype == torch.float32
    (loss + losses.loss).backward()
    for parameter, grad in gradients_of(model).items():
        assert grad is None or (grad.dtype == torch.float32 and grad.isfinite().all()), parameter


@pytest.mark.parametrize("name", ["dense", "mod_unit"])
def test_autocast_is_close_to_float32(name: str) -> None:
    model = make_model(name, dtype=torch.float32)
    tokens = make_tokens(model.config, 2, 16)
    expected = model(tokens, selector="all").logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens, selector="all").logits.float()
    error = (found - expected).abs().mean() / expected.abs().mean()
    assert 0 < error < 0.05


@pytest.mark.parametrize("how", ["autocast", "model"])
def test_the_router_has_more_values_than_bf16(how: str) -> None:
    """2,048 tokens get scores that bf16 could not tell apart, from the stream they really have."""
    config = make_config("mod_plain_scores", max_seq_len=2048, vocab_size=4096)
    model = make_model(config, dtype=torch.bfloat16 if how == "model" else torch.float32)
    inputs: list[torch.Tensor] = []
    layer = model.layers[1]
    assert isinstance(layer, MixtureOfDepths)
    layer.decider.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    tokens = torch.randperm(4096)[None, :2048]
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"), torch.no_grad():
        routing = model(tokens).routings[0]
    (x,) = inputs
    assert x.dtype == torch.bfloat16
    assert routing.logits.dtype == torch.float32
    exact = x.double() @ layer.decider.router.weight.double()[0]
    torch.testing.assert_close(routing.logits.double(), exact, rtol=0, atol=1e-5)
    assert routing.logits.unique().numel() > 2000
    assert routing.logits.bfloat16().unique().numel() < 1500


def test_rotary_phases_stay_float32_in_a_bf16_model() -> None:
    model = make_model("mod", dtype=torch.float32)
    before = model.phase_table.clone()
    model.bfloat16()
    assert model.phase_table.dtype == torch.float32
    assert torch.equal(model.phase_table, before)
    assert model.double().phase_table.dtype == torch.float64
