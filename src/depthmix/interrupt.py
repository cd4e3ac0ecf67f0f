"""Ctrl-C, SIGTERM and a closed terminal as a wish to stop, which is read between two steps.

Owns which signals these are, and what a second one means. Knows nothing of what is being stopped.
"""

import signal
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """While entered, the first signal is a wish; a Ctrl-C after it means: at once."""

    def __init__(self, *, raises: bool = True) -> None:
        """`raises`: a Ctrl-C after the first signal is a KeyboardInterrupt, wherever that strikes.

        Else whoever has more to stop than itself asks `at_once`.
        """
        self.raises = raises
        self.signals: list[signal.Signals] = []
        """All that came, in order."""
        self._before: dict[signal.Signals, Any] = {}

    @property
    def signal(self) -> signal.Signals | None:
        """The first signal, None until one arrives."""
        return self.signals[0] if self.signals else None

    @property
    def at_once(self) -> bool:
        """Whether somebody has lost patience."""
        return signal.SIGINT in self.signals[1:]

    def __enter__(self) -> "Interrupt":
        for number in STOPPING:
            # what is ignored stays so: nohup means that a closed terminal is none of our business
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
