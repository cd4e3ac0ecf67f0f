"""The options that a model chooses by name: strategies, gates and selectors, with their meaning.

Validation, `--help`, reports and traces read these tables. The modules that compute (`nn`,
`kernels`) have a formula for each name, and tests compare them with the tables.
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from depthmix.config.fields import Choices


class Strategy(NamedTuple):
    """A way to choose the tokens that a routed block keeps."""

    meaning: str
    """For `--help`."""
    label: str = ""
    """The name of the training rule in a trace."""
    kind: str = ""
    """The name of such a model in reports."""
    is_random: bool = False
    """Whether the choice is random, so that no head can predict it."""
    has_target: bool = False
    """Whether a causal head can learn top-k membership."""
    asks_head: bool = False
    """Whether training uses the causal head too, so that there must be one."""
    trains_router: bool = False
    """Whether the router learns causal routing without a loss of its own."""
    is_final: bool = False
    """Whether a skipped token never returns, so that capacities must not increase with depth."""
    is_balanced: bool = False
    """Whether only a loss keeps the fraction of routed tokens near the capacity."""


class GateRule(NamedTuple):
    """A factor on the update of a kept token."""

    formula: str
    """Of a score r, for `--help`."""
    at_zero: float
    """Its value at r = 0, where routers may start."""
    is_constant: bool = False
    """Whether it ignores the score, so that the router learns nothing from the update."""


class ExpertStrategy(NamedTuple):
    """A way to assign tokens to experts."""

    meaning: str
    """For `--help`."""
    has_target: bool = False
    """Whether each expert chooses its highest-scoring tokens, which a causal head can learn."""
    tokens_choose: bool = False
    """Whether each token chooses its best experts, which needs a balancing loss."""


STRATEGIES: Mapping[str, Strategy] = {
    "none": Strategy("every block is dense"),
    "expert_choice": Strategy(
        "each sequence's highest scores", label="top-k", kind="mod", has_target=True
    ),
    "token_choice": Strategy(
        "tokens with a positive score, up to the capacity",
        label="token choice",
        kind="token_choice",
        trains_router=True,
        is_balanced=True,
    ),
    "stochastic": Strategy("random tokens, as a control", "random", "stochastic", is_random=True),
    "early_exit": Strategy(
        "the highest scores among the remaining tokens; one that left passes no later block",
        label="top-k of the remaining tokens",
        kind="early_exit",
        has_target=True,
        is_final=True,
    ),
    "causal": Strategy(
        "tokens predicted to be among the highest scores, up to the capacity",
        label="causal, with a limit",
        kind="mod causal",
        has_target=True,
        asks_head=True,
    ),
}

GATES: Mapping[str, GateRule] = {
    "raw": GateRule("r", at_zero=0.0),
    "sigmoid": GateRule("1 / (1 + exp(-r))", at_zero=0.5),
    "tanh1": GateRule("1 + tanh(r)", at_zero=1.0),
    "unit": GateRule("1", at_zero=1.0, is_constant=True),
}
"""The factor on the update of a token with score r."""

NOISE_GATES: Mapping[str, str] = {
    "learned": "the router's score, a stronger control than the paper's",
    "gaussian": "the noise that selected the tokens, as in the paper; the router is unused",
}
"""The score that the gate is a function of under random routing."""

EXPERT_STRATEGIES: Mapping[str, ExpertStrategy] = {
    "none": ExpertStrategy("one MLP"),
    "expert_choice": ExpertStrategy("experts take tokens", has_target=True),
    "token_choice": ExpertStrategy("tokens take experts", tokens_choose=True),
}

BYPASSES: Mapping[str, str] = {
    "identity": "nothing, as in the paper",
    "lookup": "a vector from tables of n-grams of token ids, by a gate and a projection per block",
}
"""What a routed block adds to a token that it does not keep."""

MEMORY_PLACES: Mapping[str, str] = {
    "none": "nowhere",
    "input": "to the embeddings",
    "blocks": "after blocks",
}
"""Where a memory of n-grams is added to the residual stream."""

SELECTORS = ("topk", "predictor", "router", "all")
"""What may replace a strategy's own rule."""
CAUSAL_SELECTORS = ("predictor", "router", "all")
"""The selectors that do not look at later tokens."""

StrategyName = Annotated[str, Choices({name: s.meaning for name, s in STRATEGIES.items()})]
GateName = Annotated[str, Choices({name: rule.formula for name, rule in GATES.items()})]
NoiseGateName = Annotated[str, Choices(NOISE_GATES)]
BypassName = Annotated[str, Choices(BYPASSES)]
MemoryPlaceName = Annotated[str, Choices(MEMORY_PLACES)]
ExpertStrategyName = Annotated[
    str, Choices({name: s.meaning for name, s in EXPERT_STRATEGIES.items()})
]
