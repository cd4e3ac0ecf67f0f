"""A real socket, with a third-party client; slow connections; and how a server ends."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import depthmix
from depthmix.infer import Engine, SamplingParams
from depthmix.models import open_model
from depthmix.serve.app import make_app
from depthmix.serve.lane import Lane
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics
from depthmix.serve.server import (
    Offer,
    bind_socket,
    check_exposure,
    describe_model,
    is_loopback,
    load_engine,
    make_server,
    read_key,
    serve_models,
    take_turns,
)
from depthmix.serve.worker import Worker
from served_models import (
    END,
    HeldEngine,
    Running,
    make_served,
    make_twin,
    run_server,
    write_served_run,
)

SECRET = "a-key"


def ask_openai(running: Running, key: str = SECRET) -> openai.OpenAI:
    url = f"http://127.0.0.1:{running.port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the other side closes, one way or another."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def read_problem(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_the_openai_client_is_served() -> None:
    with run_server(key=SECRET) as running, ask_openai(running) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        wish: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 3}
        prompt = make_served().vocabulary.encode("once upon")
        params = SamplingParams(max_tokens=8, seed=3, stop_tokens=[END], logprobs=2)
        (truth,) = HeldEngine().generate([prompt], params)[0].samples

        whole = client.completions.create(prompt="once upon", logprobs=2, **wish)
        assert whole.choices[0].text == truth.text
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.token_logprobs == list(truth.logprobs or ())
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(truth.tokens)
        assert (whole.usage.model_extra or {})["depth"]["flops"] == truth.depth.flops

        pieces = client.completions.create(prompt="once upon", stream=True, **wish)
        assert "".join(piece.choices[0].text for piece in pieces) == truth.text

        messages: Any = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(messages=messages, logprobs=True, **wish)
        text = answer.choices[0].message.content
        assert text
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content or ()) == 8
        chunks = list(
            client.chat.completions.create(
                messages=messages, stream=True, stream_options={"include_usage": True}, **wish
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8
        with client.completions.create(
            prompt="a", stream=True, extra_body={"depth": True, "ignore_eos": True}, **wish
        ) as stream:
            paths = [(piece.choices[0].model_extra or {})["depth"]["previous"] for piece in stream]
        assert len(paths) == 8
        assert all(re.fullmatch("[01]+", path) for path in paths)


def test_the_openai_client_understands_errors() -> None:
    with run_server(key=SECRET) as running, ask_openai(running) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="a", best_of=3)
        assert refused.value.param == "best_of"
        assert "'best_of' is not supported" in refused.value.message
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="else", prompt="a")
        assert missing.value.code == "model_not_found"
        with ask_openai(running, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()

        def fail(step: int) -> None:
            raise RuntimeError("boom")

        running.engine.fail = fail
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="a")
        with pytest.raises(openai.APIError, match="its log says why"):
            list(client.completions.create(model="tiny", prompt="a", stream=True))


def test_a_client_that_hangs_up_frees_its_pages() -> None:
    with run_server() as running:
        running.engine.hold()
        wish = {"prompt": "a" * 50, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with running.connect() as connection:
            body = json.dumps(wish).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            running.engine.gate.release(2)
            running.wait_for(lambda: running.engine.num_steps == 2)
            assert running.engine.pages.num_used > 0
        running.wait_for(lambda: not running.server.server_state.connections)
        running.engine.let_go()
        running.wait_for(lambda: running.worker.num_open == 0)
        assert running.engine.pages.num_used == 0
        assert running.engine.num_steps < 100


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_not_waited_for(head: bytes) -> None:
    with run_server(Limits(header_seconds=0.2)) as running:
        with running.connect() as connection:
            connection.sendall(head)
            assert read_to_end(connection) == b""
        with running.connect() as connection:
            # the second request of a connection neither
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b'"ok"' not in connection.recv(65536):
                pass
            connection.sendall(b"GET /he")
            assert b"HTTP" not in read_to_end(connection)


@pytest.mark.parametrize("rest", [b"", b"\r\nHost: localhost\r\n\r\n"], ids=["part", "whole"])
def test_a_head_over_the_limit_is_refused(rest: bytes) -> None:
    with run_server(Limits(max_header_bytes=2000)) as running, running.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 4000 + rest)
        status, error = read_problem(read_to_end(connection))
        assert status == (431 if rest else 400)
        assert "over 2,000 bytes" in error["message"]


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_what_is_not_http_is_refused_in_the_shape_of_all_errors(start: bytes) -> None:
    with run_server() as running, running.connect() as connection:
        connection.sendall(start + b"\0\r\n\r\n")
        status, error = read_problem(read_to_end(connection))
        assert (status, error["type"]) == (400, "invalid_request_error")
        assert "not valid HTTP" in error["message"]


def test_a_body_that_breaks_off_in_an_answer_ends_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with run_server() as running, running.connect() as connection:
        connection.sendall(head)
        while b'"ok"' not in connection.recv(65536):
            pass
        connection.sendall(b"no length\r\n")
        assert read_to_end(connection) == b""
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("body", [b"x", b"x" * 10], ids=["part", "whole"])
def test_a_body_that_comes_after_the_answer_is_not_waited_for(body: bytes) -> None:
    with run_server(Limits(header_seconds=0.2)) as running, running.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        while b'"ok"' not in connection.recv(65536):
            pass
        connection.sendall(body)
        assert read_to_end(connection) == b""


def test_a_connection_without_requests_is_closed() -> None:
    with run_server(Limits(idle_seconds=0.2)) as running, running.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b'"status":"ok"' in read_to_end(connection)


def test_connections_over_the_limit_are_answered_503() -> None:
    with run_server(Limits(max_connections=3)) as running:
        held = [running.connect() for _ in range(2)]
        running.wait_for(lambda: len(running.server.server_state.connections) == 2)
        url = f"http://127.0.0.1:{running.port}/health"
        with httpx.Client() as client:
            assert client.get(url).status_code == 200
            refused = httpx.get(url)
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "service_unavailable"
            assert "too many connections" in refused.json()["error"]["message"]
            # connections that are open already go on
            assert client.get(url).status_code == 200
        for connection in held:
            connection.close()
        running.wait_for(lambda: not running.server.server_state.connections)
        assert httpx.get(url).status_code == 200


# the short answer is less than asyncio itself would call much
@pytest.mark.parametrize(("num_chars", "most"), [(300_000, None), (20_000, 65536)])
def test_who_does_not_read_is_cut_off(num_chars: int, most: int | None) -> None:
    with run_server(Limits(write_seconds=0.2), small_buffers=True) as running:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", running.port))
        with connection:
            body = json.dumps({"prompt": "a" * num_chars}).encode()
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            running.wait_for(lambda: running.server.server_state.total_requests == 1)
            running.wait_for(lambda: not running.server.server_state.connections)
            head, _, rest = read_to_end(connection).partition(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            assert len(rest) < int(length)
            assert most is None or int(length) < most


def test_a_drain_has_a_limit_and_tells_whoever_is_left() -> None:
    with run_server(Limits(drain_seconds=0)) as running:
        running.engine.hold()
        found: list[str] = []

        def ask() -> None:
            wish = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
            url = f"http://127.0.0.1:{running.port}/v1/completions"
            found.append(httpx.post(url, json=wish, timeout=30).text)

        thread = threading.Thread(target=ask)
        thread.start()
        running.engine.gate.release()
        running.wait_for(lambda: running.engine.num_steps == 1)
        # as a signal does, which only the main thread has
        running.server.handle_exit(signal.SIGTERM, None)
        # a thread between two steps sees the order, and has stopped, before this one looks
        running.wait_for(lambda: running.worker.state in ("draining", "stopped"))
        running.engine.let_go()
        thread.join(30)
        assert "shutting down" in found[0]
        assert "[DONE]" not in found[0]
        running.thread.join(30)
        assert not running.thread.is_alive()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_run(tmp_path_factory.mktemp("serving"))


def start_process(*arguments: str) -> subprocess.Popen[str]:
    source = str(Path(depthmix.__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    variables.pop("DEPTHMIX_API_KEY", None)
    command = [sys.executable, "-m", "depthmix", "serve", "--device", "cpu", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)


def test_sigterm_lets_requests_finish_and_exits_0(run: Path) -> None:
    with start_process(str(run), "--port", "0") as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.search(r"run at (http://127\.0\.0\.1:\d+)/v1", line)
            assert found is not None, line + process.stderr.read()
            assert process.stderr.readline() == "depthmix: ready\n"
            wish = {"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}
            wish |= {"stream_options": {"include_usage": True}}
            url = f"{found[1]}/v1/completions"
            with httpx.stream("POST", url, json=wish, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                *_, usage, _, last, _ = list(lines)
            assert last == "data: [DONE]"
            used = json.loads(usage.removeprefix("data: "))["usage"]
            assert used["completion_tokens"] == 300
            assert process.wait(30) == 0
            assert process.stderr.read() == "depthmix: stopped\n"
        finally:
            process.kill()


def test_a_second_sigterm_ends_the_process_at_once(run: Path) -> None:
    with start_process(str(run), "--port", "0") as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert found is not None
            assert process.stderr.readline() == "depthmix: ready\n"
            # far more than is done before the second signal
            wish = {"prompt": ["a"] * 8, "max_tokens": 400, "n": 16, "stream": True}
            wish |= {"ignore_eos": True}
            url = f"{found[0]}/v1/completions"
            with httpx.stream("POST", url, json=wish, timeout=60) as answer:
                # dropping the iterator would close the connection, and the server would end
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                while httpx.get(f"{found[0]}/health").json()["status"] != "draining":
                    pass
                process.send_signal(signal.SIGTERM)
                # as any process that does not look at the signal
                assert process.wait(30) == -signal.SIGTERM
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_sigterm_ends_a_server_that_still_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthmix.serve.worker.JOIN_SECONDS", 0.1)
    held = threading.Event()

    def load() -> Engine:
        assert held.wait(30)
        return HeldEngine()

    worker = Worker(load, Metrics(), max_queue=1)
    app = make_app([Lane(make_served(), worker, Limits())], Limits())
    server = make_server(app, [worker], Limits())
    listener = bind_socket("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.001)
        assert worker.state == "loading"
        server.handle_exit(signal.SIGTERM, None)
        thread.join(30)
        assert not thread.is_alive()
    finally:
        held.set()
    # the load is left alone, and what it makes is not used
    worker._thread.join(30)
    assert worker.state == "stopped"


def test_a_model_on_disk_becomes_an_engine(run: Path) -> None:
    stored = open_model(run)
    model = describe_model(stored, None)
    assert (model.name, describe_model(stored, "else").name) == ("run", "else")
    assert model.chat is not None
    engine = load_engine(stored, device="cpu", max_batch=2, cache_tokens=1024)
    assert engine.pages.num_rows == 2
    (sample,) = engine.generate([[5]], SamplingParams(max_tokens=3, seed=1))[0].samples
    assert sample.text is not None


def test_the_openai_client_chooses_between_two_models() -> None:
    pairs = [(make_served(), HeldEngine()), make_twin()]
    with run_server(pairs=pairs) as running, ask_openai(running) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "twin"]
        for model, engine in pairs:
            prompt = model.vocabulary.encode("once upon")
            params = SamplingParams(max_tokens=8, seed=3, stop_tokens=[END])
            (truth,) = (
                HeldEngine("tiny" if model.name == "tiny" else "tiny-dense")
                .generate([prompt], params)[0]
                .samples
            )
            before = engine.num_steps
            wish: dict[str, Any] = {"prompt": "once upon", "max_tokens": 8, "seed": 3}
            assert client.completions.create(model=model.name, **wish).choices[0].text == truth.text
            assert engine.num_steps > before
        with pytest.raises(openai.NotFoundError, match="'tiny' and 'twin' are served"):
            client.completions.create(model="else", prompt="a")


def test_two_models_are_loaded_one_after_the_other_and_ready_together() -> None:
    held, log = threading.Event(), []

    def load(number: int) -> HeldEngine:
        log.append(f"begin {number}")
        assert held.wait(30)
        log.append(f"end {number}")
        return HeldEngine()

    loads = take_turns([lambda: load(0), lambda: load(1)])
    threads = [
        threading.Thread(target=lambda i=i: (loads[i](), log.append("ready"))) for i in (0, 1)
    ]
    for thread in threads:
        thread.start()
    held.set()
    for thread in threads:
        thread.join(30)
    begun, ended, other, end, *ready = log
    assert (begun[:5], ended) == ("begin", f"end {begun[-1]}")
    assert (other[:5], end) == ("begin", f"end {other[-1]}")
    assert ready == ["ready", "ready"]


def test_a_model_that_cannot_be_loaded_holds_up_no_other() -> None:
    def fail() -> HeldEngine:
        raise ValueError("no such weights")

    loads = take_turns([HeldEngine, fail])
    found: list[Engine] = []
    thread = threading.Thread(target=lambda: found.append(loads[0]()))
    thread.start()
    with pytest.raises(ValueError, match="no such weights"):
        loads[1]()
    thread.join(30)
    assert len(found) == 1
    offers = [Offer(make_served(), HeldEngine), Offer(make_twin()[0], fail)]
    with pytest.raises(ValueError, match="no such weights"):
        serve_models(offers, host="127.0.0.1", port=0, limits=Limits())
    with pytest.raises(ValueError, match="two models are called 'tiny': name each of them"):
        serve_models(offers[:1] * 2, host="127.0.0.1", port=0, limits=Limits())


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEPTHMIX_API_KEY", raising=False)
    assert read_key(None) is None
    monkeypatch.setenv("DEPTHMIX_API_KEY", "from-outside")
    assert read_key(None) == "from-outside"
    # what `$(cat key.txt)` is not, a container's secret may be
    monkeypatch.setenv("DEPTHMIX_API_KEY", "from-outside\n")
    assert read_key(None) == "from-outside"
    monkeypatch.setenv("DEPTHMIX_API_KEY", "\n")
    assert read_key(None) is None
    file = tmp_path / "key.txt"
    file.write_text("from-file\n")
    assert read_key(file) == "from-file"
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_key(file)


def test_others_are_let_in_with_a_key_or_on_purpose() -> None:
    for host in ("127.0.0.1", "127.5.0.1", "::1", "localhost"):
        assert is_loopback(host)
        check_exposure(host, None, no_auth=False)
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com", ""):
        assert not is_loopback(host)
        with pytest.raises(ValueError, match="open to others"):
            check_exposure(host, None, no_auth=False)
        check_exposure(host, SECRET, no_auth=False)
        check_exposure(host, None, no_auth=True)
    with pytest.raises(ValueError, match="leave out one"):
        check_exposure("0.0.0.0", SECRET, no_auth=True)


def test_an_address_that_is_taken_is_told() -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port}"):
            bind_socket("127.0.0.1", port)
    for port in (-1, 70_000):
        with pytest.raises(ValueError, match="must lie between 0 and 65535"):
            bind_socket("127.0.0.1", port)
