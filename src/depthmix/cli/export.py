"""`depthmix export`: write a model for transformers."""

from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    ModelPath,
    PlainCommand,
    ScoringSelector,
    TokenizerPlace,
    app,
    check_selector,
    name_missing_extra,
)


@app.command(cls=PlainCommand)
def export(
    model: ModelPath,
    out: Annotated[Path, typer.Option(help="The folder to write.", metavar="DIR")],
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    no_tokenizer: Annotated[
        bool,
        typer.Option(
            "--no-tokenizer", help="Leave out the tokenizer, for a run trained on token ids."
        ),
    ] = False,
    selector: ScoringSelector = None,
) -> None:
    """Write a folder that Hugging Face transformers opens.

    After `import depthmix.hf`, AutoModelForCausalLM and AutoTokenizer open it like any other model.

    \b
    For example:
      depthmix export runs/demo-20261115-142233 --out exported
    """
    from depthmix.models import open_model

    opened = open_model(model, checkpoint=checkpoint, tokenizer=tokenizer)
    if selector is not None:
        check_selector(opened.config, selector, looks_ahead=True)
    with name_missing_extra("hf"):
        from depthmix.hf.export import export_model
    ids, end_token = (None, None) if no_tokenizer else opened.vocabulary
    export_model(
        opened.network,
        out,
        tokenizer=ids,
        end_token=end_token,
        chat=opened.chat,
        selector=selector,
    )
    print(f"{out}: open it with AutoModelForCausalLM.from_pretrained, after import depthmix.hf")
