"""The verb that writes down what a router does with a text."""

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
    check_device,
    check_out,
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
    """Write down what a trained model does with a text, token by token.

    For each token and each routed block: routed under top-k, routed under the causal rule, and the
    scores; for each token entropy and loss of the prediction. 'depthmix view' makes a page of it.

    \b
    For example:
      depthmix trace runs/demo-20261115-142233 --text README.md --out trace.json
    """
    check_out(out)
    # what can be wrong is asked before torch takes its seconds to load
    check_device(device)
    words = read_text(text)
    from depthmix.eval.trace import trace_model
    from depthmix.models import open_model
    from depthmix.report.traces import tell_trace, write_trace

    opened = open_model(model, checkpoint=checkpoint, tokenizer=tokenizer)
    found = trace_model(opened, words, text=text, max_tokens=max_tokens, device=device)
    write_trace(found, out)
    print(f"{out}: {tell_trace(found)}")
