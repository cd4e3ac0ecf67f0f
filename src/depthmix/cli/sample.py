"""`depthmix sample`: generate text with a trained model."""

import random
import re
import shlex
import sys
from dataclasses import replace
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    Checkpoint,
    Color,
    Device,
    FrequencyPenalty,
    MinP,
    ModelPath,
    PlainCommand,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Selector,
    Temperature,
    TokenizerPlace,
    TopK,
    TopP,
    app,
    check_counts,
    check_device,
    check_selector,
    make_params,
    read_file,
)

MAX_BATCH = 8


@app.command(cls=PlainCommand)
def sample(
    model: ModelPath,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to continue; may be repeated. Without one, a new document begins.",
            metavar="TEXT",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            help="A file with one more prompt; its final newline is dropped. - is stdin.",
            metavar="FILE",
        ),
    ] = None,
    keep_newline: Annotated[
        bool, typer.Option("--keep-newline", help="Keep the final newline of --file.")
    ] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest sample, in tokens.")] = 128,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends a sample; may be repeated. \\n, \\t and \\\\ are understood.",
            metavar="TEXT",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end of a document.")
    ] = False,
    seed: Seed = None,
    selector: Selector = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print text as it is generated; several samples are printed as each one finishes.",
            show_default="on a terminal",
        ),
    ] = None,
    color: Color = False,
    echo: Annotated[bool, typer.Option("--echo/--no-echo", help="Print the prompts, too.")] = True,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities of the tokens and of this many alternatives."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each sample as one line of JSON.")
    ] = False,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    device: Device = None,
    batch: Annotated[int, typer.Option(help="Most samples in parallel.")] = MAX_BATCH,
) -> None:
    """Generate text with a trained model.

    The last line reports the speed, the time to load and compile, and how much routing saved.
    Ctrl-C keeps the text generated so far.

    \b
    For example:
      depthmix sample runs/demo-20261115-142233 --prompt "def main(" --color
      depthmix sample runs/demo-20261115-142233 --file start.txt -n 4 --top-p 0.9 --json
    """
    # check the arguments first: torch takes seconds to load
    check_device(device)
    check_counts(batch=batch)
    if as_json and color:
        raise ValueError("--json prints no colours, but the depth of each token: leave out --color")
    if logprobs is not None and not as_json:
        raise ValueError("--logprobs are printed with --json only: add it")
    if keep_newline and file is None:
        raise ValueError("--keep-newline is for --file: add it")
    if not prompt and file is None and sys.stdin.isatty() and sys.stdout.isatty():
        offer = shlex.join(["depthmix", "chat", str(model)])
        print(f"without --prompt a new document begins; to talk with it: {offer}", file=sys.stderr)
    texts = read_prompts(prompt, file, keep_newline=keep_newline)
    from depthmix.interrupt import Interrupt
    from depthmix.models import open_model
    from depthmix.models.chat import list_ends
    from depthmix.progress import show_line
    from depthmix.sample import start_sampler
    from depthmix.sample.show import Show

    params = make_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        stop=[read_escapes(text) for text in stop or []],
        logprobs=logprobs,
        n=n,
        # drawn here, so that it can be printed
        seed=random.SystemRandom().getrandbits(31) if seed is None else seed,
    )
    opened = open_model(model, checkpoint=checkpoint, tokenizer=tokenizer)
    check_selector(opened.config, selector)
    size = min(batch, n * len(texts))
    sampler = start_sampler(opened, device=device, selector=selector, max_batch=size)
    if not ignore_eos:
        ends = list_ends(sampler.vocabulary.end_token)
        params = replace(params, stop_tokens=ends)
    if stream is None:
        stream = sys.stdout.isatty() and n * len(texts) == 1
    show = Show(sampler, texts, params, stream=stream, color=color, echo=echo, as_json=as_json)
    # outside of Interrupt: there is no text to keep yet
    with show_line("compiling kernels (once: they are cached for the next time)") as progress:
        show.warm_up(progress)
    with Interrupt() as interrupt:
        show.run(lambda: interrupt.signal)
    if not as_json:
        # on stderr, so that stdout has only the text
        with_seed = seed is None and temperature > 0
        for line in show.summarize(with_seed=with_seed, with_start=True):
            print(line, file=sys.stderr)
    if interrupt.signal is not None:
        raise typer.Exit(128 + interrupt.signal)


def read_prompts(
    prompts: list[str] | None, file: str | None, *, keep_newline: bool = False
) -> list[str]:
    """All prompts, or one empty prompt if there are none."""
    texts = list(prompts or [])
    if file is not None:
        text = read_file("--file", file)
        # editors end files with a newline, after which the model would start another line
        texts.append(text if keep_newline else text.removesuffix("\n").removesuffix("\r"))
    return texts or [""]


def read_escapes(text: str) -> str:
    r"""Replace the escapes \n, \t, \r and \\, which are hard to pass through a shell."""
    meant = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda match: meant[match[1]], text)
