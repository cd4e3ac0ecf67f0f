"""torch.compile without graph breaks: equal to eager, gradients too, compiled only once."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from depthmix.nn import Output, Transformer
from depthmix.nn.losses import routing_loss
from variants import gradients_of, loss_of, make_config, make_model, make_tokens, pad_rows

pytestmark = pytest.mark.compile

TRACED = [
    "dense_mha_qk_norm_untied",
    "mod",
    "mod_tanh1",
    "mod_kv_first_tokens",
    "token_choice",
    "stochastic",
    "early_exit",
    "causal",
    "moe_expert_choice",
    "moe_token_choice_limited",
    "mode_staged",
    "mode_integrated_token_choice",
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def make_small(name: str, **overrides: object) -> Transformer:
    """Two layers, one routed: every code path, half the time to compile."""
    small: dict[str, object] = {"num_layers": 2}
    if name == "early_exit":
        small = {"num_layers": 2, "routing.capacity": (0.5, 0.25)}
    return make_model(make_config(name, **{**small, **overrides}))


def run(
    step: Callable[..., Output], model: Transformer, tokens: Tensor, selector: str | None, seed: int
) -> list[Tensor]:
    """Loss, logits, decisions and every gradient of one step of `model`, compiled or not."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = step(tokens, selector=selector)
    loss, config = loss_of(output.logits), model.config
    loss = loss + routing_loss(config, output.routings, output.expert_routings).loss
    loss.backward()
    slots = [routing.slot.double() for routing in output.routings]
    grads = [g.clone() for g in gradients_of(model).values() if g is not None]
    return [loss.detach(), output.logits.detach(), *slots, *grads]


def check(name: str, selector: str | None, backend: str, **overrides: int) -> None:
    model = make_small(name, **overrides)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for seed in range(3):
        tokens = make_tokens(model.config, 2, 16, seed=seed)
        found = run(compiled, model, tokens, selector, seed)
        expected = run(model, model, tokens, selector, seed)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            scale = theirs.abs().max().clamp(min=1).item()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("name", TRACED)
def test_traced_equals_eager(name: str) -> None:
    check(name, None, "aot_eager")


@pytest.mark.parametrize("name", ["mod", "mode_staged"])
def test_traced_equals_eager_under_a_causal_selector(name: str) -> None:
    check(name, "predictor", "aot_eager")


@pytest.mark.parametrize(
    ("name", "overrides"),
    # one layer of experts is enough: the other model's graph has a dense and a routed block
    [("mod", {}), ("moe_expert_choice", {"num_layers": 1})],
)
def test_compiled_equals_eager(name: str, overrides: dict[str, int]) -> None:
    check(name, None, "inductor", **overrides)


def test_traced_with_padding_equals_eager() -> None:
    model = make_small("mod_first_tokens")
    tokens, documents = pad_rows(
        [make_tokens(model.config, 16), make_tokens(model.config, 5)], "left"
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = compiled(tokens, document_ids=documents).logits
    expected = model(tokens, document_ids=documents).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_the_recompilation_check_can_fail() -> None:
    model = make_small("mod")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    compiled(make_tokens(model.config, 2, 16))
    with pytest.raises(torch._dynamo.exc.RecompileError):
        compiled(make_tokens(model.config, 2, 12))
