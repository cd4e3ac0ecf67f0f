"""The `depthmix` command: one subcommand for each verb, and wiring only.

Imports what a verb needs inside the verb, so that `--help` answers at once and nothing that plans
or describes loads torch. A user's mistake ends in one sentence on stderr and exit code 2.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from depthmix.cli import (
    chat,
    demo,
    describe,
    eval_,
    export,
    import_,
    plan_memory,
    prepare,
    presets,
    report,
    runs,
    sample,
    serve,
    sweep,
    trace,
    train,
    upcycle,
    view,
)
from depthmix.cli.arguments import app

# each of them adds its verb to `app`
__all__ = [
    "app",
    "chat",
    "demo",
    "describe",
    "eval_",
    "export",
    "import_",
    "main",
    "plan_memory",
    "prepare",
    "presets",
    "report",
    "runs",
    "sample",
    "serve",
    "sweep",
    "trace",
    "train",
    "upcycle",
    "view",
]

# click's base of every usage error; typer has moved it, this way to it has stayed
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


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
    except SystemExit as stop:
        # of a verb that has said what there is to say, or of rich, whose reader is gone
        return stop.code if isinstance(stop.code, int) else 1
    except _UsageError as error:
        return _complain(error.format_message())  # pyrefly: ignore[missing-attribute]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}")
    except ValueError as error:
        return _complain(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch has no type of its own for a CPU that is out of memory
        phrases = ("out of memory", "not enough memory", "allocate memory")
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in phrases):
            raise
        return _complain("there is not enough memory for this: take a smaller model or batch")
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code


def _complain(sentence: str) -> int:
    print(f"depthmix: {sentence}", file=sys.stderr)
    return 2
