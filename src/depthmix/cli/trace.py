"""`depthmix trace`: record how a model routes a text."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Device,
    MaxTokens,
    ModelPath,
    PlainCommand,
    TokenizerPlace,
    app,
    check_out,
    trace_text,
)


@app.command(cls=PlainCommand)
def trace(
    model: ModelPath,
    text: Annotated[str, typer.Option(help="A text file, or - for stdin.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path(
        "trace.json"
    ),
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    max_tokens: MaxTokens = None,
    device: Device = None,
) -> None:
    """Record how a model routes a text, token by token.

    For each token and routed block: whether it is routed by top-k and by the causal rule, and its
    scores; for each token: the entropy and loss of the prediction. 'depthmix view' turns it into a
    page.

    \b
    For example:
      depthmix trace runs/demo-20261115-142233 --text README.md --out trace.json
    """
    from depthmix.report.traces import tell_trace, write_trace

    check_out(out)
    found = trace_text(model, text, checkpoint, tokenizer, max_tokens, device)
    write_trace(found, out)
    print(f"{out}: {tell_trace(found)}")
