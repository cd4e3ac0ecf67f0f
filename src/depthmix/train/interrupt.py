"""Ctrl-C, SIGTERM and a closed terminal as a wish to stop, which the loop reads between two steps.

Knows nothing of what is being stopped.
"""

import signal
from types import FrameType
from typing import Any


class Interrupt:
    """While entered, the first signal is a wish; a Ctrl-C after it stops at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # what is ignored stays so: nohup means that a closed terminal is none of our business
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
