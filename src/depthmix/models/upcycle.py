"""A dense checkpoint → an untrained run with routed blocks.

With every token kept, the converted model computes the same function.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from depthmix import flops
from depthmix.checkpoint.weights import fit_weights
from depthmix.config import GATES, ModelConfig, RunConfig
from depthmix.models.open import StoredModel
from depthmix.models.vocabulary import find_end
from depthmix.models.write import write_run
from depthmix.runs.folder import RunDir
from depthmix.units import format_number

# the gate is 1 + tanh(0) for any input of the router, whose inputs are normalised: the residual
# stream of SmolLM2 reaches 22,814
DEFAULTS: dict[str, Any] = {
    "routing.strategy": "expert_choice",
    "routing.capacity": 0.125,
    "routing.every": 2,
    "routing.first_dense": 2,
    "routing.gate": "tanh1",
    "routing.init_std": 0.0,
    "routing.normalize_input": True,
}

# what turns all of it off
DENSE = {"routing.strategy": "none"}

# FLOPs are printed for sequences of this length, or of the model's if that is shorter
SHOWN_LENGTH = 1024


class Upcycled(NamedTuple):
    """A new run, and its source."""

    run: RunDir
    source: StoredModel
    config: ModelConfig
    num_new: int
    """Parameters of routers and predictors."""

    def describe(self) -> list[str]:
        """The result, as lines."""
        config, routing = self.config, self.config.routing
        gate = GATES[routing.gate]
        is_same = gate.is_constant or (gate.at_zero == 1 and routing.init_std == 0)
        total = flops.num_parameters(config).total
        length = min(SHOWN_LENGTH, config.max_seq_len)
        dense = flops.forward_flops(config.dense_twin(), seq_len=length)
        routed = flops.forward_flops(config, seq_len=length)
        shares = sorted(set(config.capacities), reverse=True)
        shown = f"{shares[0]:g}" if len(shares) == 1 else f"{shares[0]:g} to {shares[-1]:g}"
        lines = [
            f"{self.run.path}: {format_number(total)} parameters of {self.source.path} "
            f"({self.source.kind}), {self.num_new:,} of them new in routers and predictors",
            f"{len(config.routed_layers)} of {config.num_layers} blocks route: capacity {shown}, "
            f"gate {routing.gate}",
            f"forward FLOPs of {length:,} tokens: {dense:.3g} dense, {routed:.3g} routed "
            f"({routed / dense:.1%})",
        ]
        if is_same:
            lines += [
                "with selector 'all', which routes every token, it still equals the dense model"
            ]
        return lines


def upcycle(
    source: StoredModel,
    out: Path,
    overrides: Mapping[str, Any],
    *,
    choose_layers: Callable[[], Sequence[int]] | None = None,
) -> Upcycled:
    """Make a run of a dense model with routers around some of its blocks.

    `overrides` are dotted fields of the model, before `DEFAULTS`; only those of its routing may
    differ from the source. `choose_layers` gives the blocks that route, once all else is checked.
    Choose a smaller `max_seq_len` when opening the source.
    """
    RunDir(out).check_free()
    if source.config.routed_layers:
        raise ValueError(
            f"{source.path} already has routed blocks: train it with 'depthmix train --from "
            f"{source.path}'"
        )
    # for any choice of blocks
    dense = source.config.override({**DEFAULTS, **overrides, **DENSE})
    _check_same(source.config, dense, source.path)
    if choose_layers is not None:
        overrides = {**overrides, "routing.layers": tuple(choose_layers())}
    config = source.config.override({**DEFAULTS, **overrides})
    if not config.routed_layers:
        raise ValueError("routing.strategy = none leaves the model dense: choose another")
    # refuses what any run refuses, before anything is written
    run = RunConfig(model=config)
    weights = source.network.cpu().state_dict()
    fitted = fit_weights(config, weights, source.path)
    weights = {name: value.float() for name, value in fitted.weights.items()}
    reason = f"upcycled from {source.path}, not trained: heal it with depthmix train --from {out}"
    folder = write_run(
        out,
        run,
        weights,
        source=source.home,
        end_token=find_end(source.home),
        chat=source.chat,
        reason=reason,
        upcycled=source.kind,
    )
    num_new = sum(weights[name].numel() for name in fitted.new)
    return Upcycled(folder, source, config, num_new)


def _check_same(dense: ModelConfig, config: ModelConfig, source: Path) -> None:
    """Refuse fields that change the source's function; shapes of tensors are checked later."""
    heads, rope = ("num_heads", "num_kv_heads", "head_width"), ("rope_theta", "rope_factors")
    for name in (*heads, *rope, "norm_eps", "max_seq_len"):
        before, after = getattr(dense, name), getattr(config, name)
        if before != after:
            raise ValueError(
                f"{name} = {after} is {before} in {source}: only fields of routing may be changed, "
                f"and max_seq_len to a smaller one"
            )
