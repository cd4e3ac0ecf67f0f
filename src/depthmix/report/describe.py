"""Models side by side: shape, parameters, FLOPs, cache bytes and routing, for people and as JSON.

Lays out the tables; the numbers come from `flops`. Does not load torch.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix import flops
from depthmix.config import ModelConfig, load_preset, preset_names
from depthmix.flops import Parameters
from depthmix.units import format_bytes, format_flops, format_number

if TYPE_CHECKING:
    from rich.console import Console

NONE = "none"
LABEL_WIDTH, MAX_CELL_WIDTH, MAX_MAP_WIDTH = 24, 36, 200


class Description(NamedTuple):
    """A model's raw numbers at one sequence length; names with `dense` are of its dense twin."""

    name: str
    config: ModelConfig
    seq_len: int
    parameters: Parameters
    forward_flops: int
    """Of one sequence."""
    dense_forward_flops: int
    kv_bytes: int
    """Of one sequence, at two bytes per number."""
    dense_kv_bytes: int

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs divided by tokens."""
        return self.forward_flops / self.seq_len

    @property
    def training_flops_per_token(self) -> float:
        """Three times the forward FLOPs."""
        return flops.TRAINING_FACTOR * self.flops_per_token

    @property
    def relative_flops(self) -> float:
        """Forward FLOPs as a share of the dense twin's."""
        return self.forward_flops / self.dense_forward_flops

    @property
    def relative_kv_bytes(self) -> float:
        """Cache bytes as a share of the dense twin's."""
        return self.kv_bytes / self.dense_kv_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data with raw numbers and the full configuration."""
        config = self.config
        return {
            "name": self.name,
            "seq_len": self.seq_len,
            "shape": config.shape._asdict(),
            "parameters": self.parameters._asdict(),
            "memory_parameters": flops.num_memory_parameters(config),
            "forward_flops": self.forward_flops,
            "forward_flops_parts": flops.count_parts(config, self.seq_len),
            "forward_flops_per_token": self.flops_per_token,
            "training_flops_per_token": self.training_flops_per_token,
            "relative_flops": self.relative_flops,
            "kv_bytes": self.kv_bytes,
            "relative_kv_bytes": self.relative_kv_bytes,
            "routed_layers": config.routed_layers,
            "capacities": config.capacities,
            "expert_layers": config.expert_layers,
            "causal_selector": config.causal_selector,
            "config": config.to_dict(),
        }


def describe_model(name: str, config: ModelConfig, seq_len: int | None = None) -> Description:
    """Count everything about a model; the default `seq_len` is its `max_seq_len`."""
    dense = config.dense_twin()
    try:
        found = Description(
            name=name,
            config=config,
            seq_len=config.max_seq_len if seq_len is None else seq_len,
            parameters=flops.num_parameters(config),
            forward_flops=flops.forward_flops(config, seq_len=seq_len),
            dense_forward_flops=flops.forward_flops(dense, seq_len=seq_len),
            kv_bytes=flops.kv_cache_bytes(config, seq_len=seq_len),
            dense_kv_bytes=flops.kv_cache_bytes(dense, seq_len=seq_len),
        )
        # a count beyond a float's range cannot be shown
        float(found.forward_flops)
    except OverflowError as error:
        raise ValueError(f"{name} is too large to count: make it smaller") from error
    return found


def list_presets() -> list[str]:
    """A line of headings, then one per preset: its parameters and forward FLOPs."""
    found = [describe_model(name, load_preset(name)) for name in preset_names()]
    lines = [
        f"{'preset':12}  {'parameters':>10}  {'FLOPs/token':>11}  {'of dense':>8}  routed blocks"
    ]
    for model in found:
        routed = len(model.config.routed_layers)
        share = f"{routed} of {model.config.num_layers}" if routed else NONE
        lines.append(
            f"{model.name:12}  {format_number(model.parameters.total):>10}  "
            f"{format_number(model.flops_per_token):>11}  {model.relative_flops:>8.1%}  {share}"
        )
    return lines


def to_json(models: Sequence[Description]) -> str:
    """A JSON list with an object for each model."""
    return json.dumps([model.to_dict() for model in models], indent=2)


def print_tables(models: Sequence[Description], console: "Console") -> None:
    """Print the models side by side, in as many tables as the console's width needs."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    encoding = (console.encoding or "ascii").lower()
    rows = [list_rows(model, ascii_only=not encoding.startswith("utf")) for model in models]
    widths = [
        min(MAX_CELL_WIDTH, max(len(model.name), *map(len, cells.values())))
        for model, cells in zip(models, rows, strict=True)
    ]
    for start, stop in _split_columns(widths, console.width - LABEL_WIDTH):
        # cells fold instead of ending in an ellipsis: a truncated number is a wrong one
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, highlight=False)
        table.add_column("", overflow="fold", min_width=min(LABEL_WIDTH - 3, console.width // 3))
        for model, width in zip(models[start:stop], widths[start:stop], strict=True):
            table.add_column(Text(model.name, overflow="fold"), overflow="fold", max_width=width)
        for label in rows[start]:
            table.add_row(label, *(Text(cells[label]) for cells in rows[start:stop]))
        console.print(table)


def list_rows(model: Description, *, ascii_only: bool = False) -> dict[str, str]:
    """One model's column of the table: label → cell."""
    config, shape = model.config, model.config.shape
    rows = {
        "layers": str(config.num_layers),
        "width": str(config.width),
        "heads": f"{config.num_heads} of width {shape.head_width}",
        "KV heads": str(shape.num_kv_heads),
        "MLP width": f"{shape.mlp_width} ({config.mlp})",
        "vocabulary": f"{config.vocab_size} ({'tied' if config.tied_head else 'untied'} head)",
        "parameters": format_number(model.parameters.total),
        "  without embedding": format_number(model.parameters.total_non_embedding),
        "  active for a token": format_number(model.parameters.active),
        "sequence length": f"{model.seq_len} tokens",
        "forward pass per token": format_flops(model.flops_per_token),
        "  of its dense twin": f"{model.relative_flops:.1%}",
        "training per token": format_flops(model.training_flops_per_token),
        "KV cache (16 bit)": format_bytes(model.kv_bytes),
        "  of the twin's cache": f"{model.relative_kv_bytes:.1%}",
    }
    ends = {"experts": _describe_experts(config), "memory": _describe_memory(config)}
    return rows | _list_routing(config, ascii_only) | ends


def _list_routing(config: ModelConfig, ascii_only: bool) -> dict[str, str]:
    routing, routed = config.routing, config.routed_layers
    labels = (
        "routed blocks",
        "  map, first to last",
        "strategy",
        "capacity",
        "gate",
        "causal head",
    )
    skipped, marked = (".", "#") if ascii_only else ("·", "▮")
    among = set(routed)
    where = "".join(marked if i in among else skipped for i in range(config.num_layers))
    if config.num_layers > MAX_MAP_WIDTH:
        where = "too deep to draw"
    if not routed:
        return dict(zip(labels, (NONE, where, NONE, "-", "-", "-"), strict=True))
    head = routing.causal_head or NONE
    if head == "predictor":
        head = f"predictor, width {routing.predictor_width}"
    return dict(
        zip(
            labels,
            (
                f"{len(routed)} of {config.num_layers}: {format_ranges(routed)}",
                where,
                routing.strategy,
                _describe_capacity(config),
                routing.gate,
                head,
            ),
            strict=True,
        )
    )


def _describe_capacity(config: ModelConfig) -> str:
    capacities, given = config.capacities, config.routing.capacity
    text = f"{capacities[0]:.4g}"
    if isinstance(given, str):
        text = f"{given}, {text} to {capacities[-1]:.4g}"
    elif len(set(capacities)) > 1:
        text = ", ".join(f"{capacity:.4g}" for capacity in capacities)
    kv_capacity = config.routing.kv_capacity
    return text if kv_capacity is None else f"{text}; keys and values {kv_capacity:.4g}"


def _describe_experts(config: ModelConfig) -> str:
    experts, layers = config.experts, config.expert_layers
    if not layers:
        return NONE
    noop = f" + {experts.num_noop} no-op" if experts.num_noop else ""
    chosen = f", {experts.per_token} per token" if experts.tokens_choose else ""
    return (
        f"{experts.num_experts}{noop} of width {config.shape.expert_width} in blocks "
        f"{format_ranges(layers)}; {experts.strategy}{chosen}, capacity {experts.capacity:.4g}"
    )


def _describe_memory(config: ModelConfig) -> str:
    memory = config.memory
    if not config.has_memory:
        return NONE
    places = {
        "input": ["at the input"],
        "blocks": [f"after blocks {format_ranges(config.memory_layers)}"],
    }
    where = places.get(memory.place, [])
    if config.bypass_layers:
        where = [*where, "for tokens that skip a block"]
    size = format_number(flops.num_memory_parameters(config))
    return (
        f"{size} parameters in {memory.num_tables} tables of {memory.num_rows} rows, "
        f"{' and '.join(where)}"
    )


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: `0-5`, `1-11 by 2`, or, if they are uneven, `1, 4`."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) < 3 or len(steps) > 1:
        return ", ".join(map(str, numbers))
    step = steps.pop()
    return f"{numbers[0]}-{numbers[-1]}" + (f" by {step}" if step > 1 else "")


def _split_columns(widths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Groups of columns that fit side by side; a single column may be too wide, and folds."""
    runs, start, used = [], 0, 0
    for i, width in enumerate(widths):
        # two characters of padding beside each column
        if i > start and used + width + 2 > room:
            runs.append((start, i))
            start, used = i, 0
        used += width + 2
    return [*runs, (start, len(widths))]
