"""Drawing on the device equals the sampler in torch, token by token; interpreted without a GPU."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthmix.infer.sampling import (
    SamplingParams,
    Settings,
    draw_gumbel,
    keep_tokens,
    pack_settings,
    sample,
    unpack_settings,
)

draw = pytest.importorskip("depthmix.kernels.decode.draw")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = float("inf"), float("nan")
# a row of a step takes about a tenth of a second in the interpreter
REPEATS = 1 if DEVICE.type == "cpu" else 8

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.7},
    {},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"temperature": 1e-4},
    {"temperature": 1e-300, "top_p": 0.9, "top_k": 4},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "top_p": 0.7},
    {"frequency_penalty": 0.7, "presence_penalty": -0.1},
    {"temperature": 0, "frequency_penalty": 1.9},
    {"presence_penalty": 1.3, "top_p": 0.8},
    {"frequency_penalty": -2, "repetition_penalty": 1.2, "top_k": 30},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 2.5},
    {"top_k": 300},
    {"top_k": 2**63 - 1},
    {"top_p": 0.05},
    {"top_p": 0.5, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 1e-12},
    {"top_p": 1 - 2**-53},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": 37, "top_p": 0.9, "temperature": 1.5},
    {"top_k": 100, "top_p": 0.99, "temperature": 50.0},
    {"top_k": 3, "min_p": 0.3},
    {"top_p": 0.8, "min_p": 0.02, "temperature": 2.0},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.3, "temperature": 0.7},
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # NaN and inf are intended, and the interpreter computes with NumPy
    with np.errstate(all="ignore"):
        yield


class Bench:
    """Sampling state of some rows, and the same settings for the reference."""

    def __init__(
        self, params: list[SamplingParams], vocab: int, *, penalized: bool = True, spare: int = 3
    ) -> None:
        num_places = len(params)
        self.state = draw.DrawState(num_places + spare, vocab, DEVICE)
        self.drawer = draw.Drawer(self.state, num_places + 2)
        # places are not in the order of rows
        self.row = torch.randperm(num_places + spare)[:num_places].to(DEVICE)
        seeds = torch.randint(-(2**62), 2**62, (num_places,)).tolist()
        steps = torch.randint(0, 5000, (num_places,)).tolist()
        shares, counts = (t.to(DEVICE) for t in pack_settings(params, seeds, steps))
        self.state.shares[:, self.row] = shares
        self.state.counts[:, self.row] = counts
        self.settings = unpack_settings(shares, counts)
        if penalized:
            shape = (self.state.num_rows, vocab)
            seen = torch.where(torch.rand(shape) < 0.3, torch.randint(1, 9, shape), 0)
            self.state.allocate_seen().copy_(seen)
        self.poison()

    def poison(self) -> None:
        """Overwrite all state that a step must not rely on; keep the counters it resets to 0."""
        for name, value in vars(self.drawer).items():
            if isinstance(value, Tensor):
                if name in ("arrivals", "num_listed", "bin_count", "bin_mass"):
                    assert not value.any(), name
                else:
                    value.fill_(NAN if value.is_floating_point() else 3)

    def draw(
        self,
        logits: Tensor,
        row: Tensor | None = None,
        *,
        plain: bool = False,
        filtered: bool = True,
    ) -> tuple[Tensor, Tensor]:
        self.poison()
        row = self.row if row is None else row
        token = torch.full((len(row),), -7, device=DEVICE)
        logprob = torch.full((len(row),), NAN, device=DEVICE)
        self.drawer(logits, row, token, logprob, plain=plain, filtered=filtered)
        self.poison()
        return token, logprob

    def read(self) -> list[Tensor]:
        state = self.state
        tensors = [state.shares, state.counts, state.tokens]
        return [t.clone() for t in (tensors if state.seen is None else [*tensors, state.seen])]

    def check(self, logits: Tensor, *, filtered: bool = True) -> Tensor:
        """Draw one step, and compare its outputs and all changes of state."""
        step = self.state.counts[2, self.row]
        settings: Settings = self.settings._replace(step=step)
        seen = None if self.state.seen is None else self.state.seen[self.row]
        truth = sample(logits, settings, seen)
        expected = self.read()
        expected[1][2, self.row] += 1
        expected[2][self.row] = truth.token
        if self.state.seen is not None:
            expected[3][self.row, truth.token] += 2
        token, logprob = self.draw(logits, filtered=filtered)
        assert token.tolist() == truth.token.tolist()
        torch.testing.assert_close(logprob, truth.logprob, rtol=1e-5, atol=1e-5, equal_nan=True)
        for ours, theirs in zip(self.read(), expected, strict=True):
            assert torch.equal(ours, theirs)
        return token


def make_params(*chosen: dict[str, Any]) -> list[SamplingParams]:
    return [SamplingParams(**kwargs) for kwargs in chosen]


def make_logits(kind: str, num: int, vocab: int) -> Tensor:
    """Rows of one kind, some of which no model should produce."""
    logits = torch.randn(num, vocab) * 3
    if kind == "ties":
        logits = logits.mul(0.5).round()
    elif kind == "zeros":
        logits = torch.where(torch.rand(num, vocab) < 0.5, 0.0, -0.0)
    elif kind == "constant":
        logits.fill_(2.5)
    elif kind == "peaked":
        logits[:, vocab // 2] += 60
    elif kind == "close":
        logits = 10 + logits * 1e-4
    elif kind == "holes":
        logits[torch.rand(num, vocab) < 0.8] = -INF
        logits[torch.rand(num, vocab) < 0.1] = NAN
    elif kind == "nothing":
        logits.fill_(-INF)
        logits[::2] = NAN
    elif kind == "endless":
        logits[torch.rand(num, vocab) < 0.2] = INF
        logits[torch.rand(num, vocab) < 0.2] = -INF
    elif kind == "huge":
        logits = logits.sign() * torch.finfo(torch.float32).max
    else:
        assert kind == "random"
    return logits.to(DEVICE)


KINDS = (
    "random",
    "ties",
    "zeros",
    "constant",
    "peaked",
    "close",
    "holes",
    "nothing",
    "endless",
    "huge",
)


@pytest.mark.parametrize(
    ("kind", "vocab"),
    [("random", 257), ("ties", 257), ("random", 1000)],
)
def test_draws_the_reference_tokens(kind: str, vocab: int) -> None:
    bench = Bench(make_params(*SETTINGS), vocab)
    for _ in range(REPEATS):
        bench.check(make_logits(kind, len(SETTINGS), vocab))


@pytest.mark.parametrize("vocab", [1, 7, 257])
def test_draws_from_what_no_model_should_give(vocab: int) -> None:
    """Every kind of row beside every other, each with its own settings."""
    for shift in range(1 if vocab < 257 else 2 * REPEATS):
        pairs = [(kind, SETTINGS[(shift + 7 * n) % len(SETTINGS)]) for n, kind in enumerate(KINDS)]
        bench = Bench(make_params(*(chosen for _, chosen in pairs)), vocab)
        bench.check(torch.cat([make_logits(kind, 1, vocab) for kind, _ in pairs]))


def test_draws_over_several_blocks() -> None:
    params = make_params(*SETTINGS[::4])
    bench = Bench(params, 4096)
    bench.check(make_logits("random", len(params), 4096))


def test_draws_where_filters_end_among_many() -> None:
    """There are too many tokens at the edge to list, so the row is read again."""
    params = make_params(
        {"top_k": 50}, {"top_p": 0.02}, {"top_k": 4500, "top_p": 0.5}, {"top_k": 4, "top_p": 0.5}
    )
    bench = Bench(params, 5003, penalized=False)
    bench.check(make_logits("constant", len(params), 5003))


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 6, "temperature": 200.0},
        {"top_p": 0.3, "temperature": 200.0},
        {"top_k": 150, "top_p": 0.3, "temperature": 200.0},
        {"top_k": 60, "top_p": 0.9, "temperature": 100.0, "min_p": 0.97},
    ],
)
def test_draws_at_the_edge_with_many_seeds(chosen: dict[str, Any]) -> None:
    """So hot that all tokens fall into few bins: most draws are decided token by token."""
    num = 10 * REPEATS
    bench = Bench(make_params(*[chosen] * num), 200, penalized=False)
    logits = make_logits("random", 1, 200).expand(num, -1).contiguous()
    assert len(bench.check(logits).unique()) > 1


@pytest.mark.parametrize("chosen", [{"top_p": 0.5}, {"top_k": 30}, {"top_k": 60, "top_p": 0.6}])
def test_draws_whether_or_not_a_filter_keeps_the_winner(chosen: dict[str, Any]) -> None:
    """A row is done at once if the filters keep the unfiltered winner, and sifted otherwise."""
    num, vocab = 10 * REPEATS, 1100
    bench = Bench(make_params(*[chosen] * num), vocab, penalized=False)
    logits = make_logits("random", 1, vocab).expand(num, -1).contiguous()
    free = sample(logits, bench.settings, None, filtered=False).token
    scores, ids = logits.double().sort(dim=1, descending=True, stable=True)
    kept = keep_tokens(scores - scores[:, :1], bench.settings).gather(1, ids.argsort(dim=1))
    is_kept = kept.gather(1, free[:, None])
    assert is_kept.any()
    assert not is_kept.all()
    bench.check(logits)


@pytest.mark.parametrize("num_close", [2, 40])
def test_draws_among_sums_that_float32_cannot_tell_apart(num_close: int) -> None:
    """Logits that cancel their noise, in one block and in several, among lower ones."""
    vocab = 2500
    chosen = [{}, {"top_p": 0.999}, {"min_p": 1e-9}, {"top_k": 2000, "temperature": 0.5}]
    bench = Bench(make_params(*chosen), vocab, penalized=False)
    for width in (900, vocab):
        logits = torch.full((len(chosen), vocab), -30.0)
        step = bench.state.counts[2, bench.row]
        ids = torch.arange(vocab, device=DEVICE).expand(len(chosen), -1)
        noise = draw_gumbel(bench.settings.seed, step, ids).cpu()
        for place, own in enumerate(noise):
            close = torch.randperm(width)[:num_close]
            sums = 8 + 1e-6 * torch.rand(num_close)
            temperature = bench.settings.temperature[place].item()
            logits[place, close] = ((sums - own[close]) * temperature).float()
        bench.check(logits.to(DEVICE))


@draw.jit
def _tell_chances(keys, shifted, out_chance, out_mass, num: tl.constexpr):
    lane = tl.arange(0, num)
    scores = tl.load(shifted + lane)
    tl.store(out_chance + lane, draw._find_chance(tl.load(keys + lane), lane * 0, scores))
    tl.store(out_mass + lane, draw._find_mass(scores))


def _invert_mix(bits: int) -> int:
    """Invert SplitMix64's step on 64 bits."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        once = bits ^ (bits >> shift)
        bits = once ^ (bits >> 2 * shift) ^ (bits >> 3 * shift if 3 * shift < 64 else 0)
        bits = bits * pow(factor, -1, 2**64) % 2**64
    return (bits - 0x9E3779B97F4A7C15) % 2**64


