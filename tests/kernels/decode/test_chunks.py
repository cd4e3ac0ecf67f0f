"""A packed step's keys, values and attention equal plain torch, token by token."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from depthmix.kernels.reference import rotate_heads
from depthmix.nn.layers import make_phase_table

kernels = pytest.importorskip("depthmix.kernels.decode.chunks")
paged_triton = pytest.importorskip("depthmix.kernels.paged_triton")

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = 64
# Triton's interpreter would multiply bf16 as integers inside `attend_tokens`
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class Shape(NamedTuple):
    num_heads: int = 2
    num_groups: int = 2
    head_width: int = 16
    page_size: int = 4
    dtype: torch.dtype = torch.float32


class Packed:
    """Chunks of several rows, with some tokens kept, over partly filled pages.

    `kept` is the number of kept tokens of each chunk; with `skips`, there are twice as many tokens.
    The chunks' rows have `past` tokens each, and are in no particular order.
    """

    def __init__(
        self, shape: Shape, kept: list[int], past: list[int], skips: bool = True, spare: int = 3
    ) -> None:
        self.shape, self.kept, self.past = shape, kept, past
        dtype, size, num_chunks = shape.dtype, shape.page_size, len(kept)
        self.num_kept = sum(kept)
        self.num_places = self.num_kept + spare
        each = [2 * n + 1 if skips else n for n in kept]
        num_tokens = sum(each) + spare
        num_rows = num_chunks + 2
        rows = torch.randperm(num_rows)[:num_chunks]
        chunk = torch.repeat_interleave(torch.arange(num_chunks), torch.tensor(each))
        # chunk, position and row of padding must not be read
        self.chunk = torch.full((num_tokens,), 10**6)
        self.chunk[: len(chunk)] = chunk
        self.row = torch.full((num_tokens,), -1)
        self.row[: len(chunk)] = rows[chunk]
        self.position = torch.randint(POSITIONS, (num_tokens,))
        self.position[len(chunk) :] = 10**9
        begins = torch.tensor([0, *each]).cumsum(0)
        chosen = [begins[c] + torch.randperm(each[c])[:n].sort().values for c, n in enumerate(kept)]
        self.index = torch.full((self.num_places,), 10**6)
        self.index[: self.num_kept] = torch.cat(chosen)
        self.first = torch.tensor([0, *kept]).cumsum(0)
        self.count = torch.tensor([self.num_kept])
        self.chunk_row = torch.where(torch.tensor(kept) > 0, rows, -1)
        self.lengths = torch.randint(0, 5, (num_rows,))
        self.lengths[rows] = torch.tensor(past)
        most = -(-(max(p + k for p, k in zip(past, kept, strict=True)) + 5) // size)
        self.table = torch.randperm(num_rows * most).view(num_rows, most)
        # entries that no row holds must not be read
        self.pages = torch.full(
            (2, shape.num_groups, num_rows * most, size, shape.head_width), torch.nan, dtype=dtype
        )
        for row in range(num_rows):
            for slot in range(int(self.lengths[row])):
                page = self.table[row, slot // size]
                new = torch.randn(2, shape.num_groups, shape.head_width).to(dtype)
                self.pages[:, :, page, slot % size] = new
        num_all = shape.num_heads + 2 * shape.num_groups
        self.qkv = torch.randn(self.num_places, num_all * shape.head_width).to(dtype)
        self.qkv[self.num_kept :] = torch.nan
        self.phase_table = make_phase_table(POSITIONS, shape.head_width, 10_000.0)

    def place_on_device(self, transposed: bool = True) -> dict[str, Tensor]:
        """The kernels' arguments; with `transposed`, pages have the GPU's memory layout."""
        names = ["index", "count", "row", "chunk", "first", "chunk_row", "lengths", "table"]
        tensors = {name: getattr(self, name).int().to(DEVICE) for name in names}
        pages = self.pages.to(DEVICE, copy=True)
        if transposed:
            pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
        return tensors | {
            "position": self.position.to(DEVICE),
            "qkv": self.qkv.to(DEVICE, copy=True),
            "phase_table": self.phase_table.to(DEVICE),
            "key_pages": pages[0],
            "value_pages": pages[1],
        }

    def store_truth(
        self, norms: list[Tensor | None], bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The queries (P, N, H) and the pages after the step."""
        shape, num = self.shape, self.num_kept
        x = self.qkv[:num]
        x = (x if bias is None else x + bias).unflatten(1, (-1, shape.head_width))
        sizes = [shape.num_heads, shape.num_groups, shape.num_groups]
        query, key, value = x.split(sizes, dim=1)
        phase = self.phase_table[self.position[self.index[:num]]][None]
        turned = []
        for heads, norm in zip((query, key), norms, strict=True):
            if norm is not None:
                invert = torch.rsqrt(heads.float().square().mean(-1, keepdim=True) + eps)
                heads = (heads.float() * invert * norm).to(heads.dtype)
            turned.append(rotate_heads(heads[None], phase)[0])
        pages = self.pages.clone()
        place = 0
        for c, num_kept in enumerate(self.kept):
            for i in range(num_kept):
                slot = self.past[c] + i
                page = self.table[self.chunk_row[c], slot // shape.page_size]
                at = slot % shape.page_size
                pages[0, :, page, at], pages[1, :, page, at] = turned[1][place], value[place]
                place += 1
        return turned[0], pages

    def attend_truth(self, query: Tensor, pages: Tensor) -> Tensor:
        """(P, N, H) in float64, from pages that hold the new keys."""
        shape = self.shape
        each = shape.num_heads // shape.num_groups
        out = torch.zeros(self.num_kept, shape.num_heads, shape.head_width, dtype=torch.float64)
        for c, num_kept in enumerate(self.kept):
            if num_kept == 0:
                continue
            end = self.past[c] + num_kept
            stored = pages[:, :, self.table[self.chunk_row[c]].long()].flatten(2, 3)[:, :, :end]
            keys, values = stored.double().repeat_interleave(each, dim=1)
            places = slice(int(self.first[c]), int(self.first[c + 1]))
            score = torch.einsum("inh,nsh->nis", query[places].double(), keys)
            seen = torch.arange(end) <= self.past[c] + torch.arange(num_kept)[:, None]
            score = score.mul(shape.head_width**-0.5).masked_fill(~seen, -torch.inf)
            out[places] = torch.einsum("nis,nsh->inh", score.softmax(-1), values)
        return out


def assert_close(found: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """As close as the dtype allows, with NaN in the same places."""
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, truth, rtol=tolerance, atol=tolerance, equal_nan=True)


def rotate(step: dict[str, Tensor], shape: Shape, extras: list[Any], eps: float = 1e-5) -> None:
    """`extras` are the norms of queries and keys, and the bias."""
    names = ["qkv", "index", "count", "row", "position", "chunk", "first", "phase_table"]
    cache = [step[n] for n in ("key_pages", "value_pages", "table", "lengths")]
    extras = [None if t is None else t.to(DEVICE) for t in extras]
    kernels.rotate_and_store(
        *[step[n] for n in names], *extras, eps, *cache, num_heads=shape.num_heads
    )


def check_stored(packed: Packed, norms: bool = False, bias: bool = False, **options: Any) -> None:
    shape = packed.shape
    extras: list[Tensor | None] = [None, None, None]
    if norms:
        extras[:2] = (1 + torch.randn(2, shape.head_width).to(shape.dtype)).unbind()
    if bias:
        extras[2] = torch.randn(packed.qkv.shape[1]).to(shape.dtype)
    step = packed.place_on_device(**options)
    untouched = {n: t.clone() for n, t in step.items() if n not in ("qkv", "key_pages")}
    del untouched["value_pages"]
    rotate(step, shape, extras)
    query, pages = packed.store_truth(extras[:2], extras[2], 1e-5)
    width = shape.num_heads * shape.head_width
    found = step["qkv"].cpu()
    assert_close(found[: packed.num_kept, :width], query.flatten(1), shape.dtype)
    # places past the last are left unchanged
    assert found[packed.num_kept :].isnan().all()
    for name, truth, before in zip(("key_pages", "value_pages"), pages, packed.pages, strict=True):
        ours = step[name].cpu()
        assert torch.equal(ours.isnan(), truth.isnan())
        assert_close(ours, truth, shape.dtype)
        old = ~before.isnan()
        assert torch.equal(ours[old], before[old])
    for name, before in untouched.items():
        assert torch.equal(step[name], before)


def check_attended(
    packed: Packed, first_chunk: int = 0, tuning: Any = None, max_places: int | None = None
) -> None:
    """Queries of chunks; those before `first_chunk` are not computed."""
    shape = packed.shape
    query, pages = packed.store_truth([None, None], None, 0.0)
    truth = packed.attend_truth(query, pages).flatten(1)
    packed.qkv[: packed.num_kept, : truth.shape[1]] = query.flatten(1)
    packed.pages = pages
    step = packed.place_on_device()
    out = torch.full((packed.num_places, truth.shape[1]), torch.nan, dtype=shape.dtype)
    out = out.to(DEVICE)
    names = ["first", "chunk_row", "lengths", "key_pages", "value_pages", "table"]
    begin = int(packed.first[first_chunk])
    kernels.attend_chunks(
        step["qkv"],
        out,
        *[step[n] for n in names],
        num_heads=shape.num_heads,
        first_chunk=first_chunk,
        max_places=packed.num_places if max_places is None else max_places,
        tuning=tuning,
    )
    found = out.cpu().double()
    assert_close(found[begin : packed.num_kept], truth[begin:], shape.dtype)
    assert found[:begin].isnan().all()
    assert found[packed.num_kept :].isnan().all()


KEPT, PAST = [1, 5, 0, 20, 1, 0], [7, 0, 3, 18, 0, 0]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(4, 2, 24, 1),
        Shape(3, 1, 8, 16, torch.bfloat16),
        Shape(2, 1, 64, 3),
        Shape(1, 1, 256, 4),
    ],
)
@pytest.mark.parametrize("extras", [(False, False), (True, False), (True, True)])
def test_keys_are_stored_as_torch_would(shape: Shape, extras: tuple[bool, bool]) -> None:
    check_stored(Packed(shape, KEPT, PAST), *extras)


