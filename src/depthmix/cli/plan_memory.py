"""`depthmix plan-memory`: estimate the memory and time of training on many GPUs."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from depthmix.cli.arguments import (
    FIELDS_ALLOWED,
    AsJson,
    RunFieldsCommand,
    app,
    name_flags,
    split_arguments,
)


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
        typer.Option(metavar="N...", help="Numbers of GPUs, one column each. Default: 8."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per sequence. Default: the model's max_seq_len.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs that share a node and NVLink.")] = 8,
    flops_per_second: Annotated[
        float, typer.Option(help="Achieved FLOP/s of one GPU.", show_default="4e14")
    ] = 400e12,
    network: Annotated[
        float, typer.Option(help="Network between nodes in Gbit/s, for each GPU.")
    ] = 400,
    nvlink: Annotated[
        float, typer.Option(help="NVLink inside a node in Gbit/s, for each GPU, one way.")
    ] = 3600,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory and time of training on many GPUs.

    Parameters are sharded as in training, but without allocating them; activations are estimated,
    and times follow from the rates that you give. For example:

    depthmix plan-memory 1b train.batch_size=512 --gpus 8 64 512
    """
    from depthmix.config import make_run_config
    from depthmix.config.fields import Positive, check_value

    counts, rest = split_counts(gpus, arguments)
    names, overrides = split_arguments(rest, train=True)
    if len(names) != 1:
        raise ValueError(
            "name one model to plan for: 'depthmix presets' lists the presets, a file ends in .toml"
        )
    if seq_len is not None:
        overrides["train.seq_len"] = str(seq_len)
    run = make_run_config(names[0], overrides)
    # after the checks: torch takes seconds to load
    from depthmix.train.memory import Cluster, estimate_run, print_estimates

    with name_flags("gpus_per_node", "flops_per_second", "network", "nvlink"):
        # before they become bytes
        for name, rate in {"network": network, "nvlink": nvlink}.items():
            check_value(name, rate, Positive[float])
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
