from functools import cache

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthmix.config import ModelConfig, RoutingConfig
from depthmix.flops import count_parts
from depthmix.infer import Engine, SamplingParams
from depthmix.infer.depth import Depth, DepthMeter, Paths, Trail, Usage, join_depths
from depthmix.nn import Output, Transformer
from variants import causal_cases, make_config, make_model, make_tokens

CASES = causal_cases()

# Two blocks of width 4, the second one routed: small enough to check by hand.
SMALL = ModelConfig(
    vocab_size=10,
    max_seq_len=16,
    num_layers=2,
    width=4,
    num_heads=2,
    num_kv_heads=1,
    mlp_width=3,
    routing=RoutingConfig(strategy="expert_choice", capacity=0.5, every=2, predictor_width=5),
)
# two query heads of width 2, and one head each for keys and values
QUERY_OUT, KEY_VALUE, MLP, HEAD = 2 * 4 * 4, 2 * 4 * 2, 3 * 4 * 3, 4 * 10
BLOCK = QUERY_OUT + KEY_VALUE + MLP
ROUTER, PREDICTOR = 4, 4 * 5 + 5
# a pair: scores and mixing, two products of two FLOPs over 2 heads of width 2
PAIR = 2 * 2 * 4


@cache
def get_model(name: str) -> Transformer:
    """Shared between tests, which must not modify it."""
    return make_model(name).requires_grad_(False)


def use(visits: tuple[int, int], num_pairs: int) -> Usage:
    """Visits to the plain and the routed block; every visit stores a key."""
    return Usage(
        num_visits=sum(visits),
        num_routed_visits=visits[1],
        num_expert_visits=0,
        num_stored=sum(visits),
        num_routed_stored=visits[1],
        num_pairs=num_pairs,
        num_expert_pairs=0,
    )


def test_an_example_by_hand() -> None:
    """A prompt of three tokens, the first and last through the routed block; then one more."""
    blocks = ((True,), (False,), (True,))
    meter = DepthMeter(SMALL)
    # pairs: 1 + 2 + 3 in the plain block, 1 + 2 in the other
    meter.add(3, use((3, 2), 6 + 3))
    weights = 3 * BLOCK + 2 * BLOCK + (3 + 2) * ROUTER + 3 * PREDICTOR + HEAD
    flops = 2 * weights + (6 + 3) * PAIR
    dense = 2 * (6 * BLOCK + HEAD) + 2 * 6 * PAIR
    assert meter.read(1, blocks) == Depth(blocks, flops, dense, num_visits=5, num_visits_dense=6)

    longer = meter.copy()
    longer.add(4, use((4, 2), 6 + 4 + 3))
    flops += 2 * (BLOCK + ROUTER + PREDICTOR + HEAD) + 4 * PAIR
    dense += 2 * (2 * BLOCK + HEAD) + 2 * 4 * PAIR
    blocks = (*blocks, (False,))
    depth = longer.read(2, blocks)
    assert depth == Depth(blocks, flops, dense, num_visits=6, num_visits_dense=8)
    assert depth.share_executed == 6 / 8
    assert depth.share_saved == pytest.approx((dense - flops) / dense)
    assert 0 < depth.share_saved < 2 / 8


def test_tokens_that_are_computed_again_cost_again() -> None:
    once, twice = DepthMeter(SMALL), DepthMeter(SMALL)
    for meter in (once, twice):
        meter.add(4, use((4, 3), 10 + 6))
    # preempted and restarted
    twice.add(5, use((5, 3), 15 + 6))
    assert twice.read(2, ()).flops > 2 * once.read(1, ()).flops
    assert twice.read(2, ()).num_visits_dense == 2 * (4 + 5)


def test_tokens_that_are_computed_again_take_the_same_path() -> None:
    trail, taken = Trail(), bytes([1, 0, 1, 1])
    trail.add(0, 4, taken)
    # preempted and restarted, in other chunks that reach further than before
    trail.add(0, 3, taken[:3])
    trail.add(3, 2, bytes([1, 0]))
    assert trail.read() == ((True,), (False,), (True,), (True,), (False,))
    nowhere = Trail()
    nowhere.add(0, 2, b"")
    nowhere.add(2, 1, b"")
    assert nowhere.read() == ((), (), ())


def test_nothing_was_computed() -> None:
    depth = DepthMeter(SMALL).read(0, ())
    assert depth == Depth((), 0, 0, 0, 0)
    assert (depth.share_saved, depth.share_executed) == (0.0, 1.0)


def test_paths_read_as_tuples() -> None:
    paths = Paths(bytes([1, 0, 0, 1, 1, 1]), 3)
    truth = ((True, False), (False, True), (True, True))
    assert tuple(paths) == truth
    assert paths == truth
    assert truth == paths
    assert paths != truth[:2]
    assert (paths[0], paths[-1], paths[1:]) == (truth[0], truth[-1], truth[1:])
    assert hash(paths) == hash(truth)
    assert len(Paths(b"", 4)) == 4
    assert Paths(b"", 2) == ((), ())
    with pytest.raises(IndexError):
        paths[3]


