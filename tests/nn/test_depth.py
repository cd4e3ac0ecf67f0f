"""The paper's equation around any block: against masks over whole sequences, and around stubs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthmix.config import STRATEGIES
from depthmix.nn import Transformer
from depthmix.nn.attention import Memory, Place
from depthmix.nn.block import Block, Update
from depthmix.nn.depth import Decider, MixtureOfDepths
from depthmix.nn.layers import make_phase_table
from depthmix.nn.routing import Candidates, Routing
from variants import NAMES, make_config, rotate_by_hand

LENGTH = 12
ROUTED = [name for name in NAMES if make_config(name).routed_layers]


class Recorder(nn.Module):
    """Stands in for a block: remembers what it was given and returns twice its input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Place]] = []

    def forward(self, x: Tensor, place: Place, **options: Any) -> Update:
        self.seen.append((x, place))
        return Update(2 * x, None)


def make_layer(name: str, block: nn.Module | None = None, **overrides: Any) -> MixtureOfDepths:
    config = make_config(name, **overrides)
    torch.manual_seed(0)
    block = block or Block(config)
    layer = MixtureOfDepths(block, config.width, config.routing, config.capacities[0]).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return layer


def make_place(documents: Tensor | None = None, positions: Tensor | None = None) -> Place:
    table = make_phase_table(64, 8, 10000.0).double()
    if positions is None:
        positions = torch.arange(LENGTH)[None]
    valid = None if documents is None else documents >= 0
    return Place(positions, table[positions], documents, valid)


def make_x(**options: Any) -> Tensor:
    return torch.randn(3, LENGTH, 32, dtype=torch.float64, **options)


