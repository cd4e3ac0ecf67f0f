"""What one process shows of a world; several are in tests/integration/test_checkpoint_ranks.py."""

import pickle

import pytest
import torch

from depthmix.world import (
    World,
    _make_portable,
    average_on_device,
    choose_device,
    join_world,
    open_world,
)

CPU = torch.device("cpu")


def test_one_process_agrees_with_itself() -> None:
    world = World(0, 1, CPU)
    assert world.is_first
    assert world.agree(True, False, True) == [True, False, True]
    assert world.agree() == []
    assert not World(1, 2, CPU).is_first


def test_the_mean_over_one_process_is_its_own() -> None:
    values = torch.tensor([1.5, 2.5], requires_grad=True)
    found = World(0, 1, CPU).average(values)
    assert found.tolist() == [1.5, 2.5]
    assert found.dtype == torch.float64
    assert not found.requires_grad
    assert average_on_device(found) is found


@pytest.mark.parametrize("size", [None, "1"])
def test_a_process_alone_is_a_world(size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    with open_world("cpu") as world:
        assert world == World(0, 1, CPU)
        assert not torch.distributed.is_initialized()


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for there, kind in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        with open_world() as world:
            assert world.device.type == kind


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device is visible"), open_world("cuda"):
        pass


class StubbornError(Exception):
    """An error that cannot be sent to another process."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def test_without_a_group_a_process_is_alone() -> None:
    world = join_world()
    assert world == World(0, 1, CPU)
    assert world.gather(lambda: 7) == [7]
    assert world.do_first(lambda: 8) == 8


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        join_world().do_first(fail)


def test_an_error_that_cannot_be_sent_is_sent_as_text() -> None:
    kept = OSError(28, "full", "file")
    assert _make_portable(kept) is kept
    told = _make_portable(StubbornError("why"))
    assert "StubbornError: why" in str(pickle.loads(pickle.dumps(told)))
    assert _make_portable(None) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device(None) == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="leave out --device cuda"):
        choose_device("cuda")
