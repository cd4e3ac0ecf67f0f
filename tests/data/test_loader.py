"""Batches: the same for any number of ranks and after any resume, every token once an epoch."""

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.data.loader import Batch, Loader, permute, prefetch
from depthmix.data.shards import Corpus, Split

FolderMaker = Callable[..., Path]


def number_documents(lengths: list[int]) -> list[list[int]]:
    """Documents of unlike ids, so that a token tells where it is from."""
    numbers = iter(range(1, 60000))
    return [[next(numbers) for _ in range(length)] for length in lengths]


@pytest.fixture
def split(make_folder: FolderMaker) -> Split:
    documents = number_documents([3, 40, 1, 0, 17, 5, 5, 90, 2, 33])
    return Corpus.open(make_folder(documents, shard_tokens=60)).split("train")


def make_loader(split: Split, **options: Any) -> Loader:
    given: dict[str, Any] = {"seq_len": 8, "batch_size": 4, "seed": 5, **options}
    return Loader(split, **given)


def assert_equal(a: Batch, b: Batch) -> None:
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def expect_row(split: Split, order: list[int], row: int, seq_len: int) -> tuple[list[int], ...]:
    """One row by the definition, a token at a time."""
    stream = [
        # an end token is counted with the document that follows it
        (place + (token == 0), int(token))
        for place, number in enumerate(order)
        for token in split.read(number)
    ]
    part = stream[row * seq_len : row * seq_len + seq_len + 1]
    tokens = [token for _, token in part[:-1]]
    targets = [token for _, token in part[1:]]
    documents = [int(place - part[0][0]) for place, _ in part[:-1]]
    return tokens, targets, documents


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_follow_the_definition(split: Split, shuffle: bool) -> None:
    loader = make_loader(split, shuffle=shuffle, batch_size=3)
    num_rows = loader.num_rows_per_epoch
    assert num_rows == (split.num_tokens - 1) // 8
    for epoch in range(2):
        order, rows = list(range(split.num_documents)), list(range(num_rows))
        if shuffle:
            order = permute(split.num_documents, (5, epoch, 0)).tolist()
            rows = permute(num_rows, (5, epoch, 1)).tolist()
        for i, row in enumerate(rows):
            batch = loader.read_rows(epoch * num_rows + i, 1)
            expected = expect_row(split, order, row, 8)
            assert tuple(array[0].tolist() for array in batch) == expected


