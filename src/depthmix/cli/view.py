"""The verb that makes a page of what a router does with a text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Device,
    MaxTokens,
    PlainCommand,
    TokenizerPlace,
    app,
    check_out,
    trace_text,
)


@app.command(cls=PlainCommand)
def view(
    source: Annotated[
        Path,
        typer.Argument(
            help="A trace; or with --text a run, a checkpoint, or a Hugging Face folder.",
            metavar="TRACE|RUN|DIR",
        ),
    ],
    text: Annotated[
        str | None, typer.Option(help="With a model: a file of text; - is stdin.", metavar="FILE")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write.", metavar="FILE", show_default="the trace's name with .html"
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    max_tokens: MaxTokens = None,
    device: Device = None,
) -> None:
    """Make a page that shows a text by the depth that each token used.

    It is one file that needs no other and no network: open it in a browser, send it, print it.

    \b
    For example:
      depthmix view trace.json
      depthmix view runs/demo-20261115-142233 --text README.md --out readme.html
    """
    from depthmix.files import replace_file
    from depthmix.report.traces import read_trace, tell_trace
    from depthmix.report.view import write_page

    if out is None:
        out = Path("trace.html") if source.is_dir() else source.with_suffix(".html")
    check_out(out)
    if source.is_file():
        options = {"--text": text, "--checkpoint": checkpoint, "--tokenizer": tokenizer}
        options |= {"--max-tokens": max_tokens, "--device": device}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(f"{source} is a trace already: leave out {', '.join(given)}")
        with _explain_damage(source):
            found = read_trace(source)
            page, told = write_page(found), tell_trace(found)
    elif text is None and source.is_dir():
        raise ValueError(f"{source} is a folder: say with --text FILE what its model shall read")
    elif text is None:
        raise ValueError(f"there is no trace '{source}': 'depthmix trace' writes one")
    else:
        found = trace_text(source, text, checkpoint, tokenizer, max_tokens, device)
        page, told = write_page(found), tell_trace(found)
    replace_file(out, page)
    print(f"{out}: {told}")


@contextmanager
def _explain_damage(trace: Path) -> Iterator[None]:
    """What a trace lacks, as a sentence: not all that a page needs is checked one by one."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{trace} is damaged ({error}): write it anew with 'depthmix trace'"
        ) from error
