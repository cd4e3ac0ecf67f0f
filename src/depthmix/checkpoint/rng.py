"""The random state of a process as JSON data: Python, numpy, and torch on the CPU and the GPU."""

import random
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def collect_rng() -> dict[str, Any]:
    """This process's random state; of the GPUs, the current one's."""
    version, words, python_gauss = random.getstate()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": {
            "version": version,
            "words": _encode(np.array(words, np.uint32)),
            "gauss": python_gauss,
        },
        "numpy": {
            "name": name,
            "keys": _encode(np.asarray(keys, np.uint32)),
            "position": position,
            "has_gauss": has_gauss,
            "gauss": gauss,
        },
        "torch": _encode(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state().numpy())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Inverse of `collect_rng`; a GPU's state is restored if there is a GPU."""
    python, numpy = state["python"], state["numpy"]
    words = _decode(python["words"], np.uint32).tolist()
    random.setstate((python["version"], tuple(words), python["gauss"]))
    keys = _decode(numpy["keys"], np.uint32)
    np.random.set_state(
        (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"])
    )
    torch.set_rng_state(torch.from_numpy(_decode(state["torch"], np.uint8)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_decode(state["cuda"], np.uint8)))


def restore_rank_rng(
    states: Sequence[Any], *, rank: int, num_ranks: int, seed: int, step: int
) -> str | None:
    """Give this rank its own of `states`, or a new one made of the seed, the rank and the step.

    Returns a sentence for the user if the number of ranks has changed.
    """
    if rank < len(states):
        restore_rng(states[rank])
    else:
        seed_rng(seed, rank, step)
    if num_ranks == len(states):
        return None
    return (
        f"the checkpoint was written by {len(states)} ranks and this run has {num_ranks}: its "
        f"random numbers are not those that an unchanged run would have drawn"
    )


def seed_rng(seed: int, rank: int, step: int) -> None:
    """Seed everything, differently for each rank and step."""
    words = np.random.SeedSequence([seed, rank, step]).generate_state(3).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    # the GPUs too
    torch.manual_seed(words[2])


def _encode(values: np.ndarray) -> str:
    return b64encode(values.tobytes()).decode("ascii")


def _decode(text: str, dtype: Any) -> np.ndarray:
    # a copy, because torch takes only memory that it may write to
    return np.frombuffer(b64decode(text), dtype).copy()