def test_boundaries_by_hand(make_folder: FolderMaker) -> None:
    split = Corpus.open(make_folder([[1, 2], [3], [], [4, 5, 6]])).split("train")
    # the stream is 1 2 0 3 0 0 4 5 6 0
    batch = Loader(split, seq_len=4, batch_size=2, seed=0, shuffle=False).next()
    assert batch.tokens.tolist() == [[1, 2, 0, 3], [0, 0, 4, 5]]
    assert batch.targets.tolist() == [[2, 0, 3, 0], [0, 4, 5, 6]]
    assert batch.documents.tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert [array.dtype for array in batch] == [np.int64, np.int64, np.int32]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=12),
    seq_len=st.integers(1, 12),
    seed=st.integers(0, 3),
    shard_tokens=st.sampled_from([1, 20, 1000]),
)
def test_every_token_of_an_epoch_appears_once(
    folder_writer: FolderMaker, lengths: list[int], seq_len: int, seed: int, shard_tokens: int
) -> None:
    documents = number_documents(lengths)
    with tempfile.TemporaryDirectory() as folder:
        folder_writer(Path(folder), documents, shard_tokens=shard_tokens)
        split = Corpus.open(folder).split("train")
        if split.num_tokens <= seq_len:
            return
        loader = Loader(split, seq_len=seq_len, batch_size=1, seed=seed)
        batches = [loader.next() for _ in range(loader.num_rows_per_epoch)]
    assert loader.epoch == 1
    seen = np.concatenate([batch.tokens.ravel() for batch in batches])
    # all but a rest that is shorter than a row, and the one token that only is a target
    assert len(seen) == loader.num_rows_per_epoch * seq_len
    assert 1 <= split.num_tokens - len(seen) <= seq_len
    words = seen[seen > 0]
    assert len(np.unique(words)) == len(words)
    assert set(words.tolist()) <= set(range(1, 1 + sum(lengths)))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ranks_together_are_the_single_process(split: Split, world_size: int) -> None:
    single = make_loader(split, batch_size=8)
    ranks = [
        make_loader(split, batch_size=8, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    # more than three epochs, so that batches lie across two
    for _ in range(3 * single.num_rows_per_epoch // 8 + 2):
        parts = [rank.next() for rank in ranks]
        together = Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        assert_equal(together, single.next())


def test_a_batch_may_be_larger_than_an_epoch(split: Split) -> None:
    small, large = make_loader(split, batch_size=1), make_loader(split, batch_size=100)
    batch = large.next()
    assert batch.tokens.shape == (100, 8)
    rows = [small.next() for _ in range(100)]
    assert_equal(batch, Batch(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True))))


@pytest.mark.parametrize("position", [0, 1, 5, 6, 7, 40])
def test_resume_at_any_position(split: Split, position: int) -> None:
    first = make_loader(split)
    for _ in range(position):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    second = make_loader(split, rank=0, world_size=1)
    second.load_state_dict(state)
    assert second.position == position
    for _ in range(4):
        assert_equal(first.next(), second.next())


def test_a_state_of_another_order_is_refused(split: Split) -> None:
    state = make_loader(split).state_dict()
    for name, value in (("seed", 6), ("seq_len", 4), ("batch_size", 8), ("shuffle", False)):
        with pytest.raises(ValueError, match=rf"{name} = {state[name]}, and {name} is now {value}"):
            make_loader(split, **{name: value}).load_state_dict(state)


def test_orders_differ_by_seed_and_by_epoch(split: Split) -> None:
    loader = make_loader(split, batch_size=1)
    num_rows = loader.num_rows_per_epoch
    first, second = loader.read_rows(0, num_rows), loader.read_rows(num_rows, num_rows)
    other = make_loader(split, seed=6).read_rows(0, num_rows)
    assert not np.array_equal(first.tokens, second.tokens)
    assert not np.array_equal(first.tokens, other.tokens)
    plain = make_loader(split, shuffle=False)
    assert_equal(plain.read_rows(0, num_rows), plain.read_rows(num_rows, num_rows))


def test_passed_epochs_are_forgotten(split: Split) -> None:
    loader = make_loader(split)
    for _ in range(40):
        loader.next()
    assert loader.epoch > 5
    assert len(loader._epochs) <= 2


def test_neighbouring_rows_are_mixed(make_folder: FolderMaker) -> None:
    split = Corpus.open(make_folder(number_documents([900]))).split("train")
    batch = make_loader(split, batch_size=50).next()
    assert (np.diff(batch.tokens[:, 0]) != 8).any()


def test_permutations_are_fixed_for_all_time() -> None:
    assert permute(8, (0, 0, 0)).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert sorted(permute(1000, (1, 2, 3)).tolist()) == list(range(1000))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 6, "world_size": 4}, "6 rows cannot be divided among 4 processes"),
        ({"seq_len": 206}, r"'train' has 206 tokens, fewer than one row of 206 \+ 1"),
        ({"seq_len": 0}, "must be at least 1"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"seed": -1}, "seed = -1 must not be negative"),
    ],
)
def test_mistakes(split: Split, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_loader(split, **options)


def test_the_longest_row_fits(split: Split) -> None:
    assert make_loader(split, seq_len=205).next().tokens.shape == (4, 205)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetched_batches_are_the_same(split: Split, depth: int) -> None:
    plain = make_loader(split)
    with prefetch(make_loader(split), depth) as ahead:
        for position in range(20):
            assert ahead.position == position
            assert_equal(ahead.next(), plain.next())
        assert ahead.state_dict() == plain.state_dict()


def test_a_prefetcher_resumes_and_closes(split: Split) -> None:
    plain = make_loader(split)
    plain.position = 7
    loader = make_loader(split)
    ahead = prefetch(loader)
    ahead.next()
    ahead.load_state_dict(plain.state_dict())
    assert_equal(ahead.next(), plain.next())
    thread = ahead._thread
    ahead.close()
    ahead.close()
    assert not thread.is_alive()
    # what was assembled and not handed out is not lost
    assert loader.position == 8
    assert_equal(loader.next(), plain.next())
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


def test_a_prefetcher_raises_an_error_after_the_batches_before_it(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(split)
    real = loader.next

    def fail() -> Batch:
        if loader.position == 2:
            raise OSError("the disk is gone")
        return real()

    monkeypatch.setattr(loader, "next", fail)
    with prefetch(loader) as ahead:
        ahead.next()
        ahead.next()
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                ahead.next()
        assert ahead.position == 2
    assert threading.active_count() == 1 or not ahead._thread.is_alive()


@pytest.mark.parametrize("last", ["batch", "error"])
def test_a_prefetcher_that_waits_for_room_can_be_closed(
    split: Split, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    loader, assembled = make_loader(split), threading.Event()
    real = loader.next

    def tell() -> Batch:
        # the queue has room for two: what follows waits
        if loader.position == 2:
            assembled.set()
            if last == "error":
                raise OSError("the disk is gone")
        return real()

    monkeypatch.setattr(loader, "next", tell)
    ahead = prefetch(loader, depth=2)
    assert assembled.wait(60)
    ahead.close()
    assert not ahead._thread.is_alive()
    assert loader.position == ahead.position == 0
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


def test_closing_wakes_whoever_waits_for_a_batch(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, closing = make_loader(split), threading.Event()
    real, told = loader.next, []

    def wait() -> Batch:
        assert closing.wait(60)
        return real()

    def ask() -> None:
        try:
            while True:
                ahead.next()
        except RuntimeError as error:
            told.append(str(error))

    monkeypatch.setattr(loader, "next", wait)
    ahead = prefetch(loader, depth=1)
    asking = threading.Thread(target=ask)
    asking.start()
    closing.set()
    ahead.close()
    asking.join(60)
    assert told == ["this prefetcher is closed"]


def test_a_prefetcher_stays_a_few_batches_ahead(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader(split)
    with prefetch(loader, depth=3) as ahead:
        for _ in range(5):
            ahead.next()
            assert loader.position <= ahead.position + 3 + 1
