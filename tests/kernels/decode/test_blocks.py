"""A step's tokens through all blocks equal the model's forward pass; without a GPU, interpreted."""

from typing import Any

import pytest
import torch

from depthmix.nn import Transformer

blocks_module = pytest.importorskip("depthmix.kernels.decode.blocks")
step_bench = pytest.importorskip("step_bench")

pytestmark = pytest.mark.slow

Bench, Part, Room, make = step_bench.Bench, step_bench.Part, step_bench.Room, step_bench.make
DEVICE = step_bench.DEVICE


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, hundreds of idle programs take seconds."""
    if not torch.cuda.is_available():
        places = blocks_module.places
        tuning = places.TILE_FLOAT32._replace(programs=2)
        monkeypatch.setattr(places, "choose_tuning", lambda *_: tuning)
        monkeypatch.setattr(places, "PROGRAMS", 3)


def run(model: Transformer, selector: str | None, path: str) -> Any:
    """Prompts beside single tokens; chunks that continue, and an empty one; then single tokens."""
    bench = Bench(model, selector, num_rows=5, most=32)
    if path == "many":
        # no step is small enough for the few-row products
        bench.blocks.few.num_rows = 0
    bench.step([Part(1, 1)], [Part(0, 6), Part(3, 2)], Room(16, 4, 4))
    bench.step([Part(1, 1), Part(4, 1)], [Part(3, 5), Part(0, 7)], Room(16, 4, 4))
    bench.step([Part(4, 1), Part(0, 1), Part(1, 1)], [], Room(4, 4, 0))
    bench.compare(1e-4)
    return bench


def force(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows or many; in steps without prompts also which rows routed blocks project."""
    limit = 64 if path == "few" else 0
    monkeypatch.setattr(blocks_module, "FEW_TOKENS", limit)
    monkeypatch.setattr(blocks_module, "FEW_PLACES", limit)


