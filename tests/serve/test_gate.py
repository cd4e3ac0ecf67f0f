"""Which requests are let in, and how large they may be."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from depthmix.serve.gate import LOOPBACK_NAMES, Gate
from depthmix.serve.limits import Limits
from served_models import Caller, HeldEngine, open_service, play

SECRET = "a-key-of-some-length"


def read_error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    async def scene() -> None:
        async with open_service(key=SECRET) as server:
            for method, path in (
                *(("GET", path) for path in ("/v1/models", "/metrics", "/openapi.json", "/nope")),
                *(("POST", path) for path in ("/v1/completions", "/tokenize", "/detokenize")),
            ):
                for shown in (
                    *(None, "", "Bearer", "Bearer ", f"Basic {SECRET}", SECRET),
                    *(f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET.upper()}"),
                ):
                    headers = {} if shown is None else {"Authorization": shown}
                    answer = await server.client.request(method, path, headers=headers)
                    assert read_error(answer) == (401, "invalid_api_key")
            assert (await server.client.get("/health")).status_code == 200
            for shown in (f"Bearer {SECRET}", f"bearer  {SECRET}"):
                answer = await server.client.get("/v1/models", headers={"Authorization": shown})
                assert answer.status_code == 200

    play(scene())


def test_a_wrong_key_is_refused_before_the_body_is_read() -> None:
    async def scene() -> None:
        async def receive() -> dict[str, Any]:
            raise AssertionError("nothing of the body is wanted")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("nothing is let in")

        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        gate = Gate(app, Limits(), key=SECRET)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await gate(scope, receive, send)
        assert sent[0]["status"] == 401
        assert (b"connection", b"close") in sent[0]["headers"]

    play(scene())


def test_only_this_machines_names_are_answered_where_no_key_is_asked_for() -> None:
    async def scene() -> None:
        async with open_service(hosts=LOOPBACK_NAMES) as server:
            for host in (
                "localhost",
                "localhost:8000",
                "127.0.0.1:8000",
                "[::1]:8000",
                "LOCALHOST",
            ):
                answer = await server.client.get("/v1/models", headers={"Host": host})
                assert answer.status_code == 200, host
            for host in ("example.com", "localhost.example.com", "", "127.0.0.1.example.com:80"):
                answer = await server.client.get("/v1/models", headers={"Host": host})
                assert read_error(answer) == (403, "wrong_host")

    play(scene())


def test_a_body_over_the_limit_is_refused() -> None:
    async def scene() -> None:
        async with open_service(Limits(max_body_bytes=100)) as server:
            fits = json.dumps({"prompt": "a"}).encode().ljust(100)
            headers = {"Content-Type": "application/json"}
            post = server.client.post
            answer = await post("/v1/completions", content=fits, headers=headers)
            assert answer.status_code == 200
            answer = await post("/v1/completions", content=fits + b" ", headers=headers)
            assert read_error(answer) == (413, "body_too_large")

            async def drip() -> Any:
                # without a length that could be looked at
                for _ in range(101):
                    yield b" "

            answer = await post("/v1/completions", content=drip(), headers=headers)
            assert read_error(answer) == (413, "body_too_large")
            for length in ("9" * 30, "101"):
                answer = await post(
                    "/v1/completions", content=b"", headers={**headers, "Content-Length": length}
                )
                assert read_error(answer) == (413, "body_too_large")

    play(scene())


def test_bodies_have_a_limit_together() -> None:
    async def scene() -> None:
        headers = {"Content-Type": "application/json"}
        limits = Limits(max_body_bytes=100, max_bodies_bytes=150)
        engine = HeldEngine()
        engine.hold()
        async with open_service(limits, engine=engine) as server:
            body = json.dumps({"prompt": "a", "max_tokens": 2}).encode().ljust(100)

            async def ask(content: Any = body) -> httpx.Response:
                return await server.client.post("/v1/completions", content=content, headers=headers)

            held = asyncio.ensure_future(ask())
            await server.wait_for(lambda: server.worker.num_open == 1)
            for _ in range(2):
                answer = await ask()
                assert read_error(answer) == (429, "bodies_full")
                assert int(answer.headers["Retry-After"]) >= 1
            gone = Caller(server.app, "/v1/completions", prompt="a")
            await gone.leave()
            # small ones still fit, and what is refused no longer counts
            fits = asyncio.ensure_future(ask(body.strip()))
            await server.wait_for(lambda: server.worker.num_open == 2)
            engine.let_go()
            assert [(await each).status_code for each in (held, fits)] == [200, 200]
            assert (await ask()).status_code == 200
            assert server.app._num_bytes == 0
        # one always fits
        async with open_service(Limits(max_body_bytes=100, max_bodies_bytes=1)) as server:
            assert (await ask()).status_code == 200

    play(scene())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scene() -> None:
        async with open_service(Limits(body_seconds=0.05)) as server:

            async def drip() -> Any:
                yield b"{"
                await asyncio.Event().wait()

            answer = await server.client.post("/v1/completions", content=drip())
            assert read_error(answer) == (408, "timeout")

    play(scene())


def test_other_sites_pages_may_call_only_where_they_are_named() -> None:
    async def scene() -> None:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        ask |= {"Access-Control-Request-Headers": "content-type,authorization"}
        name = "access-control-allow-origin"
        async with open_service() as server:
            answer = await server.client.options("/v1/completions", headers=ask)
            assert answer.status_code == 405
            answer = await server.client.get("/health", headers={"Origin": "https://a.example"})
            assert name not in answer.headers
        async with open_service(origins=["https://a.example"], key=SECRET) as server:
            # a browser asks first, and without the key
            answer = await server.client.options("/v1/completions", headers=ask)
            assert answer.status_code == 200
            assert answer.headers[name] == "https://a.example"
            ask["Origin"] = "https://b.example"
            answer = await server.client.options("/v1/completions", headers=ask)
            assert read_error(answer) == (400, "not_allowed_here")
            assert name not in answer.headers
            assert answer.headers["vary"].startswith("Origin")
            assert (await server.client.get("/v1/models")).status_code == 401

    play(scene())


@pytest.mark.parametrize(
    ("raised", "status", "sentence"),
    [
        (KeyError("/secret"), 500, "the server failed: its log says why"),
        (asyncio.CancelledError(), 503, "the server is shutting down: ask another one"),
    ],
)
def test_what_is_raised_is_answered_in_the_shape_of_all_errors(
    raised: BaseException, status: int, sentence: str
) -> None:
    async def scene() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

        async def fail(*_: Any) -> Any:
            raise raised

        async def begin(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise raised

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        # in the app, and before it
        for app, read in ((fail, receive), (begin, fail)):
            sent.clear()
            with pytest.raises(type(raised)):
                await Gate(app, Limits())(scope, read, send)
            assert sent[0]["status"] == status
            assert (b"content-type", b"application/json") in sent[0]["headers"]
            assert json.loads(sent[1]["body"])["error"]["message"] == sentence
        # an answer that has begun is not answered again
        sent.clear()
        with pytest.raises(type(raised)):
            await Gate(begin, Limits())(scope, receive, send)
        assert [message["type"] for message in sent] == ["http.response.start"]

    play(scene())


@pytest.mark.parametrize("kind", ["websocket", "else"])
def test_nothing_but_http_is_answered(kind: str) -> None:
    async def scene() -> None:
        async def fail(*_: Any) -> Any:
            raise AssertionError("nothing is let in")

        await Gate(fail, Limits())({"type": kind}, fail, fail)

    play(scene())