def test_float32_is_as_close_as_is_said() -> None:
    """From the least noise to the most, and where one formula replaces another."""
    whole = 2**52
    uniforms = [0, 1, 2, 99, whole - 1, whole - 2, whole - 3, whole - 100]
    for power in range(1, 52):
        edges = (whole >> power, whole - (whole >> power))
        uniforms += [edge + n for edge in edges for n in (-2, -1, 0, 1)]
    uniforms += torch.randint(0, whole, (4096 - len(uniforms),)).tolist()
    golden = pow(0x9E3779B97F4A7C15, -1, 2**64)
    keys = [_invert_mix(n << 12 | 0xABC) * golden % 2**64 for n in uniforms]
    key = torch.tensor([k - 2**64 if k >= 2**63 else k for k in keys], device=DEVICE)
    uniform = (torch.tensor(uniforms, dtype=torch.float64) + 0.5) / whole
    noise = -(-uniform.log()).log()
    shifted = -42.7 * torch.rand(len(keys), dtype=torch.float64)
    shifted[::2] *= 0.01
    chance, mass = torch.full((len(keys),), NAN, device=DEVICE), torch.zeros_like(key)
    _tell_chances[(1,)](key, shifted.to(DEVICE), chance, mass, len(keys))
    error = chance.cpu().double().log() - (shifted + noise)
    assert error.abs().max() < 3e-5
    assert 1 - draw.CLOSE.value > 2 * 3e-5
    expected = (shifted.exp() * 2.0**40).round().long()
    assert (mass.cpu() - expected).abs().max() <= 1


