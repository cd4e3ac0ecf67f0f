"""Weights that came from elsewhere → a run that nobody has trained here.

Owns what such a run's folder holds. Knows nothing of whose weights they were.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from depthmix.checkpoint import Checkpoints
from depthmix.data.tokenizer import TOKENIZER_FILE
from depthmix.data.writer import hash_file
from depthmix.recipe import RunConfig
from depthmix.rundir import RunDir, collect_provenance


def write_run(
    out: Path,
    run: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    source: Path,
    end_token: int | None,
    reason: str,
    **noted: str,
) -> RunDir:
    """A new run with one checkpoint, at step 0, and the tokenizer of `source` where it has one.

    `reason` says in its status where it comes from; `noted` is kept beside the source's folder.
    """
    tokenizer = source / TOKENIZER_FILE
    origin = {
        "folder": str(source.resolve()),
        "hash": None,
        "end_token": end_token,
        "tokenizer_hash": hash_file(tokenizer) if tokenizer.is_file() else None,
        **noted,
    }
    device = {"kind": "cpu", "processes": 1}
    start = collect_provenance(seed=run.train.seed, data=origin, device=device)
    folder = RunDir.create(out, run.to_toml(), start)
    if tokenizer.is_file():
        shutil.copyfile(tokenizer, out / TOKENIZER_FILE)
    state = {"config": run.to_dict(), "val": {}, "loss": None}
    Checkpoints(folder.checkpoints, asynchronous=False).save(0, {"model": dict(weights)}, state)
    folder.write_status("finished", step=0, num_steps=0, loss=None, reason=reason)
    return folder
