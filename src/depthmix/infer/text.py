"""Incremental detokenization: emit whole characters only, and no part of a stop string.

Owns the rules for holding text back. The tokenizer is just a function here.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most three bytes before its last one, and each may decode to one
# replacement character while the rest are missing.
MOST_UNSURE = 3

# Tokens decoded again together with a new one. A decoder that starts in the middle of a character
# resynchronizes after at most three bytes; the rest is a margin for tokens without text.
CONTEXT_TOKENS = 16


class TextStream:
    """The text of one sequence, emitted as soon as it is final.

    The text is that of all tokens decoded together, cut before the first stop string to complete
    (the longest, if several end at the same place), so it does not depend on token boundaries.
    `stopped` is true from then on.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or "" in stop:
            raise ValueError(
                f"stop = {stop!r} does not fit: it must be a list of non-empty strings"
            )
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        # the last tokens, their text, and how much of that text was handed to `_pass_on`
        self._window: list[int] = []
        self._text = ""
        self._num_passed = 0
        # final text that may be the beginning of a stop string
        self._held = ""

    def add(self, token: int) -> str:
        """Return the text that is now final: usually the token's, sometimes none or more."""
        if self.stopped:
            return ""
        self._window.append(token)
        self._text = self._decode(self._window)
        fresh = self._text[self._num_passed : len(self._text) - self._count_unsure()]
        self._num_passed += len(fresh)
        self._shorten_window()
        return self._pass_on(fresh)

    def finish(self) -> str:
        """Return the text held back, once no more tokens follow; it may contain a stop string."""
        if self.stopped:
            return ""
        rest = self._text[self._num_passed :]
        told, self._held = self._pass_on(rest) + self._held, ""
        self._num_passed = len(self._text)
        return told

    def _count_unsure(self) -> int:
        """Count the characters at the end that more bytes may still change.

        A replacement character stands for missing bytes, for invalid bytes, or for itself: only
        the next tokens show which.
        """
        end = self._text[-MOST_UNSURE:]
        return len(end) - len(end.rstrip(REPLACEMENT))

    def _shorten_window(self) -> None:
        """Drop tokens that no longer matter, which keeps the total work linear in the length."""
        if len(self._window) < 2 * CONTEXT_TOKENS:
            return
        window = self._window[-CONTEXT_TOKENS:]
        text = self._decode(window)
        num_passed = self._num_passed - (len(self._text) - len(text))
        # If the cut falls inside a character, the text differs: retry at the next token. A decoder
        # that drops a leading space gives a shorter text, which is still a suffix of the longer.
        in_step = len(text) > MOST_UNSURE and self._text.endswith(text)
        if in_step and num_passed >= 0:
            self._window, self._text, self._num_passed = window, text, num_passed

    def _pass_on(self, text: str) -> str:
        """Search the text held back, followed by `text`, for stop strings."""
        text = self._held + text
        found = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stop if stop in text]
        if found:
            end, minus_length = min(found)
            self.stopped, self._held = True, ""
            return text[: end + minus_length]
        num_held = max((_count_begun(text, stop) for stop in self._stop), default=0)
        told, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return told


def _count_begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
