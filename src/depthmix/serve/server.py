"""The server's process: its socket, connections that are too slow, and how it ends.

Owns the addresses to listen on, and what signals mean: the first SIGTERM or Ctrl-C stops admission
and lets requests finish, a second one ends at once. Does not know routes.
"""

import asyncio
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from depthmix.infer import Engine
from depthmix.models import StoredModel
from depthmix.sample.sampler import place_network
from depthmix.serve.answers import ServedModel
from depthmix.serve.app import make_app
from depthmix.serve.gate import LOOPBACK_NAMES, close_with
from depthmix.serve.lane import Lane
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics
from depthmix.serve.problems import RefusedError, UnavailableError
from depthmix.serve.worker import Worker
from depthmix.world import choose_device

KEY_VARIABLE = "DEPTHMIX_API_KEY"
# time to send the last answers after all requests have finished
FLUSH_SECONDS = 5


class TimedProtocol(H11Protocol):
    """A connection that is closed when a request, or the reading of an answer, takes too long.

    uvicorn itself only limits how long a connection waits between requests.
    """

    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyrefly: ignore
        """Wait for the first request, if there is room for the connection."""
        super().connection_made(transport)
        # the timer runs for any unread byte, also for short answers
        transport.set_write_buffer_limits(0)
        if len(self.connections) > self.limits.max_connections:
            full = UnavailableError("there are too many connections: try again later")
            self.app = close_with(full)  # pyrefly: ignore
        self._start_request()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a request, unless one is being answered."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_request()
        else:
            self._stop_request()

    def send_400_response(self, msg: str) -> None:
        """The answer to invalid HTTP, in the shape of all errors."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # an answer has begun
            self.transport.close()
            return
        most = self.limits.max_header_bytes
        answer = close_with(
            RefusedError(f"the request is not valid HTTP, or its head is over {most:,} bytes")
        )
        parts = (
            h11.Response(status_code=answer.status_code, headers=answer.raw_headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()

    def pause_writing(self) -> None:
        """The client has not read everything: limit the time it may take."""
        super().pause_writing()
        if self._write_timer is None:
            wait = self.limits.write_seconds
            self._write_timer = self.loop.call_later(wait, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read everything."""
        super().resume_writing()
        self._stop_write()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives its connection."""
        self._stop_request()
        self._stop_write()
        super().connection_lost(exc)

    def _start_request(self) -> None:
        if self._request_timer is None:
            wait = self.limits.header_seconds
            self._request_timer = self.loop.call_later(wait, self.transport.abort)

    def _stop_request(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class DrainingServer(uvicorn.Server):
    """A server that finishes its requests before it ends, and exits with 0."""

    def __init__(self, config: uvicorn.Config, workers: Sequence[Worker], limits: Limits) -> None:
        super().__init__(config)
        self.workers, self.limits = workers, limits
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._num_signals = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Until a signal, or until a model cannot be loaded."""
        self.loop = asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._watch_loading()))
        await super().serve(sockets)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does, but without raising them again, as being stopped is not a failure."""
        before: dict[int, Any] = {}
        # only the main thread has signals
        with suppress(ValueError):
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at once at the second."""
        self._num_signals += 1
        if self._num_signals > 1:
            # as if it had no handler
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        elif self.loop is not None:
            self.loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Take no more requests, and end when the running ones have ended."""
        self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        for worker in self.workers:
            worker.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_seconds):
                for worker in self.workers:
                    await worker.wait_idle()
        # the remaining clients get an error
        await asyncio.gather(*(worker.stop() for worker in self.workers))
        self.should_exit = True

    async def _watch_loading(self) -> None:
        # the workers are started when the app is
        for worker in self.workers:
            await worker.wait_loaded()
            if worker.state == "broken":
                self.should_exit = True
                return
        if all(worker.state == "ready" for worker in self.workers):
            _say("ready")


class Offer(NamedTuple):
    """A model that is to be served."""

    model: ServedModel
    load: Callable[[], Engine]
    """Makes its engine."""


def make_offer(
    stored: StoredModel,
    name: str | None = None,
    *,
    selector: str | None = None,
    **options: Any,
) -> Offer:
    """What is served of a model on disk; `options` are those of `load_engine`.

    Refuses a selector that the model cannot route by, before its weights are read.
    """
    try:
        stored.config.choose_selector(selector)
    except ValueError as error:
        if selector is None:
            raise
        raise ValueError(f"selector = {selector}: {error}") from error
    load = partial(load_engine, stored, selector=selector, **options)
    return Offer(describe_model(stored, name), load)


def serve_models(
    offers: Sequence[Offer],
    *,
    host: str,
    port: int,
    key: str | None = None,
    origins: Sequence[str] = (),
    limits: Limits,
) -> None:
    """Serve models until a signal, the first as the default; raises what kept one from loading.

    Listens first, so that clients get an answer while models are loaded.
    """
    names = [offer.model.name for offer in offers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two models are called '{twice}': name each of them with --name")
    workers = [
        Worker(load, Metrics(), max_queue=limits.max_queue)
        for load in take_turns([offer.load for offer in offers])
    ]
    lanes = [
        Lane(offer.model, worker, limits) for offer, worker in zip(offers, workers, strict=True)
    ]
    hosts = LOOPBACK_NAMES if key is None and is_loopback(host) else None
    app = make_app(lanes, limits, key=key, hosts=hosts, origins=origins)
    listener = bind_socket(host, port)
    server = make_server(app, workers, limits)
    shown, chosen = (f"[{host}]" if ":" in host else host), listener.getsockname()[1]
    _say(f"{' and '.join(names)} at http://{shown}:{chosen}/v1 (loading)")
    asyncio.run(server.serve([listener]))
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    _say("stopped")


def take_turns(loads: Sequence[Callable[[], Engine]]) -> list[Callable[[], Engine]]:
    """The same functions, but one runs at a time, and all return when the last one is done.

    A GPU records the steps of one engine only while nothing else runs there.
    """
    turn, together = threading.Lock(), threading.Barrier(len(loads))

    def load_in_turn(load: Callable[[], Engine]) -> Engine:
        try:
            with turn:
                engine = load()
        except BaseException:
            # the others must not wait for a load that will never end
            together.abort()
            raise
        # a failed load ends the server
        with suppress(threading.BrokenBarrierError):
            together.wait()
        return engine

    return [partial(load_in_turn, load) for load in loads]


def make_server(app: Any, workers: Sequence[Worker], limits: Limits) -> DrainingServer:
    """uvicorn with these limits."""
    config = uvicorn.Config(
        app,
        http=partial(TimedProtocol, limits),  # pyrefly: ignore
        # no web sockets
        ws="none",
        loop="asyncio",
        log_level="warning",
        # prompts and addresses are not logged
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.max_header_bytes,
        # uvicorn declares whole seconds, but asyncio takes fractions
        timeout_keep_alive=limits.idle_seconds,  # pyrefly: ignore
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )
    return DrainingServer(config, workers, limits)


def load_engine(
    stored: StoredModel,
    *,
    device: str | None = None,
    selector: str | None = None,
    max_batch: int | None = None,
    cache_tokens: int | None = None,
) -> Engine:
    """The engine of a model, ready for requests of any length."""
    engine = Engine(
        place_network(stored, choose_device(device)),
        selector=selector,
        decode=stored.vocabulary.decode,
        max_batch=max_batch,
        cache_tokens=cache_tokens,
    )
    engine.warm_up()
    return engine


def describe_model(stored: StoredModel, name: str | None) -> ServedModel:
    """What answers say about a model; its name defaults to its folder's."""
    shown = name or stored.path.resolve().name
    # a folder's name may be any bytes, an answer may not
    shown = shown.encode("utf-8", "replace").decode()
    return ServedModel(shown, stored.config, stored.vocabulary, stored.chat, int(time.time()))


def read_key(file: Path | None) -> str | None:
    """The API key: from a file, else from the environment."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    key = file.read_text(encoding="utf-8").strip()
    if not key:
        raise ValueError(f"--api-key-file {file} is empty: put the key into it")
    return key


def check_exposure(host: str, key: str | None, *, no_auth: bool) -> None:
    """Refuse to listen beyond this machine without a key, unless --no-auth allows it."""
    if key is None and not no_auth and not is_loopback(host):
        raise ValueError(
            f"--host {host} is open to others: give a key by --api-key-file or {KEY_VARIABLE}, or "
            f"say --no-auth"
        )
    if key is not None and no_auth:
        raise ValueError("there is an API key, and --no-auth: leave out one of the two")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at an address; bound early, as the model takes time to load."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port} must lie between 0 and 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"--host {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return listener


def _say(sentence: str) -> None:
    print(f"depthmix: {sentence}", file=sys.stderr, flush=True)