def test_draws_from_a_real_vocabulary() -> None:
    params = make_params({"top_k": 50, "top_p": 0.95, "temperature": 0.8})
    bench = Bench(params, 50_257, penalized=False)
    bench.check(make_logits("random", len(params), 50_257))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reads_narrow_logits_of_a_wider_tensor(dtype: torch.dtype) -> None:
    params = make_params(*SETTINGS[1::4])
    bench = Bench(params, 1000)
    wide = make_logits("random", len(params), 1024).to(dtype)
    bench.check(wide[:, :1000])


def test_follows_the_reference_over_steps() -> None:
    """Penalties apply to the tokens of earlier steps."""
    chosen = [
        {"temperature": 0, "repetition_penalty": 1.5},
        {"repetition_penalty": 3.0},
        {"repetition_penalty": 2.0, "top_p": 0.6},
        {"repetition_penalty": 2.0, "top_k": 4},
        {"temperature": 0, "frequency_penalty": 1.5},
        {"presence_penalty": 2, "frequency_penalty": 0.3},
        {"top_k": 9, "top_p": 0.9},
    ]
    bench = Bench(make_params(*chosen), 50)
    assert bench.state.seen is not None
    bench.state.seen.zero_()
    logits = make_logits("random", len(chosen), 50).abs()
    tokens = torch.stack([bench.check(logits) for _ in range(6)])
    # greedy with penalties, repeatedly from the same logits
    assert len(tokens[:, 0].unique()) > 1
    assert len(tokens[:, 4].unique()) > 1


