"""The verb that counts what many GPUs would take, before they are rented."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from depthmix.cli.arguments import FIELDS_ALLOWED, RunFieldsCommand, app, split_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from depthmix.config import RunConfig
    from depthmix.train.memory import Estimate

# sizes of GPUs to compare with, as their makers call them
GPU_BYTES = {"80 GB": 80e9, "141 GB": 141e9}


@app.command(cls=RunFieldsCommand, context_settings=FIELDS_ALLOWED)
def plan_memory(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|FIELD=VALUE",
            help="A preset or .toml file, and fields to change.",
            show_default=False,
        ),
    ],
    gpus: Annotated[
        list[str] | None,
        typer.Option(metavar="N...", help="Numbers of GPUs, a column for each; 8 if empty."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence; the model's max_seq_len if empty.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that share a node and NVLink.")] = 8,
    flops_per_second: Annotated[
        float, typer.Option(help="What one GPU really computes, in FLOP/s.", show_default="4e14")
    ] = 400e12,
    network: Annotated[
        float, typer.Option(help="Network between nodes in Gbit/s, for each GPU.")
    ] = 400,
    nvlink: Annotated[
        float, typer.Option(help="NVLink inside a node in Gbit/s, for each GPU, one way.")
    ] = 3600,
    as_json: Annotated[bool, typer.Option("--json", help="Print raw numbers as JSON.")] = False,
) -> None:
    """Count what training on many GPUs takes.

    Shards are cut for real, on this machine and without its memory; activations are estimated,
    times follow from the rates that you state. For example:

    depthmix plan-memory 1b train.batch_size=512 --gpus 8 64 512
    """
    from depthmix.config import make_run_config

    counts, rest = split_counts(gpus, arguments)
    names, overrides = split_arguments(rest, train=True)
    if len(names) != 1:
        raise ValueError(
            "name one model to plan for: 'depthmix presets' lists the presets, a file ends in .toml"
        )
    if seq_len is not None:
        overrides["train.seq_len"] = str(seq_len)
    run = make_run_config(names[0], overrides)
    # after what can be wrong: torch takes seconds to load
    from depthmix.train.memory import Cluster, estimate_run

    rates = (flops_per_second, nvlink * 1e9 / 8, network * 1e9 / 8)
    found = [estimate_run(run, Cluster(count, gpus_per_node, *rates)) for count in counts]
    if as_json:
        tree = {"model": names[0], "run": run.to_dict(), "estimates": [e.to_dict() for e in found]}
        print(json.dumps(tree, indent=2))
        return
    from rich.console import Console

    print_estimates(names[0], run, found, Console())


def split_counts(
    options: Sequence[str] | None, arguments: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Numbers of GPUs, and what is left of the arguments.

    Only the first number after an option is its value: the others stand among the arguments.
    """
    texts = [part for text in options or ["8"] for part in text.split(",")]
    rest = list(arguments)
    if options:
        texts += [text for text in arguments if text.isdecimal()]
        rest = [text for text in arguments if not text.isdecimal()]
    counts = [int(text) for text in texts if text.isdecimal() and int(text) > 0]
    if len(counts) < len(texts):
        raise ValueError(f"--gpus {' '.join(texts)} must be whole numbers of GPUs, such as 8 64")
    return counts, rest


def print_estimates(
    name: str, run: "RunConfig", estimates: Sequence["Estimate"], console: "Console"
) -> None:
    """A table with a column for each number of GPUs, and under it what was assumed."""
    from rich import box
    from rich.table import Table

    from depthmix import flops
    from depthmix.units import format_number

    rows = [list_rows(estimate) for estimate in estimates]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
    table.add_column(name, overflow="fold")
    for estimate in estimates:
        count = estimate.cluster.num_gpus
        table.add_column(f"{count} GPU{'s' if count > 1 else ''}", justify="right", overflow="fold")
    for label in rows[0]:
        table.add_row(label, *(cells[label] for cells in rows))
    cluster = estimates[0].cluster
    total = format_number(flops.num_parameters(run.model).total)
    lines = (
        f"{total} parameters, {run.train.batch_size} x {run.seq_len} tokens a step; "
        f"nothing here was measured on GPUs",
        table,
        f"Assumed: {cluster.flops_per_second / 1e12:g} TFLOP/s of a GPU, nodes of "
        f"{cluster.gpus_per_node}, {cluster.nvlink_bytes_per_second / 1e9:g} GB/s inside, "
        f"{cluster.network_bytes_per_second / 1e9:g} GB/s of network for each GPU. A total fits "
        f"where it is at most 90 % of the GPU. Activations are an estimate.",
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=isinstance(line, str))


def list_rows(estimate: "Estimate") -> dict[str, str]:
    """A column of the table: label → what stands there."""
    from depthmix.units import format_bytes, format_seconds

    memory, traffic, compute = estimate.memory, estimate.traffic, estimate.compute_seconds
    longest, both = max(compute, traffic.seconds), compute + traffic.seconds
    recomputes = memory.activations == estimate.activations_recomputed
    other = estimate.activations_kept if recomputes else estimate.activations_recomputed
    return {
        "weights shared by": f"{estimate.shard_size}",
        "sequences at a time": f"{estimate.num_rows}",
        "parameters": format_bytes(memory.parameters),
        "gradients": format_bytes(memory.gradients),
        "optimiser state": format_bytes(memory.optimizer),
        "layers in flight": format_bytes(memory.gathered),
        "activations": format_bytes(memory.activations),
        "logits and head": format_bytes(memory.loss),
        "total of one GPU": format_bytes(memory.total),
        **{
            f"  fits {name}": "yes" if estimate.fits(size) else "no"
            for name, size in GPU_BYTES.items()
        },
        f"  {'without' if recomputes else 'with'} checkpointing": format_bytes(
            memory.total - memory.activations + other
        ),
        "host memory of a node": format_bytes(estimate.host_bytes),
        "a checkpoint": format_bytes(estimate.checkpoint_bytes),
        "  all that are kept": format_bytes(estimate.disk_bytes),
        "received: all-gather": format_bytes(traffic.all_gather_bytes),
        "  reduce-scatter": format_bytes(traffic.reduce_scatter_bytes),
        "  all-reduce": format_bytes(traffic.all_reduce_bytes),
        "computing": format_seconds(compute),
        "communicating": format_seconds(traffic.seconds),
        "a step": f"{format_seconds(longest)} to {format_seconds(both)}",
    }
