"""Tiny models behind the server, for tests of it: in this process, or on disk. Asserts nothing."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from depthmix.config import ModelConfig, Recipe, RunConfig, load_preset
from depthmix.infer import Engine, Event
from depthmix.models import Chat, Vocabulary
from depthmix.models.write import write_run
from depthmix.nn import Transformer
from depthmix.serve.answers import ServedModel
from depthmix.serve.app import make_app
from depthmix.serve.lane import Lane
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics
from depthmix.serve.server import DrainingServer, bind_socket, make_server
from depthmix.serve.worker import Worker

END = 0
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no developers') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = Chat(TEMPLATE, stop_tokens=(END,))
FIELDS = {
    **{"width": 16, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 512},
    **{"vocab_size": 257, "routing.predictor_width": 8},
}


def play(scene: Coroutine[Any, Any, None]) -> None:
    """Run a test's scene; one that hangs has failed."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await scene

    asyncio.run(limited())


def make_config(preset: str = "tiny") -> ModelConfig:
    fields = FIELDS
    if preset == "tiny-dense":
        fields = {name: value for name, value in FIELDS.items() if "routing" not in name}
    return load_preset(preset).override(fields)


def make_network(config: ModelConfig | str = "tiny") -> Transformer:
    torch.manual_seed(1)
    return Transformer(make_config(config) if isinstance(config, str) else config).eval()


def make_tokenizer() -> tokenizers.Tokenizer:
    """A token for every byte, and an end token before them."""
    names = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def make_served(
    chat: Chat | None = CHAT, end_token: int = END, *, name: str = "tiny", preset: str = "tiny"
) -> ServedModel:
    vocabulary = Vocabulary(make_tokenizer(), end_token)
    return ServedModel(name, make_config(preset), vocabulary, chat, 1)


def make_twin() -> "Pair":
    """A dense model of the same shape, which does not chat."""
    return make_served(None, name="twin", preset="tiny-dense"), HeldEngine("tiny-dense")


def write_served_run(folder: Path, name: str = "run", config: ModelConfig | None = None) -> Path:
    """The same model, or one of another configuration, as a run on disk, which talks."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    make_tokenizer().save(str(source / "tokenizer.json"))
    config = config or make_config()
    # the head is the embedding, and is not kept twice
    weights = dict(make_network(config).named_parameters())
    run = RunConfig(model=config, train=Recipe())
    kept = {"source": source, "end_token": END, "chat": CHAT, "reason": "made for a test"}
    return write_run(folder / name, run, weights, **kept).path


class HeldEngine(Engine):
    """An engine whose steps wait until they may be taken, and fail where a test says so."""

    def __init__(self, preset: str = "tiny", **options: Any) -> None:
        decode = Vocabulary(make_tokenizer(), END).decode
        options = {"max_batch": 4, "seed": 0, "decode": decode, **options}
        super().__init__(make_network(preset), **options)
        self.gate = threading.Semaphore(0)
        self.is_held, self.num_steps = False, 0
        self.fail: Callable[[int], None] = lambda step: None

    def step(self) -> list[Event]:
        if self.is_held:
            self.gate.acquire()
        self.num_steps += 1
        self.fail(self.num_steps)
        return super().step()

    def hold(self) -> None:
        self.is_held = True

    def let_go(self) -> None:
        self.is_held = False
        self.gate.release()


Pair = tuple[ServedModel, HeldEngine]


class Opened(NamedTuple):
    """A server in this process."""

    app: Any
    worker: Worker
    engine: HeldEngine
    client: httpx.AsyncClient

    async def ask(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        answer = await self.ask("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, content: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        answer = await self.ask("/v1/chat/completions", messages=messages, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Until the engine's thread has come so far; a test that hangs here has failed."""
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def open_service(
    limits: Limits | None = None,
    *,
    engine: HeldEngine | None = None,
    chat: Chat | None = CHAT,
    end_token: int = END,
    load: Callable[[], Engine] | None = None,
    others: Sequence[Pair] = (),
    **options: Any,
) -> AsyncIterator[Opened]:
    """A server without sockets: the app, its worker, and a client that calls it directly.

    `others` are models beside the first one.
    """
    limits, engine = limits or Limits(), engine or HeldEngine()
    worker = Worker(load or (lambda: engine), Metrics(), max_queue=limits.max_queue)
    lanes = [Lane(make_served(chat, end_token), worker, limits)]
    for model, its_engine in others:
        its_worker = Worker(lambda its=its_engine: its, Metrics(), max_queue=limits.max_queue)
        lanes.append(Lane(model, its_worker, limits))
    app = make_app(lanes, limits, **options)
    for lane in lanes:
        lane.worker.start()
        if load is None:
            await lane.worker.wait_loaded()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield Opened(app, worker, engine, client)
    finally:
        engine.let_go()
        for lane in lanes:
            await lane.worker.stop()


class Running(NamedTuple):
    """A server in a thread of this process; its worker and engine are the first model's."""

    port: int
    server: DrainingServer
    worker: Worker
    engine: HeldEngine
    thread: threading.Thread

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def wait_for(self, is_so: Any) -> None:
        for _ in range(30_000):
            if is_so():
                return
            time.sleep(0.001)
        raise AssertionError("it does not come")

    def stop(self) -> None:
        assert self.server.loop is not None
        if self.thread.is_alive():
            self.server.loop.call_soon_threadsafe(self.server.begin_drain)
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def run_server(
    limits: Limits | None = None,
    *,
    pairs: Sequence[Pair] | None = None,
    key: str | None = None,
    small_buffers: bool = False,
) -> Iterator[Running]:
    """A server with a socket; `pairs` are models with their engines, else there is a tiny one."""
    limits, pairs = limits or Limits(), pairs or [(make_served(), HeldEngine())]
    workers = [
        Worker(lambda engine=engine: engine, Metrics(), max_queue=limits.max_queue)
        for _, engine in pairs
    ]
    lanes = [Lane(model, worker, limits) for (model, _), worker in zip(pairs, workers, strict=True)]
    app = make_app(lanes, limits, key=key)
    listener = bind_socket("127.0.0.1", 0)
    if small_buffers:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    port = listener.getsockname()[1]
    server = make_server(app, workers, limits)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    running = Running(port, server, workers[0], pairs[0][1], thread)
    try:
        running.wait_for(lambda: server.started and all(w.state == "ready" for w in workers))
        yield running
    finally:
        for _, engine in pairs:
            engine.let_go()
        running.stop()


def read_stream(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which has to end as it should."""
    *events, last, rest = text.split("\n\n")
    assert rest == ""
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


class Caller:
    """A client that is played by hand: it can leave in the middle."""

    def __init__(self, app: Any, path: str, **body: Any) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._parts = [json.dumps(body).encode()]
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"headers": headers, "query_string": b"", "root_path": "", "http_version": "1.1"}
        scope |= {"scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 1)}
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def leave(self) -> None:
        self.gone.set()
        await self.task

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