def test_nobody_changes_nothing() -> None:
    bench = Bench(make_params(*SETTINGS[-4:]), 100)
    logits = make_logits("random", 4, 100)
    for plain in (False, True):
        before = bench.read()
        token, logprob = bench.draw(logits, torch.full_like(bench.row, -1), plain=plain)
        assert not token.any()
        assert torch.equal(logprob, torch.zeros_like(logprob))
        for ours, theirs in zip(bench.read(), before, strict=True):
            assert torch.equal(ours, theirs)


def test_empty_places_among_others() -> None:
    params = make_params(*SETTINGS[::3])
    bench = Bench(params, 300)
    logits = make_logits("random", len(params), 300)
    before = bench.read()
    every = bench.draw(logits)
    shared, counts, tokens, seen = bench.read()
    bench.state.counts.copy_(before[1])
    bench.state.tokens.copy_(before[2])
    assert bench.state.seen is not None
    bench.state.seen.copy_(before[3])
    present = torch.arange(len(params), device=DEVICE) % 3 != 1
    some = bench.draw(logits, torch.where(present, bench.row, -1))
    for ours, theirs in zip(some, every, strict=True):
        assert torch.equal(ours, theirs.masked_fill(~present, 0))
    here, gone = bench.row[present], bench.row[~present]
    assert torch.equal(bench.state.shares, shared)
    for ours, new, old in zip(bench.read()[1:3], (counts, tokens), before[1:3], strict=True):
        assert torch.equal(ours[..., here], new[..., here])
        assert torch.equal(ours[..., gone], old[..., gone])
    assert torch.equal(bench.state.seen[here], seen[here])
    assert torch.equal(bench.state.seen[gone], before[3][gone])


