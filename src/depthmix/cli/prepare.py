"""`depthmix prepare`: tokenise text into a folder that training reads."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from depthmix.cli.arguments import PlainCommand, app


@app.command(cls=PlainCommand)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Text, JSONL, Parquet or token files, folders of them, hf:OWNER/NAME, or stdlib.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tokenised data.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer.json, a folder with one, or a Hugging Face name."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Vocabulary size of a new tokenizer. Default: 4096."),
    ] = None,
    val: Annotated[
        list[str] | None,
        typer.Option(help="A source for validation; may be repeated.", metavar="SOURCE"),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(help="Fraction of documents for validation, without --val.")
    ] = 0.02,
    test: Annotated[
        list[str] | None,
        typer.Option(help="A source for testing; may be repeated.", metavar="SOURCE"),
    ] = None,
    test_fraction: Annotated[
        float, typer.Option(help="Fraction of documents for testing, without --test.")
    ] = 0.0,
    text_field: Annotated[
        str, typer.Option(help="The text's field in JSONL and Parquet.")
    ] = "text",
    token_dtype: Annotated[
        str | None, typer.Option(help="Type of the token ids in a .bin file: uint16 or uint32.")
    ] = None,
    end_token: Annotated[
        int | None, typer.Option(help="Token id that ends a document, if it cannot be detected.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Threads. Default: one per core.")] = None,
    seed: Annotated[int, typer.Option(help="Seed that picks the documents held out.")] = 0,
) -> None:
    """Tokenise text into a folder that training reads.

    If it is interrupted, run the same command again to resume.

    \b
    For example:
      depthmix prepare books/ notes.jsonl --out data --vocab-size 8192
    """
    from rich.console import Console

    from depthmix.config import load_config
    from depthmix.data.prepare import prepare as prepare_data
    from depthmix.data.prepare import show_progress

    console = Console()
    with show_progress(console) as report:
        manifest = prepare_data(
            sources,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            val_sources=val or (),
            val_fraction=val_fraction,
            test_sources=test or (),
            test_fraction=test_fraction,
            text_field=text_field,
            token_dtype=token_dtype,
            end_token=end_token,
            num_workers=workers,
            seed=seed,
            progress=report,
        )
    parts = manifest.describe()
    next_command = f"depthmix train --data {shlex.quote(str(out))}"
    num_tokens, seq_len = manifest.splits["train"].num_tokens, load_config("demo").max_seq_len
    if num_tokens <= seq_len:
        # a row has one token more than its sequence: the last target
        parts.append(f"fewer tokens than one sequence of {seq_len}")
        next_command += f" train.seq_len={num_tokens - 1}"
    for line in (f"{out}: {'; '.join(parts)}", f"next: {next_command}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
