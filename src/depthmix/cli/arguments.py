"""What a command line says: models, fields to change, and help that lists the fields.

Knows the extras that a verb may need, and nothing of what it does with its arguments.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="depthmix",
    help="Mixture-of-Depths transformers: describe, prepare, train, sample.",
    # plain help: the rich one takes three times as long to come up
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# an unknown option may be a field, written the way other programs write it
FIELDS_ALLOWED = {"ignore_unknown_options": True}


ModelPath = Annotated[
    Path,
    typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.", metavar="RUN|DIR"),
]
Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE", help="Fields to change.", show_default=False),
]
Data = Annotated[
    Path | None,
    typer.Option(help="A folder made by 'prepare'; Python's standard library if empty."),
]
Checkpoint = Annotated[
    str | None, typer.Option(help="best, newest, or a step; the best if it is known.")
]
TokenizerPlace = Annotated[
    str | None, typer.Option(help="Where the tokenizer is, for a run whose data is gone.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of the text; all of them if empty.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]


class ModelsAndFields(NamedTuple):
    """The positional arguments of a verb that takes models and overrides."""

    models: list[str]
    overrides: dict[str, str]


class PlainCommand(TyperCommand):
    """A command whose help names its arguments without the types of Python."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Every argument and option, with its line."""
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                # typer would add `<list[str]>`
                parameter.display_type_rich = lambda ctx: ""  # pyrefly: ignore
        super().format_options(ctx, formatter)


class FieldsCommand(PlainCommand):
    """A command whose help ends with every field of a model."""

    train = False

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the fields, read from the configurations' own docstrings."""
        with formatter.section("Fields, to be written as FIELD=VALUE"):
            formatter.write_dl(list(list_fields(train=self.train).items()))


class RunFieldsCommand(FieldsCommand):
    """A command whose help ends with every field of a model and of a recipe."""

    train = True


def list_fields(*, train: bool) -> dict[str, str]:
    """Every field with its line of explanation, those of a recipe by their prefix."""
    from depthmix.config import ModelConfig, Recipe
    from depthmix.config.fields import document_fields

    recipe = document_fields(Recipe, "train.") if train else {}
    return {**recipe, **document_fields(ModelConfig)}


def split_arguments(arguments: Sequence[str], *, train: bool = False) -> ModelsAndFields:
    """Tell models from overrides: what has a `=` is an override, dashes before it or not.

    `train` also knows the fields of a recipe.
    """
    from depthmix.config.fields import parse_override
    from depthmix.config.train import update_names

    models, overrides = [], {}
    for i, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, value = _read_option(argument, arguments[i + 1 : i + 2], train)
            overrides[name] = value
        elif "=" in argument and not argument.endswith(".toml"):
            name, value = parse_override(argument)
            overrides[name] = value
        else:
            models.append(argument)
    return ModelsAndFields(models, update_names(overrides))


def check_device(device: str | None) -> None:
    """Refuse what is no --device; None leaves the choice."""
    if device == "mps":
        raise ValueError(
            "--device mps is not supported, because nothing has been tested on Apple's GPUs: use "
            "--device cpu"
        )
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {device} is neither cpu nor cuda")


def read_length(overrides: Mapping[str, str]) -> int | None:
    """A `max_seq_len` among fields to change; what is no number is refused where all are."""
    length = overrides.get("max_seq_len", "")
    return int(length) if length.isdecimal() else None


def read_file(option: str, file: str) -> str:
    """The text of a file that an option names, or of stdin."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not text in UTF-8: {error.reason}") from error


def read_text(file: str) -> str:
    """The text that --text names; there has to be some."""
    found = read_file("--text", file)
    if not found:
        raise ValueError(f"--text {file} is empty: give a text with at least one character")
    return found


@contextmanager
def tell_missing(extra: str) -> Iterator[None]:
    """Say which extra has the package that an import did not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs the package '{error.name}': pip install 'depthmix[{extra}]'"
        ) from error


def load_bridge() -> Any:
    """The module that writes and reads transformers' folders; without them, a sentence."""
    try:
        return import_module("depthmix.hf.export")
    except ImportError as error:
        from depthmix.hf import MISSING

        raise ValueError(MISSING) from error


def _read_option(argument: str, following: Sequence[str], train: bool) -> tuple[str, str]:
    """An option that is no option: a field if it carries its value, else a sentence that helps."""
    from depthmix.config.fields import suggest
    from depthmix.config.train import update_names

    fields = list_fields(train=train)
    option, equals, value = argument.partition("=")
    (name,) = update_names({option.lstrip("-"): value})
    if name in fields and equals:
        return name, value
    if name in fields:
        value = following[0] if following else "VALUE"
        raise ValueError(f"write '{argument} {value}' as {name}={value}")
    verb = typer.main.get_command(app).commands["train" if train else "describe"]  # pyrefly: ignore
    options = [option for parameter in verb.params for option in parameter.opts]
    close = suggest(option, ["--help", *options]) or suggest(name, fields)
    raise ValueError(f"there is no option '{option}'.{close} Fields are written FIELD=VALUE")
