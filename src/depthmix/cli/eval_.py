"""`depthmix eval`: measure a model on text and tasks."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from depthmix.cli.arguments import (
    Device,
    ModelPath,
    PlainCommand,
    TokenizerPlace,
    app,
    check_device,
    check_selector,
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
    selector: Annotated[
        str | None,
        typer.Option(
            help="How tokens are routed in tasks: by predictor, router or topk, or all.",
            show_default="the trained head",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Read at most this many tokens. Default: all.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window. Default: the model's max_seq_len.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows or questions per batch.")] = 8,
    tokenizer: TokenizerPlace = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Measure a model on text and on tasks.

    Top-k routing sees future tokens; the causal loss is the one that generation gets.

    \b
    For example:
      depthmix eval runs/demo-20261115-142233 --text essay.txt
      depthmix eval runs/demo-20261115-142233 --tasks python_syntax --json
      depthmix eval runs/final --test --keep
    """
    check_device(device)
    counts = {"--max-tokens": max_tokens, "--seq-len": seq_len, "--batch": batch, "--limit": limit}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")
    if text and data is not None:
        raise ValueError("give --text or --data, not both")
    if test and (text or (tasks and data is None)):
        raise ValueError(
            "--test is for data with a test split: leave it out, or --text and --tasks"
        )
    if keep and (not test or data is not None or max_tokens is not None or seq_len is not None):
        raise ValueError(
            "--keep keeps the loss of the whole test split of a run's own data: give --test, and "
            "neither --data, --max-tokens nor --seq-len"
        )
    if keep and not (model / "config.toml").is_file():
        raise ValueError(f"--keep is for a run, and {model} is not a run's folder: leave it out")
    reads = bool(text) or data is not None or not tasks
    for_tasks = {"--include": include, "--fewshot": fewshot, "--limit": limit}
    for_tasks |= {"--selector": selector, "--chat": chat or None}
    for_text = {"--max-tokens": max_tokens, "--seq-len": seq_len}
    for options, unused, note in (
        (for_tasks, not tasks, "for --tasks: name some, or leave it out"),
        (for_text, not reads, "for --text or --data: give one of them, or leave it out"),
    ):
        given = [name for name, value in options.items() if value not in (None, [])]
        if unused and given:
            raise ValueError(f"{', '.join(given)} is {note}")
    from depthmix.models import open_model
    from depthmix.world import choose_device

    # what is kept stands beside the last validation
    source = open_model(model, tokenizer=tokenizer, checkpoint="newest" if keep else None)
    if chat and source.chat is None:
        raise ValueError(f"{model} has no chat template: leave out --chat")
    if tasks:
        # refused before a text takes its time
        check_selector(source.config, selector, looks_ahead=True)
    from depthmix.eval.perplexity import (
        keep_test_loss,
        measure_stream,
        tell_stream,
    )
    from depthmix.eval.stream import read_stored

    # so is a tokenizer that is not there
    vocabulary = source.vocabulary if text or tasks else None
    texts = [read_text(file) for file in text or []]
    stream = read_stored(source, texts, data, max_tokens) if reads else None
    held_out = read_stored(source, (), data, max_tokens, "test") if test else None
    network = source.network.to(choose_device(device))
    found: dict[str, Any] = {"model": str(model)}
    lines = []
    if stream is not None:
        found["text"] = measure_stream(network, stream, seq_len=seq_len, batch_size=batch)
        lines += tell_stream(model, found["text"])
    if held_out is not None:
        found["test"] = measure_stream(network, held_out, seq_len=seq_len, batch_size=batch)
        lines += tell_stream(f"{model}, test split", found["test"])
    if keep and source.run is not None:
        keep_test_loss(source.run, found["test"])
    if tasks and vocabulary is not None:
        with name_missing_extra("eval"):
            from depthmix.eval.tasks import TaskModel, run_tasks, tell_tasks

        options: dict[str, Any] = {"selector": selector, "chat": source.chat if chat else None}
        adapter = TaskModel(network, vocabulary, batch_size=batch, **options)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found["tasks"] = run_tasks(
            adapter, names, include=include or (), num_fewshot=fewshot, limit=limit
        )
        found["selector"] = adapter.selector
        lines += tell_tasks(found["tasks"])
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
