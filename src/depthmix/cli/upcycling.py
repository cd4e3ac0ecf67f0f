"""The verb that makes a Mixture-of-Depths of a dense checkpoint."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from depthmix.cli.arguments import FIELDS_ALLOWED, FieldsCommand, app, split_arguments


@app.command(cls=FieldsCommand, context_settings=FIELDS_ALLOWED)
def upcycle(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json and safetensors, or a dense run.", metavar="DIR"
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new run's folder.", metavar="RUN")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Fields to change.", show_default=False),
    ] = None,
    capacity: Annotated[
        str, typer.Option(help="Share of tokens that a routed block keeps; a list; a schedule.")
    ] = "0.125",
    every: Annotated[int, typer.Option(help="Route every n-th block.")] = 2,
    first_dense: Annotated[
        int, typer.Option(help="Number of first blocks that are never routed.")
    ] = 2,
    gate: Annotated[
        str, typer.Option(help="tanh1 begins at 1, so that the dense model is unchanged.")
    ] = "tanh1",
) -> None:
    """Make a Mixture-of-Depths of a dense Llama, Mistral, Qwen2, Qwen3 or SmolLM checkpoint.

    The result is a run that nobody has trained: 'depthmix train --from' heals it, 'depthmix sample'
    and 'depthmix trace' open it.

    \b
    For example:
      depthmix upcycle models/SmolLM2-135M --out runs/smol --capacity 0.125
    """
    names, overrides = split_arguments(fields or [])
    if names:
        raise ValueError(f"'{names[0]}' is no field: write FIELD=VALUE")
    given: dict[str, Any] = {"routing.capacity": capacity, "routing.every": every}
    given |= {"routing.first_dense": first_dense, "routing.gate": gate}
    from depthmix.cli.opening import tell_missing

    with tell_missing("hf"):
        from depthmix.hf.upcycle import TOLD_LENGTH
        from depthmix.hf.upcycle import upcycle as make_run
    made = make_run(source, out, {**given, **overrides})
    place, length = shlex.quote(str(out)), min(TOLD_LENGTH, made.config.max_seq_len)
    for line in made.describe():
        print(line)
    if made.config.routing.gate == "tanh1" and made.config.routing.init_std == 0:
        print("with every token kept (selector 'all') it computes what the dense model does")
    print("its routers have learned nothing, so routing costs much of what it knew; heal it with:")
    print(f"  depthmix prepare TEXT --tokenizer {place} --out DATA")
    print(
        f"  depthmix train --from {place} --data DATA --steps 2000 train.capacity_from=1.0 "
        f"train.seq_len={length}"
    )