def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor on how many programs share it; results are bitwise equal."""
    vocab = 3000
    params = make_params(*SETTINGS[::3])
    bench = Bench(params, vocab)
    logits = make_logits("random", len(params), vocab)
    before = bench.read()
    token, logprob = bench.draw(logits)
    bench.state.counts.copy_(before[1])
    assert bench.state.seen is not None
    bench.state.seen.copy_(before[3])
    for place in range(0, len(params), 3):
        alone = bench.draw(logits[place : place + 1], bench.row[place : place + 1])
        assert torch.equal(alone[0][0], token[place])
        assert torch.equal(alone[1][0], logprob[place])


def test_parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for parts in (1, 2):
        monkeypatch.setattr(draw, "choose_parts", lambda *_, parts=parts: parts)
        bench = Bench(make_params(*SETTINGS[2::6]), 3000)
        bench.check(make_logits("random", len(SETTINGS[2::6]), 3000))


@pytest.mark.parametrize("marked", [False, True])
def test_plain_is_the_first_of_the_best(marked: bool) -> None:
    bench = Bench(make_params(*[{"temperature": 0}] * len(KINDS)), 1100, penalized=marked)
    logits = torch.cat([make_logits(kind, 1, 1100) for kind in KINDS])
    truth = sample(logits, bench.settings, None)
    expected = bench.read()
    expected[1][2, bench.row] += 1
    expected[2][bench.row] = truth.token
    if marked:
        expected[3][bench.row, truth.token] += 2
    token, logprob = bench.draw(logits, plain=True)
    assert token.tolist() == truth.token.tolist()
    assert not logprob.any()
    for ours, theirs in zip(bench.read(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_unfiltered_needs_two_kernels_only() -> None:
    chosen = [{}, {"temperature": 0.4}, {"min_p": 0.2}, {"temperature": 0}]
    bench = Bench(make_params(*chosen), 1500)
    for _ in range(REPEATS):
        bench.check(make_logits("random", len(chosen), 1500), filtered=False)


def test_fewer_places_than_there_is_room_for() -> None:
    bench = Bench(make_params({"top_p": 0.5}), 40)
    bench.drawer = draw.Drawer(bench.state, 9)
    bench.check(make_logits("random", 1, 40))
    token, logprob = bench.draw(torch.empty(0, 40, device=DEVICE), bench.row[:0])
    assert token.numel() == logprob.numel() == 0


def test_refuses_a_vocabulary_that_sums_have_no_room_for() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        draw.DrawState(2, 2**22 + 1, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [32_768, 50_257, 262_144])
@pytest.mark.parametrize("num_places", [1, 64])
def test_draws_on_a_gpu(num_places: int, vocab: int, dtype: torch.dtype) -> None:
    turns = itertools.cycle(SETTINGS)
    for _ in range(1 if num_places == 64 else len(SETTINGS)):
        params = make_params(*itertools.islice(turns, num_places))
        bench = Bench(params, vocab)
        for kind in ("random", "ties", "peaked", "holes", "constant"):
            bench.check(make_logits(kind, num_places, vocab).to(dtype))


@pytest.mark.gpu
def test_a_captured_step_is_replayed() -> None:
    """Settings, rows and steps are read on the device at every replay."""
    vocab, num_places = 32_768, 64
    params = make_params(*itertools.islice(itertools.cycle(SETTINGS), num_places))
    bench = Bench(params, vocab)
    assert bench.state.seen is not None
    logits = make_logits("random", num_places, vocab)
    token = torch.zeros(num_places, device=DEVICE, dtype=torch.int64)
    logprob = torch.zeros(num_places, device=DEVICE)
    before = bench.read()
    bench.drawer(logits, bench.row, token, logprob, plain=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.drawer(logits, bench.row, token, logprob, plain=False)
    bench.state.counts.copy_(before[1])
    bench.state.seen.copy_(before[3])
    for _ in range(20):
        logits.copy_(make_logits("random", num_places, vocab))
        step = bench.state.counts[2, bench.row]
        seen = bench.state.seen[bench.row]
        truth = sample(logits, bench.settings._replace(step=step), seen)
        graph.replay()
        assert token.tolist() == truth.token.tolist()
        torch.testing.assert_close(logprob, truth.logprob, rtol=1e-5, atol=1e-5)
        assert torch.equal(bench.state.tokens[bench.row], token)
