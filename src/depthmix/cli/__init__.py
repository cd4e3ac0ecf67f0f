"""The `depthmix` command line: one module per subcommand, and only wiring.

A subcommand imports its dependencies when it runs, so that `--help` is fast and planning or
describing a model does not load torch. User errors print one sentence on stderr and exit with 2.
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

# importing a module registers its command with `app`
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

# click's base class of usage errors; where typer keeps it has changed between releases
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
    # read when torch loads: threads that spin while waiting starve the thread they wait for
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        code = app(args, prog_name="depthmix", standalone_mode=False) or 0
        # flush here, so that a closed pipe is caught below instead of ending in a traceback
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes again at exit: send that to /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except SystemExit as stop:
        # from a command that has already printed its message, or from rich after a closed pipe
        return stop.code if isinstance(stop.code, int) else 1
    except _UsageError as error:
        return _complain(error.format_message())  # pyrefly: ignore[missing-attribute]
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}")
    except ValueError as error:
        return _complain(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch has no exception type for running out of CPU memory
        phrases = ("out of memory", "not enough memory", "allocate memory")
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in phrases):
            raise
        return _complain("out of memory: use a smaller model or batch")
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code


def _complain(sentence: str) -> int:
    print(f"depthmix: {sentence}", file=sys.stderr)
    return 2
