"""The routes: what each request is answered.

Owns the order of things: check the wish, make tokens of its prompt, put it in line, and answer
while it is computed, or not at all once its client has gone. Does not know sockets or signals.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from depthmix.models.chat import render_chat
from depthmix.serve.answers import ChatDraft, CompletionDraft, Draft, ServedModel
from depthmix.serve.gate import Gate, answer_problem
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics
from depthmix.serve.problems import FailedError, RefusedError, ServeError, StatusError
from depthmix.serve.shapes import (
    ChatAnswer,
    ChatMessage,
    ChatWish,
    CompletionAnswer,
    CompletionWish,
    DetokenizeAnswer,
    DetokenizeWish,
    HealthAnswer,
    HealthStatus,
    ModelCard,
    ModelList,
    SamplingShape,
    TokenizeAnswer,
    TokenizeWish,
    explain_errors,
)
from depthmix.serve.worker import Job, Worker

# texts as long as this are encoded in a thread, so that others need not wait
LONG_TEXT = 16_384
JSON = "application/json"
# nginx's status for a client that has gone; only logs see it
GONE = 499

logger = logging.getLogger("depthmix.serve")


def make_app(
    model: ServedModel,
    worker: Worker,
    limits: Limits,
    *,
    key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
) -> ASGIApp:
    """Everything behind the socket; the worker runs while the app does.

    `key`, `hosts` as for `Gate`; `origins` are the sites whose pages may call this server.
    """
    gate: ASGIApp = Gate(Service(model, worker, limits).make_api(), limits, key=key, hosts=hosts)
    if not origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )


class Service:
    """What the routes share: the model, the worker and the limits."""

    def __init__(self, model: ServedModel, worker: Worker, limits: Limits) -> None:
        self.model, self.worker, self.limits = model, worker, limits
        self.metrics: Metrics = worker.metrics
        self._endpoints: set[str] = set()

    def make_api(self) -> FastAPI:
        """The routes, with their schema at /openapi.json."""
        # pages that show the schema load scripts from elsewhere: there are none
        api = FastAPI(
            title="depthmix", docs_url=None, redoc_url=None, lifespan=self._run_worker, version="1"
        )
        for path, answer, shape in (
            ("/v1/completions", self.complete, CompletionAnswer),
            ("/v1/chat/completions", self.chat, ChatAnswer),
            ("/tokenize", self.tokenize, TokenizeAnswer),
            ("/detokenize", self.detokenize, DetokenizeAnswer),
        ):
            self._endpoints.add(path)
            told: dict[int | str, dict[str, Any]] = {200: {"model": shape}}
            api.add_api_route(path, answer, methods=["POST"], response_model=None, responses=told)
        api.add_api_route("/v1/models", self.list_models, response_model=ModelList)
        api.add_api_route("/v1/models/{name:path}", self.show_model, response_model=ModelCard)
        api.add_api_route("/health", self.tell_health, response_model=None)
        api.add_api_route("/metrics", self.show_metrics, response_model=None)
        api.add_exception_handler(ServeError, self._answer_problem)
        api.add_exception_handler(RequestValidationError, self._answer_invalid)
        api.add_exception_handler(HTTPException, self._answer_status)
        api.add_exception_handler(Exception, self._answer_failure)
        return api

    async def complete(self, wish: CompletionWish, request: Request) -> Response:
        """A text that goes on from a prompt, or several."""
        self._check_wish(wish, len(wish.prompt))
        prompts = [await self._encode(prompt) for prompt in wish.prompt]
        echoes = None
        if wish.echo:
            decode = self.model.vocabulary.decode
            echoes = [p if isinstance(p, str) else decode(p) for p in wish.prompt]
        end_token = self.model.vocabulary.end_token
        draft = CompletionDraft(self.model, wish, prompts, echoes)
        return await self._answer(draft, [] if end_token is None else [end_token], request)

    async def chat(self, wish: ChatWish, request: Request) -> Response:
        """The next answer in a conversation, by the model's own chat template."""
        self._check_wish(wish, 1)
        prompt = await self._encode_messages(wish.messages)
        ends = [] if self.model.chat is None else list(self.model.chat.stop_tokens)
        end_token = self.model.vocabulary.end_token
        if end_token is not None and end_token not in ends:
            ends.append(end_token)
        return await self._answer(ChatDraft(self.model, wish, [prompt]), ends, request)

    async def tokenize(self, wish: TokenizeWish) -> Response:
        """The tokens of a text, or of messages by the chat template."""
        self.worker.check_open()
        self._check_name(wish.model)
        if wish.messages is not None:
            tokens = await self._encode_messages(wish.messages)
        else:
            tokens = await self._encode_text(wish.prompt or "", begin=wish.add_special_tokens)
        longest = self.model.config.max_seq_len
        self._count("/tokenize", "completed")
        return send_shape(TokenizeAnswer(count=len(tokens), max_model_len=longest, tokens=tokens))

    async def detokenize(self, wish: DetokenizeWish) -> Response:
        """The text of tokens."""
        self.worker.check_open()
        self._check_name(wish.model)
        self._check_ids(wish.tokens)
        text = self.model.vocabulary.decode(wish.tokens)
        self._count("/detokenize", "completed")
        return send_shape(DetokenizeAnswer(prompt=text))

    async def list_models(self) -> ModelList:
        """The model that is served."""
        self.worker.check_open()
        return ModelList(data=[self._make_card()])

    async def show_model(self, name: str) -> ModelCard:
        """The same by its name."""
        self.worker.check_open()
        self._check_name(name)
        return self._make_card()

    async def tell_health(self) -> Response:
        """Whether the server works: 200 if requests are welcome, 503 if not."""
        worker, stats = self.worker, self.worker.stats
        status: dict[str, HealthStatus] = {
            "loading": "loading",
            "ready": "failing" if worker.num_failures else "ok",
            "draining": "draining",
            "stopped": "draining",
            "broken": "broken",
        }
        told = HealthAnswer(
            status=status[worker.state],
            running=0 if stats is None else stats.num_running,
            waiting=0 if stats is None else stats.num_waiting,
            failed_steps=worker.num_failures,
            message=worker.last_failure,
        )
        return send_shape(told, status=200 if worker.is_healthy else 503)

    async def show_metrics(self) -> Response:
        """Counts and times for Prometheus."""
        return Response(self.metrics.write(), media_type=self.metrics.content_type)

    async def _answer(self, draft: Draft, ends: list[int], request: Request) -> Response:
        """Put a request in line; its answer, or the stream of it."""
        wish, path = draft.wish, request.url.path
        room = self._count_room(max(map(len, draft.prompts)))
        params = wish.make_params(max_tokens=wish.count_tokens() or room, end_tokens=ends)
        job = self.worker.submit(draft.prompts, params)
        outcome = "cancelled"
        is_stream = False
        try:
            # what the engine refuses is told before a stream begins
            is_here = await race(job.wait_admitted(), request.receive)
            if is_here and wish.stream:
                is_stream = True
                return EventStream(self, draft, job, path)
            if is_here and await race(collect_samples(draft, job), request.receive):
                outcome = "completed"
                return send_shape(draft.finish())
            return Response(status_code=GONE)
        except ServeError:
            # counted where it is answered
            outcome = ""
            raise
        finally:
            if not is_stream:
                self.worker.cancel(job)
                if outcome:
                    self._count(path, outcome)

    def _check_wish(self, wish: SamplingShape, num_prompts: int) -> None:
        """What can be refused before anything is computed."""
        self.worker.check_open()
        self._check_name(wish.model)
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

    def _check_name(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise StatusError(
                404, f"the model served here is '{self.model.name}'", code="model_not_found"
            )

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self.model.config.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RefusedError(f"{wrong} is no token: they are 0 to {size - 1}")

    def _check_length(self, tokens: Sequence[int]) -> None:
        longest = self.model.config.max_seq_len
        if self.limits.max_prompt_tokens is not None:
            longest = min(longest, self.limits.max_prompt_tokens)
        if len(tokens) > longest:
            raise RefusedError(
                f"the prompt has {len(tokens)} tokens, and {longest} are allowed: shorten it",
                code="context_length_exceeded",
            )

    def _count_room(self, num_prompt: int) -> int:
        """Tokens that may follow so long a prompt in the model and in the cache."""
        config, pages = self.model.config, self.worker.check_open().pages
        room = pages.num_pages // config.num_layers * pages.page_size
        return max(1, min(config.max_seq_len, room) - num_prompt + 1)

    async def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens = await self._encode_text(prompt, begin=True)
        else:
            self._check_ids(prompt)
            tokens = prompt
        self._check_length(tokens)
        return tokens

    async def _encode_text(self, text: str, *, begin: bool) -> list[int]:
        encode = self.model.vocabulary.encode if begin else self.model.vocabulary.tokenize
        try:
            if len(text) < LONG_TEXT:
                return encode(text)
            return await asyncio.to_thread(encode, text)
        except ValueError as error:
            raise RefusedError(str(error)) from error

    async def _encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        chat = self.model.chat
        if chat is None:
            raise RefusedError(
                f"'{self.model.name}' has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        told = [message.read() for message in messages]
        try:
            text = render_chat(chat, told, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RefusedError(
                f"the chat template does not take these messages: {error}", param="messages"
            ) from error
        tokens = await self._encode_text(text, begin=False)
        self._check_length(tokens)
        return tokens

    def _make_card(self) -> ModelCard:
        model = self.model
        return ModelCard(
            id=model.name, created=model.created, max_model_len=model.config.max_seq_len
        )

    def _count(self, path: str, outcome: str) -> None:
        # an unknown path does not become a label: a client could make up any number of them
        self.metrics.requests.labels(path if path in self._endpoints else "other", outcome).inc()

    async def _answer_problem(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ServeError)
        self._count(request.url.path, error.outcome)
        return answer_problem(error)

    async def _answer_invalid(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return await self._answer_problem(request, explain_errors(error.errors()))

    async def _answer_status(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        told = {
            400: "the body cannot be read as JSON: check it",
            404: f"there is no '{path}' here: see /openapi.json",
            405: f"'{path}' does not take {request.method}",
        }
        sentence = told.get(error.status_code, "the request cannot be answered")
        return await self._answer_problem(request, StatusError(error.status_code, sentence))

    async def _answer_failure(self, request: Request, error: Exception) -> Response:
        return await self._answer_problem(
            request, FailedError("the server failed: its log says why")
        )

    @asynccontextmanager
    async def _run_worker(self, api: FastAPI) -> AsyncIterator[None]:
        self.worker.start()
        try:
            yield
        finally:
            await self.worker.stop()


class EventStream(Response):
    """An answer in pieces, as server-sent events; its job ends with it, whatever happens."""

    def __init__(self, service: Service, draft: Draft, job: Job, path: str) -> None:
        super().__init__(media_type="text/event-stream")
        # a stream's length is not known, and a proxy must not wait for its end
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self.service, self.draft, self.job, self.path = service, draft, job, path
        self.outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await race(self._write(send), receive)
        finally:
            self.service.worker.cancel(self.job)
            self.service._count(self.path, self.outcome)

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

        async def write(pieces: list[bytes], *, more: bool = True) -> None:
            body = b"".join(b"data: %b\n\n" % piece for piece in pieces)
            await send({"type": "http.response.body", "body": body, "more_body": more})

        draft = self.draft
        try:
            await write([encode_shape(piece) for piece in draft.start_stream()])
            # whatever came while the client was slow goes out at once
            while news := await self.job.read():
                pieces = []
                for choice, event in news:
                    draft.take(choice, event)
                    piece = draft.continue_stream(choice, event)
                    if piece is not None:
                        pieces.append(encode_shape(piece))
                if pieces:
                    await write(pieces)
        except ServeError as problem:
            # the status has been sent: clients look for this
            self.outcome = problem.outcome
            await write([json.dumps(problem.to_dict()).encode()], more=False)
            return
        last = [encode_shape(draft.end_stream())] if draft.wish.includes_usage else []
        self.outcome = "completed"
        await write([*last, b"[DONE]"], more=False)


async def collect_samples(draft: Draft, job: Job) -> None:
    """Take all events of a job."""
    while news := await job.read():
        for choice, event in news:
            draft.take(choice, event)


async def race(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Do some work as long as the client is there; whether it was done."""
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


def encode_shape(shape: BaseModel) -> bytes:
    """A piece of an answer as JSON."""
    return shape.model_dump_json().encode()


def send_shape(shape: BaseModel, *, status: int = 200) -> Response:
    """A whole answer."""
    return Response(encode_shape(shape), status_code=status, media_type=JSON)
