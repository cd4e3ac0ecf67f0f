"""A routed block of few rows equals the model's own layer; without a GPU, interpreted."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.infer.pages import Pages
from depthmix.infer.paths.decode import StaticLayer
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.attention import Place
from depthmix.nn.layers import look_up_phases
from depthmix.nn.routing import Routing
from variants import make_config, make_model

layout = pytest.importorskip("depthmix.infer.paths.layout")
blocks_module = pytest.importorskip("depthmix.kernels.decode.blocks")
routed = pytest.importorskip("depthmix.kernels.decode.routed")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# rows for one and for two rounds of the products; a GPU has time for two everywhere
FEW, MORE = (19 if torch.cuda.is_available() else 5), 19
PAGE, MOST, LONGEST = 4, 12, 48
# buffers that a step leaves unchanged, or resets itself
LASTING = ("arrivals", "ones", "order", "route_of_layer", "newest")


def make(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Transformer:
    sizes = {"width": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 4}
    config = make_config(name, **{**sizes, "max_seq_len": LONGEST, **overrides})
    model = make_model(config, dtype=torch.float32).requires_grad_(False)
    for place, parameter in model.named_parameters():
        if place.endswith(("w_qk.bias", "w_value.bias")):
            parameter.normal_(std=0.5)
    return model.to(DEVICE, dtype)


class Bench:
    """Some sequences at different positions, with a partly filled cache."""

    def __init__(self, model: Transformer, num_rows: int) -> None:
        config, dtype = model.config, model.embedding.weight.dtype
        sizes = (num_rows * MOST * config.num_layers, PAGE, config.num_layers, num_rows)
        pages = Pages(*sizes, longest=LONGEST)
        self.cache = PagedCache(config, pages, device=DEVICE, dtype=dtype, by_page=True)
        torch.manual_seed(0)
        lengths = torch.randint(0, 30, (config.num_layers, num_rows))
        for row in range(num_rows):
            assert pages.reserve(row, 40)
        self.cache.send_tables()
        self.cache.key.copy_(torch.randn(self.cache.key.shape))
        self.cache.value.copy_(torch.randn(self.cache.value.shape))
        self.cache.lengths.copy_(lengths)
        # one place has no sequence, and places are not rows
        self.rows = torch.randperm(num_rows).to(DEVICE)
        self.present = torch.arange(num_rows, device=DEVICE)
        self.present[3] = -1
        self.positions = torch.randint(0, 40, (num_rows,)).to(DEVICE)
        self.x = torch.randn(num_rows, config.width).to(DEVICE, dtype)
        self.phase = look_up_phases(model.phase_table, self.positions[None])

    def copy_cache(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.key.clone(), self.cache.value.clone(), self.cache.lengths.clone()

    def restore(self, saved: tuple[Tensor, Tensor, Tensor]) -> None:
        tensors = (self.cache.key, self.cache.value, self.cache.lengths)
        for tensor, old in zip(tensors, saved, strict=True):
            tensor.copy_(old)

    def make_tokens(self) -> Any:
        """A step in which every row decodes."""
        num_rows = len(self.rows)
        home = torch.where(self.present >= 0, self.rows, -1).int()
        numbers = torch.arange(num_rows + 1, device=DEVICE, dtype=torch.int32)
        num_tokens = torch.tensor([num_rows], device=DEVICE, dtype=torch.int32)
        return blocks_module.Tokens(
            given=torch.zeros_like(home),
            row=home,
            position=self.positions.int(),
            chunk=numbers[:-1].clone(),
            begin=numbers,
            chunk_row=home,
            num_tokens=num_tokens,
            sampled=numbers[:-1].clone(),
            num_sampled=num_tokens,
        )


def make_blocks(
    model: Transformer,
    bench: Bench,
    selector: str,
    tunings: Mapping[str, Any] | None = None,
    weights: Any = None,
) -> Any:
    config, cache, num_rows = model.config, bench.cache, len(bench.rows)
    weights = layout.stack_weights(model) if weights is None else weights
    rules = layout.make_rules(config, selector)
    dtype = weights.embedding.dtype
    pools = blocks_module.Pools(
        cache.key.to(dtype), cache.value.to(dtype), cache.tables, cache.lengths
    )
    blocks = blocks_module.Blocks(
        weights,
        rules,
        pools,
        config.capacities,
        most_tokens=num_rows,
        most_sampled=num_rows,
        newest=torch.zeros(num_rows, device=DEVICE, dtype=torch.int64),
    )
    blocks.few = routed.FewRows(weights, rules, num_rows, tunings)
    return blocks


def poison(blocks: Any) -> None:
    """Overwrite all state that a step must not rely on; keep the counters that it resets."""
    for owner in (blocks, blocks.few):
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and name not in LASTING:
                value.fill_(float("nan") if value.is_floating_point() else 3)


def check(
    model: Transformer,
    selector: str,
    num_rows: int = FEW,
    tunings: Mapping[str, Any] | None = None,
    tolerance: float = 2e-4,
) -> int:
    """Compare every routed layer; return the number of rows kept in all of them."""
    bench, config = Bench(model, num_rows), model.config
    blocks = make_blocks(model, bench, selector, tunings)
    present = bench.present >= 0
    documents = torch.where(present, torch.arange(1, num_rows + 1, device=DEVICE), -1)
    place = Place(bench.positions[None], bench.phase, documents[None], present[None])
    tokens, num_routes = bench.make_tokens(), len(config.routed_layers)
    taken = torch.full((num_routes, num_rows), 7, device=DEVICE, dtype=torch.uint8)
    firsts = torch.full((num_routes, num_rows + 1), 7, device=DEVICE, dtype=torch.int32)
    previous: Routing | None = None
    num_kept = 0
    for route, layer in enumerate(config.routed_layers):
        before = bench.copy_cache()
        static = StaticLayer(bench.cache, layer, bench.rows)
        truth, routing, _ = model.layers[layer](
            bench.x[None], place, selector=selector, previous=previous, cache=static
        )
        key, value, lengths = bench.copy_cache()
        bench.restore(before)
        x = bench.x.clone()
        poison(blocks)
        # the dense block before it has not run, and owes nothing
        blocks.more.zero_()
        if previous is not None:
            blocks.slots[(route - 1) % 2].copy_(previous.slot[0])
        everyone = blocks.place_all(tokens, num_rows)
        blocks._run_routed(layer, x, tokens, everyone, taken, firsts, 0, is_prepared=False)
        slot = blocks.slots[route % 2]
        kept = slot >= 0
        assert torch.equal(slot, routing.slot[0].int())
        assert torch.equal(taken[route], kept.to(torch.uint8))
        stops = kept.int().cumsum(0)
        assert firsts[route].tolist() == [0, *stops.tolist()]
        torch.testing.assert_close(x, truth[0], rtol=tolerance, atol=tolerance)
        # lengths are updated when the step ends
        ours = bench.copy_cache()
        assert torch.equal(ours[2], before[2])
        grown = torch.zeros_like(lengths)
        grown[layer, bench.rows[kept]] = 1
        assert torch.equal(lengths, before[2] + grown)
        torch.testing.assert_close(ours[0], key, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours[1], value, rtol=tolerance, atol=tolerance)
        num_kept += int(kept.sum())
        if config.routing.strategy == "early_exit":
            previous = routing
    return num_kept


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("mod", "predictor"),
        ("mod", "router"),
        ("mod_tanh1", "predictor"),
        ("mod_first_tokens", "router"),
        ("mod_gelu_mqa_untied", "predictor"),
        ("mod_qkv_bias", "predictor"),
        ("early_exit", "predictor"),
    ],
)
def test_rows_that_are_kept(name: str, selector: str) -> None:
    assert check(make(name), selector) > 1


# columns that no block divides, units of several programs, and heads narrower than a block of
# weights or wider by a part of one
ODD: dict[str, Any] = {"width": 80, "num_heads": 5, "mlp_width": 72, "routing.predictor_width": 21}
WIDER: dict[str, Any] = {**ODD, "width": 144, "num_heads": 3}


@pytest.mark.parametrize(
    ("name", "selector", "sizes"),
    [
        ("mod", "predictor", ODD),
        ("mod", "router", WIDER),
        ("mod_gelu_mqa_untied", "predictor", WIDER),
    ],
)
def test_odd_widths(name: str, selector: str, sizes: dict[str, Any]) -> None:
    assert check(make(name, **sizes), selector) > 1


@pytest.mark.parametrize("sizes", [{}, ODD, WIDER])
def test_heads_may_be_normed(sizes: dict[str, Any]) -> None:
    model = make("mod", qk_norm=True, **sizes)
    for name, parameter in model.named_parameters():
        if "norm_query" in name or "norm_key" in name:
            parameter.uniform_(0.5, 1.5)
    assert check(model, "predictor") > 1


@pytest.mark.parametrize(
    "tuning",
    [
        routed.RowTuning(most_rows=32, block=128, num_warps=2, num_stages=3),
        routed.RowTuning(most_rows=8, block=512, num_warps=1, num_stages=2),
    ],
)
def test_settings_change_nothing(tuning: Any) -> None:
    tunings = dict.fromkeys(routed.TUNINGS, tuning)
    assert check(make("mod", **ODD), "predictor", tunings=tunings) > 1


def set_bias(model: Transformer, bias: float) -> None:
    for layer in model.layers:
        if isinstance(layer, MixtureOfDepths):
            assert layer.decider.predictor is not None
            layer.decider.predictor.w_out.bias.fill_(bias)


def test_nobody_and_everybody() -> None:
    model = make("mod")
    for bias, expected in ((-50.0, 0), (50.0, (MORE - 1) * 2)):
        set_bias(model, bias)
        # more than sixteen rows: products take two rounds
        assert check(model, "predictor", MORE) == expected


@pytest.mark.parametrize("name", ["mod", "early_exit"])
def test_a_share_of_more_than_sixteen_rows(name: str) -> None:
    """Computed by many-row products, even in a step without prompts."""
    # with early exit, the second block considers only tokens kept by the first
    model = make(name, num_layers=2, **{"routing.capacity": 0.9})
    assert round(0.9 * MORE) > blocks_module.FEW_PLACES
    assert check(model, "predictor", MORE) > 1


@pytest.mark.parametrize("selector", ["predictor", "router"])
def test_some_of_more_than_sixteen(selector: str) -> None:
    assert 4 < check(make("mod"), selector, MORE) < 2 * (MORE - 1)


def test_all_is_everybody() -> None:
    assert check(make("mod"), "all") == (FEW - 1) * 2


def test_numbers_of_16_bits_round_only() -> None:
    model = make("mod")
    set_bias(model, 50.0)
    weights = layout.stack_weights(model)
    layer, results = model.config.routed_layers[0], []
    for dtype in (torch.float16, torch.float32):
        # not bfloat16, which Triton's interpreter multiplies as integers
        tensors = {
            name: tensor if name == "router" else tensor.half().to(dtype)
            for name, tensor in weights._asdict().items()
            if tensor is not None and name != "phase_table"
        }
        bench = Bench(model, FEW)
        bench.cache.key.copy_(bench.cache.key.half())
        bench.cache.value.copy_(bench.cache.value.half())
        blocks = make_blocks(model, bench, "predictor", weights=weights._replace(**tensors))
        poison(blocks)
        x = bench.x.half().to(dtype)
        taken = torch.zeros((2, FEW), device=DEVICE, dtype=torch.uint8)
        firsts = torch.zeros((2, FEW + 1), device=DEVICE, dtype=torch.int32)
        tokens = bench.make_tokens()
        everyone = blocks.place_all(tokens, FEW)
        blocks._run_routed(layer, x, tokens, everyone, taken, firsts, 0, is_prepared=False)
        assert x.dtype == dtype
        assert int(taken[0].sum()) == FEW - 1
        results.append(x.float())
    torch.testing.assert_close(*results, rtol=0, atol=5e-3)
    assert not torch.equal(results[1], bench.x.half().float())


@pytest.mark.parametrize("room", [227 * 1024, 163 * 1024, 99 * 1024, 8 * 1024])
def test_a_program_takes_no_more_shared_memory_than_there_is(room: int) -> None:
    for kind, tuning in routed.TUNINGS.items():
        limited = routed.limit_stages(kind, tuning, room)
        assert limited[:3] == tuning[:3]
        assert 1 <= limited.num_stages <= tuning.num_stages
        num_rows = 16 + max(16, tuning.most_rows) * (2 if kind == "swiglu" else 1)
        assert (limited.num_stages - 1) * num_rows * tuning.block * 2 <= room
        if room > 200 * 1024:
            assert limited == tuning


REAL: dict[str, Any] = {
    "width": 1024,
    "num_heads": 16,
    "num_kv_heads": 4,
    "mlp_width": 2816,
    "routing.predictor_width": 256,
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [7, 64, 250])
@pytest.mark.parametrize("name", ["mod", "mod_gelu_mqa_untied"])
def test_real_widths_in_float32(name: str, num_rows: int) -> None:
    assert check(make(name, **REAL), "predictor", num_rows, tolerance=2e-3) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [7, 64, 250])
def test_real_widths_in_bf16(num_rows: int) -> None:
    model = make("mod", dtype=torch.bfloat16, **REAL)
    # no token is near a tie, where rounding would decide
    set_bias(model, 50.0)
    assert check(model, "predictor", num_rows, tolerance=8e-2) == 2 * (num_rows - 1)
