"""Replicas of the server in a Ray cluster, each with the model and an engine of its own.

    serve run depthmix.serve.ray:app path=runs/first replicas=2

Owns how a replica is made, when it takes requests, and when Ray is to replace it. Ray Serve owns
the socket, and which replica a request goes to. The library is an extra: `depthmix[ray]`.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from depthmix.models import open_model
from depthmix.serve.app import make_app
from depthmix.serve.gate import LOOPBACK_NAMES
from depthmix.serve.lane import Lane
from depthmix.serve.limits import Limits
from depthmix.serve.metrics import Metrics
from depthmix.serve.server import make_offer, read_key
from depthmix.serve.worker import Worker
from depthmix.world import choose_device

try:
    from ray import serve  # pyrefly: ignore[missing-import]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("replicas need Ray: pip install 'depthmix[ray]'") from error


class ReplicaOptions(BaseModel):
    """What `serve run` takes after the name of the app, as NAME=VALUE."""

    model_config = ConfigDict(extra="forbid")

    path: Path
    """What is served, as in `depthmix serve`; each node must have it there."""
    name: str | None = None
    """Of the model in the API; its folder's unless given."""
    replicas: Annotated[int, Field(ge=1)] = 1
    gpus: Annotated[float, Field(ge=0)] | None = None
    """Of each replica; 1 where the machine that starts them has any, else 0."""
    device: str | None = None
    selector: str | None = None
    batch: Annotated[int, Field(ge=1)] | None = None
    cache_tokens: Annotated[int, Field(ge=1)] | None = None
    api_key_file: Path | None = None
    """On each node, with the key that clients must send; else its DEPTHMIX_API_KEY."""
    no_auth: bool = False
    """Answer to any host's name without a key."""
    limits: Limits = Limits()
    """For each replica; those of connections are Ray's own."""


def app(options: ReplicaOptions) -> Any:
    """The application that `serve run` starts."""
    # the replicas may run in other folders
    options = options.model_copy(update={"path": options.path.resolve()})
    gpus = options.gpus
    if gpus is None:
        gpus = float(choose_device(options.device) == "cuda")
    lanes: list[Lane] = []

    def build() -> Any:
        """One replica's app, in its own process."""
        stored = open_model(options.path)
        offer = make_offer(
            stored,
            options.name,
            device=options.device,
            selector=options.selector,
            max_batch=options.batch,
            cache_tokens=options.cache_tokens,
        )
        limits = options.limits
        worker = Worker(offer.load, Metrics(), max_queue=limits.max_queue)
        lanes[:] = [Lane(offer.model, worker, limits)]
        key = read_key(options.api_key_file)
        hosts = None if key is not None or options.no_auth else LOOPBACK_NAMES
        # Ray sends requests as soon as it has started
        return make_app(lanes, limits, key=key, hosts=hosts, waits=True)

    class Replica:
        """The server, without a socket."""

        def check_health(self) -> None:
            """Ray asks this every few seconds, and replaces a replica that raises."""
            for lane in lanes:
                worker = lane.worker
                if worker.state in ("ready", "broken") and not worker.is_healthy:
                    raise RuntimeError(worker.last_failure or str(worker.error))

    deploy = serve.deployment(
        name="depthmix",
        num_replicas=options.replicas,
        # the queue is the engine's own, which refuses with 429
        max_ongoing_requests=options.limits.max_connections,
        graceful_shutdown_timeout_s=options.limits.drain_seconds,
        ray_actor_options={"num_gpus": gpus},
    )
    return deploy(serve.ingress(build)(Replica)).bind()