def mix_by_masks(
    block: Block, x: Tensor, queries: Tensor, keys: Tensor, value_weight: Tensor, place: Place
) -> Tensor:
    """f for every token of whole sequences, with the keys that were not kept hidden by a mask."""
    attention = block.attention
    inner = block.norm_attention(x)
    heads, groups = attention.num_heads, attention.num_kv_heads
    projected = (inner @ attention.w_qk.weight.T).unflatten(-1, (heads + groups, -1))
    turned = rotate_by_hand(projected, place.phase)
    query, key = turned[:, :, :heads], turned[:, :, heads:]
    value = inner @ attention.w_value.weight.T * value_weight[..., None]
    value = value.unflatten(-1, (groups, -1))
    key, value = (t.repeat_interleave(heads // groups, dim=2) for t in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    order = torch.arange(LENGTH)
    visible = (order[None] <= order[:, None])[None] & keys[:, None, :]
    if place.documents is not None:
        visible = visible & (place.documents[:, None] == place.documents[:, :, None])
    # rows of tokens that ask nothing may see anything
    visible = visible | ~queries[:, :, None]
    shares = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    mixed = torch.einsum("bnts,bsnh->btnh", shares, value).flatten(-2) @ attention.w_out.weight.T
    return mixed + block.mlp(block.norm_mlp(x + mixed))


GATES = {
    "raw": lambda r: r,
    "sigmoid": torch.sigmoid,
    "tanh1": lambda r: 1 + torch.tanh(r),
    "unit": torch.ones_like,
}
EQUATION: dict[str, dict[str, Any]] = {
    "mod": {},
    "mod_sigmoid": {},
    "mod_tanh1": {},
    "mod_unit": {},
    "mod_kv": {},
    "token_choice": {"routing.capacity": 0.5},
    "token_choice_kv": {"routing.capacity": 0.25},
    "stochastic": {},
    "early_exit": {},
    "causal": {},
    "mod_first_tokens": {},
    "mod_plain_scores": {"qk_norm": False},
}


@pytest.mark.parametrize("layout", ["plain", "packed", "padded"])
@pytest.mark.parametrize("selector", [None, "topk", "router", "predictor", "all"])
@pytest.mark.parametrize("name", EQUATION)
def test_update_equals_the_papers_equation(name: str, selector: str | None, layout: str) -> None:
    """x_i + g(r_i)·f_i(x_S) for i in S, x_i for the others: outputs and gradients."""
    config = make_config(name, **EQUATION[name])
    if config.find_selector_problem(selector) is not None:
        selector = "topk"
    layer = make_layer(name, **EQUATION[name])
    assert isinstance(layer.block, Block)
    x = make_x(requires_grad=True)
    place = make_place()
    if layout == "packed":
        documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 12, [0] * 1 + [1] * 2 + [2] * 9])
        positions = torch.tensor([[*range(5), *range(7)], [*range(12)], [0, 0, 1, *range(9)]])
        place = make_place(documents, positions)
    elif layout == "padded":
        documents = torch.tensor([[-1] * 5 + [1] * 7, [3] * 12, [0] * 8 + [-1] * 4])
        positions = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(8), *range(4)]])
        place = make_place(documents, positions)
    found, routing, _ = layer(x, place, selector=selector)

    kept = routing.slot >= 0
    present = torch.ones_like(kept) if place.valid is None else place.valid
    assert not (kept & ~present).any()
    logits = layer.decider.router(x).squeeze(-1)
    gate = GATES[config.routing.gate]
    keys, value_weight = kept, torch.ones_like(logits)
    if layer.kv_decider is not None:
        assert routing.memory is not None
        keys = routing.memory.slot >= 0
        # an updated token always offers its keys
        assert not (kept & ~keys).any()
        value_weight = gate(layer.kv_decider.router(x).squeeze(-1))
    update = mix_by_masks(layer.block, x, kept, keys, value_weight, place)
    expected = torch.where(kept[..., None], x + gate(logits)[..., None] * update, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    # who is not kept passes by untouched, to the bit
    assert torch.equal(found[~kept], x[~kept])

    upstream = torch.randn_like(found)
    free = [x, *(p for n, p in layer.named_parameters() if "predictor" not in n)]
    ours = torch.autograd.grad((found * upstream).sum(), free, allow_unused=True)
    theirs = torch.autograd.grad((expected * upstream).sum(), free, allow_unused=True)
    for first, second in zip(ours, theirs, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if first is None else first,
            zero.expand_as(first if first is not None else zero) if second is None else second,
            rtol=0,
            atol=1e-10,
            check_dtype=False,
        )


@pytest.mark.parametrize("name", ROUTED)
def test_kept_tokens_are_unique_ascending_and_inverted(name: str) -> None:
    layer, x = make_layer(name), make_x()
    _, routing, _ = layer(x, make_place())
    for part in (routing, routing.memory):
        if part is None:
            continue
        for row in range(3):
            taken = part.index[row][part.valid[row]]
            assert torch.equal(taken, taken.unique())
            assert part.index[row].unique().numel() == part.index.shape[1]
            # the taken places stand first
            assert torch.equal(part.valid[row], part.valid[row].sort(descending=True).values)
            inverse = torch.full((LENGTH,), -1)
            inverse[taken] = torch.arange(len(taken))
            assert torch.equal(part.slot[row], inverse)
        assert torch.equal(part.weight[~part.valid], torch.zeros_like(part.weight[~part.valid]))


@pytest.mark.parametrize("name", ["mod", "stochastic", "early_exit", "mod_list"])
def test_the_block_gets_k_tokens_with_their_positions(name: str) -> None:
    recorder = Recorder()
    layer, x = make_layer(name, recorder), make_x()
    out, routing, _ = layer(x, make_place())
    ((given, place),) = recorder.seen
    capacity = make_config(name).capacities[0]
    assert given.shape[1] == -(-LENGTH * capacity // 1)
    assert torch.equal(place.positions, routing.index)
    table = make_phase_table(64, 8, 10000.0).double()
    assert torch.equal(place.phase, table[routing.index])
    for row in range(3):
        assert torch.equal(given[row], x[row, routing.index[row]])
        for slot, token in enumerate(routing.index[row].tolist()):
            # any function can stand inside: here f(x) = 2·x
            expected = x[row, token] + routing.weight[row, slot] * 2 * x[row, token]
            torch.testing.assert_close(out[row, token], expected, rtol=0, atol=1e-14)


def test_first_tokens_of_each_document_are_kept() -> None:
    layer, x = make_layer("mod_first_tokens", **{"routing.capacity": 0.5}), make_x()
    # scores that would never choose them
    nn.init.zeros_(layer.decider.router.weight)
    nn.init.ones_(layer.decider.router.weight[:, :1])
    documents = torch.tensor([[0] * 5 + [1] * 7] * 3)
    positions = torch.tensor([[*range(5), *range(7)]] * 3)
    first = positions < 2
    x[..., 0] = torch.where(positions < 3, -100.0, x[..., 0])
    for selector in (None, "topk", "router"):
        _, routing, _ = layer(x, make_place(documents, positions), selector=selector)
        assert (routing.slot[first] >= 0).all(), selector
        assert (routing.slot[positions == 2] == -1).all(), selector
        assert (routing.slot >= 0).sum() > first.sum()
    without = make_layer("mod", **{"routing.capacity": 0.5})
    without.decider.router.weight.data.copy_(layer.decider.router.weight)
    _, routing, _ = without(x, make_place(documents, positions))
    assert not (routing.slot[first] >= 0).any()


@pytest.mark.parametrize("strategy", ["token_choice", "causal"])
def test_tokens_with_queries_also_provide_keys(strategy: str) -> None:
    """All key places would go to early tokens, were none reserved for updated ones."""
    layer = make_layer("token_choice_kv", **{"routing.strategy": strategy})
    assert layer.kv_decider is not None
    for decider, sign in ((layer.decider, -1.0), (layer.kv_decider, 1.0)):
        for parameter in decider.parameters():
            nn.init.zeros_(parameter)
        decider.router.weight.data[0, 0] = sign
        if decider.predictor is not None:
            # gelu(x) of a large |x| is x or 0: this head's score is its sign as well
            decider.predictor.w_in.weight.data[0, 0] = sign
            decider.predictor.w_out.weight.data[0, 0] = 1.0
    x = make_x()
    x[..., 0] = torch.where(torch.arange(LENGTH) < 8, 50.0, -50.0)
    _, routing, _ = layer(x, make_place())
    assert routing.memory is not None
    assert (routing.slot >= 0)[0].tolist() == [False] * 8 + [True] * 3 + [False]
    assert (routing.memory.slot >= 0)[0].tolist() == [True] * 3 + [False] * 5 + [True] * 3 + [False]


def decide(
    name: str, selector: str | None, previous: Routing | None = None, **overrides: Any
) -> tuple[Decider, Routing]:
    config = make_config(name, **overrides)
    torch.manual_seed(0)
    decider = Decider(config.width, config.routing, config.capacities[0]).double()
    for parameter in decider.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return decider, decider(
        make_x(), make_place(), Candidates(), selector=selector, previous=previous
    )[-1]


def topk_members(logits: Tensor, count: int) -> Tensor:
    members = torch.zeros_like(logits, dtype=torch.bool)
    for row, scores in enumerate(logits.tolist()):
        ranked = sorted(range(len(scores)), key=lambda t, scores=scores: -scores[t])
        members[row, ranked[:count]] = True
    return members


@pytest.mark.parametrize("name", ["mod", "causal", "mod_aux", "causal_router"])
@pytest.mark.parametrize("selector", [None, "topk", "router", "predictor", "all"])
def test_target_is_topk_of_the_same_scores(name: str, selector: str | None) -> None:
    if make_config(name).find_selector_problem(selector) is not None:
        selector = None
    _, routing = decide(name, selector)
    assert routing.target is not None
    assert torch.equal(routing.target, topk_members(routing.logits, 3))


@pytest.mark.parametrize("name", ["token_choice", "stochastic"])
def test_strategies_without_topk_have_no_target(name: str) -> None:
    decider, routing = decide(name, None)
    assert routing.target is None
    assert routing.predictor_logits is None
    assert decider.predictor is None


def test_variants_cover_every_strategy() -> None:
    assert {make_config(name).routing.strategy for name in NAMES} == set(STRATEGIES)


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_uses_its_head(name: str) -> None:
    config = make_config(name)
    if not config.routed_layers:
        assert config.capacities == ()
        return
    places = -(-LENGTH * config.capacities[0] // 1)
    asked: dict[str | None, str] = {
        None: {"token_choice": "own", "stochastic": "noise"}.get(config.routing.strategy, "topk"),
        "topk": "noise" if config.routing.strategy == "stochastic" else "topk",
        "router": "router",
        "predictor": "predictor",
        "all": "all",
    }
    if config.routing.strategy == "causal":
        asked[None] = "own predictor" if config.routing.predictor else "own"
    for selector, who in asked.items():
        if config.find_selector_problem(selector) is not None:
            continue
        _, routing = decide(name, selector)
        kept = routing.slot >= 0
        scores = routing.predictor_logits if "predictor" in who else routing.logits
        assert scores is not None
        if who == "topk":
            assert torch.equal(kept, topk_members(scores, int(places)))
        elif who == "noise":
            assert (kept.sum(1) == places).all()
            assert not torch.equal(kept, topk_members(scores, int(places)))
        elif who == "all":
            assert kept.all()
        elif who.startswith("own"):
            positive = scores > 0
            assert torch.equal(kept, positive & (positive.cumsum(1) <= places))
            assert (positive.sum(1) > places).any()
        else:
            assert torch.equal(kept, scores > 0)
            assert 0 < kept.sum() < kept.numel()


def test_early_exit_keeps_only_survivors_under_every_selector() -> None:
    _, previous = decide("early_exit", "router")
    # as if half of them had left in the block before
    left = torch.arange(LENGTH) % 2 == 0
    previous = previous._replace(slot=previous.slot.masked_fill(left, -1))
    alive = previous.slot >= 0
    for selector in (None, "topk", "router", "predictor", "all"):
        _, routing = decide("early_exit", selector, previous)
        assert not ((routing.slot >= 0) & ~alive).any(), selector
        # early exit is not the only reason to stay out, except where all are asked for
        if selector == "all":
            assert torch.equal(routing.slot >= 0, alive)
        assert routing.target is not None
        assert not (routing.target & ~alive).any()
        # other strategies do not look at the block before
        _, free = decide("mod", selector, previous)
        assert ((free.slot >= 0) & ~alive).any(), selector


def test_no_target_while_decoding() -> None:
    decider, _ = decide("mod", "router")
    routing = decider(make_x(), make_place(), Candidates(), selector="router", decoding=True)[-1]
    assert routing.target is None


def test_gradients_of_the_heads() -> None:
    """The gate carries the gradient to the router and its input; the predictor listens only."""
    decider, _ = decide("mod", None)
    x = make_x(requires_grad=True)
    routing = decider(x, make_place(), Candidates())[-1]
    assert routing.predictor_logits is not None
    routing.weight.sum().backward(retain_graph=True)
    assert x.grad is not None
    kept = routing.slot >= 0
    assert torch.equal(x.grad.abs().sum(-1) > 0, kept)
    assert decider.router.weight.grad is not None
    assert decider.router.weight.grad.abs().sum() > 0
    assert decider.predictor is not None
    assert decider.predictor.w_in.weight.grad is None
    x.grad = None
    F.softplus(routing.predictor_logits).sum().backward()
    assert x.grad is None
    assert decider.predictor.w_in.weight.grad is not None


def test_unit_gate_sends_no_gradient_to_the_router() -> None:
    layer, x = make_layer("mod_unit"), make_x()
    layer(x, make_place())[0].sum().backward()
    assert layer.decider.router.weight.grad is None
    layer = make_layer("mod")
    layer(x, make_place())[0].sum().backward()
    assert layer.decider.router.weight.grad is not None
    assert layer.decider.router.weight.grad.abs().sum() > 0


def test_random_gates_equal_the_noise_that_selected() -> None:
    """The paper's control: the largest of what is drawn, which is the gate, and no router."""
    options = {"routing.noise_gate": "gaussian", "routing.capacity": 0.5}
    layer, x = make_layer("stochastic", Recorder(), **options), make_x(requires_grad=True)
    y, routing, _ = layer(x, make_place())
    assert torch.equal(routing.slot >= 0, (routing.logits.argsort(1).argsort(1) >= LENGTH // 2))
    gate = routing.logits.where(routing.slot >= 0, 0)
    torch.testing.assert_close(y, x + gate[:, :, None] * 2 * x)
    assert not torch.equal(routing.logits, layer(x, make_place())[1].logits)
    y.sum().backward()
    assert layer.decider.router.weight.grad is None
    noise = torch.cat([layer(x, make_place())[1].logits.flatten() for _ in range(100)])
    assert noise.mean().item() == pytest.approx(0, abs=0.1)
    assert noise.std().item() == pytest.approx(1, abs=0.1)
    # with another gate on the same noise
    layer = make_layer("stochastic", Recorder(), **options, **{"routing.gate": "tanh1"})
    routing = layer(x, make_place())[1]
    torch.testing.assert_close(routing.weight, 1 + routing.logits.gather(1, routing.index).tanh())


def test_bias_changes_decisions_but_not_gates() -> None:
    options = {"routing.gate": "raw", "routing.place_factor": 2.0}
    layer, x = make_layer("token_choice_bias", Recorder(), **options), make_x()
    decider = layer.decider
    assert decider.bias is not None
    scores = decider.router(x).sum(-1)
    chosen = {}
    for bias in (-0.5, 0.0, 0.5):
        decider.bias.fill_(bias)
        routing = layer(x, make_place(), selector="router")[1]
        chosen[bias] = routing.slot >= 0
        assert torch.equal(chosen[bias], scores + bias > 0)
        kept = scores.gather(1, routing.index).where(routing.valid, 0)
        torch.testing.assert_close(routing.weight, kept)
        # training has places for 2 · 0.25 · 12 tokens
        places = layer(x, make_place())[1]
        assert places.index.shape == (3, 6)
        assert torch.equal(places.slot >= 0, chosen[bias] & (chosen[bias].cumsum(1) <= 6))
    assert chosen[-0.5].sum() < chosen[0.0].sum() < chosen[0.5].sum()
    # a token decides for itself, whatever stands beside it
    order = torch.randperm(LENGTH)
    shuffled = layer(x[:, order], make_place(), selector="router")[1]
    assert torch.equal(shuffled.slot >= 0, chosen[0.5][:, order])


@pytest.mark.parametrize("capacity", [0.125, 0.7])
def test_a_bias_starts_at_the_capacity(capacity: float) -> None:
    options = {"routing.capacity": capacity, "routing.init_std": 0.3, "width": 256, "mlp_width": 8}
    model = Transformer(make_config("token_choice_bias", **options))
    layer = next(layer for layer in model.layers if isinstance(layer, MixtureOfDepths))
    x = torch.randn(1, 20_000, 256)
    share = (layer.decider.router(x).sum(-1) + layer.decider.bias > 0).double().mean().item()
    assert share == pytest.approx(capacity, abs=0.03)


def test_block_receives_the_memory() -> None:
    given: list[Memory | None] = []

    class Listener(nn.Module):
        def forward(self, x: Tensor, place: Place, *, memory: Memory | None, **_: Any) -> Update:
            given.append(memory)
            return Update(x, None)

    layer, x = make_layer("mod_kv", Listener()), make_x()
    _, routing, _ = layer(x, make_place())
    (memory,) = given
    assert memory is not None
    assert routing.memory is not None
    assert memory.x.shape[1] == 6
    assert torch.equal(memory.place.positions, routing.memory.index)
    assert torch.equal(memory.weight, routing.memory.weight)
    assert torch.equal(memory.x[1], x[1, routing.memory.index[1]])
    layer = make_layer("mod", Listener())
    assert layer(x, make_place())[1].memory is None
    assert given[-1] is None


@pytest.mark.compile
def test_layers_of_different_capacities_compile() -> None:
    torch.compiler.reset()
    x, place = torch.randn(2, LENGTH, make_config("mod").width).double(), make_place()
    for capacity in (0.125, 0.5, 0.25):
        layer = make_layer("mod", **{"routing.capacity": capacity})
        expected, routing, _ = layer(x, place)
        layer.compile(fullgraph=True, backend="eager")
        found, found_routing, _ = layer(x, place)
        assert torch.equal(found_routing.index, routing.index)
        torch.testing.assert_close(found, expected)
