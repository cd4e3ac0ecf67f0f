"""Products for kept tokens equal plain ones; without a GPU, in an emulated one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

prefetch = pytest.importorskip("depthmix.kernels.decode.prefetch")
plan = pytest.importorskip("depthmix.kernels.decode.plan")
emulation = pytest.importorskip("emulation")
step_bench = pytest.importorskip("step_bench")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_TOKENS, NUM_LAYERS, EPS = 37, 2, 1e-5


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    emulation.emulate(monkeypatch, tmp_path_factory.getbasetemp())


def make(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def make_weights(
    width: int, mixed: int, mlp_width: int, *, is_swiglu: bool, dtype: torch.dtype
) -> Any:
    torch.manual_seed(0)
    num_in = 2 * mlp_width if is_swiglu else mlp_width
    ones = torch.ones(NUM_LAYERS, width, device=DEVICE, dtype=dtype)
    return plan.Weights(
        embedding=make(5, width, dtype=dtype),
        phase_table=torch.zeros(4, 2, 8, device=DEVICE),
        norm_attention=1 + make(NUM_LAYERS, width, scale=0.2, dtype=dtype),
        w_qkv=make(NUM_LAYERS, 3 * mixed, width, scale=width**-0.5, dtype=dtype),
        w_attn_out=make(NUM_LAYERS, width, mixed, scale=mixed**-0.5, dtype=dtype),
        norm_mlp=1 + make(NUM_LAYERS, width, scale=0.2, dtype=dtype),
        w_in=make(NUM_LAYERS, num_in, width, scale=width**-0.5, dtype=dtype),
        w_mlp_out=make(NUM_LAYERS, width, mlp_width, scale=mlp_width**-0.5, dtype=dtype),
        norm=ones[0],
        head=make(5, width, dtype=dtype),
    )


class Bench:
    """Tokens of which a block keeps some, after attention."""

    def __init__(self, weights: Any, num_kept: int) -> None:
        torch.manual_seed(1)
        self.weights, self.num_kept = weights, num_kept
        width, dtype = weights.embedding.shape[1], weights.embedding.dtype
        mixed, mlp_width = weights.w_attn_out.shape[2], weights.w_mlp_out.shape[2]
        self.x = make(NUM_TOKENS, width, dtype=dtype)
        self.gate = make(NUM_TOKENS, dtype=torch.float32)
        self.kept = torch.randperm(NUM_TOKENS)[:num_kept].sort().values
        # places past the last: any token, and any numbers
        index = torch.full((NUM_TOKENS,), 3, dtype=torch.int32)
        index[:num_kept] = self.kept
        self.index = index.to(DEVICE)
        self.mixed = make(NUM_TOKENS, mixed, dtype=dtype)
        self.mixed[num_kept:] = float("nan")
        self.count = torch.tensor([num_kept], device=DEVICE, dtype=torch.int32)
        rules = plan.Rules(1, EPS, routed_layers=(0, 1))

        def poison(width: int, dtype: torch.dtype) -> Tensor:
            return torch.full((NUM_TOKENS, width), float("nan"), device=DEVICE, dtype=dtype)

        assert prefetch.find_obstacle(weights, rules, NUM_TOKENS) is None
        buffers = (poison(width, torch.float32), poison(width, dtype), poison(mlp_width, dtype))
        scores = (poison(1, torch.float32)[:, 0] for _ in range(2))
        self.products = prefetch.Prefetched(weights, rules, *buffers, *scores)
        unused = self.index
        self.places = plan.Places(self.index, self.count, self.gate, *[unused] * 4)

    def run(self, layer: int) -> Tensor:
        """x after the end of a block."""
        x = self.x.clone()
        self.products.finish(x, layer, self.mixed, self.places)
        return x

    def project(self, layer: int) -> Tensor:
        rows = self.weights.w_qkv.shape[1]
        qkv = torch.full((NUM_TOKENS, rows), 7.0, device=DEVICE, dtype=self.x.dtype)
        self.products.project(self.x, layer, self.places, qkv)
        return qkv

    def compute_projection(self, layer: int) -> Tensor:
        """The same in float32, for the kept tokens."""
        x, norm = self.x[self.kept.to(DEVICE)].float(), self.weights.norm_attention[layer].float()
        normed = functional.rms_norm(x, x.shape[-1:], norm, EPS)
        return normed @ self.weights.w_qkv[layer].float().T

    def compute(self, layer: int) -> Tensor:
        """What `run` returns, in float32."""
        weights, kept = self.weights, self.kept.to(DEVICE)
        out, norm, w_in, back = (
            part[layer].float()
            for part in (weights.w_attn_out, weights.norm_mlp, weights.w_in, weights.w_mlp_out)
        )
        x = self.x.float()
        update = self.mixed[: self.num_kept].float() @ out.T
        stream = x[kept] + update
        normed = functional.rms_norm(stream, stream.shape[-1:], norm, EPS)
        hidden = normed @ w_in.T
        if w_in.shape[0] == 2 * back.shape[1]:
            gate, up = hidden.chunk(2, dim=1)
            hidden = functional.silu(gate) * up
        else:
            hidden = functional.gelu(hidden)
        return x.index_add(0, kept, self.gate[kept, None] * (update + hidden @ back.T))


def check(bench: Bench, tolerance: float) -> None:
    for layer in range(NUM_LAYERS):
        found, expected = bench.run(layer).float(), bench.compute(layer)
        error = (found - expected).square().mean().sqrt()
        assert error < tolerance * expected.square().mean().sqrt()
        skipped = torch.ones(NUM_TOKENS, dtype=torch.bool)
        skipped[bench.kept] = False
        assert torch.equal(found[skipped], bench.x.float()[skipped])
        found, expected = bench.project(layer).float(), bench.compute_projection(layer)
        error = (found[: bench.num_kept] - expected).square().mean().sqrt()
        assert error < tolerance * expected.square().mean().sqrt() or not bench.num_kept
        assert (found[bench.num_kept :] == 7.0).all()


SIZES = [
    # width, heads together, MLP
    (64, 128, 192),
    # vectors of two and three pieces, the last of them in part
    (1088, 1024, 2112),
]


@pytest.mark.parametrize("num_kept", [0, 1, 16, 37])
def test_any_number_of_tokens(num_kept: int) -> None:
    weights = make_weights(64, 128, 192, is_swiglu=True, dtype=torch.float16)
    check(Bench(weights, num_kept), 2e-3)


@pytest.mark.parametrize("is_swiglu", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes(sizes: tuple[int, int, int], is_swiglu: bool) -> None:
    weights = make_weights(*sizes, is_swiglu=is_swiglu, dtype=torch.float16)
    check(Bench(weights, 9), 2e-3)


@pytest.mark.parametrize("num_tokens", [30, 300])
def test_places(num_tokens: int) -> None:
    """Tokens of one warp, and more than a program has threads."""
    weights = make_weights(64, 128, 192, is_swiglu=True, dtype=torch.float16)
    rules = plan.Rules(1, EPS, routed_layers=(0, 1), selector="router", first_tokens=2)
    buffers = (make(num_tokens, width) for width in (64, 64, 192))
    torch.manual_seed(4)
    score = make(num_tokens, dtype=torch.float32)
    row, position, previous = (
        torch.randint(-1, 9, (num_tokens,), dtype=torch.int32).to(DEVICE) for _ in range(3)
    )
    products = prefetch.Prefetched(weights, rules, *buffers, score, score)

    def fill(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((size,), 7, device=DEVICE, dtype=dtype)

    places = plan.Places(
        index=fill(num_tokens),
        count=fill(1),
        gate=fill(num_tokens, torch.float32),
        slot=fill(num_tokens),
        first=fill(num_tokens + 1),
        taken=fill(num_tokens, torch.uint8),
        alone=fill(num_tokens),
    )
    x, qkv = make(num_tokens, 64), make(num_tokens, weights.w_qkv.shape[1])
    given = {"row": row, "position": position, "previous": previous, "score": score, "wish": score}
    given |= places._asdict()
    products.project(x, 0, places, qkv, given)
    kept = (row >= 0) & (previous >= 0) & ((score > 0) | (position < 2))
    tokens, before = kept.nonzero()[:, 0], kept.cumsum(0) - kept.long()
    count = len(tokens)
    assert places.count.tolist() == [count]
    assert places.index[:count].tolist() == tokens.tolist()
    assert places.alone.tolist() == row[tokens].tolist() + [-1] * (num_tokens - count)
    assert places.slot.tolist() == torch.where(kept, before, -1).tolist()
    assert places.first.tolist() == [*before.tolist(), count]
    assert places.taken.tolist() == kept.int().tolist()
    torch.testing.assert_close(places.gate, score)


@pytest.mark.parametrize(
    ("name", "selector", "overrides"),
    [
        ("mod", "predictor", {}),
        ("mod", "router", {"routing.gate": "tanh1"}),
        ("mod", "all", {}),
        ("mod_gelu_mqa_untied", "predictor", {}),
        ("mod_plain_scores", "router", {}),
        # a token that left does not return
        ("early_exit", "predictor", {}),
        ("mod_first_tokens", "predictor", {}),
        # programs of a cluster with several chunks of columns, with one, and with none
        ("mod", "predictor", {"width": 832, "routing.predictor_width": 80}),
    ],
)
def test_steps_of_many_rows(name: str, selector: str, overrides: dict[str, Any]) -> None:
    """Blocks whose products are all of this kind, in decoding steps and beside a prompt."""
    sizes = {"num_layers": 4, "width": 64, "num_heads": 4, "head_width": 16, "mlp_width": 128}
    options = {**sizes, "vocab_size": 50, "max_seq_len": 40, **overrides}
    model = step_bench.make(name, dtype=torch.float16, **options)
    bench = step_bench.Bench(model, selector, 20, most=32)
    kinds = []
    launch = bench.blocks.few.prefetched._launch

    def watch(kind: str, *rest: Any) -> None:
        kinds.append(kind)
        launch(kind, *rest)

    bench.blocks.few.prefetched._launch = watch
    step, room = step_bench.Part, step_bench.Room
    bench.step([step(row, 1) for row in range(12)], [step(19, 9)], room(32, 16, 4))
    for number in range(3):
        bench.step([step(row, 1) for row in range(number, 19)], [], room(32, 32, 0))
    assert set(kinds) == {"decide", "project", "out", "in", "back"}
    bench.compare(0.01)


def test_bf16() -> None:
    weights = make_weights(64, 128, 192, is_swiglu=True, dtype=torch.bfloat16)
    check(Bench(weights, 9), 1e-2)


@pytest.mark.parametrize(
    ("sizes", "dtype", "message"),
    [
        ((64, 64, 64), torch.float32, "not all bf16"),
        ((64, 64, 96), torch.float16, "multiples of 64"),
        ((4160, 64, 64), torch.float16, "wider than 4,096"),
    ],
)
def test_obstacles(sizes: tuple[int, int, int], dtype: torch.dtype, message: str) -> None:
    weights = make_weights(*sizes, is_swiglu=True, dtype=dtype)
    rules = plan.Rules(1, EPS, routed_layers=(1,))
    obstacle = prefetch.find_obstacle(weights, rules, NUM_TOKENS)
    assert message in obstacle


@pytest.mark.parametrize("room", [227 * 1024, 99 * 1024])
def test_a_program_takes_no_more_shared_memory_than_there_is(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "find_room", lambda device: room)
    num_parts = prefetch.count_parts(DEVICE, 256)
    size = prefetch.count_rest(256) + num_parts * (prefetch.PART_BYTES + 16)
    assert 2 <= num_parts <= prefetch.MOST_PARTS
    assert size <= room


def test_the_arguments_are_as_the_kernels_have_them() -> None:
    """Names, types and their order."""
    folder = Path(prefetch.__file__).parent
    emulation.check_task(folder / "prefetch.cu", prefetch.PrefetchTask)
    emulation.check_task(folder / "decide.cu", prefetch.DecideTask)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kept", [1, 8, 16, 33])
@pytest.mark.parametrize("sizes", [(2048, 2048, 5504), (1024, 1024, 2816), (768, 1536, 2048)])
def test_real_sizes(sizes: tuple[int, int, int], num_kept: int) -> None:
    weights = make_weights(*sizes, is_swiglu=True, dtype=torch.bfloat16)
    bench = Bench(weights, num_kept)
    check(bench, 1e-2)
    first = bench.run(0)
    for _ in range(20):
        assert torch.equal(bench.run(0), first)


@pytest.mark.gpu
def test_launches_that_follow_each_other_at_once() -> None:
    """Blocks in a graph, each of which changes what the next one reads."""
    from depthmix.kernels.recording import record_graph

    weights = make_weights(1024, 1024, 2816, is_swiglu=True, dtype=torch.bfloat16)
    bench = Bench(weights, 11)
    x, mixed = bench.x.clone(), bench.mixed

    def work() -> None:
        for number in range(40):
            bench.products.finish(x, number % 2, mixed, bench.places)
            # what follows depends on it, and is depended on
            mixed[:11].copy_(x[bench.index[:11].long()]).mul_(0.5)
            x.clamp_(-4, 4)

    def restore() -> None:
        x.copy_(bench.x)
        torch.manual_seed(3)
        mixed[:11].copy_(make(11, 1024, dtype=torch.bfloat16))

    restore()
    work()
    torch.cuda.synchronize()
    expected = x.clone()
    restore()
    graph, _ = record_graph(work, restore)
    for _ in range(20):
        restore()
        graph.replay()
        assert torch.equal(x, expected)
