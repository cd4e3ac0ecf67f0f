"""Write a run from imported or converted weights; the folder is complete or absent."""

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from depthmix.checkpoint import Checkpoints, collect_tensors
from depthmix.config import RunConfig
from depthmix.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from depthmix.files import hash_file, share_file
from depthmix.models.chat import Chat, write_chat
from depthmix.models.foreign import OWN_KIND
from depthmix.models.open import StoredModel
from depthmix.models.vocabulary import find_end
from depthmix.runs.folder import RunDir, collect_provenance

# holds the files of a folder until all of them are there
UNFINISHED = ".new"


@contextmanager
def fill_folder(out: Path, mark: str) -> Iterator[Path]:
    """A folder to write the contents of `out`, which are moved there at the end, `mark` last.

    After a failure nothing is left; what a killed process has left is removed by the next attempt.
    """
    new, made = out / UNFINISHED, not out.exists()
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for path in sorted(new.iterdir(), key=lambda path: path.name == mark):
            if path.is_file():
                share_file(path)
            path.rename(out / path.name)
    except (OSError, SafetensorError) as error:
        # an error of safetensors has the system's words, but no number
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else str(error)
        raise OSError(
            number or errno.EIO, f"'{out}' could not be written ({reason}), and was removed"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if made:
            # fails, and may, if it is not empty
            with suppress(OSError):
                out.rmdir()


def write_run(
    out: Path,
    run: RunConfig,
    weights: Mapping[str, Tensor],
    *,
    source: Path,
    end_token: int | None,
    chat: Chat | None,
    reason: str,
    **noted: str,
) -> RunDir:
    """A new run with one checkpoint, at step 0, and the tokenizer of `source` if it has one.

    `reason` goes into its status, and `noted` into its provenance, beside the source's folder.
    """
    tokenizer = source / TOKENIZER_FILE
    if tokenizer.is_file():
        # a damaged one is refused now instead of when it is used
        load_tokenizer(tokenizer)
    origin = {
        "folder": str(source.resolve()),
        "hash": None,
        "end_token": end_token,
        "tokenizer_hash": hash_file(tokenizer) if tokenizer.is_file() else None,
        **noted,
    }
    device = {"kind": "cpu", "processes": 1}
    start = collect_provenance(seed=run.train.seed, data=origin, device=device)
    state = {"config": run.to_dict(), "val": {}, "loss": None}
    with fill_folder(out, "config.toml") as new:
        folder = RunDir.create(new, run.to_toml(), start)
        if tokenizer.is_file():
            shutil.copyfile(tokenizer, new / TOKENIZER_FILE)
        if chat is not None:
            write_chat(new, chat)
        Checkpoints(folder.checkpoints, asynchronous=False).save(0, {"model": dict(weights)}, state)
        folder.write_status("finished", step=0, num_steps=0, loss=None, reason=reason)
    return RunDir.open(out)


def import_model(source: StoredModel, out: Path) -> RunDir:
    """Make a run of an exported folder, with the same weights, tokenizer and chat template."""
    RunDir(out).check_free()
    path = source.path
    if source.kind != OWN_KIND:
        raise ValueError(
            f"{path} holds a model of type '{source.kind}', not a depthmix model: 'depthmix "
            f"upcycle' reads dense ones"
        )
    if source.checkpoint is not None:
        raise ValueError(f"{path} is not an exported folder: 'depthmix train --from' reads runs")
    return write_run(
        out,
        RunConfig(model=source.config),
        collect_tensors(source.network, [])["model"],
        source=path,
        end_token=find_end(path),
        chat=source.chat,
        reason=f"imported from {path}",
    )
