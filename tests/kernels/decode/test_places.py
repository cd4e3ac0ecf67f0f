"""The row kernels of a packed step against plain torch; without a GPU, interpreted."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthmix.nn.layers import RMSNorm, activate
from depthmix.nn.router import Predictor, Router
from depthmix.nn.routing import apply_gate

places = pytest.importorskip("depthmix.kernels.decode.places")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter multiplies matrices of bfloat16 as integers
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
NAN = float("nan")
EPS = 1e-5


def make(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NAN, device=DEVICE, dtype=dtype)


def integers(values: list[int] | Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype, device=DEVICE)


def check_close(ours: Tensor, truth: Tensor, *, of_products: bool = False) -> None:
    """Equal up to a rounding or two; `of_products` allows sums in another order."""
    atol = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[ours.dtype]
    if of_products:
        atol *= 5
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[ours.dtype]
    torch.testing.assert_close(ours.float(), truth.float(), rtol=rtol, atol=atol)


def choose(num_tokens: int, num_places: int, count: int, *, permuted: bool) -> Tensor | None:
    """Assign tokens to places; entries past the last are not valid tokens."""
    if not permuted:
        return None
    index = torch.full((num_places,), 1 << 30, device=DEVICE, dtype=torch.int32)
    index[:count] = torch.randperm(num_tokens, device=DEVICE)[:count].int()
    return index


def name_tokens(index: Tensor | None, count: int) -> Tensor:
    return torch.arange(count, device=DEVICE) if index is None else index[:count].long()


SIZES = [
    # tokens, places, count, width
    (19, 19, 11, 64),
    (19, 17, 17, 72),
    (5, 5, 0, 64),
    (9, 9, 4, 33),
    (3, 3, 3, 1),
]
LARGE = [(2048, 2048, 300, 2048), (5000, 5000, 4999, 1023), (2048, 2048, 2048, 16384)]


def check_rows(sizes: tuple[int, ...], dtype: torch.dtype, *, permuted: bool) -> None:
    """Check all kernels that work on rows of the stream."""
    num_tokens, num_places, count, width = sizes
    index = choose(num_tokens, num_places, count, permuted=permuted)
    token, counter = name_tokens(index, count), integers([count])
    norm = RMSNorm(width, EPS).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    x = make(num_tokens, width, dtype=dtype)
    others = torch.ones(num_tokens, dtype=torch.bool, device=DEVICE)
    others[token] = False
    x[others] = NAN
    update, more = poison(num_places, width, dtype=dtype), poison(num_places, width, dtype=dtype)
    update[:count], more[:count] = (make(count, width, dtype=dtype) for _ in range(2))
    gate = poison(num_tokens)
    gate[token] = make(count)

    out, given = poison(num_places, width, dtype=dtype), x.clone()
    places.normalize_places(given, index, counter, norm.weight, EPS, out)
    check_close(out[:count], norm(x[token].float()))
    assert out[count:].isnan().all()
    check_unmoved(given, x)

    for keep in (False, True):
        out, given = poison(num_places, width, dtype=dtype), x.clone()
        places.add_and_normalize(given, index, counter, update, norm.weight, EPS, out, keep=keep)
        total = x[token].float() + update[:count].float()
        check_close(out[:count], norm(total))
        assert out[count:].isnan().all()
        if keep:
            check_close(given[token], total)
            check_unmoved(given[others], x[others])
        else:
            check_unmoved(given, x)

    for factor in (gate, None):
        for first in (update, None):
            given = x.clone()
            places.add_update(given, index, counter, factor, first, more)
            added = more[:count].float() + (0 if first is None else first[:count].float())
            truth = x[token].float() + (1 if factor is None else factor[token][:, None]) * added
            check_close(given[token], truth)
            check_unmoved(given[others], x[others])


def check_unmoved(ours: Tensor, before: Tensor) -> None:
    torch.testing.assert_close(ours, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows(sizes: tuple[int, ...], dtype: torch.dtype, permuted: bool) -> None:
    check_rows(sizes, dtype, permuted=permuted)


@pytest.mark.gpu
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", LARGE)
def test_many_rows(sizes: tuple[int, ...], dtype: torch.dtype, permuted: bool) -> None:
    check_rows(sizes, dtype, permuted=permuted)


def test_programs_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PROGRAMS", 3)
    check_rows((19, 17, 13, 40), torch.float32, permuted=True)
    check_activation(11, 7, 1500, torch.float32, "swiglu")


def test_a_norm_may_be_wider_than_the_stream() -> None:
    x, weight, out = make(3, 24, dtype=HALF), make(24), poison(3, 24, dtype=HALF)
    places.normalize_places(x, None, integers([3]), weight, EPS, out)
    check_close(out, F.rms_norm(x.float(), (24,), weight, EPS))


def check_activation(
    num_places: int, count: int, width: int, dtype: torch.dtype, kind: str
) -> None:
    hidden = poison(num_places, 2 * width if kind == "swiglu" else width, dtype=dtype)
    hidden[:count] = make(*hidden[:count].shape, dtype=dtype)
    out = poison(num_places, width, dtype=dtype)
    places.activate_places(hidden, integers([count]), out, kind)
    check_close(out[:count], activate(hidden[:count].float(), kind))
    assert out[count:].isnan().all()


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(7, 5, 64), (4, 4, 1030), (3, 0, 16), (5, 2, 37)])
def test_activation(sizes: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    check_activation(*sizes, dtype, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2048, 300, 5504), (2048, 2048, 5461)])
def test_large_activation(sizes: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    check_activation(*sizes, dtype, kind)


def test_there_is_no_other_activation() -> None:
    with pytest.raises(ValueError, match="relu"):
        places.activate_places(make(2, 4), integers([2]), make(2, 4), "relu")


def check_product(
    num_places: int, count: int, width: int, num_out: int, dtype: torch.dtype, **options: Any
) -> Tensor:
    source = poison(num_places, width, dtype=dtype)
    source[:count] = make(count, width, dtype=dtype)
    weight = make(num_out, width, dtype=dtype, scale=width**-0.5)
    out = poison(num_places, num_out, dtype=dtype)
    options = {"expected": count, **options}
    if not source.is_cuda and "tuning" not in options:
        tuning = places.choose_tuning(count, num_out, width, dtype)
        options["tuning"] = tuning._replace(programs=min(tuning.programs, 20))
    places.multiply_places(source, weight, out, integers([count]), **options)
    check_close(out[:count], source[:count].double() @ weight.double().T, of_products=True)
    assert out[count:].isnan().all()
    return out


PRODUCTS = [
    # places, count, width, outputs
    (70, 40, 64, 48),
    (70, 70, 128, 130),
    (9, 0, 64, 32),
    (33, 32, 40, 24),
    (20, 17, 37, 19),
    (1, 1, 200, 3),
]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", PRODUCTS)
def test_product(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_product(*sizes, dtype)


@pytest.mark.parametrize(
    "tuning",
    [
        places.PlaceTuning(16, 16, 16, 1, 2, group=2, programs=30),
        places.PlaceTuning(16, 32, 32, 2, 3, group=1, programs=9),
        places.PlaceTuning(16, 32, 16, 4, 2, splits=4, programs=20),
        places.PlaceTuning(32, 16, 16, 4, 2, group=3, splits=3, programs=45),
        # tiles that begin in the middle of a program's share, which also holds whole ones
        places.PlaceTuning(16, 16, 16, 4, 2, group=2, splits=4, programs=9),
        # fewer parts than programs, and some parts without columns
        places.PlaceTuning(32, 32, 16, 4, 2, splits=8, programs=40),
    ],
)
@pytest.mark.parametrize("sizes", [(70, 51, 96, 80), (70, 9, 61, 33), (70, 0, 32, 16)])
def test_tunings_only_round(sizes: tuple[int, int, int, int], tuning: Any) -> None:
    check_product(*sizes, HALF, tuning=tuning)
    # with fewer programs than tiles
    tuning = tuning._replace(programs=min(tuning.programs, 7))
    check_product(*sizes, torch.float32, tuning=tuning)


def test_only_what_is_aligned_is_described() -> None:
    assert places.can_describe(make(3, 72, dtype=HALF))
    assert not places.can_describe(make(3, 72))
    assert not places.can_describe(make(3, 71, dtype=HALF))
    assert not places.can_describe(make(8 * 72, dtype=HALF)[4 : 4 + 2 * 72].view(2, 72))
    assert not places.can_describe(make(0, 72, dtype=HALF))


def test_splits_leave_their_counters_as_they_were_and_sum_in_order() -> None:
    tuning = places.PlaceTuning(16, 16, 16, 4, 2, splits=4, programs=32)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(check_product(32, 21, 100, 20, torch.float32, tuning=tuning)[:21])
    assert torch.equal(found[0], found[1])
    assert not places._find_arrivals(found[0].device, 32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 32, 100, 256, 777, 2048])
@pytest.mark.parametrize(
    ("width", "num_out"), [(2048, 6144), (2048, 10923), (5504, 2048), (1000, 3000), (1021, 1024)]
)
def test_large_product(width: int, num_out: int, count: int, dtype: torch.dtype) -> None:
    check_product(2048, count, width, num_out, dtype)
    # as if the guess was wrong
    check_product(2048, count, width, num_out, dtype, expected=256)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("tile", places.TILES)
def test_all_tiles(tile: Any, splits: int) -> None:
    for count in (60, 256, 1500):
        tuning = tile.tuning._replace(splits=splits)
        check_product(2048, count, 5504, 2048, torch.bfloat16, tuning=tuning)
        check_product(2048, count, 2048, 2056, torch.bfloat16, tuning=tuning)


@pytest.mark.parametrize("num_out", [8, 2048, 6144, 11008])
@pytest.mark.parametrize("width", [64, 2048, 5504])
def test_chosen_tunings_fit(width: int, num_out: int) -> None:
    for expected in (0, 1, 32, 64, 256, 2048, 16384):
        tuning = places.choose_tuning(expected, num_out, width, torch.bfloat16)
        # loads in flight fit into a multiprocessor's shared memory
        num_bytes = 2 * (tuning.block_m + tuning.block_n) * tuning.block_k * tuning.num_stages
        assert num_bytes <= 227 * 1024
        assert tuning.splits == 1 or width >= tuning.splits * tuning.block_k
    assert places.choose_tuning(256, num_out, width, torch.float32) == places.TILE_FLOAT32


def check_scores(
    most: int, count: int, width: int, units: int, dtype: torch.dtype, *, normalize: bool
) -> None:
    router = Router(width, normalize=normalize).to(DEVICE).requires_grad_(False)
    router.weight.normal_(std=width**-0.5)
    predictor = None
    heads: list[Tensor | None] = [None, None, None]
    if units:
        predictor = Predictor(width, units).to(DEVICE).requires_grad_(False)
        for parameter in predictor.parameters():
            parameter.copy_(parameter.to(dtype))
        heads = [predictor.w_in.weight, predictor.w_out.weight[0], predictor.w_out.bias[0]]
        heads = [None if head is None else head.to(dtype) for head in heads]
    x = poison(most, width, dtype=dtype)
    x[:count] = make(count, width, dtype=dtype)
    score, wish = poison(most), poison(most)
    weight = router.weight[0].clone()
    places.score_tokens(x, weight, *heads, integers([count]), score, wish, normalize=normalize)
    given = x[None, :count].double()
    truth = router.double()(given)[0, :, 0].float()
    torch.testing.assert_close(score[:count], truth, rtol=1e-4, atol=1e-4)
    if predictor is not None:
        truth = predictor.double()(given)[0, :, 0].float()
    # 16-bit units are rounded, like the model's own
    atol = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(wish[:count], truth, rtol=1e-3, atol=atol)
    assert score[count:].isnan().all()
    assert wish[count:].isnan().all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "sizes", [(40, 33, 64, 16), (18, 18, 72, 21), (20, 0, 64, 16), (9, 5, 33, 0), (7, 7, 150, 140)]
)
def test_scores(sizes: tuple[int, int, int, int], dtype: torch.dtype, normalize: bool) -> None:
    check_scores(*sizes, dtype, normalize=normalize)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(2048, 2000, 2048, 64), (8192, 8192, 1023, 64), (4000, 4000, 1024, 512)]
)
def test_many_scores(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_scores(*sizes, dtype, normalize=True)


class Step:
    """Chunks of one token, then longer and empty ones, with padding in between and after."""

    def __init__(
        self, most: int, num_alone: int, sizes: list[int], *, padding: int = 0, rows: int = 40
    ) -> None:
        lengths = [1] * num_alone + sizes
        self.begin = integers([0, *lengths]).cumsum(0).int()
        self.num_real, self.num_chunks = int(self.begin[-1]), len(lengths)
        assert self.num_real + padding <= most
        self.num_tokens = integers([self.num_real])
        self.chunk_row = torch.randperm(max(rows, self.num_chunks))[: self.num_chunks].int()
        self.chunk_row = self.chunk_row.to(DEVICE)
        if num_alone > 2:
            self.chunk_row[2] = -1
        for number, size in enumerate(lengths):
            if size == 0 and number % 2:
                self.chunk_row[number] = -1
        self.row = torch.full((most,), 7, device=DEVICE, dtype=torch.int32)
        self.position = torch.zeros(most, device=DEVICE, dtype=torch.int64)
        for number, (start, stop) in enumerate(pairwise(self.begin.tolist())):
            self.row[start:stop] = self.chunk_row[number]
            past = 0 if number % 3 == 0 else number
            self.position[start:stop] = torch.arange(past, past + stop - start)


def check_packing(
    step: Step, num_alone: int, *, gate_kind: str, first_tokens: int, exits: bool, bias: float
) -> int:
    """Returns the number of kept tokens."""
    most, num_real = step.row.shape[0], step.num_real
    wish, score = make(most) + bias, make(most)
    wish[num_real:], score[num_real:] = 5.0, NAN
    previous = None
    if exits:
        previous = torch.where(make(most) > -0.5, 3, -1).int()

    token = torch.arange(most, device=DEVICE)
    kept = (step.row >= 0) & (token < num_real) & ((wish > 0) | (step.position < first_tokens))
    if previous is not None:
        kept &= previous >= 0
    number = int(kept.sum())
    place = kept.cumsum(0) - 1
    before = torch.cat([integers([0], torch.int64), kept.cumsum(0)])
    kept_row = torch.full((num_alone,), -1, dtype=torch.int32, device=DEVICE)
    for start, stop in pairwise(step.begin.tolist()):
        if stop - start == 1 and kept[start] and place[start] < num_alone:
            kept_row[place[start]] = step.row[start]

    def junk(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, 77, device=DEVICE, dtype=dtype)

    index, slot, first, count = junk(most), junk(most), junk(step.num_chunks + 1), junk(1)
    gate, taken = poison(most), junk(most, dtype=torch.uint8)
    ours_row = junk(num_alone)
    places.pack_tokens(
        wish,
        score,
        step.row,
        step.position,
        previous,
        step.begin,
        step.num_tokens,
        first_tokens,
        index,
        slot,
        first,
        count,
        gate,
        ours_row,
        taken,
        gate_kind=gate_kind,
    )
    assert count.item() == number
    assert torch.equal(index[:number].long(), token[kept])
    assert (index[number:] == 77).all()
    assert torch.equal(slot.long(), torch.where(kept, place, -1))
    assert torch.equal(taken, kept.to(torch.uint8))
    assert torch.equal(first.long(), before[step.begin.long()])
    assert torch.equal(ours_row, kept_row)
    truth = apply_gate(gate_kind, score[:num_real])
    torch.testing.assert_close(gate[:num_real], truth, rtol=1e-5, atol=1e-6)
    assert (gate[num_real:] == 0).all()
    return number


@pytest.mark.parametrize("gate_kind", ["raw", "sigmoid", "tanh1", "unit"])
@pytest.mark.parametrize(("first_tokens", "exits"), [(0, False), (2, False), (0, True), (2, True)])
def test_packing(gate_kind: str, first_tokens: int, exits: bool) -> None:
    step = Step(60, 6, [17, 0, 9, 1, 20, 0])
    options = {"gate_kind": gate_kind, "first_tokens": first_tokens, "exits": exits}
    number = check_packing(step, 6, bias=0.0, **options)
    assert 5 < number < 50


def test_an_unknown_gate_is_not_taken_for_another() -> None:
    options = {"gate_kind": "soft", "first_tokens": 0, "exits": False}
    # the interpreter and the compiler each wrap it in their own error
    with pytest.raises(Exception, match=r"static_assert|AssertionError"):
        check_packing(Step(60, 6, [17, 0, 9, 1, 20, 0]), 6, bias=0.0, **options)


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("padding", [0, 5, 30])
def test_packing_by_several_programs(
    block: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "BLOCK_PACKED", block)
    monkeypatch.setattr(places, "BLOCK_COUNTED", 16)
    # chunks that begin where a program does, or past the last token
    step = Step(64 + padding, 11, [5, 16, 0, 8, 1, 23, 0, 0], padding=padding)
    for bias, num_alone in ((0.0, 11), (0.0, 4), (50.0, 40), (-50.0, 11)):
        options = {"gate_kind": "raw", "first_tokens": 1, "exits": False}
        check_packing(step, num_alone, bias=bias, **options)


def test_packing_nobody_and_nothing() -> None:
    options = {"gate_kind": "sigmoid", "first_tokens": 0, "exits": False}
    assert check_packing(Step(20, 3, [9]), 3, bias=-50.0, **options) == 0
    assert check_packing(Step(20, 0, [0, 0]), 3, bias=50.0, **options) == 0
    assert check_packing(Step(20, 0, [20]), 0, bias=50.0, **options) == 20
    assert check_packing(Step(1, 1, []), 1, bias=50.0, **options) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("most", [2048, 5000, 16384])
def test_packing_many(most: int) -> None:
    sizes = [most // 5, most // 3, 0, most // 4]
    for num_alone, exits in ((64, False), (200, True)):
        step = Step(most, num_alone, sizes, rows=512)
        options = {"gate_kind": "tanh1", "first_tokens": 4, "exits": exits}
        check_packing(step, num_alone, bias=-0.7, **options)


def check_step(step: Step, width: int, num_layers: int, num_rows: int, dtype: torch.dtype) -> None:
    """Check `begin_step` and `end_step`."""
    most, num_real, vocabulary = step.row.shape[0], step.num_real, 50
    given = torch.randint(-1, vocabulary, (most,), device=DEVICE)
    newest = torch.randint(vocabulary, (num_rows,), device=DEVICE)
    embedding = make(vocabulary, width, dtype=dtype)
    lengths = torch.randint(1, 30, (num_layers, num_rows), device=DEVICE, dtype=torch.int32)
    token, x = torch.full_like(given, 77), poison(most, width, dtype=dtype)
    truth_token = torch.where(given < 0, newest[step.row.clamp(min=0).long()], given)
    truth_token = torch.where((given < 0) & (step.row < 0), 0, truth_token)
    truth, begin, rows = lengths.clone(), step.begin.tolist(), step.chunk_row.tolist()
    chunks = list(zip(begin[:-1], begin[1:], rows, strict=True))
    for start, stop, row in chunks:
        if row >= 0 and start < stop and step.position[start] == 0:
            truth[:, row] = 0
    places.begin_step(
        given,
        newest,
        step.row,
        step.position,
        step.begin,
        step.chunk_row,
        step.num_tokens,
        embedding,
        lengths,
        token,
        x,
    )
    assert torch.equal(token[:num_real], truth_token[:num_real])
    assert (token[num_real:] == 77).all()
    assert torch.equal(x[:num_real], embedding[truth_token[:num_real]])
    assert x[num_real:].isnan().all()
    assert torch.equal(lengths, truth)

    route_of_layer = integers([layer // 2 if layer % 2 else -1 for layer in range(num_layers)])
    num_routes = num_layers // 2
    added = torch.randint(0, 5, (num_routes, step.num_chunks), device=DEVICE)
    firsts = F.pad(added.cumsum(1), (1, 0)).int()
    for layer, route in enumerate(route_of_layer.tolist()):
        for number, (start, stop, row) in enumerate(chunks):
            if row >= 0:
                truth[layer, row] += stop - start if route < 0 else int(added[route, number])
    places.end_step(firsts, step.begin, step.chunk_row, route_of_layer, lengths)
    assert torch.equal(lengths, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_layers", [1, 5])
def test_step(num_layers: int, dtype: torch.dtype) -> None:
    check_step(Step(50, 6, [17, 0, 9, 1, 12, 0]), 33, num_layers, 41, dtype)
    check_step(Step(9, 3, [6]), 64, num_layers, 50, dtype)
    check_step(Step(9, 0, [0]), 16, num_layers, 40, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_step(dtype: torch.dtype) -> None:
    check_step(Step(4096, 250, [1500, 0, 2000], rows=300), 2048, 24, 300, dtype)


@pytest.mark.gpu
def test_a_captured_block_follows_the_count() -> None:
    """A captured launch handles another count when it is replayed."""
    num_places, width, hidden = 512, 256, 1024
    x, weight = make(num_places, width, dtype=HALF), make(hidden, width, dtype=HALF, scale=0.06)
    norm, count = torch.ones(width, device=DEVICE), integers([8])
    normed = poison(num_places, width, dtype=HALF)
    product = poison(num_places, hidden, dtype=HALF)
    index = torch.randperm(num_places, device=DEVICE).int()

    def run() -> None:
        places.normalize_places(x, index, count, norm, EPS, normed)
        places.multiply_places(normed, weight, product, count, expected=64)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for number in (0, 3, 100, 512, 64):
        count.fill_(number)
        normed.fill_(NAN)
        product.fill_(NAN)
        graph.replay()
        rows = F.rms_norm(x[index.long()].float(), (width,), norm, EPS)[:number].to(HALF)
        truth = rows.double() @ weight.double().T
        check_close(product[:number], truth, of_products=True)
        assert product[number:].isnan().all()
