"""Tokens to text while they come: whole characters only, and nothing of a stop string.

Owns what is held back and why. Does not know the tokenizer, which is a function here.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

# A character of UTF-8 has at most three bytes before its last one, and each may show as one
# replacement character while the others are missing.
MOST_UNSURE = 3

# Tokens that are decoded again with a new one. A decoder that starts in the middle of a character
# is in step again after three bytes at most; the rest is room for tokens without text.
CONTEXT_TOKENS = 16


class TextStream:
    """The text of one sequence, told as soon as it is certain.

    It is the text of all tokens together, cut before the stop string that is complete first (of
    several that end together, the longest). So it does not depend on where tokens begin and end.
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
        # the last tokens, their text, and how much of that text went on to `_pass_on`
        self._window: list[int] = []
        self._text = ""
        self._num_passed = 0
        # certain text that may be the beginning of a stop string
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain now: often the token's, sometimes none or more."""
        if self.stopped:
            return ""
        self._window.append(token)
        self._text = self._decode(self._window)
        fresh = self._text[self._num_passed : len(self._text) - self._count_unsure()]
        self._num_passed += len(fresh)
        self._shorten_window()
        return self._pass_on(fresh)

    def finish(self) -> str:
        """What was held back, now that nothing follows; a stop string may be in it."""
        if self.stopped:
            return ""
        rest = self._text[self._num_passed :]
        told, self._held = self._pass_on(rest) + self._held, ""
        self._num_passed = len(self._text)
        return told

    def _count_unsure(self) -> int:
        """Characters at the end that more bytes may still change.

        A replacement character stands for missing bytes, for wrong bytes, or for itself: the next
        tokens will tell.
        """
        end = self._text[-MOST_UNSURE:]
        return len(end) - len(end.rstrip(REPLACEMENT))

    def _shorten_window(self) -> None:
        """Forget tokens that no longer matter, so that the work is linear in the length."""
        if len(self._window) < 2 * CONTEXT_TOKENS:
            return
        window = self._window[-CONTEXT_TOKENS:]
        text = self._decode(window)
        num_passed = self._num_passed - (len(self._text) - len(text))
        # Cut inside a character, the text differs: the next token tries again. A decoder that drops
        # a leading space gives a shorter text, which is still the end of the longer one.
        in_step = len(text) > MOST_UNSURE and self._text.endswith(text)
        if in_step and num_passed >= 0:
            self._window, self._text, self._num_passed = window, text, num_passed

    def _pass_on(self, text: str) -> str:
        """Look for stop strings in the text held back and `text` after it."""
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
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
