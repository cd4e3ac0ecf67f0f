"""One test for each mistake that public implementations of Mixture-of-Depths make."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from depthmix.nn import Cache, MixtureOfDepths, Place, Transformer
from depthmix.nn.block import Update
from depthmix.nn.layers import make_phase_table
from depthmix.nn.losses import head_loss, routing_loss
from depthmix.nn.routing import Candidates, apply_gate, expert_choice
from variants import (
    NAMES,
    gradients_of,
    loss_of,
    make_config,
    make_model,
    make_tokens,
    pad_rows,
)

ROUTED = [name for name in NAMES if make_config(name).routed_layers]


def routed_layers(model: Transformer) -> list[MixtureOfDepths]:
    return [layer for layer in model.layers if isinstance(layer, MixtureOfDepths)]


def rank_by_hand(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda t: (-scores[t], t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_values", [1, 3, 1000])
def test_k_minus_1_tokens_by_a_strict_threshold(num_values: int, dtype: torch.dtype) -> None:
    """Exactly k are kept, whether scores tie or not."""
    scores = (torch.randint(num_values, (4, 256)) / num_values).to(dtype)
    kept = expert_choice(scores, 0.125, Candidates())
    assert (kept.slot >= 0).sum(dim=1).tolist() == [32] * 4
    for row in range(4):
        assert kept.index[row].tolist() == sorted(rank_by_hand(scores[row].tolist())[:32])


def test_k_minus_1_tokens_in_a_model_without_opinions() -> None:
    model = make_model(make_config("mod", **{"routing.gate": "tanh1"}), dtype=torch.bfloat16)
    for layer in routed_layers(model):
        nn.init.zeros_(layer.decider.router.weight)
    for routing in model(make_tokens(model.config, 2, 13)).routings:
        # k = ceil(0.25 · 13), ties to the earlier token
        assert routing.index.tolist() == [[0, 1, 2, 3]] * 2
        assert routing.valid.all()


class Spy(nn.Module):
    """A block that remembers what it was given and gives a constant back."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[Tensor, Place]] = []

    def forward(self, x: Tensor, place: Place, **options: Any) -> Update:
        self.given.append((x, place))
        return Update(torch.full_like(x, 3.0), None)


def spy_on(gate: str) -> tuple[MixtureOfDepths, Spy, Tensor, Place]:
    config, spy = make_config("mod", **{"routing.gate": gate}), Spy()
    layer = MixtureOfDepths(spy, 32, config.routing, 0.25).double()
    nn.init.normal_(layer.decider.router.weight)
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    table = make_phase_table(16, 8, 10000.0).double()
    return layer, spy, x, Place(torch.arange(16)[None], table[None], None, None)


def test_positions_0_to_k_minus_1_instead_of_the_original_ones() -> None:
    layer, spy, x, place = spy_on("raw")
    layer(x, place)
    ((_, seen),) = spy.given
    logits = layer.decider.router(x).squeeze(-1).tolist()
    for row in range(3):
        expected = sorted(rank_by_hand(logits[row])[:4])
        assert expected != [0, 1, 2, 3]
        assert seen.positions[row].tolist() == expected
        assert torch.equal(seen.phase[row], place.phase[0, expected])


