"""`depthmix serve`: serve models over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Device,
    ModelPath,
    PlainCommand,
    Selector,
    TokenizerPlace,
    app,
    check_counts,
    check_device,
    name_flags,
    name_missing_extra,
)
from depthmix.serve.limits import Limits

LIMITS = Limits()


@app.command(cls=PlainCommand)
def serve(
    model: ModelPath,
    other: Annotated[
        Path | None,
        typer.Argument(
            help="A second model, to compare with the first.",
            metavar="RUN|DIR",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's name in the API; for two models, give it twice.",
            metavar="NAME",
            show_default="its folder",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="A file with the key that clients must send.", show_default="DEPTHMIX_API_KEY"
        ),
    ] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Listen beyond loopback without a key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin whose pages may call the API; may be repeated.", metavar="URL"
        ),
    ] = None,
    selector: Selector = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Most samples in parallel.", show_default="8 on a CPU, 256 on a GPU"),
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Size of the cache, in tokens that go through every block.",
            show_default="enough for the batch, at most half of the free memory",
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Most samples waiting; further requests get 429.")
    ] = LIMITS.max_queue,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt.", show_default="the model's limit")
    ] = None,
    max_n: Annotated[int, typer.Option(help="Most samples per prompt.")] = LIMITS.max_n,
    max_samples: Annotated[
        int, typer.Option(help="Most samples per request.")
    ] = LIMITS.max_samples,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest request body.")
    ] = LIMITS.max_body_bytes,
    max_connections: Annotated[
        int, typer.Option(help="Most connections; further ones get 503.")
    ] = LIMITS.max_connections,
    header_seconds: Annotated[
        float, typer.Option(help="Time limit for a request's headers.")
    ] = LIMITS.header_seconds,
    body_seconds: Annotated[
        float, typer.Option(help="Time limit for a request's body.")
    ] = LIMITS.body_seconds,
    idle_seconds: Annotated[
        float, typer.Option(help="Time that a connection may be idle between requests.")
    ] = LIMITS.idle_seconds,
    write_seconds: Annotated[
        float, typer.Option(help="Time that a client may leave an answer unread.")
    ] = LIMITS.write_seconds,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for running requests to finish after SIGTERM.")
    ] = LIMITS.drain_seconds,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    device: Device = None,
) -> None:
    """Serve a model over HTTP, with an API and a web page.

    Open the address in a browser for the page, which shows the depth of each token as text is
    generated. Programs use OpenAI's API at /v1; there are also /tokenize, /detokenize, /health and
    /metrics. With two models, a request chooses by 'model'; the first is the default. After SIGTERM
    or Ctrl-C, running requests may finish.

    \b
    For example:
      depthmix serve runs/demo-20261115-142233
      depthmix serve runs/demo-20261115-142233/mod runs/demo-20261115-142233/dense
      depthmix serve runs/demo-20261115-142233 --host 0.0.0.0 --api-key-file key.txt
    """
    # check the arguments first: torch takes seconds to load
    check_device(device)
    check_counts(batch=batch, cache_tokens=cache_tokens)
    with name_missing_extra("serve"):
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    options = {
        "max_body_bytes": max_body_bytes,
        "max_prompt_tokens": max_prompt_tokens,
        "max_n": max_n,
        "max_samples": max_samples,
        "max_queue": max_queue,
        "max_connections": max_connections,
        "header_seconds": header_seconds,
        "body_seconds": body_seconds,
        "idle_seconds": idle_seconds,
        "write_seconds": write_seconds,
        "drain_seconds": drain_seconds,
    }
    with name_flags(*options):
        limits = Limits(**options)
    from depthmix.models import open_model
    from depthmix.serve.server import (
        check_exposure,
        make_offer,
        read_key,
        serve_models,
    )

    key = read_key(api_key_file)
    check_exposure(host, key, no_auth=no_auth)
    paths = [model] if other is None else [model, other]
    if name is not None and len(name) != len(paths):
        from depthmix.units import format_count

        times, models = format_count(len(name), "time"), format_count(len(paths), "model")
        raise ValueError(f"--name is given {times} for {models}: give one name for each")
    offers = []
    for path, called in zip(paths, name or [None] * len(paths), strict=True):
        opened = open_model(path, checkpoint=checkpoint, tokenizer=tokenizer)
        with name_flags("selector"):
            offers.append(
                make_offer(
                    opened,
                    called,
                    device=device,
                    selector=selector,
                    max_batch=batch,
                    cache_tokens=cache_tokens,
                )
            )
    serve_models(offers, host=host, port=port, key=key, origins=cors_origin or (), limits=limits)
