"""What may be chosen by name in a model: strategies, gates, selectors, and what each of them means.

Owns every list of these names. Validation, `--help`, reports and traces read it here; the
modules that compute (`nn`, `kernels`) have a formula for each name, and tests compare them with
these tables.
"""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from depthmix.config.fields import Choices


class Strategy(NamedTuple):
    """A way to choose the tokens that a routed block keeps."""

    meaning: str
    """For `--help`."""
    label: str = ""
    """The name of training's own rule in a trace."""
    kind: str = ""
    """A model that routes so, as reports name it."""
    is_random: bool = False
    """Whether chance decides, which no head can foretell."""
    has_target: bool = False
    """Whether top-k membership is something that a causal head can learn."""
    asks_head: bool = False
    """Whether training asks the causal head, too, so that there must be one."""
    trains_router: bool = False
    """Whether the router learns to decide causally without a loss for it."""
    is_final: bool = False
    """Whether a token that was not kept does not come back, so that capacities must not rise."""
    is_balanced: bool = False
    """Whether a loss draws the share of kept tokens to the capacity, which nothing else holds."""


class ExpertStrategy(NamedTuple):
    """A way to bring tokens and experts together."""

    meaning: str
    """For `--help`."""
    has_target: bool = False
    """Whether experts choose, each its highest scores, which a causal head can learn."""
    tokens_choose: bool = False
    """Whether tokens choose, each its best experts, over whom a loss has to spread them."""


STRATEGIES: Mapping[str, Strategy] = {
    "none": Strategy("every block is dense"),
    "expert_choice": Strategy(
        "each sequence's highest scores", label="top-k", kind="mod", has_target=True
    ),
    "token_choice": Strategy(
        "tokens with a positive score, while there are places",
        label="token choice",
        kind="token_choice",
        trains_router=True,
        is_balanced=True,
    ),
    "stochastic": Strategy("chance, as a control", "random", "stochastic", is_random=True),
    "early_exit": Strategy(
        "the highest scores of those that the routed block before kept",
        label="top-k of those still inside",
        kind="early_exit",
        has_target=True,
        is_final=True,
    ),
    "causal": Strategy(
        "tokens that a head expects among the highest scores, while there are places",
        label="causal, with a limit",
        kind="mod causal",
        has_target=True,
        asks_head=True,
    ),
}

GATES: Mapping[str, str] = {
    "raw": "r",
    "sigmoid": "1 / (1 + exp(-r))",
    "tanh1": "1 + tanh(r)",
    "unit": "1",
}
"""What multiplies the update of a token with the score r."""

EXPERT_STRATEGIES: Mapping[str, ExpertStrategy] = {
    "none": ExpertStrategy("one MLP"),
    "expert_choice": ExpertStrategy("experts take tokens", has_target=True),
    "token_choice": ExpertStrategy("tokens take experts", tokens_choose=True),
}

SELECTORS = ("topk", "predictor", "router", "all")
"""Who may decide in place of a strategy's own rule."""
CAUSAL_SELECTORS = ("predictor", "router", "all")
"""Those that look at no later token."""

StrategyName = Annotated[str, Choices({name: s.meaning for name, s in STRATEGIES.items()})]
GateName = Annotated[str, Choices(GATES)]
ExpertStrategyName = Annotated[
    str, Choices({name: s.meaning for name, s in EXPERT_STRATEGIES.items()})
]
