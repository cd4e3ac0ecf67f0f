"""All blocks in one launch equal the model's forward pass; without a GPU, in an emulated one.

In float16, which is close enough to the model's own numbers that decisions are the same.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from depthmix.config import GATES

stream = pytest.importorskip("depthmix.kernels.decode.stream")
step_bench = pytest.importorskip("step_bench")
emulation = pytest.importorskip("emulation")
Bench, Part, Room, make = step_bench.Bench, step_bench.Part, step_bench.Room, step_bench.make

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "width": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 16,
    "mlp_width": 128,
    "vocab_size": 50,
}
REAL: dict[str, Any] = {
    "num_layers": 4,
    "width": 768,
    "num_heads": 12,
    "num_kv_heads": 4,
    "head_width": 64,
    "mlp_width": 2816,
    "max_seq_len": 640,
    "vocab_size": 4099,
}


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    emulation.emulate(monkeypatch, tmp_path_factory.getbasetemp())


def run(name: str, selector: str | None, most: int, num_steps: int, **overrides: Any) -> Any:
    """Rows begin one after the other, and all decode; some steps have empty places."""
    bench = Bench(make(name, dtype=torch.float16, **overrides), selector, most, most=most)
    assert bench.blocks.stream is not None
    bench.blocks.most_streamed = most
    for number in range(num_steps):
        num_rows = min(number + 1, most - 1 or 1) if most < 8 else most - number
        bench.step([Part(row, 1) for row in range(num_rows)], [], Room(most, most, 0))
    return bench


@pytest.mark.parametrize(
    ("name", "selector", "overrides"),
    [
        ("dense_gelu", None, {"qkv_bias": True, "num_layers": 2}),
        # a step of four expects to skip its routed blocks, and projects the next ones
        ("mod", "predictor", {}),
        ("mod", "router", {"qk_norm": True}),
        ("mod", "all", {"num_layers": 2}),
        ("early_exit", "predictor", {}),
        ("mod_first_tokens", "predictor", {"num_layers": 2}),
        # six queries share keys; rows longer than a piece, and an odd vocabulary
        (
            "mod_gelu_mqa_untied",
            "predictor",
            {
                "num_layers": 2,
                "num_heads": 6,
                "num_kv_heads": 1,
                "head_width": 32,
                "width": 1088,
                "mlp_width": 2112,
            },
        ),
    ],
)
def test_few_rows(name: str, selector: str | None, overrides: dict[str, Any]) -> None:
    run(name, selector, 4, 9, **{**SMALL, **overrides}).compare(0.01)


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "raw"])
def test_gates(gate: str) -> None:
    options = {**SMALL, "num_layers": 2, "routing.gate": gate}
    run("mod", "all", 2, 3, **options).compare(0.01)


def test_many_rows() -> None:
    """More than may be expected to skip a block."""
    run("mod", "predictor", 8, 4, **{**SMALL, "num_layers": 2}).compare(0.01)


def test_contexts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs attend to one head's context, and the last one joins their parts."""
    monkeypatch.setattr(stream, "SPAN", 2)
    heads = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_width": 32}
    bench = run("mod", "all", 1, 36, **{**SMALL, **heads})
    # a part has a span for each warp, or fewer in the last one
    assert bench.done[0] > 2 * stream.SPAN * stream.WARPS
    bench.compare(0.01)


def test_a_step_without_rows_changes_nothing() -> None:
    bench = run("mod", "predictor", 4, 2, **{**SMALL, "num_layers": 2})
    before = [t.clone() for t in (bench.cache.key, bench.cache.value, bench.cache.lengths)]
    bench.step([], [], Room(4, 4, 0))
    after = (bench.cache.key, bench.cache.value, bench.cache.lengths)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "not all bf16"),
        ({"width": 96}, "multiples of 64"),
        ({"head_width": 24, "num_heads": 8, "num_kv_heads": 8}, "head width is 24"),
    ],
)
def test_obstacles(changes: dict[str, Any], message: str) -> None:
    options = {"dtype": torch.float16, **SMALL, "num_layers": 2, **changes}
    bench = Bench(make("mod", **options), "predictor", 1, most=4)
    blocks = bench.blocks
    assert blocks.stream is None
    obstacle = stream.find_obstacle(blocks.weights, blocks.rules, blocks.pools.key)
    assert message in obstacle


def test_the_argument_is_as_the_kernel_has_it() -> None:
    """Names, types and their order."""
    emulation.check_task(Path(stream.__file__).with_name("stream.cu"), stream.StreamTask)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "selector"), [("dense", None), ("mod", "predictor"), ("mod", "router")]
)
def test_real_sizes(name: str, selector: str | None, most: int) -> None:
    bench = Bench(make(name, dtype=torch.float16, **REAL), selector, most, most=1024)
    bench.step([], [Part(row, 40 * row + 3) for row in range(min(most, 6))], Room(1024, 0, 16))
    for _ in range(40):
        bench.step([Part(row, 1) for row in range(most)], [], Room(most, most, 0))
    check_real(bench, selector)


def check_real(bench: Any, selector: str | None) -> None:
    """As `Bench.compare`, but a decision may fall the other way once in a while: see its score."""
    for row, count in enumerate(bench.done):
        tokens = bench.tokens[row : row + 1, :count].to(step_bench.DEVICE)
        truth = bench.model(tokens, selector=selector)
        found, expected = torch.cat(bench.logits[row]), truth.logits[0].float()
        if truth.routings:
            kept = torch.stack([r.slot[0] >= 0 for r in truth.routings]).to(torch.uint8)
            differs = (torch.cat(bench.taken[row], dim=1) != kept).any(dim=0)
            if differs.any():
                # what follows builds on it
                first = int(differs.int().argmax())
                found, expected = found[:first], expected[:first]
        if len(expected):
            error = (found - expected).square().mean().sqrt()
            assert error < 0.01 * expected.square().mean().sqrt()


@pytest.mark.gpu
def test_a_kernel_is_compiled_once() -> None:
    config = {"dtype": torch.float16, **SMALL, "num_layers": 2}
    kernels = []
    for _ in range(2):
        bench = Bench(make("mod", **config), "predictor", 1, most=4)
        bench.step([Part(0, 1)], [], Room(1, 1, 0))
        kernels.append(bench.blocks.stream.kernel)
    assert kernels[0] is kernels[1]
