"""Parts shared by the commands: options, checks, field overrides, and the help pages.

Commands do not import each other; anything that two of them need is here.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from depthmix.config import ModelConfig
    from depthmix.infer import SamplingParams

# in the order of use
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "First steps": ("demo",),
    "Train": ("presets", "describe", "prepare", "train", "runs"),
    "Use a model": ("sample", "chat", "serve", "view", "trace", "eval"),
    "Exchange models": ("upcycle", "export", "import"),
    "Many runs, many GPUs": ("sweep", "report", "plan-memory"),
}


class Verbs(TyperGroup):
    """The commands, grouped under headings in the order of use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the order of the help page."""
        listed = [name for names in SECTIONS.values() for name in names]
        return sorted(self.commands, key=lambda n: listed.index(n) if n in listed else len(listed))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under their headings, any others last."""
        named = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in named)
        limit = formatter.width - 6 - max(map(len, self.commands))
        for heading, names in {**SECTIONS, "Other commands": others}.items():
            present = [name for name in names if name in self.commands]
            if present:
                with formatter.section(heading):
                    formatter.write_dl(
                        [(name, self.commands[name].get_short_help_str(limit)) for name in present]
                    )


app = typer.Typer(
    name="depthmix",
    cls=Verbs,
    help="Train, sample, inspect, convert and compare Mixture-of-Depths transformers.",
    # plain help: rich takes three times as long to start
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# an unknown option may be a field written as --field value
FIELDS_ALLOWED = {"ignore_unknown_options": True}


ModelPath = Annotated[
    Path,
    typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.", metavar="RUN|DIR"),
]
Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE", help="Fields to change.", show_default=False),
]
Data = Annotated[
    Path | None,
    typer.Option(help="A folder made by 'prepare'. Default: Python's standard library."),
]
Checkpoint = Annotated[
    str | None, typer.Option(help="best, newest, or a step. Default: best, if there is one.")
]
TokenizerPlace = Annotated[
    str | None, typer.Option(help="The tokenizer, if the run's data is no longer there.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Read at most this many tokens of the text. Default: all.")
]
# sampling parameters
Temperature = Annotated[
    float, typer.Option(help="Divides the logits; 0 picks the most probable token.")
]
TopK = Annotated[int, typer.Option(help="Sample from this many most probable tokens; 0 means all.")]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the fewest tokens with this total probability; 1 means all."),
]
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens less probable than this fraction of the best; 0 drops none."),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1, tokens that already occurred are less likely.")
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Subtracted from a token's logit for each time it was generated; -2 to 2."),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from the logits of generated tokens; -2 to 2.")
]
Selector = Annotated[
    str | None,
    typer.Option(
        help="How tokens are routed: by predictor, by router, or all to skip nothing.",
        show_default="the trained head",
    ),
]
# the same where texts are only scored
ScoringSelector = Annotated[
    str | None,
    typer.Option(
        help="How tokens are routed: by predictor or router, by topk, which sees the future and "
        "cannot generate, or all to skip nothing.",
        show_default="the trained head",
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text. Default: a new one.")
]
Color = Annotated[
    bool, typer.Option("--color", help="Shade each token by the routed blocks it used.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, with all numbers in full.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")]


class ModelsAndFields(NamedTuple):
    """The positional arguments of a command that takes models and overrides."""

    models: list[str]
    overrides: dict[str, str]


class PlainCommand(TyperCommand):
    """A command whose help lists its arguments without Python types."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Every argument and option, with its help line."""
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                # typer would add `<list[str]>`
                parameter.display_type_rich = lambda ctx: ""  # pyrefly: ignore
        super().format_options(ctx, formatter)


class FieldsCommand(PlainCommand):
    """A command whose help ends with every field of a model."""

    train = False

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the fields, as documented in the configuration classes."""
        from depthmix.config import ModelConfig, Recipe
        from depthmix.config.fields import format_defaults
        from depthmix.config.presets import format_preset_values

        defaults = format_defaults(ModelConfig)
        if self.train:
            defaults |= format_defaults(Recipe, "train.")
        notes = {name: f"default: {value}" for name, value in defaults.items() if value}
        for name, value in format_preset_values().items():
            notes[name] = "; ".join(filter(None, (notes.get(name), f"in presets: {value}")))
        rows = [
            (name, f"{line} [{notes[name]}]" if name in notes else line)
            for name, line in list_fields(train=self.train).items()
        ]
        with formatter.section("Fields, written as FIELD=VALUE; each preset has its own sizes"):
            formatter.write_dl(rows)


class RunFieldsCommand(FieldsCommand):
    """A command whose help ends with every field of a model and of a training recipe."""

    train = True


def list_fields(*, train: bool) -> dict[str, str]:
    """Every field with its description; a recipe's fields have the prefix `train.`."""
    from depthmix.config import ModelConfig, Recipe
    from depthmix.config.fields import document_fields

    recipe = document_fields(Recipe, "train.") if train else {}
    return {**recipe, **document_fields(ModelConfig)}


def split_arguments(arguments: Sequence[str], *, train: bool = False) -> ModelsAndFields:
    """Separate models from overrides; an override has a `=`, and may begin with dashes.

    With `train`, a recipe's fields are accepted too.
    """
    from depthmix.config.fields import parse_override
    from depthmix.config.train import update_names

    models, overrides = [], {}
    for i, argument in enumerate(arguments):
        if argument.startswith("-"):
            name, value = _read_option(argument, arguments[i + 1 : i + 2], train)
            overrides[name] = value
        elif "=" in argument and not argument.endswith(".toml"):
            name, value = parse_override(argument)
            overrides[name] = value
        else:
            models.append(argument)
    return ModelsAndFields(models, update_names(overrides))


@contextmanager
def name_flags(*fields: str, prefix: str = "", **others: str) -> Iterator[None]:
    """Make errors name the flags that were given instead of the fields they set.

    `train.steps = 0 must …` becomes `--steps 0 must …`; `prefix` is the fields' prefix, and
    `others` are flags whose field has another name.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        for name, field in [*((field, field) for field in fields), *others.items()]:
            flag = f"--{name.replace('_', '-')}"
            message = re.sub(rf"(?<![\w.-]){re.escape(prefix + field)} = ", f"{flag} ", message)
        raise ValueError(message) from error


def check_counts(**counts: int | None) -> None:
    """Refuse flags with a number below 1; None was not given."""
    from depthmix.config.fields import Count, check_value

    with name_flags(*counts):
        for name, count in counts.items():
            check_value(name, count, Count)


def make_params(**options: Any) -> "SamplingParams":
    """The sampling parameters of flags with the same names."""
    from depthmix.infer import SamplingParams

    with name_flags(*options):
        return SamplingParams(**options)


def check_device(device: str | None) -> None:
    """Refuse an unknown --device; None means to choose one."""
    if device == "mps":
        raise ValueError(
            "--device mps is not supported: depthmix has not been tested on Apple's GPUs; use "
            "--device cpu"
        )
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {device} is neither cpu nor cuda")


def check_selector(
    config: "ModelConfig", selector: str | None, *, looks_ahead: bool = False
) -> None:
    """Refuse a --selector that a model cannot route by, before its weights are read."""
    try:
        config.choose_selector(selector, looks_ahead=looks_ahead)
    except ValueError as error:
        raise ValueError(f"--selector {selector}: {error}" if selector else str(error)) from error


def check_out(out: Path) -> None:
    """Refuse an --out that cannot be written, before any work is done."""
    if str(out) == "-":
        raise ValueError("--out cannot write to the terminal: name a file")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; create it first")


def read_file(option: str, file: str) -> str:
    """The text of the file that an option names; `-` is stdin."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {option} {file}: {error.strerror}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file} is not text in UTF-8: {error.reason}") from error


