"""One process is one rank; several are in tests/integration/test_checkpoint_ranks.py."""

import pickle

import pytest

from depthmix.checkpoint.ranks import Ranks, _make_portable


class StubbornError(Exception):
    """An error that cannot be sent to another process."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def test_one_process_is_one_rank() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.count, ranks.group) == (0, 1, None)
    assert ranks.gather(lambda: 7) == [7]
    assert ranks.do_first(lambda: 8) == 8


def test_what_the_work_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        Ranks().do_first(fail)


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    kept = OSError(28, "full", "file")
    assert _make_portable(kept) is kept
    told = _make_portable(StubbornError("why"))
    assert "StubbornError: why" in str(pickle.loads(pickle.dumps(told)))
    assert _make_portable(None) is None
