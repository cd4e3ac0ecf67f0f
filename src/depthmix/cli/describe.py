"""`depthmix describe`: show models in numbers. Loads torch for models on disk only."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    AsJson,
    FieldsCommand,
    app,
    name_flags,
    split_arguments,
)

if TYPE_CHECKING:
    from depthmix.config import ModelConfig


@app.command(cls=FieldsCommand, context_settings=FIELDS_ALLOWED)
def describe(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|FIELD=VALUE",
            help="Presets, .toml files or folders of models, and fields to change in all of them.",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence. Default: each model's max_seq_len."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show models side by side, in numbers.

    For example: depthmix describe 60m-dense 60m-mod routing.capacity=0.25
    """
    from depthmix.report.describe import describe_model, print_tables, to_json

    names, overrides = split_arguments(arguments or [])
    if not names:
        raise ValueError(
            "name at least one model to describe: 'depthmix presets' lists the presets"
        )
    with name_flags("seq_len"):
        models = [describe_model(name, read_model(name, overrides), seq_len) for name in names]
    if as_json:
        print(to_json(models))
    else:
        from rich.console import Console

        print_tables(models, Console())


def read_model(name: str, overrides: Mapping[str, Any]) -> "ModelConfig":
    """The configuration of a preset, of a .toml file, or of a model on disk."""
    if Path(name).is_dir():
        from depthmix.models import open_model

        return open_model(name).config.override(overrides)
    from depthmix.config import load_config

    return load_config(name, overrides)
