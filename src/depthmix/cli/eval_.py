"""`depthmix eval`: measure a model on text and tasks."""

import json
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    AsJson,
    Device,
    ModelPath,
    PlainCommand,
    ScoringSelector,
    TokenizerPlace,
    app,
    check_device,
    check_selector,
    name_flags,
    name_missing_extra,
    read_text,
)

Text = Annotated[
    list[str] | None,
    typer.Option(help="A text file, or - for stdin; may be repeated.", metavar="FILE"),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="Tasks, separated by commas: names from lm-eval, .yaml files, or the built-in "
        "python_syntax."
    ),
]


@app.command(name="eval", cls=PlainCommand)
def evaluate(
    model: ModelPath,
    text: Text = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder made by 'prepare'; its validation split is read.",
            show_default="the run's own, without --text or --tasks",
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Measure the data's test split, too.")
    ] = False,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Keep the test loss in the run's folder, for 'report'."),
    ] = False,
    tasks: Tasks = None,
    include: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of more lm-eval tasks; may be repeated.", metavar="DIR"),
    ] = None,
    fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question. Default: set by the task.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most questions of each task.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use the model's chat template for tasks.")
    ] = False,
    selector: ScoringSelector = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Read at most this many tokens. Default: all.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window. Default: the model's max_seq_len.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows or questions per batch.")] = 8,
    tokenizer: TokenizerPlace = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on text and on tasks.

    Top-k routing sees future tokens; the causal loss is the one that generation gets. Texts are
    measured under both; --selector is for tasks.

    \b
    For example:
      depthmix eval runs/demo-20261115-142233 --text essay.txt
      depthmix eval runs/demo-20261115-142233 --tasks python_syntax --json
      depthmix eval runs/final --test --keep
    """
    check_device(device)
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if tasks is not None and not names:
        raise ValueError(f"--tasks '{tasks}' names no task: leave it out, or name one")
    from depthmix.eval.options import EvalOptions

    with name_flags("max_tokens", "seq_len", "limit", batch="batch_size", fewshot="num_fewshot"):
        options = EvalOptions(
            texts=(read_text(file) for file in text) if text else None,
            data=data,
            test=test,
            keep=keep,
            tasks=names,
            include=include or (),
            num_fewshot=fewshot,
            limit=limit,
            chat=chat,
            selector=selector,
            max_tokens=max_tokens,
            seq_len=seq_len,
            batch_size=batch,
        )
    from depthmix.models import open_model

    source = open_model(model, tokenizer=tokenizer)
    if options.tasks:
        check_selector(source.config, selector, looks_ahead=True)
    from depthmix.eval.evaluate import describe_results, evaluate_model

    with name_missing_extra("eval"):
        found = evaluate_model(source, options, device=device)
    print(json.dumps(found, indent=2) if as_json else "\n".join(describe_results(found)))
