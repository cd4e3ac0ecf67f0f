"""Plan the next step: continuous batching over a paged cache.

Sequences are served in arrival order. Running sequences that decode go first, then those still
computing their prompt, then the waiting queue. When an older sequence runs short of pages, the
youngest gives up its own and is recomputed later. A younger sequence never delays the oldest, so
every sequence finishes. Steps may be planned while others are in flight: the tokens those will
compute count as computed, and the tokens they will sample count as known. The scheduler knows how
many tokens a sequence has, but not which ones, and nothing about the model.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from depthmix.infer.pages import Pages, Stored


class Chunk(NamedTuple):
    """Tokens start .. start + count - 1 of a sequence, computed in this step."""

    key: int
    row: int
    start: int
    count: int
    samples: bool
    """Whether the next token is sampled from the last token's logits."""


@dataclass(slots=True, eq=False)
class Plan:
    """The chunks of a step, stored as columns.

    A step of hundreds of rows is planned, filled in and settled by operations on whole columns,
    because the host has less than a millisecond for it.
    """

    key: np.ndarray
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    samples: np.ndarray
    rounds: int = field(default=1, kw_only=True)
    """How often the step is computed, each time for the tokens drawn the time before. More than
    once only if every chunk decodes: the host then has less to do for each token."""

    @classmethod
    def gather(cls, chunks: "Chunks") -> "Plan":
        """Convert chunks to columns."""
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

    def split(self) -> "Iterator[Plan]":
        """The plan of each round."""
        if self.rounds == 1:
            yield self
            return
        for number in range(self.rounds):
            yield Plan(self.key, self.row, self.start + number, self.count, self.samples)


Chunks = Plan | Sequence[Chunk]


# compared by identity: two sequences are never equal
@dataclass(slots=True, eq=False)
class _Sequence:
    """What stays constant while a sequence runs; what changes is stored by row."""

    key: int
    arrival: int
    num_prompt: int
    num_known: int
    """Prompt tokens plus tokens sampled so far; maintained only while it waits."""
    max_known: int
    row: int | None = None
    num_needed: int = 0
    """Pages it held when it was preempted, plus those of its next token: with fewer it would soon
    be preempted again."""


def _get_arrival(sequence: _Sequence) -> int:
    return sequence.arrival


class _BlockedError(Exception):
    """Pages are missing, and the sequence to preempt is part of a step in flight."""