@pytest.mark.parametrize("name", ["dense", "mod"])
def test_few_logits_of_many_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a prompt: many-row products for its tokens, few-row products for the logits."""
    monkeypatch.setattr(blocks_module, "FEW_TOKENS", 2)
    bench = Bench(make(name, num_layers=2), "predictor" if name == "mod" else None, 2, most=32)
    bench.step([], [Part(0, 6), Part(1, 3)], Room(16, 0, 4), most_asked=2)
    bench.step([Part(0, 1)], [Part(1, 4)], Room(8, 4, 4), most_asked=1)
    bench.compare(1e-4)


@pytest.mark.parametrize("path", ["few", "all", "many"])
@pytest.mark.parametrize(
    ("name", "selector", "overrides"),
    [
        ("dense", None, {"num_layers": 2}),
        ("mod", "predictor", {"num_layers": 2}),
        ("early_exit", "predictor", {"num_layers": 2}),
    ],
)
def test_both_kinds_of_products(
    name: str,
    selector: str | None,
    overrides: dict[str, Any],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(path, monkeypatch)
    run(make(name, **overrides), selector, path)


@pytest.mark.parametrize(
    ("name", "selector", "path", "overrides"),
    [
        # two layers, the second one routed
        ("dense_gelu", None, "many", {"qkv_bias": True}),
        ("mod_qkv_bias", "router", "few", {}),
        ("mod_qkv_bias", "predictor", "many", {}),
        ("mod_first_tokens", "predictor", "few", {}),
        ("mod_first_tokens", "router", "many", {}),
        ("mod", "all", "few", {}),
        ("mod", "all", "many", {}),
        ("mod_gelu_mqa_untied", "predictor", "many", {}),
        ("mod_plain_scores", "router", "few", {}),
        # heads of width 24, which is not a power of two
        ("mod", "predictor", "few", {"width": 72, "num_heads": 3, "mlp_width": 40}),
        ("mod", "predictor", "many", {"width": 72, "num_heads": 3, "mlp_width": 40}),
    ],
)
def test_kinds_of_models(
    name: str,
    selector: str | None,
    path: str,
    overrides: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force(path, monkeypatch)
    run(make(name, num_layers=2, **overrides), selector, path)


def test_sizes_between_the_limits_take_both_paths() -> None:
    """More than sixteen tokens but fewer places: dense blocks are large, routed ones small."""
    bench = Bench(make("mod", num_layers=2), "predictor", num_rows=4, most=32)
    bench.step([], [Part(2, 13), Part(1, 5)], Room(32, 0, 4))
    bench.step([Part(1, 1), Part(2, 1)], [Part(0, 2)], Room(32, 4, 4))
    bench.compare(1e-4)


def test_a_row_may_begin_again() -> None:
    bench = Bench(make("mod", num_layers=2), "predictor", num_rows=2, most=16)
    bench.step([Part(1, 1)], [Part(0, 5)], Room(16, 4, 4))
    bench.done, bench.logits, bench.taken = [0, 0], [[], []], [[], []]
    bench.step([Part(0, 1)], [Part(1, 4)], Room(16, 4, 4))
    bench.compare(1e-4)


def test_an_empty_step_changes_nothing() -> None:
    bench = Bench(make("mod", num_layers=2), "predictor", num_rows=2, most=16)
    bench.step([Part(1, 1)], [Part(0, 5)], Room(16, 4, 4))
    before = [t.clone() for t in (bench.cache.key, bench.cache.value, bench.cache.lengths)]
    for room in (Room(16, 4, 4), Room(4, 4, 0)):
        bench.step([], [], room)
    after = (bench.cache.key, bench.cache.value, bench.cache.lengths)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


REAL: dict[str, Any] = {
    "width": 768,
    "num_heads": 12,
    "num_kv_heads": 4,
    "mlp_width": 2048,
    "max_seq_len": 640,
    "vocab_size": 4096,
    "routing.predictor_width": 192,
}


def run_real(model: Transformer, selector: str | None) -> Any:
    """Long prompts in several chunks, beside many rows that decode."""
    bench = Bench(model, selector, num_rows=80, most=1024)
    bench.step([Part(row, 1) for row in range(64)], [Part(70, 300), Part(71, 41)], Room(512, 64, 4))
    for number in range(3):
        alone = [Part(row, 1) for row in range(number, 64)]
        chunks = [Part(70, 70), Part(72 + number, 501), Part(71, 113)]
        bench.step(alone, chunks, Room(1024, 64, 4))
    everyone = [Part(row, 1) for row in range(75)]
    for _ in range(2):
        bench.step(everyone, [], Room(128, 128, 0))
    bench.step(everyone[60:71], [], Room(16, 16, 0))
    bench.step([Part(70, 1)], [], Room(1, 1, 0))
    return bench


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "selector", "overrides"),
    [
        ("dense", None, {}),
        ("mod", "predictor", {}),
        ("mod", "router", {"qk_norm": True}),
        ("mod_qkv_bias", "all", {}),
        ("early_exit", "predictor", {}),
        # heads of width 48
        ("mod", "predictor", {"width": 576}),
        ("mod_gelu_mqa_untied", "predictor", {}),
    ],
)
def test_real_sizes_in_float32(name: str, selector: str | None, overrides: dict[str, Any]) -> None:
    run_real(make(name, **{**REAL, **overrides}), selector).compare(1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "selector"), [("dense", None), ("mod", "all")])
def test_real_sizes_in_bf16_are_as_good_as_the_model(name: str, selector: str | None) -> None:
    model = make(name, dtype=torch.bfloat16, **REAL)
    bench = run_real(model, selector)
    exact = make(name, **REAL)
    # the same weights, rounded
    for ours, theirs in zip(exact.parameters(), model.parameters(), strict=True):
        ours.copy_(theirs)
    for row, count in enumerate(bench.done):
        tokens = bench.tokens[row : row + 1, :count].to(DEVICE)
        if not count:
            continue
        truth = exact(tokens, selector=selector).logits[0]
        usual = (model(tokens, selector=selector).logits[0].float() - truth).square().mean()
        error = (torch.cat(bench.logits[row]) - truth).square().mean()
        # root mean square error, little more than that of the model's own forward pass
        assert error.sqrt() < 1.5 * usual.sqrt() + 1e-3 * truth.square().mean().sqrt()


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("rules", {"gate": "soft"}, "there is no gate 'soft'"),
        ("rules", {"selector": "topk"}, "there is no selector 'topk'"),
        ("rules", {"num_heads": 4}, "w_qkv must be"),
        ("weights", {"router": None}, "routed_layers need the router"),
        ("weights", {"norm": torch.ones(5)}, "norm must be"),
    ],
)
def test_mistakes_are_told(part: str, changes: dict[str, Any], message: str) -> None:
    bench = Bench(make("mod"), "predictor", num_rows=1, most=4)
    blocks = bench.blocks
    parts = {"weights": blocks.weights, "rules": blocks.rules}
    parts[part] = parts[part]._replace(**changes)
    with pytest.raises(ValueError, match=message):
        blocks_module.Blocks(
            *parts.values(),
            blocks.pools,
            bench.config.capacities,
            most_tokens=4,
            most_sampled=4,
            newest=bench.newest,
        )
