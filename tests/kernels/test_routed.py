"""A routed block for many sequences equals the model's own layer; without a GPU, interpreted."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.infer.cache import PagedCache
from depthmix.infer.decode import DecodeStep, StaticLayer
from depthmix.infer.pages import Pages
from depthmix.nn import MixtureOfDepths, Transformer
from depthmix.nn.attention import Place
from depthmix.nn.layers import look_up_phases
from depthmix.nn.routing import Routing
from variants import make_config, make_model

single = pytest.importorskip("depthmix.infer.single")
routed = pytest.importorskip("depthmix.kernels.routed")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS, PAGE, MOST = 19, 4, 12


def make(name: str, **overrides: Any) -> Transformer:
    sizes = {"width": 64, "num_heads": 2, "num_kv_heads": 1, "num_layers": 4, "max_seq_len": 48}
    config = make_config(name, **{**sizes, **overrides})
    return make_model(config, dtype=torch.float32).to(DEVICE).requires_grad_(False)


class Bench:
    """Some sequences that stand at different places, with a cache that is partly filled."""

    def __init__(self, model: Transformer) -> None:
        config = model.config
        pages = Pages(NUM_ROWS * MOST * config.num_layers, PAGE, config.num_layers, NUM_ROWS)
        self.cache = PagedCache(config, pages, device=DEVICE, dtype=torch.float32)
        torch.manual_seed(0)
        lengths = torch.randint(0, 30, (config.num_layers, NUM_ROWS))
        for row in range(NUM_ROWS):
            assert pages.reserve(row, 40)
        self.cache.follow(pages.drain_changes())
        self.cache.key.normal_()
        self.cache.value.normal_()
        self.cache.lengths.copy_(lengths)
        # one place has no sequence, and places are not rows
        self.rows = torch.randperm(NUM_ROWS, device=DEVICE)
        self.present = torch.arange(NUM_ROWS, device=DEVICE)
        self.present[5] = -1
        self.positions = torch.randint(0, 40, (NUM_ROWS,), device=DEVICE)
        self.x = torch.randn(NUM_ROWS, config.width, device=DEVICE)
        self.phase = look_up_phases(model.phase_table, self.positions[None])

    def copy_cache(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.key.clone(), self.cache.value.clone(), self.cache.lengths.clone()


def poison(step: routed.RoutedRows) -> None:
    """Leave nothing that a step may build on, but for the counters that it resets itself."""
    for name, value in vars(step).items():
        if isinstance(value, Tensor) and name not in ("arrivals", "norm_heads"):
            value.fill_(float("nan") if value.is_floating_point() else 3)


def check(
    model: Transformer,
    selector: str,
    previous: Routing | None = None,
    tunings: Mapping[str, Any] | None = None,
) -> int:
    """Compare every routed layer; the number of rows that were kept in all of them."""
    bench, config = Bench(model), model.config
    rules = single.make_rules(config, selector)
    weights = single.stack_weights(model)
    step = routed.RoutedRows(weights, rules, NUM_ROWS, 0.25, tunings)
    documents = torch.where(bench.present >= 0, torch.arange(1, NUM_ROWS + 1, device=DEVICE), -1)
    place = Place(bench.positions[None], bench.phase, documents[None], (bench.present >= 0)[None])
    home = torch.where(bench.present >= 0, bench.rows, -1)
    num_kept = 0
    for layer in config.routed_layers:
        before = bench.copy_cache()
        static = StaticLayer(bench.cache, layer, bench.rows)
        truth, routing, _ = model.layers[layer](
            bench.x[None], place, selector=selector, previous=previous, cache=static
        )
        stored = bench.copy_cache()
        tensors = (bench.cache.key, bench.cache.value, bench.cache.lengths)
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        x = bench.x.clone()
        poison(step)
        slot = step(
            x,
            layer,
            bench.phase[0].contiguous(),
            bench.positions,
            home,
            None if previous is None else previous.slot[0],
            bench.cache.key,
            bench.cache.value,
            bench.cache.tables[layer],
            bench.cache.lengths[layer],
        )
        assert torch.equal(slot, routing.slot[0])
        torch.testing.assert_close(x, truth[0], rtol=0, atol=2e-4)
        for ours, theirs in zip(bench.copy_cache(), stored, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        num_kept += int((slot >= 0).sum())
        if rules.early_exit:
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
        ("early_exit", "predictor"),
    ],
)
def test_rows_that_are_kept(name: str, selector: str) -> None:
    assert check(make(name), selector) > 3


# columns that no block divides, units of several programs, and heads narrower than a block of
# weights or wider by a part of one
ODD = {"width": 80, "num_heads": 5, "mlp_width": 72, "routing.predictor_width": 21}
WIDER = {**ODD, "width": 144, "num_heads": 3}


@pytest.mark.parametrize(
    ("name", "selector", "sizes"),
    [
        ("mod", "predictor", ODD),
        ("mod", "router", WIDER),
        ("mod_gelu_mqa_untied", "predictor", WIDER),
    ],
)
def test_odd_widths(name: str, selector: str, sizes: dict[str, int]) -> None:
    assert check(make(name, **sizes), selector) > 3


@pytest.mark.parametrize("sizes", [{}, ODD, WIDER])
def test_heads_may_be_normed(sizes: dict[str, int]) -> None:
    model = make("mod", **{**sizes, "qk_norm": True})
    for name, parameter in model.named_parameters():
        if "norm_query" in name or "norm_key" in name:
            parameter.uniform_(0.5, 1.5)
    assert check(model, "predictor") > 3


@pytest.mark.parametrize(
    "tuning",
    [
        routed.Tuning(block_out=32, block=128, num_warps=2, num_stages=3),
        routed.Tuning(block_out=64, block=512, num_warps=1, num_stages=2),
    ],
)
def test_settings_change_nothing(tuning: routed.Tuning) -> None:
    assert check(make("mod", **ODD), "predictor", tunings=dict.fromkeys(routed.TUNINGS, tuning)) > 3


def set_bias(model: Transformer, bias: float) -> None:
    for layer in model.layers:
        if isinstance(layer, MixtureOfDepths):
            assert layer.decider.predictor is not None
            layer.decider.predictor.w_out.bias.fill_(bias)


def test_nobody_and_everybody() -> None:
    model = make("mod")
    for bias, expected in ((-50.0, 0), (50.0, (NUM_ROWS - 1) * 2)):
        set_bias(model, bias)
        # more than sixteen rows: products go round twice
        assert check(model, "predictor") == expected


def test_numbers_of_16_bits_round_only() -> None:
    model = make("mod")
    set_bias(model, 50.0)
    weights, rules = single.stack_weights(model), single.make_rules(model.config, "predictor")
    layer, results = model.config.routed_layers[0], []
    for dtype in (torch.float16, torch.float32):
        # not bfloat16, which Triton's interpreter multiplies as integers
        tensors = {
            name: tensor if name == "router" else tensor.half().to(dtype)
            for name, tensor in weights._asdict().items()
            if tensor is not None and name != "phase_table"
        }
        bench = Bench(model)
        x, pages = bench.x.half().to(dtype), [bench.cache.key, bench.cache.value]
        pages = [page.half().to(dtype) for page in pages]
        step = routed.RoutedRows(weights._replace(**tensors), rules, NUM_ROWS, 0.25)
        step(
            x,
            layer,
            bench.phase[0].contiguous(),
            bench.positions,
            torch.where(bench.present >= 0, bench.rows, -1),
            None,
            *pages,
            bench.cache.tables[layer],
            bench.cache.lengths[layer],
        )
        assert x.dtype == dtype
        results.append(x.float())
    torch.testing.assert_close(*results, rtol=0, atol=5e-3)
    assert not torch.equal(results[1], bench.x.half().float())


@pytest.mark.parametrize("name", ["mod", "early_exit"])
def test_a_whole_step(name: str) -> None:
    model = make(name)
    weights, config = single.stack_weights(model), model.config
    tokens = torch.randint(config.vocab_size, (NUM_ROWS,)).tolist()
    found = []
    for kernel in (None, single.make_routed_rows(config, weights, "predictor", NUM_ROWS)):
        bench = Bench(model)
        step = DecodeStep(model, bench.cache, "predictor", NUM_ROWS, routed=kernel)
        step.send(tokens, bench.positions.tolist(), bench.rows.tolist())
        outputs = [step.run() for _ in range(2)]
        found.append((outputs, bench.copy_cache()))
        # the layers are as they were
        assert all(layer._compiled_call_impl is None for layer in model.layers)
    for ours, truth in zip(found[1][0], found[0][0], strict=True):
        assert torch.equal(ours.told, truth.told)
        torch.testing.assert_close(ours.logits, truth.logits, rtol=0, atol=1e-3)
    for ours, truth in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-3)


@pytest.mark.parametrize("room", [227 * 1024, 163 * 1024, 99 * 1024, 8 * 1024])
def test_a_program_takes_no_more_shared_memory_than_there_is(room: int) -> None:
    for kind, tuning in routed.TUNINGS.items():
        limited = routed.limit_stages(kind, tuning, room)
        assert limited[:3] == tuning[:3]
        assert 1 <= limited.num_stages <= tuning.num_stages
        num_rows = 16 + tuning.block_out * (2 if kind in ("rotate", "swiglu") else 1)
        assert (limited.num_stages - 1) * num_rows * tuning.block * 2 <= room
        if room > 200 * 1024:
            assert limited == tuning