class Scheduler:
    """Plans steps of at most `max_step_tokens` tokens over at most `max_rows` sequences.

    A chunk has at most `chunk_tokens` tokens. With `invariant`, the only limit is that it ends at a
    multiple of `chunk_tokens` in its sequence, so it does not depend on the rest of the batch.
    Sampled tokens are then also recomputed one by one, because a product over several tokens
    rounds differently from one over a single token. A chunk that does not fit into the step
    waits, so `max_step_tokens` should leave room for a chunk beside `max_rows` decoding
    sequences. Without `invariant`, chunks are cut to fit the token budget and the free pages.
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
        """`on_stop` gets key, row and computed tokens of each sequence that gives up its row."""
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
        # both in arrival order
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        # a heap: low rows first, so that a small batch occupies the first rows
        self._free_rows = list(range(max_rows))
        self._num_arrived = 0
        # indexed by row: state of the sequence that owns it
        self._key = np.full(max_rows, -1)
        self._num_prompt = np.zeros(max_rows, dtype=np.int64)
        self._num_known = np.zeros(max_rows, dtype=np.int64)
        """Prompt tokens plus tokens sampled so far."""
        self._max_known = np.zeros(max_rows, dtype=np.int64)
        self._num_computed = np.zeros(max_rows, dtype=np.int64)
        """Tokens whose keys and values are in the cache."""
        self._num_started = np.zeros(max_rows, dtype=np.int64)
        """The same after all steps in flight."""
        self._num_ahead = np.zeros(max_rows, dtype=np.int64)
        """Tokens that steps in flight will sample."""
        # rows of the running sequences in order, cached until they change
        self._rows: np.ndarray | None = None
        # a plan of decoding rows only, how often it can be repeated, and whether it was started
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
        """Append a sequence to the waiting queue; it may grow by `max_new` tokens."""
        if key in self._sequences:
            raise ValueError(f"key must be new, but sequence {key} is already queued.")
        if num_prompt < 1:
            raise ValueError(f"num_prompt must be at least 1, not {num_prompt}.")
        if max_new < 0:
            raise ValueError(f"max_new must be at least 0, not {max_new}.")
        worst = self.pages.count_worst(num_prompt + max_new)
        if worst > self.pages.num_pages:
            raise ValueError(
                f"num_prompt + max_new = {num_prompt + max_new} tokens may need {worst} pages, but "
                f"the cache has {self.pages.num_pages}: request fewer tokens or enlarge the cache."
            )
        sequence = _Sequence(key, self._num_arrived, num_prompt, num_prompt, num_prompt + max_new)
        self._num_arrived += 1
        self._repeated = None
        self._sequences[key] = sequence
        self._waiting.append(sequence)

    def append(self, *keys: int) -> None:
        """Record that each of these sequences sampled a token, which is now theirs to compute."""
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
        """Remove a sequence, finished or not, running or waiting; unknown keys are ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence.row is None:
            self._waiting.remove(sequence)
        else:
            self._stop(sequence)

    def plan(self, most_rounds: int = 1) -> Plan:
        """Choose the chunks of the next step and reserve their pages; empty if there is no work.

        The step has more than one round, up to `most_rounds`, if it decodes the same rows as the
        last one and no sequence waits.

        This may preempt sequences, but never one in a step in flight: if that would be necessary,
        the plan is empty until that step is settled. A chunk that is not started is planned again.
        """
        repeated, self._repeated = self._repeat(most_rounds), None
        if repeated is not None:
            self._repeated = repeated
            return repeated
        try:
            return self._plan()
        except _BlockedError:
            return Plan.gather([])

    def start(self, chunks: Chunks) -> None:
        """Record that a planned step is in flight: later plans build on its outcome."""
        plan = Plan.gather(chunks)
        self._was_started = plan is self._repeated
        self._num_started[plan.row] += plan.count * plan.rounds
        self._num_ahead[plan.row] += plan.samples * plan.rounds
        self.pages.promise(plan.row, plan.count * plan.rounds)

    def settle(self, chunks: Chunks, stored: Stored) -> None:
        """Record that a step was computed: layer l stored `stored[i][l]` tokens of chunks[i].

        Rounds are settled one by one. Chunks of sequences removed in the meantime are ignored.
        """
        plan = Plan.gather(chunks)
        assert plan.rounds == 1
        row, start, count, samples = plan.row, plan.start, plan.count, plan.samples
        is_there = self._key[row] == plan.key
        if np.count_nonzero(is_there) < len(row):
            columns = (row, start, count, samples, np.asarray(stored))
            row, start, count, samples, stored = (column[is_there] for column in columns)
        assert np.array_equal(self._num_computed[row], start), "settled twice"
        self._num_computed[row] = start + count
        is_started = self._num_started[row] > start
        if np.count_nonzero(is_started) < len(row):
            # computed without a call to `start`: count it as started too
            self._num_started[row[~is_started]] += count[~is_started]
        self._num_ahead[row] -= samples & is_started
        self.pages.settle(row, stored, count * is_started)

    def abandon(self, chunk: Chunk, *, restart: bool) -> None:
        """Undo `start` for a chunk whose step failed.

        Pass `restart` if the step may have changed the cache: the sequence then starts over.
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
        # the others wait for a token that is not known yet
        decodes = ~has_prompt & (start < num_expected)
        prefills = [self._sequences[key] for key in self._key[rows[has_prompt]].tolist()]
        chosen = self._reserve_next(rows[decodes])
        chunks: list[Chunk] = []
        # false in the usual case, where all sequences decode
        if prefills or self._waiting:
            self._plan_prefills(prefills, chosen, chunks)
        if not len(chosen):
            return Plan.gather(chunks)
        ones = np.ones(len(chosen), dtype=np.int64)
        plan = Plan(self._key[chosen], chosen, self._num_started[chosen], ones, ones.astype(bool))
        if not chunks:
            if len(chosen) == len(rows) and not self._waiting:
                # until one of them ends, each step decodes the next tokens of the same rows
                self._repeated, self._was_started = plan, False
                self._num_repeats = int((self._max_known[rows] - start).min()) - 1
            return plan
        more = Plan.gather(chunks)
        return Plan(*map(np.concatenate, zip(plan.columns, more.columns, strict=True)))

    def _repeat(self, most_rounds: int) -> Plan | None:
        """Repeat a plan of decoding rows only, if the rows are the same and have room."""
        last = self._repeated
        if last is None or not self._was_started or not self._num_repeats:
            return None
        rounds = min(most_rounds, self._num_repeats)
        while not self._make_room(last.row, rounds):
            if rounds == 1:
                return None
            rounds //= 2
        self._num_repeats, self._was_started = self._num_repeats - rounds, False
        # the same column objects, so that a caller who knows them need not read them again
        start = last.start + last.rounds
        return Plan(last.key, last.row, start, last.count, last.samples, rounds=rounds)

    def _make_room(self, rows: np.ndarray, num_tokens: int) -> bool:
        """Reserve room for so many tokens in each of these rows, or in none."""
        short = rows[self.pages.room[rows] < num_tokens]
        return not len(short) or self.pages.reserve_all(short, num_tokens)

    def _reserve_next(self, decoding: np.ndarray) -> np.ndarray:
        """Reserve room for the next token of these rows, oldest first; return those that got it."""
        room = self.pages.room
        first = decoding[: self.max_step_tokens]
        short = first[room[first] == 0]
        if not len(short) or self.pages.reserve_all(short, 1):
            # the usual case: enough pages for all
            return first
        chosen: list[int] = []
        for sequence in [self._sequences[key] for key in self._key[decoding].tolist()]:
            row = sequence.row
            # preempted earlier in this loop
            if row is None or len(chosen) == self.max_step_tokens:
                continue
            # all rows planned so far are older, so none of them is preempted
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
        """Count the tokens that will be known after all steps in flight."""
        known = self._num_known[rows] + self._num_ahead[rows]
        return np.minimum(known, self._max_known[rows])

    def _is_under_way(self, row: int) -> bool:
        return bool(self._num_started[row] > self._num_computed[row])

    def _plan_prefills(
        self, prefills: list[_Sequence], decoding: np.ndarray, chunks: list[Chunk]
    ) -> None:
        """Add the chunks of running sequences that do not decode, then admit waiting ones.

        The first sequence without room ends the plan: otherwise later ones could starve it.
        """
        num_left = self.max_step_tokens - len(decoding)
        # sequences planned below need not be added: they are older than any that follows
        planned = set(self._key[decoding].tolist())
        for sequence in prefills:
            if sequence.row is None:
                continue
            wanted = self._count_next(sequence.row, num_left)
            count = self._reserve_tokens(sequence.row, wanted)
            while wanted and not count and self._preempt_younger(sequence, planned):
                count = self._reserve_tokens(sequence.row, wanted)
            if not count:
                return
            chunks.append(self._make_chunk(sequence.row, count))
            num_left -= count
        self._admit(num_left, chunks)

    def _admit(self, num_left: int, chunks: list[Chunk]) -> None:
        """Give rows to waiting sequences and add their first chunks."""
        wanted: list[int] = []
        for sequence in self._waiting[: len(self._free_rows)]:
            expected = min(sequence.num_known, sequence.max_known)
            count = self._count_chunk(0, sequence.num_prompt, expected, num_left)
            if not count:
                break
            wanted.append(count)
            num_left -= count
        admitted = self._waiting[: len(wanted)]
        rows = sorted(self._free_rows)[: len(wanted)]
        # usually there are pages for all of them, which the loop then finds reserved
        if wanted and not any(sequence.num_needed for sequence in admitted):
            self.pages.reserve_all(rows, np.array(wanted))
        for sequence, row, most in zip(admitted, rows, wanted, strict=True):
            if sequence.num_needed > self.pages.num_free:
                return
            count = self._reserve_tokens(row, most)
            if not count:
                return
            sequence.row = heappop(self._free_rows)
            assert sequence.row == row
            self._take_row(sequence, row)
            insort(self._running, self._waiting.pop(0), key=_get_arrival)
            self._rows = None
            samples = count == min(sequence.num_known, sequence.max_known)
            chunks.append(Chunk(sequence.key, row, 0, count, samples))
            if count < most:
                return

    def _take_row(self, sequence: _Sequence, row: int) -> None:
        self._key[row] = sequence.key
        self._num_prompt[row] = sequence.num_prompt
        self._num_known[row] = sequence.num_known
        self._max_known[row] = sequence.max_known
        self._num_computed[row] = self._num_started[row] = self._num_ahead[row] = 0

    def _count_next(self, row: int, num_left: int) -> int:
        """Count the tokens of a row's next chunk."""
        start, num_prompt = int(self._num_started[row]), int(self._num_prompt[row])
        return self._count_chunk(start, num_prompt, int(self._count_expected(row)), num_left)

    def _count_chunk(self, start: int, num_prompt: int, num_expected: int, num_left: int) -> int:
        """Count the tokens of a chunk from `start` on; 0 if it must wait for a later step."""
        if not self.invariant:
            return min(num_expected - start, self.chunk_tokens, num_left)
        end = min(start + self.chunk_tokens - start % self.chunk_tokens, num_expected)
        count = min(end, num_prompt) - start if start < num_prompt else 1
        return count if count <= num_left else 0

    def _reserve_tokens(self, row: int, wanted: int) -> int:
        """Reserve a chunk's pages and return its token count: less if it may be cut, or 0."""
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
        """Preempt the youngest sequence that arrived after this one and is not in the plan."""
        younger = [
            other
            for other in self._running
            if other.arrival > sequence.arrival and other.key not in planned
        ]
        if younger:
            self._give_way(younger[-1])
        return bool(younger)

    def _give_way(self, sequence: _Sequence) -> None:
        """Preempt a sequence, unless it is part of a step in flight."""
        assert sequence.row is not None
        if self._is_under_way(sequence.row):
            raise _BlockedError
        self._preempt(sequence)

    def _preempt(self, sequence: _Sequence) -> None:
        """Take row and pages from a sequence; it waits ahead of all that arrived later."""
        assert sequence.row is not None
        num_owned = self.pages.count_owned(sequence.row)
        num_needed = num_owned + self.pages.count_missing(sequence.row, 1)
        # capped at the most it can ever need: steps in flight may have reserved more
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
