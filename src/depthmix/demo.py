"""The demo: compare a routed model with its dense twin in FLOPs, then train both at equal compute.

This module decides what is shown; training, sampling, report and trace are the ordinary ones.
"""

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from depthmix.budget import make_schedule
from depthmix.config import ModelConfig, RunConfig, list_recipe, load_config
from depthmix.data.shards import Corpus
from depthmix.eval.trace import trace_model
from depthmix.files import replace_file
from depthmix.infer import SamplingParams
from depthmix.models import StoredModel, open_model
from depthmix.models.vocabulary import Vocabulary
from depthmix.progress import say
from depthmix.report import write_report
from depthmix.report.curves import Points, draw_text_plot, plot_losses
from depthmix.report.describe import describe_model, print_tables
from depthmix.report.figures import NoMatplotlib
from depthmix.report.view import write_page
from depthmix.runs.folder import RunDir, name_run
from depthmix.runs.losses import JUDGED, TRAINED, read_metric
from depthmix.sample import start_sampler
from depthmix.sample.show import Show
from depthmix.train.launch import Launch, launch
from depthmix.units import format_difference, format_number, format_power

FLOPS = 2e12
TWINS = ("dense", "mod")
PICTURE = "losses.png"
ROUTING = "routing.html"

# The same for both models; everything else is the default recipe, the best one in the sweeps. The
# batch is small because a small budget allows few steps.
RECIPE = {
    **{"train.batch_size": 4, "train.document_mask": False, "train.log_every": 20},
    **{"train.val_tokens": 65536, "train.val_every": 400},
}

# fixed, so that every demo shows the same text
SAMPLING = SamplingParams(max_tokens=128, temperature=0.6, top_p=0.9, seed=0)
PROMPT = "def"

# on the routing page: readers rarely look at more than a window or two
NUM_READ = 500


class Trained(NamedTuple):
    """One of the demo's runs, read back from its folder."""

    name: str
    folder: RunDir
    curve: list[tuple[int | float, float | None]]
    """(FLOPs, training loss)."""
    last: dict[str, Any]
    """The last training metrics."""
    val: dict[str, Any]
    """The last validation."""


def run_demo(
    console: Console,
    *,
    preset: str = "demo",
    flops: float = FLOPS,
    data: Path | None = None,
    out: Path | None = None,
    device: str | None = None,
) -> tuple[Trained, Trained] | None:
    """Train a model and its dense twin with the same FLOPs; None if interrupted."""
    config = load_config(preset)
    folder = out or name_run(_name_size(preset) + "-twins", datetime.now())
    _check_free(folder)
    if not config.routed_layers:
        raise ValueError(
            f"'{preset}' has no routed blocks to compare with a dense twin: choose a preset such "
            f"as 'demo' or '60m-mod'"
        )
    size = _name_size(preset)
    runs = plan_twins(config, preset, flops)
    steps = " and ".join(f"{make_schedule(run).num_steps}" for run in runs.values())
    print_tables([describe_model(name, run.model) for name, run in runs.items()], console)
    console.print(
        f"Training both for {format_power(flops)} executed FLOPs, {steps} steps, on "
        f"{data or 'the Python standard library'}.\n",
        highlight=False,
    )
    trained = []
    for name, run in runs.items():
        place = folder / name.removeprefix(f"{size}-")
        assert place.name in TWINS
        plan = Launch(run=run, name=name, data=data, out=place, device=device)
        outcome, where = launch(plan, console)
        if outcome.state != "finished":
            return None
        trained.append(read_run(name, where))
        console.print()
    dense, routed = trained
    print_result(console, dense, routed)
    curves = {run.name: run.curve for run in trained}
    console.print(draw_text_plot(curves, x_label="training FLOPs"), highlight=False, markup=False)
    save_picture(
        console, curves, folder / PICTURE, f"Dense and routed at {format_power(flops)} FLOPs"
    )
    say(console, f"the runs: depthmix runs {folder}")
    model = open_model(routed.folder.path)
    # before sampling, which may lower the precision of the network
    routing = write_routing(model, routed.folder, folder / ROUTING, device)
    # other data may not be Python: start from an empty prompt
    show_sample(console, routed.name, model, PROMPT if data is None else "", device)
    report = write_report(folder, None, shlex.join(["depthmix", "report", str(folder)]))
    shown = "in tables" if report.problem else "with their curves"
    say(console, f"\nThe report compares the two runs, {shown}: {report.page}")
    say(console, routing)
    console.print(f"\n{describe_outcome(config, dense, routed)}", highlight=False, markup=False)
    return dense, routed


def plan_twins(config: ModelConfig, preset: str, flops: float) -> dict[str, RunConfig]:
    """The dense and the routed run by name, with the same recipe and budget."""
    size = _name_size(preset)
    twins = {f"{size}-dense": config.dense_twin(), f"{size}-mod": config}
    fields = {**RECIPE, **list_recipe(preset), "train.flops": flops}
    return {name: RunConfig.from_overrides(model, fields) for name, model in twins.items()}