def read_text(file: str) -> str:
    """The text of the file that --text names; refuses an empty one."""
    found = read_file("--text", file)
    if not found:
        raise ValueError(f"--text {file} is empty: give a file with at least one character")
    return found


def trace_text(
    path: Path,
    text: str,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Trace a model on a file's text, with a progress bar on stderr."""
    # check the arguments first: torch takes seconds to load
    check_device(device)
    words = read_text(text)
    from rich.console import Console

    from depthmix.eval.trace import trace_model
    from depthmix.models import open_model
    from depthmix.progress import show_bar

    model = open_model(path, checkpoint=checkpoint, tokenizer=tokenizer)
    with name_flags("max_tokens"), show_bar(Console(stderr=True), gone=True) as bar:
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


@contextmanager
def name_missing_extra(extra: str) -> Iterator[None]:
    """Turn a missing package into an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs the package '{error.name}': pip install 'depthmix[{extra}]'"
        ) from error


def _read_option(argument: str, following: Sequence[str], train: bool) -> tuple[str, str]:
    """An unknown option: a field if it carries a value, else an error with a suggestion."""
    from depthmix.config.fields import suggest
    from depthmix.config.train import update_names

    fields = list_fields(train=train)
    option, equals, value = argument.partition("=")
    (name,) = update_names({option.lstrip("-"): value})
    if name in fields and equals:
        return name, value
    if name in fields:
        value = following[0] if following else "VALUE"
        raise ValueError(f"write '{argument} {value}' as {name}={value}")
    verb = typer.main.get_command(app).commands["train" if train else "describe"]  # pyrefly: ignore
    options = [option for parameter in verb.params for option in parameter.opts]
    # compared without dashes, which would make short names look alike
    near = get_close_matches(name, [option.lstrip("-") for option in ["--help", *options]], n=1)
    close = f" Did you mean '--{near[0]}'?" if near else suggest(name, fields)
    raise ValueError(f"there is no option '{option}'.{close} Fields are written FIELD=VALUE")
