"""Who computes what in the next step: continuous batching over a paged cache.

Arrival order decides. Running sequences that decode go first, then those that still compute
their prompt, then the waiting line; who came last gives up its pages when an older one lacks
some, and is computed again later. The oldest sequence is never held up by a younger one's
demands, so everybody finishes. Steps may be planned while others are under way: what those will
have computed counts as computed, and the token that one will sample counts as known. Knows how
many tokens a sequence has, not which, and nothing of the model.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from depthmix.infer.pages import Pages, Stored


class Chunk(NamedTuple):
    """Tokens start .. start + count - 1 of a sequence are computed in this step."""

    key: int
    row: int
    start: int
    count: int
    samples: bool
    """The last token's logits give the sequence's next token."""


# compared by identity: two sequences are never the same one
@dataclass(slots=True, eq=False)
class _Sequence:
    key: int
    arrival: int
    num_prompt: int
    num_known: int
    """Tokens of the prompt and tokens sampled so far."""
    max_known: int
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_started: int = 0
    """The same once all steps that are under way are done."""
    num_ahead: int = 0
    """Tokens that steps under way will sample."""
    row: int | None = None
    num_needed: int = 0
    """Pages it had when it was preempted and those of its next token: with fewer it would soon be
    preempted again."""

    @property
    def num_expected(self) -> int:
        """Tokens that are known once all steps that are under way are done."""
        return min(self.num_known + self.num_ahead, self.max_known)


def _get_arrival(sequence: _Sequence) -> int:
    return sequence.arrival


class _BlockedError(Exception):
    """Pages are missing, and whoever has to give way is in a step that is under way."""


class Scheduler:
    """Plans steps of at most `max_step_tokens` tokens over at most `max_rows` sequences.

    A chunk has at most `chunk_tokens` tokens. With `invariant` it ends at a multiple of that in its
    sequence, which is its only limit: it does not depend on who else is there, and tokens that a
    sequence sampled are also computed again one by one, because a product over several tokens
    rounds differently from one over a single token. A chunk that does not fit into the step
    then waits, so `max_step_tokens` should leave room for a chunk beside `max_rows` decoding
    sequences. Without `invariant`, chunks are cut to what budget and pages allow.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        max_rows: int,
        max_step_tokens: int,
        chunk_tokens: int,
        invariant: bool,
    ) -> None:
        if not 1 <= max_rows <= pages.num_rows:
            raise ValueError(
                f"max_rows must lie between 1 and the {pages.num_rows} rows of the page tables, "
                f"not {max_rows}."
            )
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}.")
        least_tokens = chunk_tokens if invariant else 1
        if max_step_tokens < least_tokens:
            why = " (a whole chunk, which invariant=True never cuts)" if invariant else ""
            raise ValueError(
                f"max_step_tokens must be at least {least_tokens}{why}, not {max_step_tokens}."
            )
        self.pages = pages
        self.max_step_tokens = max_step_tokens
        self.chunk_tokens = chunk_tokens
        self.invariant = invariant
        self.num_preempted = 0
        """Preemptions so far."""
        self._sequences: dict[int, _Sequence] = {}
        # both in the order of arrival
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        # a heap: low rows first, so that a small batch is one at the front
        self._free_rows = list(range(max_rows))
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        """Sequences that own a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, new or preempted."""
        return len(self._waiting)

    def add(self, key: int, num_prompt: int, max_new: int) -> None:
        """Put a sequence at the end of the line; it may grow by `max_new` tokens."""
        if key in self._sequences:
            raise ValueError(f"key must be new, but sequence {key} is already in line.")
        if num_prompt < 1:
            raise ValueError(f"num_prompt must be at least 1, not {num_prompt}.")
        if max_new < 0:
            raise ValueError(f"max_new must be at least 0, not {max_new}.")
        worst = self.pages.count_worst(num_prompt + max_new)
        if worst > self.pages.num_pages:
            raise ValueError(
                f"num_prompt + max_new = {num_prompt + max_new} tokens may need {worst} pages, but "
                f"the cache has {self.pages.num_pages}: ask for fewer tokens or make it larger."
            )
        sequence = _Sequence(key, self._num_arrived, num_prompt, num_prompt, num_prompt + max_new)
        self._num_arrived += 1
        self._sequences[key] = sequence
        self._waiting.append(sequence)

    def append(self, key: int) -> None:
        """Note that a token was sampled: the sequence has one more to compute."""
        sequence = self._sequences[key]
        assert sequence.num_known < sequence.max_known, "pages were promised for max_new tokens"
        sequence.num_known += 1

    def remove(self, key: int) -> None:
        """Forget a sequence, finished or not, wherever it stands; an unknown key is fine."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence.row is None:
            self._waiting.remove(sequence)
        else:
            self._stop(sequence)

    def plan(self) -> list[Chunk]:
        """Choose the chunks of the next step and reserve their pages; empty if nothing is to do.

        Sequences may be preempted on the way, but none that is in a step under way: the plan is
        then empty until that step is settled. A chunk that was not started is planned again.
        """
        try:
            return self._plan()
        except _BlockedError:
            return []

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Note that a planned step is under way: later plans count on what it will do."""
        for chunk in chunks:
            sequence = self._sequences[chunk.key]
            sequence.num_started += chunk.count
            sequence.num_ahead += chunk.samples
            self.pages.promise(chunk.row, chunk.count)

    def settle(self, chunks: Sequence[Chunk], stored: Stored) -> None:
        """Note that a step was computed: layer l stored `stored[i][l]` tokens of chunks[i].

        The chunk of a sequence that was removed in the meantime is ignored.
        """
        numbers, rows, promised = [], [], []
        for number, (key, row, start, count, samples) in enumerate(chunks):
            sequence = self._sequences.get(key)
            if sequence is None or sequence.row is None:
                continue
            assert (sequence.row, sequence.num_computed) == (row, start), "settled twice"
            started = sequence.num_started > start
            sequence.num_computed = start + count
            if started:
                sequence.num_ahead -= samples
            else:
                sequence.num_started = start + count
            numbers.append(number)
            rows.append(row)
            promised.append(count if started else 0)
        if len(numbers) < len(chunks):
            stored = np.asarray(stored)[numbers]
        self.pages.settle(rows, stored, promised)

    def abandon(self, chunk: Chunk, *, restart: bool) -> None:
        """Take back that a chunk was started: its step failed.

        `restart` where the step may have changed what the cache holds: the sequence starts again.
        """
        sequence = self._sequences.get(chunk.key)
        if sequence is None or sequence.row is None:
            return
        if restart:
            self._preempt(sequence)
        elif sequence.num_started > sequence.num_computed:
            sequence.num_started -= chunk.count
            sequence.num_ahead -= chunk.samples
            self.pages.withdraw(chunk.row, chunk.count)

    def _plan(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        prefills: list[_Sequence] = []
        decoding: list[_Sequence] = []
        for sequence in self._running:
            start, num_known = sequence.num_started, sequence.num_known + sequence.num_ahead
            num_known = min(num_known, sequence.max_known)
            if start + 1 < num_known or start < sequence.num_prompt:
                prefills.append(sequence)
            elif start < num_known:
                # else its newest token is not yet known
                decoding.append(sequence)
        num_left, room = self.max_step_tokens, self.pages.room
        short = [s.row for s in decoding[:num_left] if s.row is not None and not room[s.row]]
        if short:
            # where there is enough for all, nobody has to be asked below
            self.pages.reserve_all(short, 1)
        for sequence in decoding:
            row = sequence.row
            # preempted a moment ago
            if row is None or not num_left:
                continue
            # everybody planned so far is older, so that nobody planned is preempted
            while not (room[row] or self.pages.reserve(row, 1)):
                youngest = self._running[-1]
                self._give_way(youngest)
                if youngest is sequence:
                    break
            else:
                chunks.append(Chunk(sequence.key, row, sequence.num_started, 1, True))
                num_left -= 1
        # usual while all decode: nothing below has work
        if prefills or self._waiting:
            self._plan_prefills(prefills, num_left, chunks)
        return chunks

    def _plan_prefills(self, prefills: list[_Sequence], num_left: int, chunks: list[Chunk]) -> None:
        """Add the chunks of sequences that run but do not decode, then admit waiting ones.

        Whoever finds no room ends the plan: if others went on, they could keep it from ever
        getting any.
        """
        # those planned below are older than whoever asks next
        planned = {chunk.key for chunk in chunks}
        for sequence in prefills:
            if sequence.row is None:
                continue
            wanted = self._count_chunk(sequence, num_left)
            count = self._reserve_tokens(sequence.row, wanted)
            while wanted and not count and self._preempt_younger(sequence, planned):
                count = self._reserve_tokens(sequence.row, wanted)
            if not count:
                return
            chunks.append(self._make_chunk(sequence, sequence.row, count))
            num_left -= count
        while self._waiting and self._free_rows:
            sequence, row = self._waiting[0], self._free_rows[0]
            if sequence.num_needed > self.pages.num_free:
                return
            count = self._reserve_tokens(row, self._count_chunk(sequence, num_left))
            if not count:
                return
            sequence.row = heappop(self._free_rows)
            insort(self._running, self._waiting.pop(0), key=_get_arrival)
            chunks.append(self._make_chunk(sequence, row, count))
            num_left -= count

    def _count_chunk(self, sequence: _Sequence, num_left: int) -> int:
        """Count the tokens of a sequence's next chunk, 0 if it must wait for a later step."""
        start = sequence.num_started
        if not self.invariant:
            return min(sequence.num_expected - start, self.chunk_tokens, num_left)
        end = min(start + self.chunk_tokens - start % self.chunk_tokens, sequence.num_expected)
        count = min(end, sequence.num_prompt) - start if start < sequence.num_prompt else 1
        return count if count <= num_left else 0

    def _reserve_tokens(self, row: int, wanted: int) -> int:
        """Reserve the pages of a chunk and return its tokens: fewer if it may be cut, 0 if none."""
        if self.pages.reserve(row, wanted):
            return wanted
        if self.invariant:
            return 0
        count = bisect_right(
            range(1, wanted + 1),
            self.pages.num_free,
            key=lambda num_tokens: self.pages.count_missing(row, num_tokens),
        )
        self.pages.reserve(row, count)
        return count

    def _make_chunk(self, sequence: _Sequence, row: int, count: int) -> Chunk:
        start = sequence.num_started
        return Chunk(sequence.key, row, start, count, start + count == sequence.num_expected)

    def _preempt_younger(self, sequence: _Sequence, planned: set[int]) -> bool:
        """Preempt the youngest sequence that came after this one and is not in the plan."""
        younger = [
            other
            for other in self._running
            if other.arrival > sequence.arrival and other.key not in planned
        ]
        if younger:
            self._give_way(younger[-1])
        return bool(younger)

    def _give_way(self, sequence: _Sequence) -> None:
        """Preempt a sequence, unless a step that is under way computes it."""
        if sequence.num_started > sequence.num_computed:
            raise _BlockedError
        self._preempt(sequence)

    def _preempt(self, sequence: _Sequence) -> None:
        """Take row and pages from a sequence; it waits before all that came after it."""
        assert sequence.row is not None
        num_owned = self.pages.count_owned(sequence.row)
        num_needed = num_owned + self.pages.count_missing(sequence.row, 1)
        # no more than it can ever have: steps under way may have asked for more
        num_needed = min(num_needed, self.pages.count_worst(sequence.max_known))
        sequence.num_needed = max(sequence.num_needed, num_needed)
        self._stop(sequence)
        insort(self._waiting, sequence, key=_get_arrival)
        self.num_preempted += 1

    def _stop(self, sequence: _Sequence) -> None:
        assert sequence.row is not None
        self.pages.release(sequence.row)
        heappush(self._free_rows, sequence.row)
        self._running.remove(sequence)
        sequence.row = None
        sequence.num_computed = sequence.num_started = sequence.num_ahead = 0
