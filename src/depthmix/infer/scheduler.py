"""Who computes what in the next step: continuous batching over a paged cache.

Arrival order decides. Running sequences that decode go first, then those that still compute
their prompt, then the waiting line; who came last gives up its pages when an older one lacks
some, and is computed again later. The oldest sequence is never held up by a younger one's
demands, so everybody finishes. Steps may be planned while others are under way: what those will
have computed counts as computed, and the token that one will sample counts as known. Knows how
many tokens a sequence has, not which, and nothing of the model.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
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


@dataclass(slots=True, eq=False)
class Plan:
    """The chunks of a step, kept as columns.

    A step of hundreds of rows is planned, filled in and settled by operations on whole columns:
    the host has less than a millisecond for it.
    """

    key: np.ndarray
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    samples: np.ndarray

    @classmethod
    def gather(cls, chunks: "Chunks") -> "Plan":
        """The same chunks as columns."""
        if isinstance(chunks, Plan):
            return chunks
        key, row, start, count, samples = np.array(chunks, dtype=np.int64).reshape(-1, 5).T
        return cls(key, row, start, count, samples.astype(bool))

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self.key, self.row, self.start, self.count, self.samples

    def __len__(self) -> int:
        return len(self.key)

    def __iter__(self) -> Iterator[Chunk]:
        return map(Chunk._make, zip(*(c.tolist() for c in self.columns), strict=True))

    def __getitem__(self, index: slice) -> "Plan":
        return Plan(*(column[index] for column in self.columns))


Chunks = Plan | Sequence[Chunk]


# compared by identity: two sequences are never the same one
@dataclass(slots=True, eq=False)
class _Sequence:
    """What stays the same while a sequence runs; what changes is kept by row."""

    key: int
    arrival: int
    num_prompt: int
    num_known: int
    """Tokens of the prompt and tokens sampled so far, while it waits."""
    max_known: int
    row: int | None = None
    num_needed: int = 0
    """Pages it had when it was preempted and those of its next token: with fewer it would soon be
    preempted again."""


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
        on_stop: Callable[[int, int, int], object] | None = None,
    ) -> None:
        """`on_stop` hears the key, row and computed tokens of a sequence that gives up its row."""
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
        self.on_stop = on_stop
        self.num_preempted = 0
        """Preemptions so far."""
        self._sequences: dict[int, _Sequence] = {}
        # both in the order of arrival
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        # a heap: low rows first, so that a small batch is one at the front
        self._free_rows = list(range(max_rows))
        self._num_arrived = 0
        # by row, of the sequence that has it
        self._key = np.full(max_rows, -1)
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)
        self._num_known = np.zeros(max_rows, dtype=np.int64)
        """Tokens of the prompt and tokens sampled so far."""
        self._max_known = np.zeros(max_rows, dtype=np.int64)
        self._num_computed = np.zeros(max_rows, dtype=np.int64)
        """Tokens whose keys and values are in the cache."""
        self._num_started = np.zeros(max_rows, dtype=np.int64)
        """The same once all steps that are under way are done."""
        self._num_ahead = np.zeros(max_rows, dtype=np.int64)
        """Tokens that steps under way will sample."""
        # rows of those that run, in their order, until that changes
        self._rows: np.ndarray | None = None
        # a plan in which all decode, how often it can be repeated, and whether it was started
        self._repeated: Plan | None = None
        self._num_repeats, self._was_started = 0, False

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
        self._repeated = None
        self._sequences[key] = sequence
        self._waiting.append(sequence)

    def append(self, *keys: int) -> None:
        """Note that a token of each of these was sampled: they have one more to compute."""
        rows = []
        for key in keys:
            sequence = self._sequences[key]
            if sequence.row is None:
                assert sequence.num_known < sequence.max_known, "pages were promised for max_new"
                sequence.num_known += 1
            else:
                rows.append(sequence.row)
        if rows:
            self._num_known[rows] += 1
            excess = self._num_known[rows] > self._max_known[rows]
            assert not np.count_nonzero(excess), "pages were promised for max_new tokens"

    def remove(self, key: int) -> None:
        """Forget a sequence, finished or not, wherever it stands; an unknown key is fine."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence.row is None:
            self._waiting.remove(sequence)
        else:
            self._stop(sequence)

    def plan(self) -> Plan:
        """Choose the chunks of the next step and reserve their pages; empty if nothing is to do.

        Sequences may be preempted on the way, but none that is in a step under way: the plan is
        then empty until that step is settled. A chunk that was not started is planned again.
        """
        repeated, self._repeated = self._repeat(), None
        if repeated is not None:
            self._repeated = repeated
            return repeated
        try:
            return self._plan()
        except _BlockedError:
            return Plan.gather([])

    def start(self, chunks: Chunks) -> None:
        """Note that a planned step is under way: later plans count on what it will do."""
        plan = Plan.gather(chunks)
        self._was_started = plan is self._repeated
        self._num_started[plan.row] += plan.count
        self._num_ahead[plan.row] += plan.samples
        self.pages.promise(plan.row, plan.count)

    def settle(self, chunks: Chunks, stored: Stored) -> None:
        """Note that a step was computed: layer l stored `stored[i][l]` tokens of chunks[i].

        The chunk of a sequence that was removed in the meantime is ignored.
        """
        plan = Plan.gather(chunks)
        row, start, count, samples = plan.row, plan.start, plan.count, plan.samples
        is_there = self._key[row] == plan.key
        if np.count_nonzero(is_there) < len(row):
            columns = (row, start, count, samples, np.asarray(stored))
            row, start, count, samples, stored = (column[is_there] for column in columns)
        assert np.array_equal(self._num_computed[row], start), "settled twice"
        self._num_computed[row] = start + count
        is_started = self._num_started[row] > start
        if np.count_nonzero(is_started) < len(row):
            # computed without `start`: it is both at once
            self._num_started[row[~is_started]] += count[~is_started]
        self._num_ahead[row] -= samples & is_started
        self.pages.settle(row, stored, count * is_started)

    def abandon(self, chunk: Chunk, *, restart: bool) -> None:
        """Take back that a chunk was started: its step failed.

        `restart` where the step may have changed what the cache holds: the sequence starts again.
        """
        sequence, self._repeated = self._sequences.get(chunk.key), None
        if sequence is None or sequence.row is None:
            return
        if restart:
            self._preempt(sequence)
        elif self._is_under_way(sequence.row):
            self._num_started[chunk.row] -= chunk.count
            self._num_ahead[chunk.row] -= chunk.samples
            self.pages.withdraw(chunk.row, chunk.count)

    def _plan(self) -> Plan:
        rows = self._list_rows()
        start = self._num_started[rows]
        num_expected = self._count_expected(rows)
        has_prompt = (start + 1 < num_expected) | (start < self._num_prompt[rows])
        # others wait for a token that is not yet known
        decodes = ~has_prompt & (start < num_expected)
        prefills = [self._sequences[key] for key in self._key[rows[has_prompt]].tolist()]
        chosen = self._reserve_next(rows[decodes])
        chunks: list[Chunk] = []
        # usual while all decode: nothing below has work
        if prefills or self._waiting:
            self._plan_prefills(prefills, chosen, chunks)
        ones = np.ones(len(chosen), dtype=np.int64)
        plan = Plan(self._key[chosen], chosen, self._num_started[chosen], ones, ones.astype(bool))
        if not chunks:
            if len(chosen) == len(rows) and not self._waiting:
                # nothing changes until one of them ends: the next tokens of the same rows follow
                self._repeated, self._was_started = plan, False
                self._num_repeats = int((self._max_known[rows] - start).min(initial=1)) - 1
            return plan
        more = Plan.gather(chunks)
        return Plan(*map(np.concatenate, zip(plan.columns, more.columns, strict=True)))

    def _repeat(self) -> Plan | None:
        """The plan after one in which everybody decodes, where it has the same rows and room."""
        last = self._repeated
        if last is None or not self._was_started or not self._num_repeats:
            return None
        short = last.row[self.pages.room[last.row] == 0]
        if len(short) and not self.pages.reserve_all(short, 1):
            return None
        self._num_repeats, self._was_started = self._num_repeats - 1, False
        # the same columns: whoever knows them need not look at them again
        return Plan(last.key, last.row, last.start + 1, last.count, last.samples)

    def _reserve_next(self, decoding: np.ndarray) -> np.ndarray:
        """Reserve the next token of these rows, oldest first; returns those that have room."""
        room = self.pages.room
        first = decoding[: self.max_step_tokens]
        short = first[room[first] == 0]
        if not len(short) or self.pages.reserve_all(short, 1):
            # the usual case: there is enough for everybody
            return first
        chosen: list[int] = []
        for sequence in [self._sequences[key] for key in self._key[decoding].tolist()]:
            row = sequence.row
            # preempted a moment ago
            if row is None or len(chosen) == self.max_step_tokens:
                continue
            # everybody planned so far is older, so that nobody planned is preempted
            while not (room[row] or self.pages.reserve(row, 1)):
                youngest = self._running[-1]
                self._give_way(youngest)
                if youngest is sequence:
                    break
            else:
                chosen.append(row)
        return np.array(chosen, dtype=np.int64)

    def _list_rows(self) -> np.ndarray:
        if self._rows is None:
            rows = [sequence.row for sequence in self._running]
            self._rows = np.array(rows, dtype=np.int64)
        return self._rows

    def _count_expected(self, rows: np.ndarray | int) -> np.ndarray | np.int64:
        """Tokens that are known once all steps that are under way are done."""
        known = self._num_known[rows] + self._num_ahead[rows]
        return np.minimum(known, self._max_known[rows])

    def _is_under_way(self, row: int) -> bool:
        return bool(self._num_started[row] > self._num_computed[row])

    def _plan_prefills(
        self, prefills: list[_Sequence], decoding: np.ndarray, chunks: list[Chunk]
    ) -> None:
        """Add the chunks of sequences that run but do not decode, then admit waiting ones.

        Whoever finds no room ends the plan: if others went on, they could keep it from ever
        getting any.
        """
        num_left = self.max_step_tokens - len(decoding)
        # those planned below are older than whoever asks next
        planned = set(self._key[decoding].tolist())
        for sequence in prefills:
            if sequence.row is None:
                continue
            wanted = self._count_chunk(sequence.row, num_left)
            count = self._reserve_tokens(sequence.row, wanted)
            while wanted and not count and self._preempt_younger(sequence, planned):
                count = self._reserve_tokens(sequence.row, wanted)
            if not count:
                return
            chunks.append(self._make_chunk(sequence.row, count))
            num_left -= count
        while self._waiting and self._free_rows:
            sequence, row = self._waiting[0], self._free_rows[0]
            if sequence.num_needed > self.pages.num_free:
                return
            # the row is not its own yet, but says what there is to do
            self._take_row(sequence, row)
            count = self._reserve_tokens(row, self._count_chunk(row, num_left))
            if not count:
                self._key[row] = -1
                return
            sequence.row = heappop(self._free_rows)
            insort(self._running, self._waiting.pop(0), key=_get_arrival)
            self._rows = None
            chunks.append(self._make_chunk(row, count))
            num_left -= count

    def _take_row(self, sequence: _Sequence, row: int) -> None:
        self._key[row] = sequence.key
        self._num_prompt[row] = sequence.num_prompt
        self._num_known[row] = sequence.num_known
        self._max_known[row] = sequence.max_known
        self._num_computed[row] = self._num_started[row] = self._num_ahead[row] = 0

    def _count_chunk(self, row: int, num_left: int) -> int:
        """Count the tokens of a row's next chunk, 0 if it must wait for a later step."""
        start, num_expected = int(self._num_started[row]), int(self._count_expected(row))
        if not self.invariant:
            return min(num_expected - start, self.chunk_tokens, num_left)
        num_prompt = int(self._num_prompt[row])
        end = min(start + self.chunk_tokens - start % self.chunk_tokens, num_expected)
        count = min(end, num_prompt) - start if start < num_prompt else 1
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

    def _make_chunk(self, row: int, count: int) -> Chunk:
        start = int(self._num_started[row])
        samples = start + count == int(self._count_expected(row))
        return Chunk(int(self._key[row]), row, start, count, samples)

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
        assert sequence.row is not None
        if self._is_under_way(sequence.row):
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
        sequence.num_known = int(self._num_known[sequence.row])
        self._stop(sequence)
        insort(self._waiting, sequence, key=_get_arrival)
        self.num_preempted += 1

    def _stop(self, sequence: _Sequence) -> None:
        row = sequence.row
        assert row is not None
        if self.on_stop is not None:
            self.on_stop(sequence.key, row, int(self._num_computed[row]))
        self.pages.release(row)
        heappush(self._free_rows, row)
        self._running.remove(sequence)
        self._key[row] = -1
        self._rows = self._repeated = sequence.row = None
