"""Counts from a configuration equal what torch counts on the real model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthmix import flops
from depthmix.config import (
    ExpertsConfig,
    MemoryConfig,
    ModelConfig,
    RoutingConfig,
    load_preset,
)
from depthmix.nn import Output, Routing, Transformer
from depthmix.nn.experts import Experts
from depthmix.nn.router import Predictor
from depthmix.train.muon import Muon
from depthmix.train.optim import list_muon

STRATEGIES = ("none", "expert_choice", "token_choice", "stochastic", "early_exit", "causal")

# name -> fields; each is one branch of how experts are counted
EXPERTS: dict[str, dict[str, Any]] = {
    "one MLP": {},
    "expert choice": {"strategy": "expert_choice", "num_experts": 3, "capacity": 1.7},
    "expert choice, one in two blocks": {"strategy": "expert_choice", "every": 2, "num_noop": 1},
    "expert choice without predictor": {"strategy": "expert_choice", "predictor": False},
    "token choice": {"strategy": "token_choice", "num_experts": 3, "per_token": 2, "capacity": 2.0},
    "token choice with few places": {"strategy": "token_choice", "per_token": 2, "capacity": 0.6},
    "token choice with no-ops": {"strategy": "token_choice", "num_noop": 2, "capacity": 0.5},
}


@contextmanager
def counting() -> Iterator[FlopCounterMode]:
    # the CPU's fused attention is not among the operators that the counter knows
    math = [SDPBackend.MATH]
    with sdpa_kernel(math), FlopCounterMode(display=False) as counter:
        yield counter


def list_routings(output: Output) -> list[Routing]:
    """Every routing over depth, with those for keys and values."""
    return [*output.routings, *(r.memory for r in output.routings if r.memory is not None)]


def add_up(output: Output) -> Tensor:
    """A loss that reaches every parameter: the logits and the scores of every head."""
    scores = [output.logits]
    for routing in [*list_routings(output), *output.expert_routings]:
        scores.append(routing.logits)
        if routing.predictor_logits is not None:
            scores.append(routing.predictor_logits)
    return torch.stack([score.sum() for score in scores]).sum()


def count_stopped_flops(model: Transformer, tokens: Tensor) -> int:
    """FLOPs of the gradients that are not computed, by watching the model run.

    Predictors stop the gradient at their input; a unit gate gives the scores of its tokens none.
    """
    count = 0

    def watch(module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal count
        count += 2 * inputs[0][..., 0].numel() * module.weight.numel()

    hooks = [
        module.w_in.register_forward_hook(watch)
        for module in model.modules()
        if isinstance(module, Predictor)
    ]
    with torch.no_grad():
        output = model(tokens)
    for hook in hooks:
        hook.remove()
    routing = model.config.routing
    if routing.gate == "unit" and not routing.draws_scores:
        num_scores = sum(r.index.numel() for r in list_routings(output))
        # of the scores' input and of the weights, two FLOPs each
        count += 4 * num_scores * model.config.width
    return count


def check_flops(config: ModelConfig, seq_len: int, batch_size: int) -> None:
    model = Transformer(config)
    tokens = torch.randint(config.vocab_size, (batch_size, seq_len))
    with counting() as counter:
        loss = add_up(model(tokens))
        forward = counter.get_total_flops()
        loss.backward()
        both = counter.get_total_flops()
    assert flops.forward_flops(config, seq_len=seq_len, batch_size=batch_size) == forward
    unused = config.routing.draws_scores
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (unused and "decider.router" in name)
    stopped = count_stopped_flops(model, tokens)
    training = flops.training_flops(config, seq_len=seq_len, batch_size=batch_size)
    assert both == training - stopped
    assert flops.num_parameters(config).total == sum(p.numel() for p in model.parameters())


def make_config(
    routing: dict[str, Any],
    experts: dict[str, Any],
    memory: dict[str, Any] | None = None,
    **fields: Any,
) -> ModelConfig:
    small: dict[str, Any] = {
        "vocab_size": 19, "max_seq_len": 24, "num_layers": 4, "width": 12, "num_heads": 2,
        "mlp_width": 20,
    }  # fmt: skip
    routing = {"predictor_width": 5, **routing}
    if routing.get("strategy") == "early_exit":
        routing |= {"every": 1, "kv_capacity": None}
    experts = {"num_experts": 2, "predictor_width": 7, **experts}
    tables: dict[str, Any] = {"num_rows": 5, **(memory or {})}
    return ModelConfig(
        **small | fields,
        routing=RoutingConfig(**routing),
        experts=ExpertsConfig(**experts),
        memory=MemoryConfig(**tables),
    )


@pytest.mark.parametrize("kv_capacity", [None, 0.55])
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS.keys())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_variant_counts_what_torch_counts(
    strategy: str, experts: dict[str, Any], kv_capacity: float | None
) -> None:
    routing = {"strategy": strategy, "capacity": 0.3, "kv_capacity": kv_capacity}
    check_flops(make_config(routing, experts), seq_len=17, batch_size=3)


# It draws the arguments of `make_config` and not its result: runtime type checks draw random
# numbers, which hypothesis does not allow inside a strategy.
@st.composite
def draw_arguments(draw: st.DrawFn) -> dict[str, Any]:
    num_layers = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 2))
    num_heads = kv_heads * draw(st.integers(1, 3))
    max_seq_len = draw(st.integers(8, 24))
    strategy = draw(st.sampled_from(STRATEGIES))
    every = 1 if strategy == "early_exit" else draw(st.integers(1, num_layers))
    first_dense = draw(st.integers(0, num_layers - every))
    num_routed = len(range(first_dense + every - 1, num_layers, every))
    share = st.floats(0.01, 1.0)
    capacity = draw(
        st.one_of(
            share,
            # early_exit wants them falling; to the others any order is the same
            st.lists(share, min_size=num_routed, max_size=num_routed).map(
                lambda shares: tuple(sorted(shares, reverse=True))
            ),
            st.sampled_from(["linear", "cosine"]),
        )
    )
    routing: dict[str, Any] = {
        "strategy": strategy,
        "capacity": capacity,
        "every": every,
        "first_dense": first_dense,
        "first_tokens": draw(st.integers(0, 1)),
        "gate": draw(st.sampled_from(["raw", "sigmoid", "tanh1", "unit"])),
        "normalize_input": draw(st.booleans()),
        "predictor_width": draw(st.integers(1, 6)),
        "kv_capacity": draw(st.sampled_from([None, 1.0])),
    }
    if isinstance(capacity, float) and draw(st.booleans()):
        routing["kv_capacity"] = draw(st.floats(capacity, 1.0))
    if strategy == "stochastic":
        routing["noise_gate"] = draw(st.sampled_from(["learned", "gaussian"]))
    if strategy == "token_choice":
        routing["kv_capacity"] = None
        routing["bias_rate"] = draw(st.sampled_from([0.0, 0.5]))
        routing["place_factor"] = draw(st.sampled_from([1.0, 1.3, 4.0]))
    if strategy != "causal":
        routing["predictor"] = draw(st.booleans())
    experts: dict[str, Any] = {
        "strategy": draw(st.sampled_from(["none", "expert_choice", "token_choice"])),
        "num_experts": draw(st.integers(1, 4)),
        "every": draw(st.integers(1, num_layers)),
        "width": draw(st.one_of(st.none(), st.integers(1, 9))),
        "predictor": draw(st.booleans()),
        "predictor_width": draw(st.integers(1, 6)),
    }
    if experts["strategy"] != "none":
        experts["num_noop"] = draw(st.integers(0, 2))
        choices = experts["num_experts"] + experts["num_noop"]
        experts["per_token"] = draw(st.integers(1, choices))
        chooses = experts["strategy"] == "token_choice"
        most = float(experts["per_token"] if chooses else experts["num_experts"])
        experts["capacity"] = draw(st.one_of(st.just(most), st.floats(0.01, most)))
    memory: dict[str, Any] = {
        "place": draw(st.sampled_from(["none", "input", "blocks"])),
        "every": draw(st.integers(1, num_layers)),
        "ngrams": draw(st.sampled_from([(1,), (2, 3), (1, 2, 5)])),
        "num_hashes": draw(st.integers(1, 2)),
        "width": draw(st.sampled_from([12, 24])),
    }
    if strategy != "none" and memory["place"] != "blocks":
        routing["bypass"] = draw(st.sampled_from(["identity", "lookup"]))
    return dict(
        routing=routing,
        experts=experts,
        memory=memory,
        num_layers=num_layers,
        max_seq_len=max_seq_len,
        vocab_size=draw(st.integers(1, 30)),
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        width=num_heads * 2 * draw(st.integers(1, 3)),
        head_width=draw(st.sampled_from([None, 2, 6])),
        mlp_width=draw(st.one_of(st.none(), st.integers(1, 20))),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        residual_mix=draw(st.booleans()),
        value_embedding=draw(st.booleans()),
        tied_head=draw(st.booleans()),
    )


@given(arguments=draw_arguments(), data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_any_configuration_counts_what_torch_counts(
    arguments: dict[str, Any], data: st.DataObject
) -> None:
    config = make_config(**arguments)
    seq_len = data.draw(st.integers(1, config.max_seq_len))
    check_flops(config, seq_len, batch_size=data.draw(st.integers(1, 3)))


@pytest.mark.parametrize("name", ["tiny-mod", "60m-dense", "1b-mod"])
def test_presets_count_what_torch_counts(name: str) -> None:
    config = load_preset(name)
    # fake tensors have shapes and no memory, so that the largest preset fits anywhere
    with FakeTensorMode(), torch.no_grad(), counting() as counter:
        model = Transformer(config)
        model(torch.zeros(2, config.max_seq_len, dtype=torch.long))
    assert flops.forward_flops(config, batch_size=2) == counter.get_total_flops()
    assert flops.num_parameters(config).total == sum(p.numel() for p in model.parameters())


# Everything in these two is worked out by hand in the comments, with no code in common.


def test_dense_counts_by_hand() -> None:
    config = ModelConfig(
        vocab_size=10, max_seq_len=3, num_layers=1, width=4, num_heads=2, num_kv_heads=1,
        mlp="gelu", mlp_width=8,
    )  # fmt: skip
    assert flops.count_parts(config) == {
        # 3 tokens, queries 4 x 4, keys and values 4 x 4, output 4 x 4: 2 · 3 · 48
        "attention_projections": 288,
        # 2 products, 2 heads, 3 x 3 pairs, width 2: 2 · 2 · 2 · 9 · 2
        "attention_scores": 144,
        # 4 x 8 and 8 x 4: 2 · 3 · 64
        "mlp": 384,
        "experts": 0,
        "routers": 0,
        "predictors": 0,
        "memory": 0,
        # 4 x 10: 2 · 3 · 40
        "head": 240,
    }
    assert flops.forward_flops(config, batch_size=2) == 2112
    assert flops.training_flops(config, batch_size=2) == 6336
    assert flops.flops_per_token(config) == 352.0
    # 6 pairs in place of 9 take 48 from the scores
    assert flops.forward_flops(config, causal_half=True) == 1008
    assert flops.training_flops(config, causal_half=True) == 3024
    assert flops.flops_per_token(config, causal_half=True) == 336.0
    # 304 a token in matrices, 4 pairs of 16
    assert flops.flops_per_token(config, seq_len=2) == 304 + 32
    # embedding 40, three norms of 4, attention 48, MLP 64
    assert flops.num_parameters(config) == (164, 164, 124, 124)
    # 3 tokens, a key and a value of width 2, 2 bytes
    assert flops.kv_cache_bytes(config) == 24


def test_mixture_of_depths_counts_by_hand() -> None:
    config = ModelConfig(
        vocab_size=10, max_seq_len=4, num_layers=2, width=4, num_heads=2, mlp_width=8,
        routing=RoutingConfig(strategy="expert_choice", capacity=0.5, predictor_width=3),
    )  # fmt: skip
    assert flops.count_parts(config) == {
        # 4 tokens in the first block, 2 in the second; 4 x 12 and 4 x 4: 2 · (4 + 2) · 64
        "attention_projections": 768,
        # 2 products, 2 heads of width 2, 16 and 4 pairs: 2 · 2 · 2 · 2 · 20
        "attention_scores": 320,
        # 4 x 16 and 8 x 4: 2 · (4 + 2) · 96
        "mlp": 1152,
        "experts": 0,
        # all 4 tokens to choose, the 2 chosen ones for the gate; 4 x 1: 2 · (4 + 2) · 4
        "routers": 48,
        # all 4 tokens, 4 x 3 and 3 x 1: 2 · 4 · 15
        "predictors": 120,
        "memory": 0,
        # 2 · 4 · 40
        "head": 320,
    }
    assert flops.forward_flops(config) == 2728
    # 10 and 3 pairs in place of 16 and 4: 16 · 13 in place of 16 · 20
    assert flops.forward_flops(config, causal_half=True) == 2616
    # embedding 40, last norm 4, two blocks of 168 (64 + 96 + 8), router 4, predictor 12 + 3 + 1;
    # a token meets the second block half the time
    assert flops.num_parameters(config) == (400, 316, 360, 276)
    # 6 tokens, a key and a value of width 4, 2 bytes
    assert flops.kv_cache_bytes(config) == 96
    assert flops.kv_cache_bytes(config, seq_len=1, batch_size=3, bytes_per_element=1) == 48


def test_memory_counts_by_hand() -> None:
    """One and three places where 3 tokens of width 4 get a projection of 6 numbers and a gate."""
    memory = MemoryConfig(place="input", ngrams=(2, 3), num_hashes=1, num_rows=5, width=6)
    config = ModelConfig(
        vocab_size=10, max_seq_len=3, num_layers=3, width=4, num_heads=2, mlp_width=8, memory=memory
    )  # fmt: skip
    plain = replace(config, memory=MemoryConfig())
    # 2 · 3 · (4 · 6 + 4)
    assert flops.count_parts(config)["memory"] == 168
    assert flops.forward_flops(config) == flops.forward_flops(plain) + 168
    assert flops.num_memory_parameters(config) == 30
    before, after = flops.num_parameters(plain), flops.num_parameters(config)
    assert after.total == before.total + 30 + 28
    assert after.active == before.active + 28
    blocks = replace(config, memory=replace(memory, place="blocks"))
    assert flops.count_parts(blocks)["memory"] == 3 * 168
    # a product of 4 x 6 with itself, the result with itself and with the matrix, five times
    more = flops.optimizer_flops(blocks, "muon") - flops.optimizer_flops(plain, "muon")
    assert more == 3 * 5 * 2 * (2 * 4 * 4 * 6 + 4 * 4 * 4)
    # routed blocks at most, whatever they keep
    routing = RoutingConfig(strategy="expert_choice", capacity=0.5, bypass="lookup")
    bypass = replace(config, routing=routing, memory=replace(memory, place="none"))
    assert flops.count_parts(bypass)["memory"] == 168


def test_decoupled_counts_by_hand() -> None:
    config = ModelConfig(
        vocab_size=10, max_seq_len=4, num_layers=1, width=4, num_heads=2, mlp_width=8,
        routing=RoutingConfig(
            strategy="stochastic", capacity=0.25, kv_capacity=0.75, every=1
        ),
    )  # fmt: skip
    parts = flops.count_parts(config)
    # 1 query, 3 keys and values: 2 · (1 · (16 + 16) + 3 · 32); 3 pairs: 2 · 2 · 2 · 2 · 3
    assert parts["attention_projections"] == 256
    assert parts["attention_scores"] == 48
    # two routers of 4 weights over 4 tokens, then over 1 and 3
    assert parts["routers"] == 96
    # 1 · (3 + 1)/2 = 2 pairs in place of 3
    assert flops.count_parts(config, causal_half=True)["attention_scores"] == 32
    # 40 + 4 + 8 in the routers always; keys, values and the first norm (32 + 4) at 3/4; the other
    # 32 + 96 + 4 at 1/4
    assert flops.num_parameters(config).active == 40 + 4 + 8 + 27 + 33
    assert flops.kv_cache_bytes(config) == 3 * 8 * 2


def test_places_to_spare_are_computed_and_not_stored() -> None:
    plain, spare, double = (
        make_config({"strategy": "token_choice", "capacity": c, "place_factor": factor}, {})
        for c, factor in ((0.25, 1.0), (0.25, 2.0), (0.5, 1.0))
    )
    assert flops.forward_flops(spare) == flops.forward_flops(double)
    assert flops.kv_cache_bytes(spare) == flops.kv_cache_bytes(plain)
    assert flops.num_parameters(spare) == flops.num_parameters(plain)


def test_causal_half_counts_pairs_in_causal_order() -> None:
    config = make_config({"strategy": "expert_choice", "capacity": 0.5}, {}, num_layers=2)
    whole = flops.count_parts(config, 10)
    half = flops.count_parts(config, 10, causal_half=True)
    pairs = sum(i >= j for size in (10, 5) for i in range(size) for j in range(size))
    assert half["attention_scores"] * (100 + 25) == whole["attention_scores"] * pairs
    assert {**half, "attention_scores": 0} == {**whole, "attention_scores": 0}


def test_causal_half_is_the_mean_over_decoupled_choices() -> None:
    choices = [
        sum(key <= query for query in queries for key in keys)
        for keys in combinations(range(6), 4)
        for queries in combinations(keys, 3)
    ]
    routing = {"strategy": "expert_choice", "capacity": 0.5, "kv_capacity": 4 / 6, "every": 1}
    config = make_config(routing, {}, num_layers=1)
    scores = flops.count_parts(config, 6, causal_half=True)["attention_scores"]
    whole = flops.count_parts(config, 6)["attention_scores"]
    assert scores * 12 * len(choices) == whole * sum(choices)


@given(arguments=draw_arguments())
def test_parts_add_up(arguments: dict[str, Any]) -> None:
    config = make_config(**arguments)
    parts = flops.count_parts(config)
    assert tuple(parts) == flops.PARTS
    assert sum(parts.values()) == flops.forward_flops(config)
    assert flops.training_flops(config, batch_size=2) == 6 * sum(parts.values())
    assert flops.flops_per_token(config) * config.max_seq_len == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize("kv_capacity", [None, 0.6])
@pytest.mark.parametrize("strategy", ["none", "expert_choice", "stochastic", "early_exit"])
def test_kv_bytes_are_those_of_the_tokens_kept(strategy: str, kv_capacity: float | None) -> None:
    routing = {"strategy": strategy, "capacity": 0.35, "kv_capacity": kv_capacity}
    config = make_config(routing, {}, num_kv_heads=1, num_layers=5)
    routings = Transformer(config)(torch.zeros(2, 19, dtype=torch.long)).routings
    stored = [routing.memory or routing for routing in routings]
    num_tokens = sum(int(routing.valid.sum()) for routing in stored)
    num_tokens += (config.num_layers - len(routings)) * 2 * 19
    # one key and one value head of width 6, float32
    expected = num_tokens * 2 * 6 * 4
    found = flops.kv_cache_bytes(config, seq_len=19, batch_size=2, bytes_per_element=4)
    assert found == expected


@pytest.mark.parametrize(
    "experts",
    # capacities that give whole numbers of places, so that the average is exact
    [
        {},
        {"strategy": "expert_choice", "every": 2, "capacity": 0.5},
        {"strategy": "expert_choice", "capacity": 2.0, "predictor": False},
        {"strategy": "token_choice", "capacity": 0.5, "num_noop": 1},
        {"strategy": "token_choice", "per_token": 2, "capacity": 2.0},
    ],
)
@pytest.mark.parametrize("strategy", ["none", "expert_choice", "token_choice"])
def test_active_parameters_are_those_that_tokens_meet(
    strategy: str, experts: dict[str, Any]
) -> None:
    config = make_config(
        {"strategy": strategy, "capacity": 0.5},
        experts,
        qk_norm=True,
        qkv_bias=True,
        tied_head=False,
    )
    model = Transformer(config)
    num_tokens, num_seen = 16, dict[nn.Module, int]()

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        # the norms inside heads see (1, tokens, heads, width), all others (1, tokens, width); a
        # router sees all of its tokens, then some of them again
        num_seen[module] = max(num_seen.get(module, 0), inputs[0].shape[1])

    for module in model.modules():
        # modules with weights of their own; experts are counted by pairs below
        if list(module.parameters(False)) and not isinstance(module, nn.Embedding | Experts):
            module.register_forward_hook(watch)
    model(torch.zeros(1, num_tokens, dtype=torch.long))
    met = sum(
        sum(p.numel() for p in module.parameters(False)) * count / num_tokens
        for module, count in num_seen.items()
    )
    for layer in config.expert_layers:
        share = 0.5 if layer in config.routed_layers else 1.0
        met += share * config.experts.capacity * 3 * config.width * config.shape.mlp_width
    embedding = config.vocab_size * config.width
    found = flops.num_parameters(config)
    assert found.active == round(met + embedding)
    assert found.active_non_embedding == found.active - 2 * embedding
    assert found.total_non_embedding == found.total - 2 * embedding


def test_dense_tokens_meet_every_parameter() -> None:
    found = flops.num_parameters(load_preset("60m-dense"))
    assert found.active == found.total
    assert found.active_non_embedding == found.total_non_embedding


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"seq_len": 0}, "seq_len = 0 must be at least 1"),
        ({"seq_len": -3}, "seq_len = -3"),
        ({"seq_len": 65}, "longer than max_seq_len = 64"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_absurd_requests_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    config = load_preset("tiny")
    for count in (flops.forward_flops, flops.training_flops, flops.kv_cache_bytes):
        with pytest.raises(ValueError, match=sentence):
            count(config, **arguments)
    with pytest.raises(ValueError, match="bytes_per_element"):
        flops.kv_cache_bytes(config, bytes_per_element=0)


@pytest.mark.parametrize("name", [name for name in EXPERTS if "without" not in name])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_muon_counts_what_torch_counts(name: str, mlp: str) -> None:
    routing = {"strategy": "expert_choice", "every": 2}
    config = make_config(routing, EXPERTS[name], num_kv_heads=1, qk_norm=True, mlp=mlp)
    model = Transformer(config)
    matrices = list_muon(model)
    shapes = [tuple(matrix.shape) for p in matrices for matrix in (p if p.ndim == 3 else [p])]
    assert shapes == flops.list_matrices(config)
    optimizer = Muon([{"params": matrices}], weight_decay=0.1, momentum=0.95)
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    with counting() as counter:
        optimizer.step()
    assert flops.optimizer_flops(config, "muon") == counter.get_total_flops()


@pytest.mark.parametrize(
    ("fields", "full", "executed"),
    [
        # one dense block of width 4: a head of 4, an MLP of 8 with two matrices, 10 ids, 2 tokens
        (
            {"mlp": "gelu"},
            # 3 · (projections, scores, MLP, head)
            3 * (2 * 2 * (4 * 16) + 4 * 4 * 4 + 2 * 2 * 64 + 2 * 2 * 40),
            # scores of 3 pairs in place of 4; Muon: 8×4 twice three, 4×4 twice two
            3 * (2 * 2 * (4 * 16) + 4 * 3 * 4 + 2 * 2 * 64 + 2 * 2 * 40)
            + 5 * (3 * 2 * 16 * (16 + 4) + 2 * 2 * 16 * (8 + 4)),
        ),
        # SwiGLU: one more matrix of 8×4
        (
            {},
            3 * (2 * 2 * (4 * 16) + 4 * 4 * 4 + 2 * 2 * 96 + 2 * 2 * 40),
            3 * (2 * 2 * (4 * 16) + 4 * 3 * 4 + 2 * 2 * 96 + 2 * 2 * 40)
            + 5 * (4 * 2 * 16 * (16 + 4) + 2 * 2 * 16 * (8 + 4)),
        ),
        # and routed at a half: one token in the block, its router scored three times
        (
            {"routing.strategy": "expert_choice", "routing.capacity": 0.5, "routing.every": 1}
            | {"routing.predictor": False, "routing.aux_loss_weight": 0.01},
            3 * (2 * (4 * 16) + 4 * 1 * 4 + 2 * 96 + 2 * 3 * 4 + 2 * 2 * 40),
            3 * (2 * (4 * 16) + 4 * 1 * 4 + 2 * 96 + 2 * 3 * 4 + 2 * 2 * 40)
            + 5 * (4 * 2 * 16 * (16 + 4) + 2 * 2 * 16 * (8 + 4)),
        ),
    ],
)
def test_conventions_by_hand(fields: dict[str, Any], full: int, executed: int) -> None:
    plain = ModelConfig(
        vocab_size=10, max_seq_len=2, num_layers=1, width=4, num_heads=1, mlp_width=8
    )
    config = plain.override(fields)
    assert flops.training_flops(config) == full
    assert flops.executed_flops(config, "muon") == executed
    assert flops.executed_flops(config, "adamw") == flops.training_flops(config, causal_half=True)
    with pytest.raises(ValueError, match="there is no optimizer 'sgd'"):
        flops.optimizer_flops(config, "sgd")
