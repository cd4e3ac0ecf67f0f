"""Ctrl-C, SIGTERM and a closed terminal as a request to stop, checked between steps.

Defines which signals these are, and what a second one means.
"""

import signal
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While entered, the first signal asks to stop; a Ctrl-C after it stops at once."""

    def __init__(self, *, raises: bool = True) -> None:
        """With `raises`, a Ctrl-C after the first signal raises KeyboardInterrupt.

        Otherwise the caller checks `at_once`, to stop other processes first.
        """
        self.raises = raises
        self.signals: list[signal.Signals] = []
        """All signals so far, in order."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signal(self) -> signal.Signals | None:
        """The first signal, or None."""
        return self.signals[0] if self.signals else None

    @property
    def at_once(self) -> bool:
        """Whether to stop immediately: Ctrl-C came after the first signal."""
        return signal.SIGINT in self.signals[1:]

    def __enter__(self) -> "Interrupt":
        for number in STOPPING:
            # an ignored signal stays ignored: with nohup, a closed terminal changes nothing
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(signal.Signals(number))
        if self.raises and self.signals[1:] and number == signal.SIGINT:
            raise KeyboardInterrupt
