import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from depthmix.infer.pages import Pages
from depthmix.infer.scheduler import Chunk, Scheduler


class WatchedPages(Pages):
    """Records which rows are released: during `plan`, these are the preemptions."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.released: list[int] = []

    def release(self, row: int) -> None:
        self.released.append(row)
        super().release(row)


@dataclass
class Model:
    """A test's model of a sequence; keys are assigned in arrival order."""

    key: int
    num_prompt: int
    max_known: int
    num_known: int
    num_computed: int = 0
    row: int | None = None
    lengths: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0

    @property
    def decodes(self) -> bool:
        return self.num_computed >= self.num_prompt and self.num_known - self.num_computed == 1


class Simulation:
    """Runs a scheduler without a model and checks every plan."""

    def __init__(
        self,
        pages: WatchedPages,
        *,
        max_rows: int,
        max_step_tokens: int,
        chunk_tokens: int,
        invariant: bool,
    ) -> None:
        self.pages = pages
        self.max_rows = max_rows
        self.scheduler = Scheduler(
            pages,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            chunk_tokens=chunk_tokens,
            invariant=invariant,
        )
        self.alive: dict[int, Model] = {}
        self.num_added = 0

    @property
    def most_tokens(self) -> int:
        """Length of the longest sequence that may be added."""
        return self.pages.num_pages // self.pages.num_layers * self.pages.page_size

    def add(self, num_prompt: int, max_new: int) -> Model:
        key = self.num_added
        self.num_added += 1
        self.scheduler.add(key, num_prompt, max_new)
        self.alive[key] = Model(key, num_prompt, num_prompt + max_new, num_prompt)
        return self.alive[key]

    def remove(self, key: int) -> None:
        self.scheduler.remove(key)
        self.alive.pop(key, None)

    def plan(self) -> list[Chunk]:
        running = {model.row: model for model in self.alive.values() if model.row is not None}
        num_preempted = self.scheduler.num_preempted
        self.pages.released.clear()
        chunks = list(self.scheduler.plan())

        victims = [running.pop(row) for row in self.pages.released]
        assert self.scheduler.num_preempted == num_preempted + len(victims)
        planned = {chunk.key for chunk in chunks}
        for victim in victims:
            # an older sequence remains, and all younger ones are part of this step
            assert any(model.key < victim.key for model in running.values())
            later = {model.key for model in running.values() if model.key > victim.key}
            assert later <= planned
            victim.row, victim.num_computed, victim.chunks = None, 0, []
            victim.num_preempted += 1
        self.check_order(chunks)
        for chunk in chunks:
            self.check_chunk(chunk, running)
        self.check_budget(chunks)
        return chunks

    def check_order(self, chunks: list[Chunk]) -> None:
        """Decoding sequences, other running ones, then the head of the queue: each in order."""
        alive = self.alive.values()
        decoding = [model.key for model in alive if model.row is not None and model.decodes]
        others = [model.key for model in alive if model.row is not None and not model.decodes]
        waiting = [model.key for model in alive if model.row is None]
        keys = [chunk.key for chunk in chunks]
        num_decoding = min(len(decoding), self.scheduler.max_step_tokens)
        assert keys[:num_decoding] == decoding[:num_decoding]
        rest = keys[num_decoding:]
        assert rest == (others + waiting)[: len(rest)]
        assert bool(chunks) == bool(self.alive)

    def check_chunk(self, chunk: Chunk, running: dict[int, Model]) -> None:
        model = self.alive[chunk.key]
        if model.row is None:
            assert chunk.row not in running
            model.row, model.lengths = chunk.row, [0] * self.pages.num_layers
        size = self.scheduler.chunk_tokens
        assert chunk.row == model.row
        assert chunk.start == model.num_computed
        end = chunk.start + chunk.count
        assert chunk.start < end <= model.num_known
        assert chunk.count <= size
        assert chunk.samples == (end == model.num_known)
        num_pages = self.pages.counts[chunk.row].tolist()
        for owned, length in zip(num_pages, model.lengths, strict=True):
            assert owned * self.pages.page_size >= length + chunk.count
        if self.scheduler.invariant:
            assert chunk.start // size == (end - 1) // size
            known = model.num_prompt if chunk.start < model.num_prompt else chunk.start + 1
            assert end == min(known, (chunk.start // size + 1) * size)

    def check_budget(self, chunks: list[Chunk]) -> None:
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_step_tokens
        rows = [model.row for model in self.alive.values() if model.row is not None]
        assert len(set(rows)) == len(rows)
        assert all(0 <= row < self.max_rows for row in rows)
        assert self.scheduler.num_running == len(rows)
        assert self.scheduler.num_waiting == len(self.alive) - len(rows)
        empty = set(range(self.pages.num_rows)) - set(rows)
        assert not any(self.pages.count_owned(row) for row in empty)

    def settle(self, chunks: list[Chunk], stored: list[list[int]]) -> None:
        self.scheduler.settle(chunks, stored)
        for chunk, counts in zip(chunks, stored, strict=True):
            model = self.alive.get(chunk.key)
            if model is None:
                continue
            model.num_computed += chunk.count
            model.chunks.append((chunk.start, chunk.count))
            model.lengths = [a + b for a, b in zip(model.lengths, counts, strict=True)]
            assert self.pages.lengths[chunk.row].tolist() == model.lengths
            if chunk.samples and model.num_known < model.max_known:
                self.scheduler.append(chunk.key)
                model.num_known += 1
            elif chunk.samples:
                self.remove(chunk.key)

    def step(self, pick: random.Random, share: float) -> list[Chunk]:
        """Plan and compute; each layer stores each token with probability `share`."""
        chunks = self.plan()
        layers = range(self.pages.num_layers)
        stored = [
            [sum(pick.random() < share for _ in range(chunk.count)) for _ in layers]
            for chunk in chunks
        ]
        self.settle(chunks, stored)
        return chunks

    def finish(self, pick: random.Random, share: float) -> None:
        # every step computes something: finishing in far fewer steps means that nothing starves
        for _ in range(5000):
            if not self.step(pick, share):
                break
        assert not self.alive
        assert self.pages.num_used == 0
        assert list(self.scheduler.plan()) == []


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    page_size, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    max_rows, chunk_tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    invariant = draw(st.booleans())
    # sequences may be as long as the pool allows: the smallest pool that `add` accepts for them
    num_pages = draw(st.integers(num_layers, 10 * num_layers))
    return Simulation(
        WatchedPages(num_pages, page_size, num_layers, max_rows + draw(st.integers(0, 1))),
        max_rows=max_rows,
        max_step_tokens=(chunk_tokens if invariant else 1) + draw(st.integers(0, 6)),
        chunk_tokens=chunk_tokens,
        invariant=invariant,
    )


shares = st.sampled_from([0.0, 0.3, 0.8, 1.0])
seeds = st.integers(0, 2**32)


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences come and go between steps, even while a step is in flight."""

    simulation: Simulation | None = None

    @initialize(simulation=simulations())
    def start(self, simulation: Simulation) -> None:
        self.simulation = simulation

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        assert self.simulation is not None
        most = self.simulation.most_tokens
        num_prompt = data.draw(st.integers(1, most))
        self.simulation.add(num_prompt, data.draw(st.integers(0, most - num_prompt)))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        assert self.simulation is not None
        self.simulation.remove(data.draw(st.integers(0, self.simulation.num_added)))

    @rule(num_steps=st.integers(1, 8), seed=seeds, share=shares)
    def step(self, num_steps: int, seed: int, share: float) -> None:
        assert self.simulation is not None
        pick = random.Random(seed)
        for _ in range(num_steps):
            self.simulation.step(pick, share)

    @precondition(lambda self: self.simulation.alive)
    @rule(data=st.data())
    def remove_during_step(self, data: st.DataObject) -> None:
        assert self.simulation is not None
        chunks = self.simulation.plan()
        self.simulation.remove(data.draw(st.sampled_from([chunk.key for chunk in chunks])))
        num_layers = self.simulation.pages.num_layers
        self.simulation.settle(chunks, [[chunk.count] * num_layers for chunk in chunks])

    def teardown(self) -> None:
        if self.simulation is not None:
            self.simulation.finish(random.Random(0), share=0.7)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@settings(max_examples=100)
@given(simulation=simulations(), data=st.data(), seed=seeds, share=shares)
def test_everybody_finishes(
    simulation: Simulation, data: st.DataObject, seed: int, share: float
) -> None:
    most = simulation.most_tokens
    for num_prompt in data.draw(st.lists(st.integers(1, most), max_size=8)):
        simulation.add(num_prompt, data.draw(st.integers(0, most - num_prompt)))
    simulation.finish(random.Random(seed), share)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), min_size=2, max_size=6),
    num_pages=st.integers(10, 60),
    seed=seeds,
)
@example(lengths=[(12, 8)] * 5, num_pages=10, seed=0)
def test_invariant_chunks_do_not_depend_on_the_others(
    lengths: list[tuple[int, int]], num_pages: int, seed: int
) -> None:
    def run(group: list[tuple[int, int]]) -> list[Model]:
        simulation = Simulation(
            WatchedPages(num_pages, 4, 2, 4),
            max_rows=4,
            max_step_tokens=9,
            chunk_tokens=5,
            invariant=True,
        )
        models = [simulation.add(*length) for length in group]
        simulation.finish(random.Random(seed), share=0.9)
        return models

    together = run(lengths)
    for length, model in zip(lengths, together, strict=True):
        # chunks since the last preemption, which restarts at the first token
        assert model.chunks == run([length])[0].chunks


def make_simulation(
    num_pages: int = 100, *, max_step_tokens: int = 16, invariant: bool = False
) -> Simulation:
    """Two layers, pages of 4 tokens, 3 rows, chunks of 8."""
    return Simulation(
        WatchedPages(num_pages, 4, 2, 3),
        max_rows=3,
        max_step_tokens=max_step_tokens,
        chunk_tokens=8,
        invariant=invariant,
    )


def store_all(simulation: Simulation) -> list[Chunk]:
    return simulation.step(random.Random(0), share=1.0)


def test_prefill_then_decode() -> None:
    simulation = make_simulation()
    simulation.add(11, 2)
    assert store_all(simulation) == [Chunk(0, 0, 0, 8, False)]
    assert store_all(simulation) == [Chunk(0, 0, 8, 3, True)]
    assert store_all(simulation) == [Chunk(0, 0, 11, 1, True)]
    assert store_all(simulation) == [Chunk(0, 0, 12, 1, True)]
    assert store_all(simulation) == []


def test_a_chunk_is_cut_to_the_budget_and_the_next_one_goes_on_from_there() -> None:
    simulation = make_simulation(max_step_tokens=10)
    simulation.add(8, 1)
    simulation.add(20, 1)
    assert store_all(simulation) == [Chunk(0, 0, 0, 8, True), Chunk(1, 1, 0, 2, False)]
    assert store_all(simulation) == [Chunk(0, 0, 8, 1, True), Chunk(1, 1, 2, 8, False)]
    assert store_all(simulation) == [Chunk(1, 1, 10, 8, False)]


def test_an_invariant_chunk_waits_for_a_step_with_room() -> None:
    simulation = make_simulation(max_step_tokens=10, invariant=True)
    simulation.add(8, 1)
    simulation.add(20, 1)
    # this one would fit, but must not overtake
    simulation.add(2, 1)
    assert store_all(simulation) == [Chunk(0, 0, 0, 8, True)]
    assert store_all(simulation) == [Chunk(0, 0, 8, 1, True), Chunk(1, 1, 0, 8, False)]
    assert store_all(simulation) == [Chunk(1, 1, 8, 8, False), Chunk(2, 0, 0, 2, True)]
    assert simulation.scheduler.num_preempted == 0


def test_a_chunk_is_cut_to_the_free_pages() -> None:
    # five pages per layer: the first prompt takes one, the second's second chunk the rest
    simulation = make_simulation(num_pages=10, max_step_tokens=8)
    simulation.add(4, 16)
    simulation.add(20, 0)
    assert store_all(simulation) == [Chunk(0, 0, 0, 4, True), Chunk(1, 1, 0, 4, False)]
    assert store_all(simulation) == [Chunk(0, 0, 4, 1, True), Chunk(1, 1, 4, 7, False)]
    # its last page has room for one token, although the step has room for seven
    assert store_all(simulation) == [Chunk(0, 0, 5, 1, True), Chunk(1, 1, 11, 1, False)]
    assert simulation.pages.num_free == 0
    # nothing fits now, and the second waits with what it has
    assert store_all(simulation) == [Chunk(0, 0, 6, 1, True)]
    assert simulation.scheduler.num_preempted == 0


@pytest.mark.parametrize("invariant", [False, True])
def test_the_youngest_is_preempted_and_computed_again(invariant: bool) -> None:
    # two prompts fill the pool: at their ninth token only one can continue
    simulation = make_simulation(num_pages=8, invariant=invariant)
    simulation.add(6, 9)
    simulation.add(6, 4)
    simulation.add(1, 1)
    last = store_all(simulation)
    assert [chunk.key for chunk in last] == [0, 1]
    while not simulation.scheduler.num_preempted:
        last = store_all(simulation)
    assert last == [Chunk(0, 0, 8, 1, True)]
    again: list[Chunk] = []
    while 1 in simulation.alive:
        again += [chunk for chunk in store_all(simulation) if chunk.key == 1]
    counts = [chunk.count for chunk in again]
    # it had sampled three tokens; sampled tokens are recomputed one by one with `invariant`
    assert counts == ([6, 1, 1, 1, 1] if invariant else [8, 1, 1])
    simulation.finish(random.Random(0), share=1.0)


def test_a_preempted_sequence_waits_for_the_pages_it_had() -> None:
    simulation = make_simulation(num_pages=8)
    simulation.add(6, 9)
    simulation.add(6, 4)
    while simulation.alive:
        store_all(simulation)
    # only once: readmitted immediately, it would only be preempted again
    assert simulation.scheduler.num_preempted == 1


def test_a_prefill_takes_the_pages_of_a_younger_one_not_yet_in_the_plan() -> None:
    simulation = make_simulation(num_pages=12, max_step_tokens=16, invariant=True)
    simulation.add(24, 0)
    simulation.add(24, 0)
    assert [chunk.key for chunk in store_all(simulation)] == [0, 1]
    assert [chunk.key for chunk in store_all(simulation)] == [0]
    assert simulation.scheduler.num_preempted == 0
    assert [chunk.key for chunk in store_all(simulation)] == [0]
    assert simulation.scheduler.num_preempted == 1
    simulation.finish(random.Random(0), share=1.0)


def test_a_prefill_preempts_the_youngest_first() -> None:
    simulation = make_simulation(num_pages=14, max_step_tokens=24, invariant=True)
    for _ in range(3):
        simulation.add(24, 0)
    assert [chunk.key for chunk in store_all(simulation)] == [0, 1, 2]
    assert [chunk.key for chunk in store_all(simulation)] == [0]
    assert [model.num_preempted for model in simulation.alive.values()] == [0, 0, 1]
    simulation.finish(random.Random(0), share=1.0)


def test_a_sequence_that_preempts_itself_does_not_come_back_at_once() -> None:
    simulation = make_simulation(num_pages=8)
    simulation.add(5, 3)
    simulation.add(8, 2)
    store_all(simulation)
    # its own pages are free now, but they were not enough before either
    assert store_all(simulation) == [Chunk(0, 0, 5, 1, True)]
    assert (simulation.scheduler.num_waiting, simulation.scheduler.num_preempted) == (1, 1)
    simulation.finish(random.Random(0), share=1.0)


@pytest.mark.parametrize("num_prompt", [24, 36])
def test_the_order_of_arrival_outlives_a_preemption(num_prompt: int) -> None:
    simulation = make_simulation(num_pages=18, max_step_tokens=24, invariant=True)
    simulation.add(num_prompt, 0)
    middle = simulation.add(24, 4)
    youngest = simulation.add(1, 20)
    while not middle.num_preempted:
        store_all(simulation)
    # it decodes and was already planned, so the one before it was preempted
    assert youngest.num_preempted == 0
    # with the longer prompt the youngest is preempted too: it waits behind the middle one
    while 0 in simulation.alive:
        store_all(simulation)
    assert youngest.num_preempted == (num_prompt == 36)
    simulation.finish(random.Random(0), share=1.0)


def test_a_chunk_without_budget_preempts_nobody_and_is_not_overtaken() -> None:
    pages = WatchedPages(100, 4, 2, 8)
    scheduler = Scheduler(pages, max_rows=8, max_step_tokens=8, chunk_tokens=4, invariant=True)
    for key in range(5):
        scheduler.add(key, 1, 9)
    scheduler.add(5, 12, 1)
    scheduler.add(6, 5, 1)
    for keys in ([0, 1, 2, 3, 4], [5, 6]):
        chunks = list(scheduler.plan())
        assert [chunk.key for chunk in chunks] == keys
        scheduler.settle(chunks, [[chunk.count] * 2 for chunk in chunks])
    for key in range(5):
        scheduler.append(key)
    # three tokens are left: sequence 6 has only one to compute, sequence 5 a chunk of four
    assert [chunk.key for chunk in scheduler.plan()] == [0, 1, 2, 3, 4]
    assert scheduler.num_preempted == 0


def test_a_sequence_whose_token_is_not_known_yet_rests() -> None:
    scheduler = make_simulation(max_step_tokens=1).scheduler
    for key in range(2):
        scheduler.add(key, 1, 1)
        (chunk,) = scheduler.plan()
        assert chunk == Chunk(key, key, 0, 1, True)
        scheduler.settle([chunk], [[1, 1]])
    assert list(scheduler.plan()) == []
    scheduler.append(0)
    scheduler.append(1)
    # both decode, one fits
    assert list(scheduler.plan()) == [Chunk(0, 0, 1, 1, True)]


def test_the_chunk_of_a_removed_sequence_means_nothing_to_a_new_one_of_its_key() -> None:
    scheduler = make_simulation().scheduler
    scheduler.add(0, 5, 1)
    (chunk,) = scheduler.plan()
    scheduler.remove(0)
    scheduler.add(0, 7, 1)
    scheduler.settle([chunk], [[5, 5]])
    assert list(scheduler.plan()) == [Chunk(0, 0, 0, 7, True)]


def test_a_plan_that_was_not_computed_is_made_again() -> None:
    simulation = make_simulation()
    simulation.add(5, 1)
    chunks = simulation.plan()
    assert simulation.plan() == chunks
    simulation.finish(random.Random(0), share=1.0)


def test_settling_a_chunk_twice_is_caught() -> None:
    simulation = make_simulation()
    simulation.add(5, 1)
    (chunk,) = store_all(simulation)
    with pytest.raises(AssertionError, match="settled twice"):
        simulation.scheduler.settle([chunk], [[0, 0]])


def test_a_sequence_that_can_never_run_is_refused() -> None:
    simulation = make_simulation(num_pages=9)
    # four pages per layer, one page is left over
    simulation.add(15, 1)
    with pytest.raises(ValueError, match=r"17 tokens may need 10 pages, but the cache has 9"):
        simulation.add(15, 2)
    simulation.finish(random.Random(0), share=1.0)


def test_a_key_in_line_is_refused_and_a_removed_one_is_new() -> None:
    scheduler = make_simulation().scheduler
    scheduler.add(7, 4, 1)
    with pytest.raises(ValueError, match="sequence 7 is already queued"):
        scheduler.add(7, 4, 1)
    scheduler.remove(7)
    scheduler.remove(7)
    scheduler.add(7, 4, 1)
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)


@pytest.mark.parametrize(("num_prompt", "max_new"), [(0, 3), (3, -1)])
def test_bad_lengths_are_refused(num_prompt: int, max_new: int) -> None:
    name = "num_prompt" if num_prompt < 1 else "max_new"
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        make_simulation().scheduler.add(0, num_prompt, max_new)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_rows", 0, "between 1 and the 3 rows"),
        ("max_rows", 4, "between 1 and the 3 rows"),
        ("chunk_tokens", 0, "at least 1"),
        ("max_step_tokens", 7, "at least 8"),
    ],
)
def test_bad_limits_are_refused(name: str, value: int, message: str) -> None:
    limits: dict[str, Any] = {"max_rows": 3, "max_step_tokens": 8, "chunk_tokens": 8, name: value}
    with pytest.raises(ValueError, match=f"{name} must .*{message}"):
        Scheduler(Pages(8, 4, 2, 3), **limits, invariant=True)


@dataclass
class Traveller:
    """A test's model of a sequence that may be in several steps at a time."""

    num_prompt: int
    num_known: int
    max_known: int
    num_computed: int = 0
    num_started: int = 0
    row: int | None = None
    lengths: list[int] = field(default_factory=list)


class Flights:
    """A scheduler whose steps are settled late: up to `depth` are in flight at a time."""

    def __init__(self, scheduler: Scheduler, pages: WatchedPages, depth: int, seed: int) -> None:
        self.scheduler, self.pages, self.depth = scheduler, pages, depth
        self.pick = random.Random(seed)
        self.share = self.pick.choice((0.0, 0.3, 0.8, 1.0))
        self.alive: dict[int, Traveller] = {}
        # the rounds of each step, and how many of the oldest are settled
        self.steps: deque[list[list[Chunk]]] = deque()
        self.num_added = 0

    def add(self) -> None:
        most = self.pages.num_pages // self.pages.num_layers * self.pages.page_size
        num_prompt = self.pick.randint(1, most)
        max_new = self.pick.randint(0, most - num_prompt)
        self.scheduler.add(self.num_added, num_prompt, max_new)
        self.alive[self.num_added] = Traveller(num_prompt, num_prompt, num_prompt + max_new)
        self.num_added += 1

    def remove(self, key: int) -> None:
        self.scheduler.remove(key)
        del self.alive[key]

    def restart(self, key: int) -> None:
        traveller = self.alive[key]
        traveller.row, traveller.num_computed, traveller.num_started = None, 0, 0

    def start(self) -> bool:
        """Plan a step and start it; return whether there was one."""
        row_of = {key: t.row for key, t in self.alive.items() if t.row is not None}
        key_of = {row: key for key, row in row_of.items()}
        self.pages.released.clear()
        plan = self.scheduler.plan(self.pick.choice((1, 1, 2, 5)))
        rounds = [list(part) for part in plan.split()]
        chunks = rounds[0]
        for row in self.pages.released:
            key = key_of[row]
            traveller = self.alive[key]
            assert traveller.num_started == traveller.num_computed, "it was under way"
            assert any(other < key for other in key_of.values()), "the oldest gave way"
            self.restart(key)
        keys = [chunk.key for chunk in chunks]
        assert len(set(keys)) == len(keys)
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_step_tokens
        # the plan itself: only then may the next one repeat it
        self.scheduler.start(plan)
        if chunks:
            self.steps.append([])
        for part in rounds:
            for chunk in part:
                self.check_chunk(chunk)
                self.alive[chunk.key].num_started += chunk.count
            if chunks:
                self.steps[-1].append(part)
        self.check_books()
        return bool(chunks)

    def check_chunk(self, chunk: Chunk) -> None:
        traveller = self.alive[chunk.key]
        if traveller.row is None:
            traveller.row, traveller.lengths = chunk.row, [0] * self.pages.num_layers
        assert (chunk.row, chunk.start) == (traveller.row, traveller.num_started)
        # tokens that steps in flight will draw count as known, up to the maximum
        parts = [part for step in self.steps for part in step]
        num_ahead = sum(c.samples for part in parts for c in part if c.key == chunk.key)
        num_expected = min(traveller.num_known + num_ahead, traveller.max_known)
        end = chunk.start + chunk.count
        assert chunk.start < end <= num_expected
        assert chunk.count <= self.scheduler.chunk_tokens
        assert chunk.samples == (end == num_expected)
        if end > traveller.num_known:
            # the host does not know such a token, so it is computed alone
            assert chunk.count == 1

    def check_books(self) -> None:
        """There is room for whatever the steps in flight store."""
        rows = [t.row for t in self.alive.values() if t.row is not None]
        assert len(set(rows)) == len(rows)
        assert self.pages.num_free >= 0
        for traveller in self.alive.values():
            if traveller.row is None:
                continue
            num_left = traveller.num_started - traveller.num_computed
            assert self.pages.promised[traveller.row] == num_left
            num_pages = self.pages.counts[traveller.row].tolist()
            for owned, length in zip(num_pages, traveller.lengths, strict=True):
                assert owned * self.pages.page_size >= length + num_left
        empty = set(range(self.pages.num_rows)) - set(rows)
        assert not any(self.pages.count_owned(row) for row in empty)

    def settle(self, *, may_stop: bool = True) -> None:
        """Finish the oldest step: settle each round, then take its tokens, like the engine."""
        step = self.steps[0]
        while step:
            # in flight until it is settled
            self.settle_round(step.pop(0), may_stop)
        self.steps.popleft()
        self.check_books()

    def settle_round(self, chunks: list[Chunk], may_stop: bool) -> None:
        layers = range(self.pages.num_layers)
        stored = [
            [sum(self.pick.random() < self.share for _ in range(chunk.count)) for _ in layers]
            for chunk in chunks
        ]
        # ignored for removed sequences
        self.scheduler.settle(chunks, stored)
        for chunk, counts in zip(chunks, stored, strict=True):
            traveller = self.alive.get(chunk.key)
            if traveller is None:
                continue
            traveller.num_computed += chunk.count
            traveller.lengths = [a + b for a, b in zip(traveller.lengths, counts, strict=True)]
            assert self.pages.lengths[chunk.row].tolist() == traveller.lengths
        for chunk in chunks:
            traveller = self.alive.get(chunk.key)
            if traveller is None or not chunk.samples:
                continue
            if traveller.num_known == traveller.max_known:
                self.remove(chunk.key)
            elif may_stop and self.pick.random() < 0.05:
                # a stop token: what later steps draw after it is discarded
                self.remove(chunk.key)
            else:
                self.scheduler.append(chunk.key)
                traveller.num_known += 1

    def fail(self, *, restart: bool) -> None:
        """A step failed: all steps in flight are abandoned, newest first."""
        # whoever repeats steps without the host cannot leave the cache as it was
        restart = restart or any(len(step) > 1 for step in self.steps)
        while self.steps:
            for chunk in self.steps.pop()[0]:
                self.scheduler.abandon(chunk, restart=restart)
                traveller = self.alive.get(chunk.key)
                if traveller is None:
                    continue
                if restart:
                    self.restart(chunk.key)
                else:
                    traveller.num_started -= chunk.count
        assert all(t.num_started == t.num_computed for t in self.alive.values())
        self.check_books()

    def act(self) -> None:
        """Take a random action."""
        choice = self.pick.random()
        if choice < 0.1:
            self.add()
        elif choice < 0.13 and self.alive:
            self.remove(self.pick.choice(list(self.alive)))
            self.check_books()
        elif choice < 0.16:
            self.fail(restart=self.pick.random() < 0.5)
        elif choice < 0.6 and len(self.steps) < self.depth:
            self.start()
        elif self.steps:
            self.settle()

    def finish(self) -> None:
        """Step like the engine: fill the pipeline, then wait for the oldest."""
        for _ in range(5000):
            while len(self.steps) < self.depth and self.start():
                pass
            if not self.steps:
                break
            self.settle(may_stop=False)
        assert not self.alive, "a sequence starves"
        assert self.pages.num_used == 0
        assert not self.pages.promised.any()


@settings(max_examples=150)
@given(
    page_size=st.integers(1, 4),
    num_layers=st.integers(1, 3),
    share_of_pages=st.integers(1, 10),
    max_rows=st.integers(1, 4),
    chunk_tokens=st.integers(1, 6),
    spare_tokens=st.integers(0, 6),
    ahead=st.sampled_from([0, 0, 1, 5]),
    invariant=st.booleans(),
    depth=st.integers(1, 2),
    seed=seeds,
)
def test_everybody_finishes_while_steps_are_under_way(
    page_size: int,
    num_layers: int,
    share_of_pages: int,
    max_rows: int,
    chunk_tokens: int,
    spare_tokens: int,
    ahead: int,
    invariant: bool,
    depth: int,
    seed: int,
) -> None:
    pages = WatchedPages(share_of_pages * num_layers, page_size, num_layers, max_rows, ahead)
    scheduler = Scheduler(
        pages,
        max_rows=max_rows,
        max_step_tokens=(chunk_tokens if invariant else 1) + spare_tokens,
        chunk_tokens=chunk_tokens,
        invariant=invariant,
    )
    flights = Flights(scheduler, pages, depth, seed)
    for _ in range(60):
        flights.act()
    flights.finish()


def test_a_token_that_is_not_drawn_yet_is_planned() -> None:
    scheduler = make_simulation().scheduler
    scheduler.add(0, 5, 2)
    plans = []
    for _ in range(4):
        plans.append(list(scheduler.plan()))
        scheduler.start(plans[-1])
    # only two more tokens may be computed before the first of them is known
    assert plans == [
        [Chunk(0, 0, 0, 5, True)],
        [Chunk(0, 0, 5, 1, True)],
        [Chunk(0, 0, 6, 1, True)],
        [],
    ]
    for (chunk,) in plans[:2]:
        scheduler.settle([chunk], [[1, 1]])
        scheduler.append(0)
    assert scheduler.pages.promised[0] == 1
    scheduler.settle(plans[2], [[1, 0]])
    assert list(scheduler.plan()) == []
    scheduler.remove(0)
    assert scheduler.pages.num_used == 0


def test_steps_that_only_decode_repeat_the_last_plan() -> None:
    """Its columns are the same objects, which is how a runner knows that it has seen them."""
    scheduler = make_simulation(num_pages=32).scheduler
    for key in range(2):
        scheduler.add(key, 3, 4 + key)
    plans = [scheduler.plan()]
    scheduler.start(plans[0])
    for number in range(1, 6):
        plans.append(scheduler.plan())
        scheduler.start(plans[-1])
        settled = plans[number - 1]
        scheduler.settle(settled, [[1, 1]] * len(settled))
        if number < 5:
            scheduler.append(*settled.key.tolist())
    first, *repeated, last = plans[1:]
    assert [plan.start.tolist() for plan in plans[1:]] == [[3, 3], [4, 4], [5, 5], [6, 6], [7]]
    for plan in repeated:
        assert plan.row is first.row
        assert plan.key is first.key
    # the first sequence had its last token
    assert last.key.tolist() == [1]
    # a new sequence is planned beside the others
    scheduler.add(2, 3, 1)
    assert scheduler.plan().key.tolist() == [2]


def test_a_repeated_plan_has_as_many_rounds_as_rows_have_tokens() -> None:
    scheduler = make_simulation(num_pages=32).scheduler
    for key in range(2):
        scheduler.add(key, 3, 7 + key)
    plans = []
    for _ in range(5):
        plans.append(scheduler.plan(4))
        scheduler.start(plans[-1])
    # prompts and new rows are planned once; the first sequence ends after seven more tokens
    assert [(plan.start.tolist(), plan.rounds) for plan in plans] == [
        ([0, 0], 1),
        ([3, 3], 1),
        ([4, 4], 4),
        ([8, 8], 2),
        ([10], 1),
    ]
    assert scheduler.pages.promised.tolist()[:2] == [10, 11]
    for part in plans[2].split():
        assert part.rounds == 1
    assert [part.start.tolist() for part in plans[2].split()] == [[n, n] for n in (4, 5, 6, 7)]


def test_nobody_under_way_gives_way() -> None:
    # two prompts fill the pool: the first one's ninth token needs the second one's pages
    scheduler = make_simulation(num_pages=8).scheduler
    for key in range(2):
        scheduler.add(key, 8, 2)
    chunks = list(scheduler.plan())
    assert [chunk.count for chunk in chunks] == [8, 8]
    scheduler.start(chunks)
    assert list(scheduler.plan()) == []
    assert scheduler.num_preempted == 0
    scheduler.settle(chunks, [[8, 8], [8, 8]])
    for chunk in chunks:
        scheduler.append(chunk.key)
    assert [chunk.key for chunk in scheduler.plan()] == [0]
    assert scheduler.num_preempted == 1


@pytest.mark.parametrize("restart", [False, True])
def test_steps_that_failed_are_planned_again(restart: bool) -> None:
    scheduler = make_simulation().scheduler
    scheduler.add(0, 12, 2)
    steps = []
    for _ in range(3):
        steps.append(list(scheduler.plan()))
        scheduler.start(steps[-1])
    scheduler.settle(steps[0], [[8, 3]])
    for (chunk,) in reversed(steps[1:]):
        scheduler.abandon(chunk, restart=restart)
    assert scheduler.pages.promised[0] == 0
    # from what was settled, or from the beginning if the cache's content is unknown
    assert list(scheduler.plan()) == steps[0 if restart else 1]
    scheduler.remove(0)
    assert scheduler.pages.num_used == 0
