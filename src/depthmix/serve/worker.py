"""The one thread that owns the engine: requests go in and events come out through queues.

Owns the engine's life (loading, stepping, failing, stopping), who is admitted, and what happens to
requests when a step fails. The server's loop never waits for the engine, nor the engine for a
reader: a step's events are handed over at once, and lie with their request until they are read.
Knows nothing of HTTP.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from depthmix.infer import Engine, Event, SamplingParams, TokenScore
from depthmix.infer.results import Stats
from depthmix.serve.metrics import Metrics
from depthmix.serve.problems import (
    ENDING,
    BusyError,
    FailedError,
    RefusedError,
    ServeError,
    UnavailableError,
)

State = Literal["loading", "ready", "draining", "broken", "stopped"]

# after so many failed steps in a row, /health answers 503
MOST_FAILURES = 3
JOIN_SECONDS = 5.0

SORRY = {
    "loading": "the model is being loaded: try again soon",
    "draining": ENDING,
    "broken": "the server has failed and must be restarted: its log says why",
    "stopped": ENDING,
}

logger = logging.getLogger("depthmix.serve")


class ChoiceEvent(NamedTuple):
    """An event of the engine, with the request's own numbering."""

    choice: int
    """Which of the request's samples, all prompts' together."""
    event: Event


class Scored(NamedTuple):
    """One of a request's prompts, scored."""

    number: int
    scores: list[TokenScore]
    """Of each token but the first."""


