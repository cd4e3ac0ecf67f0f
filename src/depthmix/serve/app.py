"""The routes: how each request is answered.

Owns the order of things: choose the model, check the parameters, tokenize the prompt, put it in
line, and answer while it is computed, or stop once its client has gone. Does not know sockets
or signals.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from depthmix.models.chat import list_ends
from depthmix.serve.answers import ChatDraft, CompletionDraft, Draft
from depthmix.serve.gate import Gate, Sites, answer_problem
from depthmix.serve.lane import Lane, run_sized
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics, write_metrics
from depthmix.serve.page import answer_page
from depthmix.serve.problems import FAILED, FailedError, RefusedError, ServeError, StatusError
from depthmix.serve.shapes import (
    ChatAnswer,
    ChatChunk,
    ChatWish,
    CompletionAnswer,
    CompletionWish,
    DetokenizeAnswer,
    DetokenizeWish,
    HealthAnswer,
    HealthStatus,
    ModelCard,
    ModelList,
    ProblemAnswer,
    SamplingShape,
    TokenizeAnswer,
    TokenizeWish,
    encode_shape,
    explain_errors,
)
from depthmix.serve.worker import Job

JSON = "application/json"
EVENTS = "text/event-stream"
# what any route may answer, for the schema
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemAnswer} for status in ("4XX", "5XX")
}
# nginx's status for a client that has gone; only logs see it
GONE = 499
# most pieces of a stream that are written at once
MOST_PIECES = 64

logger = logging.getLogger("depthmix.serve")


def make_app(
    lanes: Sequence[Lane],
    limits: Limits,
    *,
    key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    waits: bool = False,
) -> ASGIApp:
    """Everything behind the socket; the lanes' workers run while the app does.

    `key`, `hosts` as for `Gate`; `origins` are the sites whose pages may call this server. It has
    started before the models are loaded, unless it `waits` for them.
    """
    service = Service(lanes, limits, waits=waits)
    gate: ASGIApp = Gate(service.make_api(), limits, key=key, hosts=hosts)
    if not origins:
        return gate
    return Sites(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )


class Service:
    """What the routes share: the lanes, of which the first is the default, and the limits."""

    def __init__(self, lanes: Sequence[Lane], limits: Limits, *, waits: bool = False) -> None:
        self.lanes = {lane.model.name: lane for lane in lanes}
        assert len(self.lanes) == len(lanes) > 0
        self.default, self.limits, self.waits = lanes[0], limits, waits
        self._endpoints: set[str] = set()

    def make_api(self) -> FastAPI:
        """The routes, with their schema at /openapi.json."""
        # no pages for the schema: they load scripts from other sites
        api = FastAPI(
            title="depthmix",
            version="1",
            docs_url=None,
            redoc_url=None,
            lifespan=self._run_workers,
            responses=PROBLEMS,
        )
        for path, answer, shape in (
            ("/v1/completions", self.complete, CompletionAnswer),
            ("/v1/chat/completions", self.chat, ChatAnswer),
            ("/tokenize", self.tokenize, TokenizeAnswer),
            ("/detokenize", self.detokenize, DetokenizeAnswer),
        ):
            self._endpoints.add(path)
            described: dict[str, Any] = {"model": shape}
            if path.startswith("/v1"):
                described["content"] = {EVENTS: {"schema": {"type": "string"}}}
            options: dict[str, Any] = {"methods": ["POST"], "response_model": None}
            api.add_api_route(path, answer, responses={200: described}, **options)
        api.add_api_route("/", answer_page, include_in_schema=False, response_model=None)
        api.add_api_route("/v1/models", self.list_models, response_model=ModelList)
        api.add_api_route("/v1/models/{name:path}", self.show_model, response_model=ModelCard)
        health = {"model": HealthAnswer}
        api.add_api_route(
            "/health", self.show_health, response_model=None, responses={200: health, 503: health}
        )
        numbers = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        # the answer is text, but errors are JSON
        problem = {"content": {JSON: {"schema": {"$ref": "#/components/schemas/ProblemAnswer"}}}}
        api.add_api_route(
            "/metrics",
            self.show_metrics,
            response_class=PlainTextResponse,
            response_model=None,
            responses={200: numbers, "4XX": problem, "5XX": problem},
        )
        api.add_exception_handler(ServeError, self._answer_problem)
        api.add_exception_handler(RequestValidationError, self._answer_invalid)
        api.add_exception_handler(HTTPException, self._answer_status)
        api.add_exception_handler(Exception, self._answer_failure)
        return api

    async def complete(self, wish: CompletionWish, request: Request) -> Response:
        """Continue a prompt, or several."""
        lane = self._choose_lane(wish.model, request)
        self._check_wish(wish, len(wish.prompt))
        prompts = await lane.encode_prompts(wish.prompt)
        vocabulary = lane.model.vocabulary
        echoes = None
        if wish.echo:
            echoes = [p if isinstance(p, str) else vocabulary.decode(p) for p in wish.prompt]
        draft = CompletionDraft(lane.model, wish, prompts, echoes)
        return await self._answer(lane, draft, list_ends(vocabulary.end_token), request)

    async def chat(self, wish: ChatWish, request: Request) -> Response:
        """Answer a conversation, by the model's own chat template."""
        lane = self._choose_lane(wish.model, request)
        self._check_wish(wish, 1)
        prompt = await lane.encode_messages(wish.messages)
        model = lane.model
        ends = list_ends(model.vocabulary.end_token, model.chat)
        return await self._answer(lane, ChatDraft(model, wish, [prompt]), ends, request)

    async def tokenize(self, wish: TokenizeWish, request: Request) -> Response:
        """The tokens of a text, or of messages by the chat template."""
        lane = self._choose_lane(wish.model, request)
        if wish.messages is not None:
            tokens = await lane.encode_messages(wish.messages)
        else:
            tokens = await lane.encode_text(wish.prompt or "", begin=wish.add_special_tokens)
        longest = lane.model.config.max_seq_len
        self._count(request, "completed")
        answer = TokenizeAnswer(count=len(tokens), max_model_len=longest, tokens=tokens)
        return send_json(encode_shape(answer))

    async def detokenize(self, wish: DetokenizeWish, request: Request) -> Response:
        """The text of tokens."""
        lane = self._choose_lane(wish.model, request)
        text = await lane.decode(wish.tokens)
        self._count(request, "completed")
        return send_json(encode_shape(DetokenizeAnswer(prompt=text)))

    async def list_models(self) -> ModelList:
        """The models that are served, the default one first."""
        for lane in self.lanes.values():
            lane.worker.check_open()
        return ModelList(data=[lane.make_card() for lane in self.lanes.values()])

    async def show_model(self, name: str, request: Request) -> ModelCard:
        """One of them by its name."""
        return self._choose_lane(name, request).make_card()

    async def show_health(self) -> Response:
        """Whether the server works: 200 if requests are welcome, 503 if not."""
        # of several models, the one in the worst state
        ranks = ("ok", "failing", "loading", "draining", "broken")
        found = [describe_lane(lane) for lane in self.lanes.values()]
        worst = max(found, key=lambda each: ranks.index(each.status))
        whole = HealthAnswer(
            status=worst.status,
            running=sum(each.running for each in found),
            waiting=sum(each.waiting for each in found),
            failed_steps=max(each.failed_steps for each in found),
            message=next((each.message for each in found if each.message), None),
        )
        is_healthy = all(lane.worker.is_healthy for lane in self.lanes.values())
        return send_json(encode_shape(whole), status=200 if is_healthy else 503)

    async def show_metrics(self) -> Response:
        """Counts and times for Prometheus."""
        text = write_metrics({name: lane.worker.metrics for name, lane in self.lanes.items()})
        return Response(text, media_type=Metrics.content_type)

    async def _answer(
        self, lane: Lane, draft: Draft, ends: list[int], request: Request
    ) -> Response:
        """Put a request in line and return its answer, or a stream."""
        wish, worker = draft.wish, lane.worker
        room = lane.count_room(max(map(len, draft.prompts)))
        params = wish.make_params(room=room, end_tokens=ends)
        options = {"scores": wish.scores_prompts, "streams": wish.stream}
        job = worker.submit(draft.prompts, params, **options)
        draft.scores = job.scores
        outcome = "cancelled"
        is_stream = False
        try:
            # a refusal by the engine must come before a stream begins
            is_here = await race(job.wait_begun(), request.receive)
            if is_here and wish.stream:
                is_stream = True
                return EventStream(self, draft, job, request)
            if is_here and await race(collect_samples(draft, job), request.receive):
                text = await run_sized(draft.count_items(), draft.finish)
                outcome = "completed"
                return send_json(text)
            return Response(status_code=GONE)
        except ServeError:
            # counted where it is answered
            outcome = ""
            raise
        finally:
            if not is_stream:
                worker.cancel(job)
                if outcome:
                    self._count(request, outcome)

    def _choose_lane(self, name: str | None, request: Request) -> Lane:
        """The model that a request is for, if it takes requests."""
        if name is not None and name not in self.lanes:
            names = " and ".join(f"'{known}'" for known in self.lanes)
            verb = "is" if len(self.lanes) == 1 else "are"
            raise StatusError(
                404,
                f"there is no model '{name[:100]}' here: {names} {verb} served",
                code="model_not_found",
            )
        lane = self.default if name is None else self.lanes[name]
        request.state.lane = lane
        lane.worker.check_open()
        return lane

    def _check_wish(self, wish: SamplingShape, num_prompts: int) -> None:
        """Refuse what can be refused before anything is computed."""
        limits = self.limits
        if wish.n > limits.max_n:
            raise RefusedError(
                f"n = {wish.n} is more than {limits.max_n}: ask for fewer", param="n"
            )
        if num_prompts * wish.n > limits.max_samples:
            raise RefusedError(
                f"{num_prompts} prompts with n = {wish.n} are more than {limits.max_samples} "
                f"samples: send several requests"
            )

    def _count(self, request: Request, outcome: str) -> None:
        # requests without a model are counted with the default one
        lane = getattr(request.state, "lane", self.default)
        # not of the address, which may be one that cannot be decoded
        path = request.scope["path"]
        # an unknown path is not a label, as clients could make up any number of them
        known = path if path in self._endpoints else "other"
        lane.worker.metrics.requests.labels(known, outcome).inc()

    async def _answer_problem(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ServeError)
        self._count(request, error.outcome)
        return answer_problem(error)

    async def _answer_invalid(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await self._answer_problem(request, explain_errors(error.errors()))

    async def _answer_status(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:200]
        sentences = {
            400: "the body cannot be read as JSON: check it",
            404: f"there is no '{path}' here: see /openapi.json",
            405: f"'{path}' does not take {request.method}",
        }
        sentence = sentences.get(error.status_code, "the request cannot be answered")
        answer = await self._answer_problem(request, StatusError(error.status_code, sentence))
        # the methods that are allowed
        answer.headers.update(error.headers or {})
        return answer

    async def _answer_failure(self, request: Request, error: Exception) -> Response:
        return await self._answer_problem(request, FailedError(FAILED))

    @asynccontextmanager
    async def _run_workers(self, api: FastAPI) -> AsyncIterator[None]:
        for lane in self.lanes.values():
            lane.worker.start()
        try:
            if self.waits:
                for lane in self.lanes.values():
                    await lane.worker.wait_loaded()
                    if lane.worker.error is not None:
                        raise lane.worker.error
            yield
        finally:
            await asyncio.gather(*(lane.worker.stop() for lane in self.lanes.values()))


class EventStream(Response):
    """An answer in pieces, as server-sent events; its job ends with it, whatever happens."""

    def __init__(self, service: Service, draft: Draft, job: Job, request: Request) -> None:
        super().__init__(media_type=EVENTS)
        # a stream's length is not known, and a proxy must not wait for its end
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self.service, self.draft, self.job, self.request = service, draft, job, request
        self.outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(self._write(send), receive)
        finally:
            self.request.state.lane.worker.cancel(self.job)
            self.service._count(self.request, self.outcome)

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

        async def write(pieces: list[bytes], *, more: bool = True) -> None:
            body = b"".join(b"data: %b\n\n" % piece for piece in pieces)
            await send({"type": "http.response.body", "body": body, "more_body": more})

        draft = self.draft

        def encode(piece: CompletionAnswer | ChatChunk) -> bytes:
            if draft.wish.counts_usage:
                piece.usage = draft.count_usage()
            return encode_shape(piece)

        try:
            size = draft.count_items() if draft.scores else 0
            await write(await run_sized(size, lambda: list(map(encode, draft.start_stream()))))
            # what arrived while the client was slow is sent together
            while news := await self.job.read():
                for first in range(0, len(news), MOST_PIECES):
                    pieces = []
                    for choice, event in news[first : first + MOST_PIECES]:
                        piece = draft.continue_stream(choice, draft.take(choice, event))
                        if piece is not None:
                            pieces.append(encode(piece))
                    if pieces:
                        await write(pieces)
                    # other requests may run in between
                    await asyncio.sleep(0)
        except Exception as error:
            problem = error
            if not isinstance(problem, ServeError):
                logger.exception("a stream failed")
                problem = FailedError(FAILED)
            # the status has been sent already, so clients look for this
            self.outcome = problem.outcome
            await write([json.dumps(problem.to_dict()).encode()], more=False)
            return
        last = [encode_shape(draft.end_stream())] if draft.wish.includes_usage else []
        self.outcome = "completed"
        await write([*last, b"[DONE]"], more=False)


def describe_lane(lane: Lane) -> HealthAnswer:
    """The state of one model."""
    worker, stats = lane.worker, lane.worker.stats
    status: dict[str, HealthStatus] = {
        "loading": "loading",
        "ready": "failing" if worker.num_failures else "ok",
        "draining": "draining",
        "stopped": "draining",
        "broken": "broken",
    }
    return HealthAnswer(
        status=status[worker.state],
        running=0 if stats is None else stats.num_running,
        waiting=0 if stats is None else stats.num_waiting,
        failed_steps=worker.num_failures,
        message=worker.last_failure,
    )


async def collect_samples(draft: Draft, job: Job) -> None:
    """Take all events of a job."""
    while news := await job.read():
        for choice, event in news:
            draft.take(choice, event)


async def race(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do some work while the client is connected; return whether it was finished."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_gone(receive: Receive) -> None:
    """Until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def send_json(text: bytes, *, status: int = 200) -> Response:
    """A whole answer."""
    return Response(text, status_code=status, media_type=JSON)
