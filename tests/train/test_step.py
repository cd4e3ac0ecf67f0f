"""One training step against the same step written out, and losses that fall."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from depthmix.kernels import linear_cross_entropy
from depthmix.nn import Transformer, losses
from depthmix.nn.losses import IGNORE, language_model_loss, routing_loss
from depthmix.train.step import TrainStep, _copy_state, _restore_state, compute_loss
from variants import (
    NAMES,
    enlarge_updates,
    gradients_of,
    make_config,
    make_model,
    make_tokens,
    pad_rows,
)

STRATEGIES = ["dense", "mod", "token_choice", "causal", "moe_token_choice", "mode_staged"]


def make_batch(model: Transformer, seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = make_tokens(model.config, 4, 17, seed=seed)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_the_sum_of_its_parts(name: str) -> None:
    model = make_model(name, dtype=torch.float32)
    tokens, documents = pad_rows(
        [make_tokens(model.config, 16), make_tokens(model.config, 7)], "right"
    )
    targets = tokens.roll(-1, dims=1).masked_fill(documents < 0, IGNORE)
    torch.manual_seed(0)
    found = compute_loss(model, tokens, targets, documents)
    torch.manual_seed(0)
    output = model(tokens, document_ids=documents)
    expected = language_model_loss(output.logits, targets)
    routing = routing_loss(model.config, output.routings, output.expert_routings)
    torch.testing.assert_close(found.language_model, expected)
    torch.testing.assert_close(found.total, expected + routing.loss)
    torch.testing.assert_close(found.routing.loss, routing.loss)
    assert (found.routing.router is None) == (routing.router is None)
    # the parts of the sum have a gradient, and no metric has: it would be computed, of zeros
    assert found.language_model.requires_grad
    metrics = [t for t in tree_leaves(found.routing[1:]) if t is not None]
    assert not any(metric.requires_grad for metric in metrics)


def test_results_of_a_step_need_no_gradient() -> None:
    model = make_model("mod", dtype=torch.float32)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = step(*make_batch(model))
    parts = [t for t in tree_leaves(found) if t is not None]
    assert len(parts) > 2
    assert not any(part.requires_grad for part in (*parts, found.total))


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "backend"),
    # inductor takes most of a second for each kernel, and tests/integration/test_compile.py has it
    # for both kinds of blocks
    [("dense", "aot_eager"), ("mod", "aot_eager"), ("stochastic", "inductor")],
)
def test_a_compiled_loss_is_the_same_and_goes_backward(name: str, backend: str) -> None:
    """Also where routing adds nothing, and the total is one of its parts."""
    results = []
    for compiled in (False, True):
        small = make_config(name, num_layers=1, **{"routing.every": 1})
        model, function = make_model(small, dtype=torch.float32), compute_loss
        if compiled:
            function = torch.compile(compute_loss, fullgraph=True, backend=backend)
        torch.manual_seed(0)
        found = function(model, *make_batch(model))
        found.total.backward()
        results.append((found.total.detach(), found.language_model.detach(), gradients_of(model)))
    (total, part, grads), (total2, part2, grads2) = results
    assert grads
    if name != "stochastic":
        # chance is drawn otherwise when it is compiled
        torch.testing.assert_close((total2, part2), (total, part))
        torch.testing.assert_close(grads2, grads, rtol=1e-3, atol=1e-5)
    assert grads2.keys() == grads.keys()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [5, 63, 64, 65, 1000])
def test_a_padded_vocabulary_is_seen_nowhere(
    vocab_size: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the loss and every gradient are those without padding, and so is all else."""
    config = make_config("mod", vocab_size=vocab_size, tied_head=tied)
    model = make_model(config, dtype=torch.float32)
    assert (model.head.weight is model.embedding.weight) == tied
    twin = copy.deepcopy(model)
    tokens, targets = make_batch(model)
    tokens, targets = tokens[:2], targets[:2].clone()
    targets[1, 5:] = IGNORE
    results = []
    for network, chunked in ((twin, False), (model, True)):
        loss = partial(linear_cross_entropy, chunked=chunked)
        monkeypatch.setattr(losses, "linear_cross_entropy", loss)
        found = compute_loss(network, tokens, targets)
        found.total.backward()
        results.append(found.total.detach())
    torch.testing.assert_close(results[1], results[0])
    truth = gradients_of(twin)
    for name, grad in gradients_of(model).items():
        torch.testing.assert_close(grad, truth[name], rtol=1e-4, atol=1e-6)
    assert model.head.weight.shape == model.embedding.weight.shape == (vocab_size, config.width)
    shapes, known = ({n: t.shape for n, t in m.state_dict().items()} for m in (model, twin))
    assert shapes == known


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_equals_the_same_step_by_hand(name: str) -> None:
    model = make_model(name)
    twin = copy.deepcopy(model)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        tokens, targets = make_batch(model, seed)
        found = step(tokens, targets)
        expected = compute_loss(twin, tokens, targets)
        twin.zero_grad()
        expected.total.backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        torch.testing.assert_close(found.total, expected.total, rtol=1e-6, atol=0)
    for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=key)
    # nothing is left to leak into the next step
    assert all(grad is None for grad in gradients_of(model).values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_lowers_the_loss(name: str) -> None:
    torch.manual_seed(0)
    model = enlarge_updates(Transformer(make_config(name)))
    step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    tokens, targets = make_batch(model)
    losses = [step(tokens, targets).language_model.item() for _ in range(12)]
    # it starts as a guess among 64 tokens
    assert losses[0] == pytest.approx(4.16, abs=0.2)
    assert losses[-1] < losses[0] - 0.4


def test_precision_is_autocast() -> None:
    model = make_model("mod", dtype=torch.float32)
    twin = copy.deepcopy(model)
    tokens, targets = make_batch(model)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), precision=torch.bfloat16)
    found = step(tokens, targets).total
    exact = compute_loss(twin, tokens, targets).total
    assert found.dtype == torch.float32
    assert found != exact
    assert found.item() == pytest.approx(exact.item(), rel=0.1)
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_warm_up_steps_can_be_undone() -> None:
    """State that was there comes back; state that the steps made starts at zero."""
    model = make_model("token_choice_bias", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=False)
    step = TrainStep(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    saved = _copy_state(model, [optimizer])
    step(*make_batch(model))
    _restore_state([optimizer], saved)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    made = [t for values in optimizer.state.values() for t in values.values()]
    assert made
    assert not any(t.any() for t in made)
    step(*make_batch(model))
    middle = copy.deepcopy(optimizer.state_dict())
    saved = _copy_state(model, [optimizer])
    step(*make_batch(model, seed=2))
    _restore_state([optimizer], saved)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, middle["state"][number][key])


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    results = []
    for accumulate in (1, 2, 4):
        model = make_model("mod")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        result = TrainStep(model, optimizer, num_micro_batches=accumulate)(*make_batch(model))
        weights = torch.cat([p.flatten() for p in model.parameters()])
        # each part in its own precision: the language model's is float32, routing's is the model's
        results.append((result.language_model, result.routing.loss, weights))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0])