def test_unsorted_topk_scrambles_causality() -> None:
    """The gathered sequence is in order, and no kept token sees a later one."""
    layer, spy, x, place = spy_on("raw")
    layer(x, place)
    assert (spy.given[0][1].positions.diff(dim=1) > 0).all()
    model = make_model("mod")
    embedded: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _m, _i, out: embedded.append(out.requires_grad_()))
    output = model(make_tokens(model.config, 1, 16))
    for position in range(16):
        (grad,) = torch.autograd.grad(
            output.logits[0, position].sum(), embedded[0], retain_graph=True
        )
        assert not grad[0, position + 1 :].any()


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh1", "unit"])
def test_residual_scaled_or_doubled_by_the_gate(gate: str) -> None:
    layer, _, x, place = spy_on(gate)
    out, routing, _ = layer(x, place)
    added = out - x
    kept = routing.slot >= 0
    assert torch.equal(out[~kept], x[~kept])
    weight = apply_gate(gate, layer.decider.router(x).squeeze(-1))
    torch.testing.assert_close(added[kept], (3 * weight[kept])[:, None].expand(-1, 32))


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh1"])
def test_router_without_gradient(gate: str) -> None:
    """The language-model loss alone trains the router, and by the right amount."""
    model = make_model(make_config("mod", **{"routing.gate": gate}))
    tokens = make_tokens(model.config, 2, 16)

    def compute_loss() -> Tensor:
        logits = model(tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    compute_loss().backward()
    for layer in routed_layers(model):
        weight = layer.decider.router.weight
        assert weight.grad is not None
        with torch.no_grad():
            step = 1e-6
            weight[0, 3] += step
            more = compute_loss()
            weight[0, 3] -= 2 * step
            less = compute_loss()
            weight[0, 3] += step
        slope = (more - less).item() / (2 * step)
        assert weight.grad[0, 3].item() == pytest.approx(slope, rel=1e-4, abs=1e-8)
        assert weight.grad.abs().max() > 1e-6


def test_targets_without_the_batch_rows_offset() -> None:
    """Membership is each row's own: a row alone has the targets that it has in the batch."""
    model = make_model("mod")
    tokens = make_tokens(model.config, 4, 16)
    for index, routing in enumerate(model(tokens).routings):
        assert routing.target is not None
        by_hand = torch.zeros(4, 16, dtype=torch.bool)
        for row, scores in enumerate(routing.logits.tolist()):
            by_hand[row, rank_by_hand(scores)[:4]] = True
        assert torch.equal(routing.target, by_hand)
        assert routing.target.sum(dim=1).tolist() == [4] * 4
        assert not torch.equal(routing.target[0], routing.target[1])
        for row in range(4):
            alone = model(tokens[row : row + 1]).routings[index].target
            assert alone is not None
            assert torch.equal(routing.target[row], alone[0])


@pytest.mark.parametrize("gate", ["raw", "sigmoid", "tanh1", "unit"])
def test_softmax_gate_over_the_sequence_leaks(gate: str) -> None:
    """A token's gate depends on its own score only."""
    layer, _, x, place = spy_on(gate)
    _, before, _ = layer(x, place)
    token = int(before.index[0, -1])
    louder = x.clone()
    # the last kept token of row 0 gets a higher score: the same tokens are kept
    louder[0, token] *= 1.5 if before.logits[0, token] > 0 else 0.5
    _, after, _ = layer(louder, place)
    assert torch.equal(before.index, after.index)
    assert not torch.equal(before.logits[0, token], after.logits[0, token])
    assert torch.equal(before.weight[:, :-1], after.weight[:, :-1])


def read_state(model: nn.Module) -> list[tuple[str, Any]]:
    """Everything a module holds that a forward pass could change."""
    state: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                copies = {k: None if t is None else t.detach().clone() for k, t in value.items()}
                state += [(f"{name}.{k}", t) for k, t in copies.items()]
            elif key != "_modules":
                state.append((f"{name}.{key}", copy.deepcopy(value)))
    return state


@pytest.mark.parametrize("name", NAMES)
def test_python_counter_on_a_module(name: str) -> None:
    """A forward pass leaves nothing behind, so that resuming and checkpointing lose nothing."""
    model = make_model(name)
    tokens = make_tokens(model.config, 2, 12)
    before = read_state(model)
    for selector in (None, "all"):
        torch.manual_seed(0)
        first = model(tokens, selector=selector).logits
        torch.manual_seed(0)
        assert torch.equal(model(tokens, selector=selector).logits, first)
    for (key, old), (new_key, new) in zip(before, read_state(model), strict=True):
        assert key == new_key
        same = torch.equal(old, new) if isinstance(old, Tensor) else old == new
        assert same, key


def checkpoint_layers(model: Transformer) -> Transformer:
    """The same model, whose layers compute their forward pass again in the backward pass."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for layer in model.layers:
        layer.forward = wrap(layer.forward)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_activation_checkpointing_decides_twice_the_same(name: str) -> None:
    """Loss and gradients to the bit, the random strategy included."""
    config = make_config(name)
    results = []
    for model in (make_model(config), checkpoint_layers(make_model(config))):
        torch.manual_seed(2)
        output = model(make_tokens(config, 2, 16))
        loss = loss_of(output.logits)
        loss = loss + routing_loss(config, output.routings, output.expert_routings).loss
        loss.backward()
        results.append((loss, gradients_of(model)))
    (plain, plain_grads), (again, again_grads) = results
    assert torch.equal(plain, again)
    for key, grad in plain_grads.items():
        other = again_grads[key]
        assert (grad is None) == (other is None), key
        assert grad is None or other is None or torch.equal(grad, other), key


def test_rows_sharing_one_cache() -> None:
    """What one row says changes nothing for another, in any layer's cache."""
    model = make_model("mod")
    tokens = make_tokens(model.config, 2, 10)
    other = tokens.clone()
    other[0] = (other[0] + 1) % model.config.vocab_size
    found = []
    for given in (tokens, other):
        cache = Cache(model.config, 2, 10, dtype=torch.float64)
        pieces = [
            model(given[:, t : t + 1], selector="router", cache=cache).logits for t in range(10)
        ]
        found.append((torch.cat(pieces, dim=1), [layer.lengths for layer in cache.layers]))
    (first, lengths), (second, other_lengths) = found
    assert torch.equal(first[1], second[1])
    assert not torch.allclose(first[0], second[0])
    for ours, theirs in zip(lengths, other_lengths, strict=True):
        assert ours[1] == theirs[1]
    assert any(ours[0] != theirs[0] for ours, theirs in zip(lengths, other_lengths, strict=True))
    # within one batch the rows have lengths of their own
    assert any(ours[0] != ours[1] for ours in lengths)


@pytest.mark.parametrize("selector", [None, "predictor"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_crash_or_route_the_padding(side: str, selector: str | None) -> None:
    model = make_model("mod")
    rows = [make_tokens(model.config, n, seed=n) for n in (16, 3, 1)]
    tokens, documents = pad_rows(rows, side)
    output = model(tokens, selector=selector, document_ids=documents)
    assert output.logits.isfinite().all()
    for routing in output.routings:
        assert (routing.slot[documents < 0] == -1).all()
        if selector is None:
            assert (routing.slot >= 0).sum(1).tolist() == [4, 1, 1]


@pytest.mark.parametrize("selector", ["predictor", "router"])
def test_every_token_routed_at_decode(selector: str) -> None:
    """A lone token is routed by its score: k = max(1, …) would route every one of them."""
    model = make_model("mod")
    tokens = make_tokens(model.config, 32, 1)
    cache = Cache(model.config, 32, 4, dtype=torch.float64)
    alone = model(tokens, selector=selector)
    cached = model(tokens, selector=selector, cache=cache)
    for layer, whole, step in zip(
        model.config.routed_layers, alone.routings, cached.routings, strict=True
    ):
        for routing in (whole, step):
            scores = routing.predictor_logits if selector == "predictor" else routing.logits
            assert scores is not None
            assert torch.equal(routing.slot >= 0, scores > 0)
            assert 0 < (routing.slot >= 0).sum() < 32
        assert torch.equal(cache.layers[layer].lengths, (step.slot[:, 0] >= 0).long())


class NoSync(TorchDispatchMode):
    """Raises where a tensor's value is asked for on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, packet = torch.ops.aten, func.overloadpacket
        asks = packet in (aten._local_scalar_dense, aten.nonzero, aten.masked_select)
        if packet in (aten.index, aten.index_put, aten.index_put_):
            # a mask as an index is counted first
            asks = any(index is not None and index.dtype == torch.bool for index in args[1])
        if asks:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("selector", [None, "all"])
def test_item_in_the_hot_path(name: str, selector: str | None) -> None:
    """Forward, losses and backward never ask a tensor for its value."""
    config = make_config(name)
    model = make_model(config)
    tokens, documents = pad_rows([make_tokens(config, 12), make_tokens(config, 5)], "left")
    with NoSync():
        output = model(tokens, selector=selector, document_ids=documents)
        loss = output.logits.sum()
        loss = loss + routing_loss(config, output.routings, output.expert_routings).loss
        loss.backward()
    assert output.logits.isfinite().all()


def test_item_in_the_decode_path() -> None:
    model = make_model("mode_staged")
    cache = Cache(model.config, 2, 8, dtype=torch.float64, compact=False)
    with NoSync():
        for _ in range(3):
            logits = model(torch.zeros(2, 2).long(), selector="router", cache=cache).logits
    assert logits.shape == (2, 2, model.config.vocab_size)


def test_the_item_check_can_fail() -> None:
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).sum().item()
    mask = torch.tensor([True, False, True])
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        torch.arange(3)[mask]
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        mask.nonzero()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("selector", [None, "all"])
def test_the_cpu_waits_for_the_gpu(name: str, selector: str | None) -> None:
    """CUDA's own check: forward, losses and backward in bf16, without one synchronisation."""
    config = make_config(name)
    model = make_model(config, dtype=torch.float32).cuda()
    tokens, documents = pad_rows([make_tokens(config, 12), make_tokens(config, 5)], "left")
    tokens, documents = tokens.cuda(), documents.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in (None, documents):
            with torch.autocast("cuda", torch.bfloat16):
                output = model(tokens, selector=selector, document_ids=ids)
            loss = output.logits.float().sum()
            loss = loss + routing_loss(config, output.routings, output.expert_routings).loss
            loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_that_depend_on_values(name: str) -> None:
    """The forward pass runs on tensors that have shapes and no values."""
    config = make_config(name)
    with FakeTensorMode():
        model = Transformer(config)
        output = model(torch.zeros(2, 16, dtype=torch.long))
    assert tuple(output.logits.shape) == (2, 16, config.vocab_size)
    for routing, capacity in zip(output.routings, config.capacities, strict=True):
        assert tuple(routing.index.shape) == (2, -(-16 * capacity // 1))


@pytest.mark.parametrize("name", ["mod", "stochastic", "early_exit", "token_choice", "mod_list"])
def test_all_tokens_computed_and_then_masked(name: str) -> None:
    """A routed block's products are those of K tokens."""
    config, length = make_config(name), 16
    tokens = make_tokens(config, 2, length)
    counted = []
    for model in (make_model(config), make_model(config.dense_twin())):
        with FlopCounterMode(display=False) as counter:
            model(tokens)
        counted.append(counter.get_flop_counts())
    routed, dense = counted
    products = torch.ops.aten.mm
    for index, capacity in zip(config.routed_layers, config.capacities, strict=True):
        num_kept = -(-length * capacity // 1)
        ours = routed[f"Transformer.layers.{index}.block"][products]
        theirs = dense[f"Transformer.layers.{index}"][products]
        assert ours * length == theirs * num_kept
        assert ours > 0
    assert sum(routed["Global"].values()) < sum(dense["Global"].values())


def test_predictor_measured_against_a_non_causal_topk() -> None:
    """Under a causal selector the targets are of that forward pass, not of a top-k one."""
    model = make_model(make_config("mod", **{"routing.every": 1}))
    tokens = make_tokens(model.config, 4, 16)
    by_topk = model(tokens, selector="topk").routings
    causal = model(tokens, selector="predictor").routings
    differs = False
    for ours, theirs in zip(causal, by_topk, strict=True):
        assert ours.target is not None
        assert theirs.target is not None
        for row, scores in enumerate(ours.logits.tolist()):
            kept = set(rank_by_hand(scores)[:4])
            assert ours.target[row].tolist() == [t in kept for t in range(16)]
        differs = differs or not torch.equal(ours.target, theirs.target)
    assert differs
    metrics = routing_loss(model.config, causal).predictor
    assert metrics is not None
    predicted = [r.predictor_logits for r in causal if r.predictor_logits is not None]
    targets = [r.target for r in causal if r.target is not None]
    expected = head_loss(predicted, targets, [None] * 4)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert torch.equal(ours, theirs)
    hits = sum(((r.slot >= 0) & t).sum().item() for r, t in zip(causal, targets, strict=True))
    routed = sum((r.slot >= 0).sum().item() for r in causal)
    assert metrics.precision.item() == pytest.approx(hits / routed)
    assert metrics.recall.item() == pytest.approx(hits / sum(t.sum().item() for t in targets))
    assert metrics.routed_fraction.item() == pytest.approx(routed / (4 * 4 * 16))
