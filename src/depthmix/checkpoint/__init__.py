"""Training state ⇄ disk: atomic, checksummed, in the background, from one process to N ranks.

    RUN/checkpoints/step-00001000/
      model.safetensors       weights by name (with several ranks, one file of each rank)
      optimizer.safetensors   the optimisers' state by the parameter's name, likewise
      adapters.safetensors    of a training of adapters: what the weights were merged from
      state.json              all that is not a tensor
      checksums.json          size and sha256 of every other file

Nothing in a checkpoint is unpickled. Knows nothing of the training loop.
"""

from depthmix.checkpoint.rng import collect_rng, restore_rank_rng, restore_rng, seed_rng
from depthmix.checkpoint.store import Checkpoints, Found
from depthmix.checkpoint.tensors import (
    Parts,
    collect_tensors,
    find_largest,
    restore_tensors,
    sort_header,
)
from depthmix.checkpoint.weights import load_weights

__all__ = [
    "Checkpoints",
    "Found",
    "Parts",
    "collect_rng",
    "collect_tensors",
    "find_largest",
    "load_weights",
    "restore_rank_rng",
    "restore_rng",
    "restore_tensors",
    "seed_rng",
    "sort_header",
]
