import gc
from collections.abc import Iterator

import pytest
import torch

from depthmix.kernels.recording import record_graph


class Circle:
    """Refers to itself, so that only garbage collection frees it."""

    def __init__(self, held: object) -> None:
        self.held, self.own = held, self


@pytest.fixture
def _collect_often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.gpu
@pytest.mark.usefixtures("_collect_often")
def test_a_graph_that_is_garbage_does_not_spoil_another() -> None:
    """As when an engine was dropped while another one records its steps."""
    x = torch.arange(4.0, device="cuda")
    for _ in range(20):
        graph, doubled = record_graph(lambda: x * 2)
        # allocates tuples and lists, as any real work does
        record_graph(lambda: [[x + 1, [n]] for n in range(20)])
        graph.replay()
        torch.cuda.synchronize()
        assert doubled.tolist() == [0, 2, 4, 6]
        Circle(graph)
    assert gc.isenabled()


def test_collections_are_off_only_while_recording() -> None:
    from depthmix.kernels.recording import _without_collections

    assert gc.isenabled()
    with _without_collections():
        assert not gc.isenabled()
        with _without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="capture"), _without_collections():
        raise RuntimeError("capture failed")
    assert gc.isenabled()