def describe_outcome(config: ModelConfig, dense: Trained, routed: Trained) -> str:
    """The demo's outcome in plain words."""
    more = routed.last["tokens"] / dense.last["tokens"]
    layers = len(config.routed_layers)
    text = (
        f"What this shows: both models had the same training compute, data and recipe. In {layers} "
        f"of the routed model's {config.num_layers} blocks, a router picks the tokens that the "
        f"block processes, and the others skip it. So each token costs less, and the model read "
        f"{more:.1f} times as much text for the same compute."
    )
    ours, theirs = (read_metric(run.val, JUDGED) for run in (routed, dense))
    if ours is None or theirs is None:
        return text
    outcome = format_difference(100 * (ours - theirs) / theirs)
    return (
        f"{text} Its validation loss, routing token by token as in sampling, is {outcome} that of "
        f"its dense twin ({ours:.3f} against {theirs:.3f}). One short run of each small model "
        f"shows that routing works, not how much it gains: for comparisons at larger budgets, see "
        f"the project's results."
    )


def _name_size(preset: str) -> str:
    return Path(preset.removesuffix(".toml")).name.removesuffix("-mod")


def _check_free(folder: Path) -> None:
    """Refuse a folder that already has runs: a demo cannot be resumed as a whole."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"'{folder}' is a file: choose another --out for the folder of both runs")
    for name in TWINS:
        if (folder / name).exists():
            raise ValueError(
                f"'{folder}' already contains a demo: choose another --out, or remove the folder"
            )


def read_run(name: str, folder: RunDir) -> Trained:
    """A finished run's curve and final metrics."""
    records = folder.read_metrics()
    train, val = ([r for r in records if r["kind"] == kind] for kind in ("train", "val"))
    curve = [(record["flops"], record["loss"]) for record in train]
    return Trained(name, folder, curve, train[-1], val[-1] if val else {})


def save_picture(console: Console, curves: Mapping[str, Points], path: Path, title: str) -> None:
    """Draw both curves; if they cannot be drawn, say so in one line."""
    try:
        plot_losses(curves, path, title=title, y_label="training loss, nats per token")
    except NoMatplotlib as error:
        say(console, f"no picture: {error}")
        return
    say(console, f"the picture: {path}")


def show_sample(
    console: Console, name: str, model: StoredModel, prompt: str, device: str | None
) -> None:
    """Print a short sample of the model, and how much compute routing saved."""
    try:
        sampler = start_sampler(model, device=device, max_batch=1)
    except ValueError as error:
        # data prepared from token ids has no tokenizer
        say(console, f"\nno sample: {error}")
        return
    say(console, f"\nA sample of {name}, routed token by token:\n")
    # leave room for the prompt in a model with short sequences
    most = min(SAMPLING.max_tokens, model.config.max_seq_len // 2)
    params = dataclasses.replace(SAMPLING, max_tokens=most)
    show = Show(sampler, [prompt], params, stream=True, file=console.file)
    show.warm_up()
    show.run()
    for line in show.summarize():
        say(console, line)
    more = f"--prompt {shlex.quote(prompt)} " if prompt else ""
    say(console, f"more: depthmix sample {shlex.quote(str(model.path))} {more}--color")


def write_routing(model: StoredModel, run: RunDir, page: Path, device: str | None) -> str:
    """Write a page of held-out text, coloured by depth; returns a sentence about it."""
    try:
        words = read_held_out(run, model.vocabulary)
        found = trace_model(model, words, text="held-out text", max_tokens=NUM_READ, device=device)
    except ValueError as error:
        # data prepared from token ids has no tokenizer, and some data has no validation split
        return f"no routing page: {error}"
    replace_file(page, write_page(found))
    return (
        f"The routing page shows through how many routed blocks each of {len(found['tokens'])} "
        f"tokens of held-out text went: {page}"
    )


def read_held_out(run: RunDir, vocabulary: Vocabulary) -> str:
    """A validation document of the run's data that fills the page, or the longest."""
    used = run.read_starts()[-1]["data"]
    split = Corpus.open(used["folder"]).split("val")
    if not split.num_documents:
        raise ValueError(f"the data in {used['folder']} has no validation split")
    # the first of those that fill the page
    number = int((split.document_lengths.clip(max=NUM_READ)).argmax())
    # the last token is the document's end
    return vocabulary.decode(split.read(number, 0, NUM_READ + 1)[:-1].tolist())


def print_result(console: Console, dense: Trained, routed: Trained) -> None:
    """Both runs side by side."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column("", overflow="fold")
    for run in (dense, routed):
        table.add_column(run.name, justify="right", overflow="fold")

    def add(label: str, write: Callable[[Any], str], *values: int | float | None) -> None:
        table.add_row(label, *("" if value is None else write(value) for value in values))

    runs = (dense, routed)
    add("training FLOPs", format_power, *(run.last["flops"] for run in runs))
    add("tokens seen", format_number, *(run.last["tokens"] for run in runs))
    add("tokens per second", format_number, *(run.last["tokens_per_second"] for run in runs))
    add("validation loss", "{:.3f}".format, *(read_metric(run.val, TRAINED) for run in runs))
    add("  under causal routing", "{:.3f}".format, None, read_metric(routed.val, ("causal",)))
    bits = (read_metric(run.val, JUDGED, "bits_per_byte") for run in runs)
    add("bits per byte", "{:.3f}".format, *bits)
    speeds = [run.last["tokens_per_second"] for run in runs]
    # a run of one step has no speed
    add(
        "speed-up, measured",
        "{:.2f} x".format,
        None,
        speeds[1] / speeds[0] if all(speeds) else None,
    )
    per_token = [run.last["flops"] / run.last["tokens"] for run in runs]
    add("speed-up, by FLOPs", "{:.2f} x".format, None, per_token[0] / per_token[1])
    console.print(table)
