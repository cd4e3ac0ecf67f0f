"""Which requests are let in: their key, their host's name, and their size and pace.

Stands before the routes, so that a request is refused before its body is read. Does not know what
is asked.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from depthmix.serve.limits import Limits
from depthmix.serve.problems import (
    ENDING,
    FAILED,
    BusyError,
    FailedError,
    ServeError,
    StatusError,
    UnavailableError,
)

# liveness checks need no key; the page asks for it and contains nothing about the models
OPEN_PATHS = frozenset({"/", "/health"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})


class GoneError(Exception):
    """The client has closed its connection."""


class Gate:
    """Passes permitted requests on to `app`, each with its whole body."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        *,
        key: str | None = None,
        hosts: Collection[str] | None = None,
    ) -> None:
        """`key` is what clients must show; `hosts` the names by which they may call the server.

        A web page can make its own host's name point to this machine, so without a key only this
        machine's own names are answered.
        """
        self.app, self.limits, self.hosts = app, limits, hosts
        self._most_bytes = max(limits.max_bodies_bytes, limits.max_body_bytes)
        self._num_bytes = 0
        self._key = None if key is None else _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # there are no web sockets here; the lifespan belongs to the app
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        is_begun = False

        async def watch(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await self._admit(scope, receive, watch)
        except BaseException as error:
            # else the server below would answer, in plain text; it still logs what is raised
            if not is_begun:
                is_ending = isinstance(error, asyncio.CancelledError)
                problem = UnavailableError(ENDING) if is_ending else FailedError(FAILED)
                await close_with(problem)(scope, receive, send)
            raise

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        body = b""
        try:
            self._check_head(scope)
            self._check_host(headers)
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
                body = await self._read_body(headers, receive)
                receive = _replay(body, receive)
        except ServeError as problem:
            await close_with(problem)(scope, receive, send)
            return
        except GoneError:
            return
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_bytes -= len(body)

    def _check_head(self, scope: Scope) -> None:
        # h11 only limits a head that is still incomplete
        most = self.limits.max_header_bytes
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > most:
            raise StatusError(
                431, f"the head is over {most:,} bytes: send less", code="head_too_large"
            )

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        if self.hosts is None:
            return
        name = _cut_port(headers.get(b"host", b"").decode("latin-1")).lower()
        if name not in self.hosts:
            raise StatusError(
                403, "this server answers to the names of its own machine only", code="wrong_host"
            )

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if self._key is None:
            return
        scheme, _, shown = headers.get(b"authorization", b"").partition(b" ")
        # digests have one length, and comparing them takes constant time
        fits = hmac.compare_digest(_digest(shown.strip()), self._key)
        if scheme.lower() != b"bearer" or not fits:
            raise StatusError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """All of the body; it counts from here on."""
        most = self.limits.max_body_bytes
        length = headers.get(b"content-length", b"0")
        too_large = StatusError(
            413, f"the body is larger than {most:,} bytes: send less", code="body_too_large"
        )
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise too_large
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise GoneError
                    part = message.get("body", b"")
                    size += len(part)
                    self._num_bytes += len(part)
                    if size > most:
                        raise too_large
                    if self._num_bytes > self._most_bytes:
                        raise BusyError(
                            "the open requests are too large together: try again later",
                            code="bodies_full",
                        )
                    parts.append(part)
                    more = message.get("more_body", False)
        except BaseException as error:
            self._num_bytes -= size
            if isinstance(error, TimeoutError):
                slow = StatusError(408, "the body took too long to arrive", code="timeout")
                raise slow from None
            raise
        return b"".join(parts)


class Sites(CORSMiddleware):
    """Which other sites' pages may call the server; what it refuses has the shape of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a browser that asks before it sends a page's request."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        refusal = answer_problem(
            StatusError(
                answer.status_code,
                "pages of that origin may not send this method or these headers to this server",
                code="not_allowed_here",
            )
        )
        kept = {n: v for n, v in answer.headers.items() if not n.startswith("content-")}
        refusal.headers.update(kept)
        return refusal


class PlainJSON(Response):
    """JSON text that can always be encoded."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Half of a surrogate pair, which UTF-8 lacks, becomes a question mark."""
        return content.encode("utf-8", "replace")


def answer_problem(problem: ServeError) -> Response:
    """A problem as an answer."""
    text = json.dumps(problem.to_dict(), ensure_ascii=False)
    return PlainJSON(text, status_code=problem.status, headers=problem.headers)


def close_with(problem: ServeError) -> Response:
    """A problem as a connection's last answer: what is left of the request is not read."""
    response = answer_problem(problem)
    response.headers["Connection"] = "close"
    return response


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body at once, then later messages: that the client has gone."""
    is_sent = False

    async def read() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _cut_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
