"""The verb that records what a router does with a text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Device,
    MaxTokens,
    ModelPath,
    PlainCommand,
    TokenizerPlace,
    app,
    check_device,
    read_text,
)


@app.command(cls=PlainCommand)
def trace(
    model: ModelPath,
    text: Annotated[str, typer.Option(help="A file of text; - is stdin.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path(
        "trace.json"
    ),
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    max_tokens: MaxTokens = None,
    device: Device = None,
) -> None:
    """Record what a model does with a text, token by token.

    For each token and each routed block: routed under top-k, routed under the causal rule, and the
    scores; for each token entropy and loss of the prediction. 'depthmix view' makes a page of it.

    \b
    For example:
      depthmix trace runs/demo-20261115-142233 --text README.md --out trace.json
    """
    from depthmix.report.traces import write_trace

    check_folder(out)
    found = trace_text(model, text, checkpoint, tokenizer, max_tokens, device)
    write_trace(found, out)
    print(f"{out}: {describe(found)}")


def trace_text(
    path: Path,
    text: str,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Trace a model over the text of a file, with a bar on stderr."""
    # mistakes are found before torch takes its seconds to load
    check_device(device)
    words = read_text(text)
    from rich.console import Console

    from depthmix.eval.trace import trace_model
    from depthmix.models import open_model
    from depthmix.progress import show_bar

    model = open_model(path, checkpoint=checkpoint, tokenizer=tokenizer)
    with show_bar(Console(stderr=True), gone=True) as bar:
        return trace_model(
            model,
            words,
            text=text,
            max_tokens=max_tokens,
            device=device,
            report=lambda done, total: bar.update(
                "reading", done, total, f"{done:,} of {total:,} tokens"
            ),
        )


def describe(trace: dict[str, Any]) -> str:
    """A trace in a line."""
    from depthmix.report.traces import measure_rule

    windows, rules = len(trace["window_starts"]), trace["rules"]
    parts = [f"{len(trace['tokens']):,} tokens in {windows} window{'' if windows == 1 else 's'}"]
    for name, rule in rules.items():
        measured = measure_rule(trace, name)
        share = sum(measured["share_routed"]) / len(measured["share_routed"])
        loss = "" if measured["mean_loss"] is None else f", loss {measured['mean_loss']:.3f}"
        parts.append(f"{rule['label']} routes {share:.1%}{loss}")
    return "; ".join(parts)


def check_folder(out: Path) -> None:
    """Refuse a place that cannot be written to, before the work starts."""
    if str(out) == "-":
        raise ValueError("--out writes a file, not to the terminal: name one")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    if not out.parent.is_dir():
        raise ValueError(f"there is no folder {out.parent} for --out {out}: make it first")