class Job:
    """A client's request: prompts with the same parameters. Belongs to the server's loop."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        scores: bool = False,
        streams: bool = True,
    ) -> None:
        """`scores` asks for the prompts' log-probabilities, too.

        Unless it `streams`, the reader is woken at the end, not for every token.
        """
        self.prompts, self.params, self.streams = prompts, params, streams
        self.scores: dict[int, list[TokenScore]] = {}
        """By the prompts' numbers."""
        self.num_scores = len(prompts) if scores else 0
        self.num_open = self.num_samples = len(prompts) * params.n + self.num_scores
        """Samples that have not ended, and prompts to be scored: each counts as one."""
        self.start_seconds = time.monotonic()
        self._news: list[ChoiceEvent] = []
        self._problem: ServeError | None = None
        self._begun, self._bell = asyncio.Event(), asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self.num_open == 0

    @property
    def is_scored(self) -> bool:
        """Whether its prompts have what was asked for."""
        return len(self.scores) == self.num_scores

    async def wait_begun(self) -> None:
        """Until the engine has taken it and its prompts are scored; raises why not."""
        await self._begun.wait()
        if self._problem is not None and not (self._news and self.is_scored):
            raise self._problem

    async def read(self) -> list[ChoiceEvent]:
        """What is new, as soon as there is something; empty at the end. Raises what went wrong."""
        while not self._news and self._problem is None and not self.is_done:
            self._bell.clear()
            await self._bell.wait()
        news, self._news = self._news, []
        if not news and self._problem is not None:
            raise self._problem
        return news

    def _hear(self, news: "_Word") -> int:
        """Take the worker's news; returns how many samples ended with it."""
        num_before = self.num_open
        if isinstance(news, ChoiceEvent):
            # most are of this kind
            self._news.append(news)
            self.num_open -= news.event.result is not None
            if self.streams or not self.num_open:
                self._bell.set()
            return num_before - self.num_open
        if isinstance(news, Scored):
            self.scores[news.number] = news.scores
            self.num_open -= 1
        elif news is not None and num_before:
            self._problem, self.num_open = news, 0
        if self.is_scored or self._problem is not None:
            self._begun.set()
        self._bell.set()
        return num_before - self.num_open


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt of a job while the engine has it."""

    job: Job
    number: int
    num_left: int
    """Samples that have not ended."""
    first_seconds: dict[int, float]
    """When a sample had its first token."""


class _Order(NamedTuple):
    what: Literal["add", "cancel", "stop"]
    job: Job | None = None


_Word = ChoiceEvent | Scored | ServeError | None
_News = tuple[Job, _Word]


class Worker:
    """Runs an engine in a thread. All methods are for the server's loop."""

    def __init__(self, load: Callable[[], Engine], metrics: Metrics, *, max_queue: int) -> None:
        """`load` makes the engine, in the thread that will own it."""
        self.metrics, self.max_queue = metrics, max_queue
        self.state: State = "loading"
        self.error: BaseException | None = None
        """Why the engine could not be loaded, or broke."""
        self.engine: Engine | None = None
        self.stats: Stats | None = None
        """Where the engine stood after the last step."""
        self.num_failures = 0
        """Steps that failed in a row."""
        self.last_failure: str | None = None
        self.num_open = 0
        """Samples that were admitted and have not ended."""
        self._load = load
        self._orders: SimpleQueue[_Order] = SimpleQueue()
        # the thread's own, in the order of arrival
        self._prompts: dict[int, _Prompt] = {}
        # which of a job's prompts are to be scored
        self._unscored: deque[tuple[Job, int]] = deque()
        # the loop's own: those that have not ended
        self._jobs: set[Job] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        # the state is changed from both sides
        self._entering = threading.Lock()
        # a load cannot be interrupted, and must not keep a process that wants to end
        self._thread = threading.Thread(target=self._run, name="depthmix-engine", daemon=True)

    @property
    def is_healthy(self) -> bool:
        """Whether requests are welcome and likely to succeed."""
        return self.state == "ready" and self.num_failures < MOST_FAILURES

    def start(self) -> None:
        """Load the engine and go to work; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def wait_loaded(self) -> None:
        """Until the model is there, or something else has happened."""
        while self.state == "loading":
            self._changed.clear()
            await self._changed.wait()

    async def wait_idle(self) -> None:
        """Until no request is open."""
        while self.num_open:
            self._changed.clear()
            await self._changed.wait()

    def check_open(self) -> Engine:
        """The engine, where requests are taken; else says why they are not."""
        if self.state != "ready" or self.engine is None:
            raise UnavailableError(SORRY.get(self.state, SORRY["loading"]))
        return self.engine

    def submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: bool
    ) -> Job:
        """Put a request in line, or say why not; `options` as for `Job`."""
        engine = self.check_open()
        job = Job(prompts, params, **options)
        room = engine.pages.num_rows + self.max_queue
        if job.num_samples > room:
            raise RefusedError(
                f"{job.num_samples} samples are more than this server can hold ({room}): ask for "
                f"fewer at a time"
            )
        if self.num_open + job.num_samples > room:
            raise BusyError("too many requests are waiting: try again later")
        self.num_open += job.num_samples
        self._jobs.add(job)
        self._orders.put(_Order("add", job))
        return job

    def cancel(self, job: Job) -> None:
        """End a request where it stands, before the next step; one that is done is fine."""
        if not job.is_done:
            self._orders.put(_Order("cancel", job))

    def drain(self) -> None:
        """Take no more requests; those that were taken go on."""
        with self._entering:
            if self.state in ("loading", "ready"):
                self.state = "draining"
        self._changed.set()

    async def stop(self) -> None:
        """End the thread, and whatever it has not finished."""
        self.drain()
        self._orders.put(_Order("stop"))
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        # deliver its last news
        await asyncio.sleep(0)

    # below: the thread

    def _run(self) -> None:
        try:
            self.engine = self._load()
            self._show()
            self._enter("ready")
            while self._take_orders():
                if self._unscored:
                    # one at a time, as the others' tokens wait for it
                    self._score(self.engine, *self._unscored.popleft())
                if self.engine.has_work:
                    self._step(self.engine)
            self._enter("stopped")
        except BaseException as error:
            # whatever the error: no request may wait for a thread that is gone
            if self.engine is not None:
                logger.exception("the engine broke, and takes no more requests")
            self.error = error
            self._enter("broken")
        finally:
            # the loop looks at the state before it takes a job: after this no more can come
            self._post([], then=self._turn_away)

    def _enter(self, state: State) -> None:
        with self._entering:
            # a worker that drains does not become ready again
            if not (state == "ready" and self.state == "draining"):
                self.state = state
        self._post([])

    def _take_orders(self) -> bool:
        """Do what was ordered, and wait for an order where nothing else is to be done."""
        assert self.engine is not None
        while True:
            try:
                order = self._orders.get(block=not (self.engine.has_work or self._unscored))
            except Empty:
                return True
            if order.what == "stop":
                return False
            assert order.job is not None
            if order.what == "add":
                self._add(self.engine, order.job)
            else:
                self._cancel(self.engine, order.job)

    def _add(self, engine: Engine, job: Job) -> None:
        added: list[int] = []
        try:
            for number, prompt in enumerate(job.prompts):
                request = engine.add(prompt, job.params)
                added.append(request)
                self._prompts[request] = _Prompt(job, number, job.params.n, {})
        except Exception as error:
            for request in added:
                del self._prompts[request]
                engine.cancel(request)
            if isinstance(error, ValueError):
                problem: ServeError = RefusedError(str(error))
            else:
                logger.exception("a request could not be added")
                problem = FailedError(describe_failure(error))
            self._report([(job, problem)])
            return
        self._unscored += [(job, number) for number in range(job.num_scores)]
        self.metrics.tokens_in.inc(sum(map(len, job.prompts)))
        self._report([(job, None)])

    def _score(self, engine: Engine, job: Job, number: int) -> None:
        try:
            scores = engine.score(job.prompts[number], top=job.params.logprobs or 0)
        except Exception as error:
            logger.exception("a prompt could not be scored")
            self._fail(engine, [job], self._note_failure(error))
        else:
            self._report([(job, Scored(number, scores))])

    def _cancel(self, engine: Engine, job: Job) -> None:
        # the job is done when it has all of them
        dropped = [Scored(number, []) for other, number in self._unscored if other is job]
        self._drop_scores([job])
        self._report([(job, scored) for scored in dropped])
        requests = [key for key, prompt in self._prompts.items() if prompt.job is job]
        self._pass_on([event for request in requests for event in engine.cancel(request)])

    def _step(self, engine: Engine) -> None:
        num_preempted = engine.stats().num_preempted
        try:
            events = engine.step()
        except Exception as error:
            logger.exception("a step failed, and the requests in it with it")
            problem = self._note_failure(error)
            stats = engine.stats()
            # the requests that had a row in it; a failing step may take the rows back
            num_rows = stats.num_running + stats.num_preempted - num_preempted
            self._fail_oldest(engine, num_rows, problem)
        else:
            self.num_failures, self.last_failure = 0, None
            self._pass_on(events)

    def _note_failure(self, error: Exception) -> FailedError:
        """Count a failure of the engine; returns the error for its requests."""
        self.metrics.failed_steps.inc()
        self.num_failures += 1
        self.last_failure = describe_failure(error)
        return FailedError(self.last_failure)

    def _fail_oldest(self, engine: Engine, num_rows: int, problem: ServeError) -> None:
        """End the requests of so many samples, but one at least: so there is always progress.

        Rows are given in the order of arrival, so that the oldest samples are those that have one.
        """
        jobs: dict[Job, None] = {}
        for prompt in self._prompts.values():
            if jobs and num_rows <= 0:
                break
            jobs[prompt.job] = None
            num_rows -= prompt.num_left
        self._fail(engine, jobs, problem)

    def _fail(self, engine: Engine, jobs: Collection[Job], problem: ServeError) -> None:
        self._drop_scores(jobs)
        for request, prompt in list(self._prompts.items()):
            if prompt.job in jobs:
                # if this raises too, the engine is broken
                engine.cancel(request)
                del self._prompts[request]
        self._report([(job, problem) for job in jobs])

    def _drop_scores(self, jobs: Collection[Job]) -> None:
        self._unscored = deque(each for each in self._unscored if each[0] not in jobs)

    def _pass_on(self, events: Sequence[Event]) -> None:
        """Hand events to their requests, all at once: a call for each would cost too much."""
        now, metrics = time.monotonic(), self.metrics
        news: list[_News] = []
        num_tokens = 0
        for event in events:
            prompt = self._prompts.get(event.request)
            if prompt is None:
                continue
            start = prompt.job.start_seconds
            if event.token is not None:
                num_tokens += 1
                if event.sample not in prompt.first_seconds:
                    prompt.first_seconds[event.sample] = now
                    metrics.first_token.observe(now - start)
            choice = prompt.number * prompt.job.params.n + event.sample
            news.append((prompt.job, ChoiceEvent(choice, event)))
            if event.result is None:
                continue
            metrics.add_depth(event.result.depth)
            metrics.sample_time.observe(now - start)
            num_later = len(event.result.tokens) - 1
            if num_later > 0 and event.sample in prompt.first_seconds:
                metrics.per_token.observe((now - prompt.first_seconds[event.sample]) / num_later)
            prompt.num_left -= 1
            if not prompt.num_left:
                del self._prompts[event.request]
        metrics.tokens_out.inc(num_tokens)
        self._report(news)

    def _report(self, news: Sequence[_News]) -> None:
        """Hand over news; a reader who has them finds metrics that include them."""
        try:
            self._show()
        finally:
            if news:
                self._post(news)

    def _show(self) -> None:
        assert self.engine is not None
        pages = self.engine.pages
        self.stats = self.engine.stats()
        self.metrics.show(self.stats, pages.num_used, pages.num_pages)

    def _post(self, news: Sequence[_News], then: Callable[[], None] | None = None) -> None:
        assert self._loop is not None
        # a loop that is closed has no readers
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, news, then)

    # in the loop again

    def _deliver(self, news: Sequence[_News], then: Callable[[], None] | None) -> None:
        for job, word in news:
            self.num_open -= job._hear(word)
            if job.is_done:
                self._jobs.discard(job)
        if then is not None:
            then()
        self._changed.set()

    def _turn_away(self) -> None:
        """End all jobs: the thread is gone, and no engine will."""
        problem = UnavailableError(SORRY[self.state])
        self._deliver([(job, problem) for job in self._jobs], None)


def describe_failure(error: BaseException) -> str:
    """What a client may know of an error inside."""
    words = f"{type(error).__name__} {error}".lower()
    if isinstance(error, MemoryError) or "outofmemory" in words or "out of memory" in words:
        return (
            "the server ran out of memory while it computed this request: ask for less at a time, "
            "or try again later"
        )
    return "the server failed while it computed this request: its log says why"
