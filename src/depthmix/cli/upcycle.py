"""`depthmix upcycle`: turn a dense checkpoint into a Mixture-of-Depths model."""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    Fields,
    FieldsCommand,
    app,
    check_counts,
    check_device,
    name_flags,
    read_text,
    split_arguments,
)

if TYPE_CHECKING:
    from depthmix.models import StoredModel


@app.command(cls=FieldsCommand, context_settings=FIELDS_ALLOWED)
def upcycle(
    source: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json and safetensors, a dense run, or a model on the "
            "Hugging Face hub.",
            metavar="DIR|OWNER/NAME",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new run's folder.", metavar="RUN")],
    fields: Fields = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Fraction of tokens that a routed block processes, a list of them, or a schedule.",
            show_default="0.125",
        ),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Route every n-th block.", show_default="2")
    ] = None,
    first_dense: Annotated[
        int | None, typer.Option(help="Leave this many first blocks dense.", show_default="2")
    ] = None,
    least: Annotated[
        int | None,
        typer.Option(
            help="Route this many blocks, those whose removal hurts least on --text.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A text for --least; may be repeated.", metavar="FILE", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="For --least: cpu or cuda. Default: a GPU if there is one.")
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Gate of routed blocks; tanh1 starts at 1, which leaves the model unchanged.",
            show_default="tanh1",
        ),
    ] = None,
) -> None:
    """Turn a dense Llama, Mistral or Qwen into a routed model.

    Reads Llama (including SmolLM), Mistral, Qwen2 and Qwen3. The result is an untrained run:
    'depthmix train --from' heals it, 'depthmix sample' and 'depthmix trace' open it.

    \b
    For example:
      depthmix upcycle models/SmolLM2-135M --out runs/smol --capacity 0.125
      depthmix upcycle HuggingFaceTB/SmolLM2-135M --out runs/smol
      depthmix upcycle SmolLM2-135M --out runs/smol --least 10 --text essay.txt
    """
    check_device(device)
    names, overrides = split_arguments(fields or [])
    if names:
        raise ValueError(f"'{names[0]}' is not a field: write FIELD=VALUE")
    flags = {"capacity": capacity, "every": every, "first_dense": first_dense, "gate": gate}
    given: dict[str, Any] = {f"routing.{n}": v for n, v in flags.items() if v is not None}
    if least is None:
        unused = [name for name, value in (("--text", text), ("--device", device)) if value]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} needs --least: give the number of blocks to route"
            )
    else:
        if not text:
            raise ValueError("--least needs --text, a file to measure the blocks on")
        if "routing.layers" in overrides:
            raise ValueError("give --least or routing.layers, not both")
        check_counts(least=least)
    from depthmix.config.train import read_length
    from depthmix.models import open_model
    from depthmix.models.hub import fetch_model, is_hub_name
    from depthmix.models.upcycle import SHOWN_LENGTH
    from depthmix.models.upcycle import upcycle as make_run
    from depthmix.runs.folder import RunDir

    given |= overrides
    if is_hub_name(source):
        # before a download that may take minutes
        RunDir(out).check_free()
        print(f"downloading {source} from the Hugging Face hub", file=sys.stderr)
        source = fetch_model(str(source))
    opened = open_model(source, max_seq_len=read_length(overrides))
    with name_flags(*flags, prefix="routing."):
        choose = None if least is None else partial(choose_blocks, opened, least, text, device)
        made = make_run(opened, out, given, choose_layers=choose)
    place, length = shlex.quote(str(out)), min(SHOWN_LENGTH, made.config.max_seq_len)
    for line in made.describe():
        print(line)
    print("its routers are untrained, so routing costs quality; heal it with:")
    print(f"  depthmix prepare TEXT --tokenizer {place} --out DATA")
    print(
        f"  depthmix train --from {place} --data DATA --steps 2000 "
        f"{shlex.quote(f'train.teacher={source}')} train.seq_len={length}"
    )


def choose_blocks(
    source: "StoredModel", count: int, files: list[str] | None, device: str | None
) -> tuple[int, ...]:
    """The blocks whose removal hurts least on some text, with a progress bar."""
    from rich.console import Console

    from depthmix.eval.blocks import measure_least
    from depthmix.progress import show_bar

    with show_bar(Console(stderr=True), gone=True) as bar:
        least = measure_least(
            source,
            (read_text(file) for file in files or []),
            count,
            device=device,
            report=lambda done, total: bar.update("leaving out blocks", done, total),
        )
    print(least.describe())
    return least.layers