def test_clipping_bounds_the_update_and_tells_the_norm() -> None:
    updates, norms = [], []
    for clip in (1e9, 0.01):
        model = make_model("mod")
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=clip)
        norm = step(*make_batch(model)).grad_norm
        assert norm is not None
        norms.append(norm.item())
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        updates.append((after - before).norm().item())
    assert norms[0] == pytest.approx(norms[1])
    assert updates[0] == pytest.approx(norms[0], rel=1e-4)
    assert updates[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("clip", [0.05, 1e9])
@pytest.mark.parametrize("fused", [True, False])
def test_an_optimiser_gets_the_clipped_gradient(fused: bool, clip: float) -> None:
    model = make_model("mod", dtype=torch.float32)
    # without a memory, the optimiser's mean of the gradients is the last one
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.0, 0.9), fused=fused)
    step, places, norms = TrainStep(model, optimizer, max_grad_norm=clip), set(), []
    for seed in range(3):
        twin = copy.deepcopy(model)
        compute_loss(twin, *make_batch(model, seed)).total.backward()
        norms.append(nn.utils.clip_grad_norm_(twin.parameters(), clip).item())
        found = step(*make_batch(model, seed)).grad_norm
        assert found is not None
        assert found.item() == pytest.approx(norms[-1])
        for p, expected in zip(model.parameters(), twin.parameters(), strict=True):
            assert (expected.grad is None) == (p not in optimizer.state)
            if expected.grad is not None:
                torch.testing.assert_close(optimizer.state[p]["exp_avg"], expected.grad)
        if step.divisor is not None:
            assert step.divisor.item() == pytest.approx(max(1, norms[-1] / clip))
            places.add(step.divisor.data_ptr())
        # no other step may be scaled
        assert not hasattr(optimizer, "grad_scale")
    # else a divisor from an earlier step would do
    assert max(norms) > 1.1 * min(norms) > 0.055
    # a recorded step finds it by its place
    assert len(places) == fused


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_hides_nothing_that_is_not_finite(fused: bool, value: float) -> None:
    model = make_model("mod", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    step = TrainStep(model, optimizer, max_grad_norm=1.0)
    model.norm.weight.register_hook(lambda grad: grad.fill_(value))
    norm = step(*make_batch(model)).grad_norm
    assert norm is not None
    assert not norm.isfinite()
    assert model.norm.weight.isnan().all()


def test_one_optimiser_that_is_not_fused_keeps_all_from_it() -> None:
    """Muon cannot divide: the gradients themselves are clipped, for both alike."""
    model = make_model("mod", dtype=torch.float32)
    params = list(model.parameters())
    optimizers = [
        torch.optim.SGD(params[i::2], lr=1.0, fused=fused) for i, fused in enumerate((True, False))
    ]
    step = TrainStep(model, optimizers, max_grad_norm=0.01)
    before = torch.cat([p.detach().flatten() for p in params])
    step(*make_batch(model))
    after = torch.cat([p.detach().flatten() for p in params])
    assert step.divisor is None
    assert (after - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_several_optimisers_share_a_step() -> None:
    model = make_model("mod")
    params = list(model.parameters())
    before = [p.detach().clone() for p in params]
    halves = [torch.optim.SGD(params[i::2], lr=0.1) for i in range(2)]
    TrainStep(model, halves)(*make_batch(model))
    moved = [not torch.equal(p, old) for p, old in zip(params, before, strict=True)]
    assert sum(moved[0::2]) > 0
    assert sum(moved[1::2]) > 0
    assert all(grad is None for grad in gradients_of(model).values())


def test_biases_bring_the_share_of_tokens_to_the_capacity() -> None:
    """Whatever the scores begin with; without a rate that counts they stay where they are."""
    shares = {}
    for rate in (1.0, 1e-6):
        config = make_config("token_choice_bias", **{"routing.bias_rate": rate})
        model = make_model(config, dtype=torch.float32)
        step = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        found = [step(*make_batch(model, seed)).routing.shares for seed in range(60)]
        last = torch.stack([share for share in found[-20:] if share is not None])
        assert last.shape == (20, 2)
        shares[rate] = last.mean(0)
    torch.testing.assert_close(shares[1.0], torch.full((2,), 0.25), rtol=0, atol=0.03)
    assert ((shares[1e-6] - 0.25).abs() > 0.05).any()


def test_a_bias_moves_by_the_mean_of_the_micro_batches() -> None:
    model = make_model("token_choice_bias", dtype=torch.float32)
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("decider.bias")}
    before = [bias.clone() for bias in biases.values()]
    tokens, targets = make_batch(model)
    chosen = [(r.logits > 0).float().mean() for r in model(tokens).routings]
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), num_micro_batches=2)
    step(tokens, targets)
    for bias, old, share in zip(biases.values(), before, chosen, strict=True):
        torch.testing.assert_close(bias, old + (0.25 - share))