def test_many_heads_are_shared_out_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with some queries and some keys, or keys and values."""
    monkeypatch.setattr(kernels, "BLOCK_ROTATED", 32)
    check_stored(Packed(Shape(5, 5), [3, 2], [0, 4]), True, True)


def test_pages_may_lie_in_any_order_in_memory() -> None:
    check_stored(Packed(Shape(4, 2), KEPT, PAST), transposed=False)


def test_all_tokens_may_be_kept() -> None:
    packed = Packed(Shape(), KEPT, PAST, skips=False)
    assert packed.index[: packed.num_kept].tolist() == list(range(packed.num_kept))
    check_stored(packed)


def test_padding_is_passed_by() -> None:
    """A place without a row changes nothing, although it is counted."""
    packed = Packed(Shape(), [2], [3])
    step = packed.place_on_device()
    step["row"].fill_(-1)
    step["position"].fill_(10**9)
    before = {n: step[n].clone() for n in ("qkv", "key_pages", "value_pages")}
    rotate(step, packed.shape, [None, None, None])
    for name, value in before.items():
        torch.testing.assert_close(step[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_step_may_keep_nobody() -> None:
    packed = Packed(Shape(), [0, 0], [3, 0])
    check_stored(packed)
    check_attended(packed)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(4, 2, 24, 1),
        Shape(3, 1, 8, 16, torch.bfloat16),
        Shape(2, 1, 64, 3),
        Shape(2, 2, 128, 16, torch.bfloat16),
        Shape(1, 1, 256, 5),
    ],
)
@pytest.mark.parametrize("first_chunk", [0, 2])
def test_chunks_attend_as_torch_would(shape: Shape, first_chunk: int) -> None:
    check_attended(Packed(shape, KEPT, PAST), first_chunk)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16)])
@pytest.mark.parametrize("kept", [[40], [16, 0, 1, 17, 33], [0, 32]])
def test_blocks_may_end_anywhere(blocks: tuple[int, int], kept: list[int], split: bool) -> None:
    """Inside a chunk, inside the keys that all queries of a block see, and inside pages."""
    tuning = kernels.ChunkTuning(*blocks, num_warps=4, num_stages=2, split=split)
    packed = Packed(Shape(1, 1), kept, [31, 5, 0, 16, 15][: len(kept)], skips=False, spare=0)
    check_attended(packed, tuning=tuning, max_places=sum(kept))


def test_no_chunk_is_left() -> None:
    check_attended(Packed(Shape(), [1, 1], [3, 4]), first_chunk=2)


@pytest.mark.parametrize("width", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("max_places", [1, 20, 256, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tuning_fits(width: int, max_places: int, dtype: torch.dtype) -> None:
    """Into the shared memory of an H200 and of a desktop card, including loads in flight."""
    for room in (kernels.SHARED_BYTES, 99 * 1024):
        tuning = kernels.choose_tuning(dtype, width, 16, max_places, room)
        assert tuning.block_m in (16, 32, 64, 128)
        lines = tuning.block_m + 2 * tuning.block_n * (1 + (tuning.num_stages - 1) // 2)
        assert lines * max(16, 1 << (width - 1).bit_length()) * dtype.itemsize < room


@pytest.mark.parametrize("shape", [Shape(), Shape(6, 2, 24, 1), Shape(4, 1, 16, 16, NARROW)])
@pytest.mark.parametrize("busy", [None, 0, 2])
def test_tokens_attend_as_torch_would(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, busy: int | None
) -> None:
    """Queries alone in their rows; a place without one is left unchanged."""
    monkeypatch.setattr(paged_triton, "PROGRAMS", 3 * 5 * shape.num_groups)
    packed = Packed(shape, [1] * 5, [0, 40, 7, 3, 19])
    query, pages = packed.store_truth([None, None], None, 0.0)
    truth = packed.attend_truth(query, pages).flatten(1)
    packed.qkv[: packed.num_kept, : truth.shape[1]] = query.flatten(1)
    packed.pages = pages
    step = packed.place_on_device()
    place_row = packed.chunk_row.to(DEVICE)
    place_row[3] = -1
    out = torch.full((packed.num_places, truth.shape[1]), torch.nan, dtype=shape.dtype)
    out = out.to(DEVICE)
    names = ["lengths", "key_pages", "value_pages", "table"]
    kernels.attend_tokens(
        step["qkv"],
        out,
        place_row,
        *[step[n] for n in names],
        num_heads=shape.num_heads,
        busy=busy,
        num_places=5,
    )
    found = out.cpu().double()
    there = [0, 1, 2, 4]
    assert_close(found[there], truth[there], shape.dtype)
    assert found[[3, 5, 6, 7]].isnan().all()
    assert step["lengths"].tolist() == packed.lengths.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "width", "page_size"),
    [((4, 4), 128, 16), ((8, 2), 128, 16), ((4, 4), 64, 16), ((4, 2), 96, 1), ((2, 1), 256, 5)],
)
def test_real_sizes(dtype: torch.dtype, heads: tuple[int, int], width: int, page_size: int) -> None:
    shape = Shape(*heads, width, page_size, dtype)
    kept, past = [1, 1, 700, 0, 130, 3, 1025], [900, 17, 0, 5, 1300, 511, 1000]
    check_stored(Packed(shape, kept, past), True, True)
    check_attended(Packed(shape, kept, past), first_chunk=2)
    # few queries each, in many chunks
    kept, past = [33, 0, 31, 1, 64, 2, 0, 17] * 4, [100, 3, 800, 0, 64, 15, 1, 1000] * 4
    check_attended(Packed(shape, kept, past))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_step_can_be_captured(dtype: torch.dtype) -> None:
    """A graph follows changes on the device: another count, other chunks, other lengths."""
    shape = Shape(4, 2, 64, 16, dtype)
    steps = [
        Packed(shape, kept, past, skips=False, spare=200 - sum(kept))
        for kept, past in (([0, 60, 1], [5, 40, 95]), ([100, 0, 99], [0, 100, 1]))
    ]
    devices = [packed.place_on_device() for packed in steps]
    static = {n: t.clone() for n, t in devices[0].items()}
    out = torch.full((200, 4 * 64), torch.nan, dtype=dtype, device=DEVICE)
    names = ["first", "chunk_row", "lengths", "key_pages", "value_pages", "table"]

    def run_step() -> None:
        rotate(static, shape, [None, None, None])
        kernels.attend_chunks(
            static["qkv"],
            out,
            *[static[n] for n in names],
            num_heads=4,
            first_chunk=0,
            max_places=200,
        )

    run_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_step()
    for packed, device in zip(steps, devices, strict=True):
        for name, value in device.items():
            static[name].copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        truth = packed.attend_truth(*packed.store_truth([None, None], None, 0.0)).flatten(1)
        found = out.cpu().double()
        assert_close(found[: packed.num_kept], truth, dtype)
        assert found[packed.num_kept :].isnan().all()
