"""Signals become a wish, and what was there before comes back."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from depthmix.interrupt import Interrupt

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Handlers of our own, so that a broken `Interrupt` does not end the tests."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{signal.Signals(number).name} went past the wish")

    before = {number: signal.signal(number, fail) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_first_signal_is_a_wish(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        assert interrupt.signal is None
        signal.raise_signal(number)
        assert interrupt.signal is number
    # still there to be told at the end
    assert interrupt.signal is number


def test_a_second_ctrl_c_stops_at_once() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interrupt.signal is signal.SIGINT


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_ctrl_c_can_be_asked_for(first: signal.Signals) -> None:
    with Interrupt(raises=False) as interrupt:
        signal.raise_signal(first)
        assert not interrupt.at_once
        signal.raise_signal(signal.SIGTERM)
        assert not interrupt.at_once
        signal.raise_signal(signal.SIGINT)
        assert interrupt.at_once
    assert interrupt.signals == [first, signal.SIGTERM, signal.SIGINT]


def test_a_ctrl_c_after_a_termination_stops_at_once() -> None:
    with Interrupt():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", SIGNALS)
def test_a_termination_is_never_more_than_a_wish(first: signal.Signals) -> None:
    """Batch systems may send it several times."""
    with Interrupt() as interrupt:
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal is not None


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_come_back(fails: bool) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with Interrupt():
            assert all(signal.getsignal(n) != old for n, old in zip(SIGNALS, before, strict=True))
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert [signal.getsignal(number) for number in SIGNALS] == before
    with pytest.raises(AssertionError, match="SIGTERM went past"):
        signal.raise_signal(signal.SIGTERM)


def test_an_ignored_signal_stays_ignored() -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        assert interrupt.signal is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
