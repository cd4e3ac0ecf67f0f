"""Save and load a model and its optimisers as safetensors files, on any number of ranks.

The only module that uses torch.distributed.checkpoint (DCP): every rank writes its own shards, and
reads what its shards need, for any number of ranks. Nothing is pickled.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from depthmix.files import name_file, sync_file
from depthmix.world import World

Parts = dict[str, dict[str, Tensor]]
"""`{"model": {name: tensor}, "optimizer": {name: tensor}}`, and any other parts."""

# where DCP stores the positions of shards, as JSON in a file's metadata
SHARDS = "DCP_SHARDING_INFO"
# added to parameter names by torch.compile and activation checkpointing
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


def collect_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> Parts:
    """Every tensor of a training, by a name that does not depend on the number of ranks.

    They are the live ones, not copies. A tensor with two names (a tied head) is there once, by
    its first. Settings such as the learning rate are left out: a schedule gives them again.
    """
    named = _name_tensors(model)
    state: dict[str, Tensor] = {}
    for optimizer, _, name, param in _list_trained(named, optimizers):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                state[f"{name}.{key}"] = value
            elif value is not None:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps '{key}' as {type(value).__name__}: only "
                    f"optimisers whose state is tensors can be saved"
                )
    return {"model": {name: value.detach() for name, value in named.items()}, "optimizer": state}


@torch.no_grad()
def restore_tensors(model: nn.Module, optimizers: Sequence[Optimizer], tensors: Parts) -> None:
    """Put `tensors` (see `collect_tensors`) into a model and its optimisers.

    Memory that is there is kept, so that a recorded CUDA graph stays valid; state that does not
    exist yet is made, and state that `tensors` does not have is dropped.
    """
    named = _name_tensors(model)
    _check_same_names(set(named), set(tensors["model"]))
    for name, value in tensors["model"].items():
        _fill(named[name], value)
    new: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors["optimizer"].items():
        name, _, key = full_name.rpartition(".")
        new.setdefault(name, {})[key] = value
    for optimizer, group, name, param in _list_trained(named, optimizers):
        old = optimizer.state.pop(param, {})
        for key, value in new.pop(name, {}).items():
            if isinstance(old.get(key), Tensor):
                _fill(old[key], value)
                optimizer.state[param][key] = old[key]
                continue
            # as torch has it: a fused or capturable step is counted where the parameter is
            on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
            optimizer.state[param][key] = value.to("cpu" if on_cpu else param.device)
    if new:
        raise ValueError(
            f"the checkpoint has optimiser state for '{min(new)}', which this run does not "
            f"train: resume with the configuration of the run"
        )


def find_largest(tensors: Parts) -> float:
    """Largest absolute value in this rank's part of the tensors; NaN if there is any."""
    shares = [_localize(tensor) for named in tensors.values() for tensor in named.values()]
    # a norm makes no copy, for which a device may have no room
    return float(nn.utils.get_total_norm([t for t in shares if t.numel()], math.inf))


