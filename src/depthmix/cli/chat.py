"""`depthmix chat`: talk with a model in the terminal."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

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
    check_device,
    check_selector,
    make_params,
)


@app.command(cls=PlainCommand)
def chat(
    model: ModelPath,
    system: Annotated[str | None, typer.Option(help="The system prompt.", metavar="TEXT")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    seed: Seed = None,
    color: Color = False,
    selector: Selector = None,
    checkpoint: Checkpoint = None,
    tokenizer: TokenizerPlace = None,
    device: Device = None,
) -> None:
    """Talk with a model in the terminal.

    Uses the model's chat template, if it has one; otherwise the model continues your text. Ctrl-C
    stops an answer, Ctrl-D quits, /help lists commands.

    \b
    For example:
      depthmix chat exported
      depthmix chat runs/demo-20261115-142233 --color
    """
    check_device(device)
    from depthmix.models import open_model
    from depthmix.progress import show_line
    from depthmix.sample import start_sampler
    from depthmix.sample.talk import Talk

    params = make_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    opened = open_model(model, checkpoint=checkpoint, tokenizer=tokenizer)
    check_selector(opened.config, selector)
    sampler = start_sampler(opened, device=device, selector=selector, max_batch=1)
    talk = Talk(sampler, params, chat=opened.chat, system=system, color=color, screen=sys.stdout)
    with show_line("compiling kernels (once: they are cached for the next time)") as progress:
        sampler.warm_up_all(progress)
    _say(talk.begin())
    read = _make_reader()
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            # drops the line being typed, nothing else
            _say("\nCtrl-D quits")
            continue
        except EOFError:
            break
        if line == "/quit":
            break
        try:
            if line.startswith("/") and not line.startswith("//"):
                _say(talk.command(line))
                continue
            code = _answer(talk, line[1:] if line.startswith("//") else line)
        except ValueError as error:
            _say(f"depthmix: {error}")
            continue
        if code:
            raise typer.Exit(code)


def _answer(talk: Any, text: str) -> int:
    """Print an answer; returns the exit code that a signal asks for, else 0."""
    from depthmix.interrupt import Interrupt

    # Ctrl-C stops the answer, never the program, however often it is pressed
    with Interrupt(raises=False) as interrupt:
        _say(talk.answer(text, lambda: interrupt.signal))
    others = [number for number in interrupt.signals if number != signal.SIGINT]
    return 128 + others[0] if others else 0


def _make_reader() -> Callable[[], str]:
    """A function that reads the next line; in a terminal, ↑ recalls earlier lines."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # `input` uses it once it is imported; some builds of Python lack it
        with suppress(ImportError):
            import readline  # noqa: F401

    def read() -> str:
        parts = [input("> " if is_terminal else "")]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1].removesuffix("\\")
            parts.append(input("… " if is_terminal else ""))
        return "\n".join(parts)

    return read


def _say(sentence: str) -> None:
    # on stderr, so that stdout has only the answers
    sys.stdout.flush()
    print(sentence, file=sys.stderr, flush=True)
