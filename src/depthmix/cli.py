"""The `depthmix` command: one subcommand for each verb, and wiring only.

Imports what a verb needs inside the verb, so that `--help` answers at once and nothing that plans
or describes loads torch. A user's mistake ends in one sentence on stderr and exit code 2.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="depthmix",
    help="Mixture-of-Depths transformers: count, compare, try.",
    add_completion=False,
    # plain help: the rich one takes three times as long to come up
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# click's base of every usage error; typer has moved it, this way to it has stayed
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

# an unknown option may be a field, written the way other programs write it
_FIELDS_ALLOWED = {"ignore_unknown_options": True}


class ModelsAndFields(NamedTuple):
    """The positional arguments of a verb that takes models and overrides."""

    models: list[str]
    overrides: dict[str, str]


class FieldsCommand(TyperCommand):
    """A command whose help ends with every configuration field."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the fields, read from the configuration's own docstrings."""
        from depthmix.config import ModelConfig
        from depthmix.fields import document_fields

        with formatter.section("Fields, to be written as FIELD=VALUE"):
            formatter.write_dl(list(document_fields(ModelConfig).items()))


def _print_version(wanted: bool) -> bool:
    if wanted:
        from depthmix import __version__

        print(f"depthmix {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=FieldsCommand, context_settings=_FIELDS_ALLOWED)
def describe(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|FIELD=VALUE",
            help="Presets or .toml files to show, and fields to change in all of them.",
            show_default=False,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens in a sequence; without it each model's max_seq_len."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print raw numbers and full configurations as JSON.")
    ] = False,
) -> None:
    """Show models side by side, in numbers.

    For example: depthmix describe 60m-dense 60m-mod routing.capacity=0.25
    """
    from depthmix.describe import describe_model, load_model, print_tables, to_json

    names, overrides = split_arguments(arguments or [])
    if not names:
        raise ValueError(
            "name at least one model to describe: 'depthmix presets' lists the presets"
        )
    models = [describe_model(name, load_model(name, overrides), seq_len) for name in names]
    if as_json:
        print(to_json(models))
    else:
        from rich.console import Console

        print_tables(models, Console())


@app.command()
def presets() -> None:
    """List the presets, with parameters and FLOPs."""
    from depthmix.describe import list_presets

    print(*list_presets(), sep="\n")


@app.command()
def demo(
    preset: Annotated[
        str, typer.Option(help="A preset or .toml file with routed blocks.", metavar="MODEL")
    ] = "demo",
    steps: Annotated[int, typer.Option(help="Optimisation steps of each model.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = 8,
) -> None:
    """Train a routed and a dense model for a few steps.

    The tokens are random and the CPU is enough: this shows that both learn, and what routing saves.
    """
    # checked before torch loads, which takes a while
    for name, value in (("--steps", steps), ("--batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    from rich.console import Console

    from depthmix.demo import run_demo

    run_demo(Console(), preset=preset, num_steps=steps, batch_size=batch_size)


def split_arguments(arguments: Sequence[str]) -> ModelsAndFields:
    """Tell models from overrides: what has a `=` is an override, dashes before it or not."""
    from depthmix.fields import parse_override

    models, overrides = [], {}
    for i, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, value = _read_option(argument, arguments[i + 1 : i + 2])
            overrides[name] = value
        elif "=" in argument and not argument.endswith(".toml"):
            name, value = parse_override(argument)
            overrides[name] = value
        else:
            models.append(argument)
    return ModelsAndFields(models, overrides)


def _read_option(argument: str, following: Sequence[str]) -> tuple[str, str]:
    """An option that is no option: a field if it carries its value, else a sentence that helps."""
    from depthmix.config import ModelConfig
    from depthmix.fields import document_fields, suggest

    fields = document_fields(ModelConfig)
    option, equals, value = argument.partition("=")
    name = option.lstrip("-")
    if name in fields and equals:
        return name, value
    if name in fields:
        value = following[0] if following else "VALUE"
        raise ValueError(f"write '{argument} {value}' as {name}={value}")
    close = suggest(option, ["--seq-len", "--json", "--help"]) or suggest(name, fields)
    raise ValueError(f"there is no option '{option}'.{close} Fields are written FIELD=VALUE")


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # read when torch loads: threads that wait by spinning take the core from the one they wait for
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        code = app(args, prog_name="depthmix", standalone_mode=False) or 0
        # what is still in the buffer may meet a closed pipe, which is not worth a traceback
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit: let it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except _UsageError as error:
        return _complain(error.format_message())  # pyrefly: ignore[missing-attribute]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}")
    except ValueError as error:
        return _complain(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch has no type of its own for a CPU that is out of memory
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _complain("there is not enough memory for this: take a smaller model or batch")
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code


def _complain(sentence: str) -> int:
    print(f"depthmix: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