def test_joining() -> None:
    first = Depth(((True,), (False,)), 10, 20, 3, 4)
    second = Depth(((False,),), 1, 4, 1, 2)
    joined = join_depths([first, second])
    assert joined == Depth(((True,), (False,), (False,)), 11, 24, 4, 6)
    assert joined.share_saved == 1 - 11 / 24
    assert join_depths([first]) == first


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7])
@pytest.mark.parametrize("name", ["dense", "mod_kv", "mode_staged", "mode_integrated_token_choice"])
def test_chunks_add_up(name: str, chunk_tokens: int) -> None:
    """However a prompt is chunked, it costs the same, in the model and in its dense twin."""
    prompt = make_tokens(make_config(name), 15).tolist()
    depths = []
    for size in (64, chunk_tokens):
        engine = Engine(get_model(name), chunk_tokens=size)
        [result] = engine.generate([prompt], SamplingParams(max_tokens=3, temperature=0))
        depths.append(result.samples[0].depth)
    assert depths[0] == depths[1]


def count_pairs(output: Output, config: ModelConfig, num_prompt: int) -> tuple[int, int]:
    """Count the prompt's (query, key) pairs hidden by the causal mask, and all visible pairs.

    Torch multiplies the hidden ones too; a single token has none.
    """
    num_tokens = output.logits.shape[1]
    routings = dict(zip(config.routed_layers, output.routings, strict=True))
    num_hidden = num_seen = 0
    for layer in range(config.num_layers):
        asks_T = offers_T = torch.ones(num_tokens, dtype=torch.bool)
        if layer in routings:
            routing = routings[layer]
            asks_T = routing.slot[0] >= 0
            offers_T = (routing.memory or routing).slot[0] >= 0
        pairs_TT = asks_T[:, None] & offers_T
        num_seen += int(pairs_TT.tril().sum())
        num_hidden += int(pairs_TT[:num_prompt, :num_prompt].triu(1).sum())
    return num_hidden, num_seen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "selector"), CASES)
def test_flops_are_what_torch_counts(name: str, selector: str | None) -> None:
    """A prompt in one chunk and three more tokens, for every variant."""
    model, num_prompt = get_model(name), 9
    config = model.config
    prompt = make_tokens(config, num_prompt).tolist()
    engine = Engine(model, selector=selector, max_batch=1)
    # the FLOP counter does not know the CPU's fused attention
    math = [SDPBackend.MATH]
    with sdpa_kernel(math), FlopCounterMode(display=False) as counter:
        [result] = engine.generate([prompt], SamplingParams(max_tokens=4, seed=1))
    [sample] = result.samples
    output = model(torch.tensor([[*prompt, *sample.tokens[:-1]]]), selector=selector)
    num_hidden, num_seen = count_pairs(output, config, num_prompt)
    pair_flops = 4 * config.num_heads * config.shape.head_width
    assert sample.depth.flops == counter.get_total_flops() - num_hidden * pair_flops
    num_visits = sum(int((routing.slot >= 0).sum()) for routing in output.routings)
    num_dense = config.num_layers - len(config.routed_layers)
    assert sample.depth.num_visits == num_visits + num_dense * (num_prompt + 3)
    assert num_seen > 0


@pytest.mark.parametrize("name", ["dense", "dense_gelu", "dense_mha_qk_norm_untied"])
def test_a_dense_model_saves_nothing(name: str) -> None:
    prompts = [make_tokens(make_config(name), n).tolist() for n in (12, 1)]
    engine = Engine(get_model(name), max_batch=2, chunk_tokens=5)
    for result in engine.generate(prompts, SamplingParams(max_tokens=4)):
        depth = result.samples[0].depth
        assert depth.flops == depth.dense_flops > 0
        assert (depth.share_saved, depth.share_executed) == (0.0, 1.0)
        assert depth.blocks == ((),) * (len(result.prompt) + 3)


@pytest.mark.parametrize("name", ["mod", "mod_kv", "early_exit", "mod_gelu_mqa_untied"])
def test_dense_flops_are_the_twins(name: str) -> None:
    config = make_config(name)
    prompt = make_tokens(config, 11).tolist()
    depths = []
    for model in (get_model(name), make_model(config.dense_twin())):
        engine = Engine(model, chunk_tokens=4)
        [result] = engine.generate([prompt], SamplingParams(max_tokens=5))
        depths.append(result.samples[0].depth)
    assert depths[0].dense_flops == depths[1].flops
    assert depths[0].flops < depths[1].flops
    assert depths[0].share_saved == 1 - depths[0].flops / depths[1].flops


def test_a_prompt_costs_what_planning_says() -> None:
    """All pairs that the causal mask allows, and one token's logits instead of all."""
    config = make_config("dense")
    engine = Engine(get_model("dense"))
    [result] = engine.generate([[1] * 20], SamplingParams(max_tokens=1))
    parts = count_parts(config, 20, causal_half=True)
    parts["head"] //= 20
    assert result.samples[0].depth.flops == sum(parts.values())
