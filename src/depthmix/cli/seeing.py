"""The verbs that show what a router does with a text."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from depthmix.cli.arguments import ModelPath, PlainCommand, app, check_device

Checkpoint = Annotated[
    str | None, typer.Option(help="best, newest, or a step; the best if it is known.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Where the tokenizer is, for a run whose data is gone.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of the text; all of them if empty.")
]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")]


@app.command(cls=PlainCommand)
def trace(
    model: ModelPath,
    text: Annotated[str, typer.Option(help="A file of text; - is stdin.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path(
        "trace.json"
    ),
    checkpoint: Checkpoint = None,
    tokenizer: Tokenizer = None,
    max_tokens: MaxTokens = None,
    device: Device = None,
) -> None:
    """Write down what a trained model does with a text, token by token.

    For each token and each routed block: routed under top-k, routed under the causal rule, and the
    scores; for each token entropy and loss of the prediction. 'depthmix view' makes a page of it.

    \b
    For example:
      depthmix trace runs/demo-20261115-142233 --text README.md --out trace.json
    """
    from depthmix.report.traces import write_trace

    _check_folder(out)
    found = trace_text(model, text, checkpoint, tokenizer, max_tokens, device)
    write_trace(found, out)
    print(f"{out}: {describe(found)}")


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
    tokenizer: Tokenizer = None,
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
    from depthmix.report.traces import read_trace
    from depthmix.report.view import write_page

    if out is None:
        out = Path("trace.html") if source.is_dir() else source.with_suffix(".html")
    _check_folder(out)
    if source.is_file():
        options = {"--text": text, "--checkpoint": checkpoint, "--tokenizer": tokenizer}
        options |= {"--max-tokens": max_tokens, "--device": device}
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise ValueError(f"{source} is a trace already: leave out {', '.join(given)}")
        with _explain_damage(source):
            found = read_trace(source)
            page, told = write_page(found), describe(found)
    elif text is None and source.is_dir():
        raise ValueError(f"{source} is a folder: say with --text FILE what its model shall read")
    elif text is None:
        raise ValueError(f"there is no trace '{source}': 'depthmix trace' writes one")
    else:
        found = trace_text(source, text, checkpoint, tokenizer, max_tokens, device)
        page, told = write_page(found), describe(found)
    replace_file(out, page)
    print(f"{out}: {told}")


def trace_text(
    path: Path,
    text: str,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Trace a model over the text of a file."""
    # what can be wrong is asked before torch takes its seconds to load
    check_device(device)
    words = read_text(text)
    from depthmix.eval.trace import trace_model
    from depthmix.models import open_model

    model = open_model(path, checkpoint=checkpoint, tokenizer=tokenizer)
    return trace_model(model, words, text=text, max_tokens=max_tokens, device=device)


def read_text(file: str) -> str:
    """The text of a file, or of stdin."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        found = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is not text in UTF-8: {error.reason}") from error
    if not found:
        raise ValueError(f"--text {file} is empty: give a text with at least one character")
    return found


def describe(trace: dict[str, Any]) -> str:
    """A trace in a line."""
    from depthmix.report.depths import measure_rule

    windows, rules = len(trace["window_starts"]), trace["rules"]
    parts = [f"{len(trace['tokens']):,} tokens in {windows} window{'' if windows == 1 else 's'}"]
    for name, rule in rules.items():
        told = measure_rule(trace, name)
        share = sum(told["share_routed"]) / len(told["share_routed"])
        loss = "" if told["mean_loss"] is None else f", loss {told['mean_loss']:.3f}"
        parts.append(f"{rule['label']} routes {share:.1%}{loss}")
    return "; ".join(parts)


@contextmanager
def _explain_damage(trace: Path) -> Iterator[None]:
    """What a trace lacks, as a sentence: not all that a page needs is checked one by one."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"{trace} is damaged ({error}): write it anew with 'depthmix trace'"
        ) from error


def _check_folder(out: Path) -> None:
    """Refuse a place that cannot be written, before the work and not after it."""
    if str(out) == "-":
        raise ValueError("--out writes a file, not to the terminal: name one")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for --out {out}: make it first")
