"""One thread owns the engine: what goes in comes out, and nothing that fails is left waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from depthmix.infer import Engine, Event, SamplingParams
from depthmix.serve.metrics import Metrics
from depthmix.serve.problems import BusyError, FailedError, RefusedError, UnavailableError
from depthmix.serve.worker import Job, Worker, describe_failure
from served_models import HeldEngine, play

SIX = SamplingParams(max_tokens=6, seed=3, n=2, logprobs=1)
LONG = SamplingParams(max_tokens=100, seed=1)


@asynccontextmanager
async def work(engine: HeldEngine, max_queue: int = 16) -> AsyncIterator[Worker]:
    worker = Worker(lambda: engine, Metrics(), max_queue=max_queue)
    worker.start()
    await worker.wait_loaded()
    try:
        yield worker
    finally:
        engine.let_go()
        await worker.stop()


async def read_all(job: Job) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    while news := await job.read():
        for choice, event in news:
            found.setdefault(choice, []).append(event)
    return found


async def wait_steps(engine: HeldEngine, count: int) -> None:
    while engine.num_steps < count:
        await asyncio.sleep(0.001)


def test_a_job_hears_what_the_engine_generates() -> None:
    async def scene() -> None:
        prompts = [[5, 6, 7], [8, 9]]
        truth = HeldEngine().generate(prompts, SIX)
        async with work(HeldEngine()) as worker:
            job = worker.submit(prompts, SIX)
            assert worker.num_open == 4
            found = await read_all(job)
            assert job.is_done
            assert worker.num_open == 0
        samples = [sample for result in truth for sample in result.samples]
        assert [found[choice][-1].result for choice in range(4)] == samples
        tokens = [[event.token for event in found[choice]] for choice in range(4)]
        assert tokens == [list(sample.tokens) for sample in samples]

    play(scene())


def test_who_does_not_read_holds_up_nobody() -> None:
    async def scene() -> None:
        async with work(HeldEngine()) as worker:
            silent, eager = worker.submit([[5]], LONG), worker.submit([[6]], SIX)
            assert len(await read_all(eager)) == 2
            await worker.wait_idle()
            # all of it lies there
            news = await silent.read()
            assert len(news) == 100
            assert await silent.read() == []

    play(scene())


def test_a_cancelled_job_frees_its_pages_before_the_next_step() -> None:
    async def scene() -> None:
        engine = HeldEngine()
        engine.hold()
        async with work(engine) as worker:
            job = worker.submit([[5] * 40, [6] * 40], SamplingParams(max_tokens=400, n=2))
            engine.gate.release(3)
            await wait_steps(engine, 3)
            assert engine.pages.num_used > 0
            worker.cancel(job)
            # the step that may be under way
            engine.gate.release()
            await worker.wait_idle()
            assert engine.pages.num_used == 0
            assert engine.num_steps <= 4
            assert worker.stats is not None
            assert (worker.stats.num_running, worker.stats.num_waiting) == (0, 0)
            # twice, or too late, is fine
            worker.cancel(job)

    play(scene())


def test_a_full_line_refuses_and_opens_again() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)
        engine.hold()
        async with work(engine, max_queue=2) as worker:
            jobs = [worker.submit([[5]], SIX), worker.submit([[5]], SamplingParams(max_tokens=2))]
            with pytest.raises(BusyError) as caught:
                worker.submit([[5]], SIX)
            assert caught.value.headers == {"Retry-After": "1"}
            # no time would help this one
            with pytest.raises(RefusedError, match="4 samples are more than this server can hold"):
                worker.submit([[5]] * 2, SIX)
            engine.let_go()
            for job in jobs:
                await read_all(job)
            assert len(await read_all(worker.submit([[5]], SIX))) == 2

    play(scene())


def test_what_the_engine_refuses_is_told_and_leaves_nothing() -> None:
    async def scene() -> None:
        engine = HeldEngine()
        async with work(engine) as worker:
            job = worker.submit([[5], [999]], SIX)
            with pytest.raises(RefusedError, match="token 999 is not in the vocabulary"):
                await job.wait_begun()
            assert not engine.has_work
            assert worker.num_open == 0
            await worker.submit([[5]], SIX).wait_begun()

    play(scene())


def test_who_wants_the_whole_is_woken_once() -> None:
    async def scene() -> None:
        async with work(HeldEngine()) as worker:
            job = worker.submit([[5], [6]], SIX, streams=False)
            assert len(await job.read()) == 4 * 6
            assert await job.read() == []

    play(scene())


def test_prompts_are_scored_one_at_a_time_between_the_others_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        engine = HeldEngine()
        num_scored: list[int] = []
        steps: list[int] = []
        gate = threading.Event()
        score = engine.score

        def watch(prompt: list[int], **options: Any) -> Any:
            num_scored.append(len(prompt))
            steps.append(engine.num_steps)
            if prompt[0] == 9:
                raise MemoryError
            if prompt[0] == 3:
                gate.wait()
            return score(prompt, **options)

        monkeypatch.setattr(engine, "score", watch)
        async with work(engine) as worker:
            job = worker.submit([[5, 6], [5, 6, 7], [8] * 4], SIX, scores=True)
            assert job.num_open == 9
            await job.wait_begun()
            assert [len(job.scores[number]) for number in range(3)] == [1, 2, 3]
            assert num_scored == [2, 3, 4]
            assert steps == [0, 1, 2]
            assert len(await read_all(job)) == 6
            # one that fails ends its own request only
            other, bad = worker.submit([[5]], SIX), worker.submit([[7, 7], [9]], SIX, scores=True)
            with pytest.raises(FailedError, match="out of memory"):
                await bad.wait_begun()
            assert len(await read_all(other)) == 2
            await worker.wait_idle()
            assert engine.pages.num_used == 0
            # one that is cancelled is not scored
            del num_scored[:]
            worker.cancel(worker.submit([[3], [4], [4]], SIX, scores=True))
            gate.set()
            await worker.wait_idle()
            assert num_scored in ([], [1])
            # nor one that is open when the server ends, which gets an error
            gate.clear()
            job = worker.submit([[3], [4]], SIX, scores=True)
            stop = asyncio.create_task(worker.stop())
            # it has ordered the end by now
            await asyncio.sleep(0)
            gate.set()
            await stop
            with pytest.raises(UnavailableError):
                await job.wait_begun()
            assert worker.num_open == 0

    play(scene())


def test_a_failed_step_ends_its_own_requests_only() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=2)
        engine.hold()

        def fail(step: int) -> None:
            if step == 3:
                raise RuntimeError("CUDA out of memory at /secret/path")

        engine.fail = fail
        async with work(engine) as worker:
            hit = [worker.submit([[5]], LONG), worker.submit([[6]], LONG)]
            spared = worker.submit([[7]], SamplingParams(max_tokens=6, seed=3))
            for job in (*hit, spared):
                await job.wait_begun()
            engine.gate.release(3)
            for job in hit:
                with pytest.raises(FailedError, match="ran out of memory") as caught:
                    await read_all(job)
                assert "secret" not in caught.value.message
            assert worker.num_failures == 1
            assert worker.last_failure is not None
            assert worker.is_healthy
            engine.let_go()
            (events,) = (await read_all(spared)).values()
            assert events[-1].result is not None
            assert len(events[-1].result.tokens) == 6
            # it works again
            assert (worker.num_failures, worker.last_failure) == (0, None)
            await worker.wait_idle()
            assert engine.pages.num_used == 0

    play(scene())


def test_steps_that_always_fail_fail_everybody_and_show() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)

        def fail(step: int) -> None:
            raise RuntimeError("device-side assert")

        engine.fail = fail
        async with work(engine) as worker:
            for job in [worker.submit([[5]], LONG) for _ in range(3)]:
                with pytest.raises(FailedError, match="its log says why"):
                    await read_all(job)
            assert worker.num_failures == 3
            assert not worker.is_healthy
            assert worker.num_open == 0

    play(scene())


def test_an_engine_that_cannot_even_cancel_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)

        def fail(*_: object) -> None:
            raise RuntimeError("the device is gone")

        engine.fail = fail
        monkeypatch.setattr(engine, "cancel", fail)
        async with work(engine) as worker:
            jobs = [worker.submit([[5]], LONG) for _ in range(3)]
            for job in jobs:
                with pytest.raises(UnavailableError, match="must be restarted"):
                    await read_all(job)
            assert worker.state == "broken"
            assert str(worker.error) == "the device is gone"
            assert worker.num_open == 0
            with pytest.raises(UnavailableError, match="must be restarted"):
                worker.submit([[5]], LONG)

    play(scene())


def test_a_broken_engine_leaves_no_job_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise RuntimeError("the device is gone")

    async def check(worker: Worker, *jobs: Job) -> None:
        for job in jobs:
            with pytest.raises(UnavailableError, match="must be restarted"):
                await read_all(job)
        assert worker.state == "broken"
        assert worker.num_open == 0

    async def cancel_fails_for_the_second() -> None:
        engine = HeldEngine()
        engine.hold()
        engine.fail = lambda step: break_down() if step == 4 else None
        cancel = engine.cancel
        seen: list[int] = []

        def cancel_one(request: int) -> list[Event]:
            seen.append(request)
            if len(seen) > 1:
                break_down()
            return cancel(request)

        monkeypatch.setattr(engine, "cancel", cancel_one)
        async with work(engine) as worker:
            jobs = [worker.submit([[5]], LONG), worker.submit([[6]], LONG)]
            for job in jobs:
                await job.wait_begun()
            engine.gate.release(4)
            await check(worker, *jobs)

    async def cancel_fails_after_add() -> None:
        engine = HeldEngine()
        monkeypatch.setattr(engine, "cancel", break_down)
        async with work(engine) as worker:
            await check(worker, worker.submit([[5], [999]], LONG))

    async def stats_fail_at_the_end() -> None:
        engine = HeldEngine()
        stats = engine.stats

        def count() -> Any:
            return break_down() if engine.num_steps else stats()

        monkeypatch.setattr(engine, "stats", count)
        async with work(engine) as worker:
            job = worker.submit([[5]], SamplingParams(max_tokens=1))
            # its token has been computed
            assert len(await read_all(job)) == 1
            assert worker.num_open == 0

    for scene in (cancel_fails_for_the_second, cancel_fails_after_add, stats_fail_at_the_end):
        play(scene())


def test_any_step_that_succeeds_ends_a_row_of_failures() -> None:
    async def scene() -> None:
        # a prompt's first chunk has no event
        engine = HeldEngine(chunk_tokens=16)
        engine.hold()

        def fail(step: int) -> None:
            if step <= 3:
                raise RuntimeError("no")

        engine.fail = fail
        async with work(engine) as worker:
            for _ in range(3):
                job = worker.submit([[5]], LONG)
                engine.gate.release()
                with pytest.raises(FailedError):
                    await read_all(job)
            assert not worker.is_healthy
            job = worker.submit([[5] * 100], LONG)
            engine.gate.release()
            while not worker.is_healthy:
                await asyncio.sleep(0.001)
            assert worker.num_failures == 0
            assert not job._news

    play(scene())


def test_a_failed_score_shows() -> None:
    async def scene() -> None:
        engine = HeldEngine()

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("CUDA out of memory")

        engine.score = fail  # pyrefly: ignore[bad-assignment]
        async with work(engine) as worker:
            for count in (1, 2, 3):
                job = worker.submit([[5, 6]], SIX, scores=True)
                with pytest.raises(FailedError, match="ran out of memory"):
                    await job.wait_begun()
                assert worker.num_failures == count
            assert worker.last_failure is not None
            assert not worker.is_healthy
            assert worker.metrics.failed_steps._value.get() == 3

    play(scene())


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    async def scene() -> None:
        def load() -> Engine:
            raise ValueError("no such weights")

        worker = Worker(load, Metrics(), max_queue=1)
        with pytest.raises(UnavailableError, match="is being loaded"):
            worker.submit([[5]], LONG)
        worker.start()
        await worker.wait_loaded()
        assert worker.state == "broken"
        assert str(worker.error) == "no such weights"
        await worker.stop()

    play(scene())


def test_draining_finishes_and_stopping_tells_the_rest() -> None:
    async def scene() -> None:
        engine = HeldEngine(max_batch=1)
        engine.hold()
        async with work(engine) as worker:
            first, second = worker.submit([[5]], SIX), worker.submit([[5]], LONG)
            worker.drain()
            with pytest.raises(UnavailableError, match="shutting down"):
                worker.submit([[5]], SIX)
            engine.gate.release(12)
            assert len(await read_all(first)) == 2
            stop = asyncio.ensure_future(worker.stop())
            engine.let_go()
            await stop
            with pytest.raises(UnavailableError, match="shutting down"):
                await read_all(second)
            assert worker.state == "stopped"
            assert worker.num_open == 0

    play(scene())


def test_a_client_learns_nothing_of_the_inside() -> None:
    assert "memory" in describe_failure(MemoryError())
    assert "memory" in describe_failure(RuntimeError("CUDA out of memory. Tried 3 GiB at 0xff"))
    for error in (RuntimeError("CUDA out of memory at 0xff"), KeyError("/root/0xff")):
        assert "0xff" not in describe_failure(error)
