"""`depthmix view`: show on a page how a model routes a text."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Device,
    PlainCommand,
    TokenizerPlace,
    app,
    check_device,
    check_out,
    name_flags,
    trace_text,
)
from depthmix.config.fields import Count, check_value

# tokens on a page by default, which make a few megabytes
MAX_SHOWN = 16_384


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
        str | None, typer.Option(help="With a model: a text file, or - for stdin.", metavar="FILE")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write.", metavar="FILE", show_default="the trace's name with .html"
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Show at most this many tokens; browsers get slow with many more.",
            show_default=f"{MAX_SHOWN:,}",
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Show a text on a page, shaded by the depth of each token.

    The page is a single file that works offline: open it in a browser, send it or print it.

    \b
    For example:
      depthmix view trace.json
      depthmix view runs/demo-20261115-142233 --text README.md --out readme.html
    """
    check_device(device)
    with name_flags("max_tokens"):
        check_value("max_tokens", max_tokens, Count)
    from depthmix.files import replace_file
    from depthmix.report.traces import cut_trace, explain_damage, read_trace, tell_trace
    from depthmix.report.view import write_page

    if out is None:
        out = Path("trace.html") if source.is_dir() else source.with_suffix(".html")
    check_out(out)
    if source.is_file():
        options = {"--text": text, "--checkpoint": checkpoint, "--tokenizer": tokenizer}
        options |= {"--device": device}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(f"{source} is already a trace: leave out {', '.join(given)}")
        with explain_damage(source):
            found = cut_trace(read_trace(source), max_tokens or MAX_SHOWN)
            page, summary = write_page(found), tell_trace(found)
    elif text is None and source.is_dir():
        raise ValueError(f"{source} is a folder: give its model a text with --text FILE")
    elif text is None:
        raise ValueError(f"there is no trace '{source}': write one with 'depthmix trace'")
    else:
        found = trace_text(source, text, checkpoint, tokenizer, max_tokens or MAX_SHOWN, device)
        page, summary = write_page(found), tell_trace(found)
    num_shown = len(found["tokens"]) - found["num_added"]
    if max_tokens is None and num_shown == MAX_SHOWN:
        summary += f"; only the first {MAX_SHOWN:,} tokens are shown, --max-tokens shows more"
    replace_file(out, page)
    print(f"{out}: {summary}")