def copy_to_cpu(tensors: Parts, memory: Parts) -> Parts:
    """Copies on the CPU, complete on return; `memory` is earlier copies that may be overwritten."""
    copies: Parts = {part: {} for part in tensors}
    for part, named in tensors.items():
        for name, tensor in named.items():
            copy = memory.get(part, {}).get(name)
            if copy is None or _describe(copy) != _describe(tensor):
                copy = tensor.detach().to("cpu", copy=True)
            else:
                _localize(copy).copy_(_localize(tensor), non_blocking=True)
            copies[part][name] = copy
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def write_tensors(folder: Path, tensors: Parts, world: World) -> None:
    """Write every part into files of its own, on disk when this returns (see `name_files`)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    # one file per index
    index = {_join(p, name): i for i, p in enumerate(tensors, start=1) for name in tensors[p]}
    writer = HuggingFaceStorageWriter(str(folder), index, save_distributed=True)
    _silence_single_process()
    # safetensors takes no other; a moment may have the strides of a gradient
    flat = {name: tensor.contiguous() for name, tensor in _flatten(tensors).items()}
    try:
        dcp.save(
            flat,
            storage_writer=writer,
            process_group=world.group,
            no_dist=world.group is None,
        )
    except dcp.CheckpointException as failed:
        raise _unwrap(failed) from failed


def name_files(folder: Path, parts: Sequence[str], world: World) -> list[Path]:
    """Name this rank's files after their parts, as DCP's own names cannot be chosen.

    Equal tensors make equal files, byte for byte (see `sort_header`).
    """
    named = []
    for path in sorted(folder.glob(f"shard-{world.rank + 1:05d}-*.safetensors")):
        match = re.fullmatch(r"shard-\d+-model-(\d+)-of-\d+", path.stem)
        assert match, f"unknown name of a shard: {path.name}"
        share = f".rank-{world.rank:05d}-of-{world.size:05d}" if world.size > 1 else ""
        named.append(path.with_name(f"{parts[int(match[1]) - 1]}{share}.safetensors"))
        os.rename(path, named[-1])
        sort_header(named[-1])
    return named


def sort_header(path: Path) -> None:
    """Rewrite a safetensors file's header in a fixed order, in place.

    safetensors keeps its metadata in a hash map and writes it in another order each time.
    """
    with name_file(path), open(path, "r+b") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        tree = json.loads(file.read(num_bytes))
        metadata = tree.pop("__metadata__", {})
        if SHARDS in metadata:
            # DCP has the tensors in the order in which they were handed over
            metadata[SHARDS] = json.dumps(json.loads(metadata[SHARDS]), sort_keys=True)
        # tensors stay in the order of their bytes
        tree = {"__metadata__": dict(sorted(metadata.items())), **tree} if metadata else tree
        header = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(header) <= num_bytes, f"{path}: the header has grown"
        file.seek(8)
        # the format pads a header with spaces
        file.write(header.ljust(num_bytes))
        sync_file(file)


def read_tensors(folder: Path, tensors: Parts, world: World) -> None:
    """Fill `tensors` in place from a checkpoint.

    The model must have the names, shapes and types that were saved. The other parts take on the
    names of the checkpoint: missing tensors are made, as the parameter of their name is, and ones
    that it does not hold are taken out.
    """
    stored = _read_layout(folder)
    for part, named in tensors.items():
        here = {name for owner, name in stored if owner == part}
        if part == "model":
            _check_same_names(set(named), here)
            continue
        for name in set(named) - here:
            del named[name]
        for name in sorted(here - set(named)):
            like = tensors["model"].get(name.rpartition(".")[0])
            named[name] = _make_like(like, *stored[part, name])
    for part, named in tensors.items():
        for name, tensor in named.items():
            shape, dtype = stored[part, name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"'{name}' in {folder} is {dtype} {shape} and this run has {tensor.dtype} "
                    f"{tuple(tensor.shape)}: resume with the configuration of the run"
                )
    _load(folder, tensors, world.group)


def read_part(folder: Path, part: str) -> dict[str, Tensor]:
    """All tensors of one part, whole and on the CPU, without the other ranks."""
    stored = _read_layout(folder)
    named = {
        name: torch.empty(shape, dtype=dtype)
        for (owner, name), (shape, dtype) in stored.items()
        if owner == part
    }
    _load(folder, {part: named}, None)
    return named


def _load(folder: Path, tensors: Parts, group: Any) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(folder))
    _silence_single_process()
    try:
        dcp.load(
            _flatten(tensors), storage_reader=reader, process_group=group, no_dist=group is None
        )
    except dcp.CheckpointException as failed:
        raise _unwrap(failed) from failed


def _read_layout(folder: Path) -> dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]:
    """(part, name) → shape and type of every whole tensor in a checkpoint."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    parts = {path.name.split(".")[0] for path in folder.glob("*.safetensors")}
    layout = {}
    for flat, entry in metadata.state_dict_metadata.items():
        first, _, rest = flat.partition(".")
        key = (first, rest) if first in parts and first != "model" else ("model", flat)
        assert isinstance(entry, TensorStorageMetadata)
        layout[key] = (tuple(entry.size), entry.properties.dtype)
    return layout


def _join(part: str, name: str) -> str:
    # weights keep their plain names, so that other programs can use the file
    return name if part == "model" else f"{part}.{name}"


def _flatten(tensors: Parts) -> dict[str, Tensor]:
    return {_join(part, name): t for part, named in tensors.items() for name, t in named.items()}


def _name_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, each once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            named[".".join(p for p in path.split(".") if p not in _WRAPPERS)] = value
    return named


class _Trained(NamedTuple):
    optimizer: Optimizer
    group: dict[str, Any]
    name: str
    param: Tensor


def _list_trained(named: dict[str, Tensor], optimizers: Sequence[Optimizer]) -> list[_Trained]:
    names = {id(value): name for name, value in named.items()}
    found: list[_Trained] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = names.pop(id(param), None)
                if name is None:
                    raise ValueError(
                        f"{type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(param.shape)} that is not the model's, or is another optimiser's"
                    )
                found.append(_Trained(optimizer, group, name, param))
    return found


def _check_same_names(expected: set[str], stored: set[str]) -> None:
    for names, problem in ((expected - stored, "has no"), (stored - expected, "has an unknown")):
        if names:
            raise ValueError(
                f"the checkpoint {problem} '{min(names)}' ({len(names)} such tensors): it is of "
                f"another model configuration"
            )


def _make_like(like: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, sharded like its parameter if it has the parameter's shape."""
    if like is not None and tuple(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype)
    return torch.empty(shape, dtype=dtype)


def _localize(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyrefly: ignore


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, getattr(tensor, "placements", None), _localize(tensor).shape


def _fill(target: Tensor, value: Tensor) -> None:
    if _localize(target).data_ptr() != _localize(value).data_ptr():
        target.copy_(value)


def _silence_single_process() -> None:
    # DCP warns about `no_dist` even when it is asked for. Not `catch_warnings`: a background
    # thread would put back the filters of another thread
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def _unwrap(failed: BaseException) -> Exception:
    """The first rank's error inside DCP's own error, which is not even an `Exception`."""
    errors = [error for error, _ in failed.failures.values()]  # pyrefly: ignore
    for error in errors:
        if isinstance(error, Exception):
            return error
    raise errors[0]
