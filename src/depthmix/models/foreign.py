"""Models in Hugging Face folders: a `config.json` → a `ModelConfig`, and their tensors → ours.

Knows the dense families that can be read, what is refused of them, and one table of names for both
directions; also reads exported folders. JSON and safetensors are read directly: nothing is
unpickled, and no code of the folder or of transformers is needed.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix import flops
from depthmix.checkpoint.weights import align_weight
from depthmix.config import ModelConfig, fields
from depthmix.files import parse_json
from depthmix.units import format_bytes

CONFIG_FILE = "config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# marks a folder with the weights of an adapter instead of a model
ADAPTER_FILE = "adapter_config.json"
# bytes that a table of rotary phases, and the cache of one text, may take in any model
MAX_TABLE_BYTES = 2**28
# a cache may take more where it is at most this multiple of the weights: the longest models that
# are published are at 4
MAX_CACHE_SHARE = 16

# model_type of what depthmix exports
OWN_KIND = "depthmix"

# model_type → the fields that differ from the defaults; SmolLM and many others are of type llama
FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}

# type of rotary positions → their names for the numbers in our `rope_factors`
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}

# our name → theirs; several of theirs are stacked to make ours
TABLE: dict[str, tuple[str, ...]] = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
# the same in each block: after layers.N. in our names, and model.layers.N. in theirs
BLOCK_TABLE: dict[str, tuple[str, ...]] = {
    "norm_attention.weight": ("input_layernorm.weight",),
    "attention.w_qk.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
    "attention.w_qk.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias"),
    "attention.w_value.weight": ("self_attn.v_proj.weight",),
    "attention.w_value.bias": ("self_attn.v_proj.bias",),
    "attention.w_out.weight": ("self_attn.o_proj.weight",),
    "attention.norm_query.weight": ("self_attn.q_norm.weight",),
    "attention.norm_key.weight": ("self_attn.k_norm.weight",),
    "norm_mlp.weight": ("post_attention_layernorm.weight",),
    "mlp.w_gate.weight": ("mlp.gate_proj.weight",),
    "mlp.w_up.weight": ("mlp.up_proj.weight",),
    "mlp.w_out.weight": ("mlp.down_proj.weight",),
}

# a table of frequencies that old releases saved; it follows from the configuration
IGNORED = ".rotary_emb.inv_freq"

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Entry(NamedTuple):
    """One of our tensors, and the tensors that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    num_rows: tuple[int, ...]
    """First dimension of each of theirs."""
    rest: tuple[int, ...]
    """The other dimensions, which they share."""

    def list_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each of theirs."""
        for name, rows in zip(self.theirs, self.num_rows, strict=True):
            yield name, (rows, *self.rest)


def read_config(folder: Path, *, max_seq_len: int | None = None) -> ModelConfig:
    """The dense model that a folder's `config.json` describes; refuses what ours cannot express.

    `max_seq_len` asks for fewer positions than the model has.
    """
    tree = read_tree(folder)
    kind = str(tree.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder} is of the architecture '{kind}', which cannot be read: it must be one of "
            f"{', '.join(FAMILIES)}"
        )
    num_positions = _get(folder, tree, "max_position_embeddings", int)
    length = min(num_positions, max_seq_len or num_positions)
    _refuse_unreadable(folder, tree)
    try:
        problem = next(_find_problems(kind, tree, length), None)
    except TypeError as error:
        # a list where a number belongs, and the like
        raise ValueError(f"{folder / CONFIG_FILE} is damaged: {error}") from error
    if problem is not None:
        raise ValueError(f"{folder} has {problem}")
    kind_of_rope, rope = _read_rope(tree)
    try:
        config = ModelConfig.from_dict(
            {
                "vocab_size": _get(folder, tree, "vocab_size", int),
                "max_seq_len": length,
                "num_layers": _get(folder, tree, "num_hidden_layers", int),
                "width": _get(folder, tree, "hidden_size", int),
                "num_heads": _get(folder, tree, "num_attention_heads", int),
                "num_kv_heads": tree.get("num_key_value_heads"),
                "head_width": tree.get("head_dim"),
                "mlp_width": _get(folder, tree, "intermediate_size", int),
                "tied_head": tree.get("tie_word_embeddings", False),
                "rope_theta": rope.get("rope_theta", tree.get("rope_theta", 10000.0)),
                "rope_factors": [rope[name] for name in ROPES[kind_of_rope]] or None,
                "norm_eps": tree.get("rms_norm_eps", 1e-6),
                **FAMILIES[kind],
            }
        )
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} does not make a model: {error}") from error
    _check_positions(folder, config, "max_position_embeddings")
    return config


def read_tree(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG_FILE}: name the folder of a model")
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is not a JSON object")
    return tree


def _refuse_unreadable(folder: Path, tree: Mapping[str, Any]) -> None:
    """Refuse folders whose weights are not a model's own, regardless of their configuration."""
    if (folder / ADAPTER_FILE).is_file():
        raise ValueError(
            f"{folder} has an {ADAPTER_FILE}: merge the adapter into its model with peft "
            f"(merge_and_unload), save that, and name its folder"
        )
    if tree.get("quantization_config"):
        raise ValueError(
            f"{folder} has quantised weights (quantization_config): use the original ones"
        )


def _check_positions(folder: Path, config: ModelConfig, name: str) -> None:
    """Refuse a length that would take far more memory than the model, before it is taken."""
    weight_bytes = 4 * flops.num_parameters(config).total
    cache_bytes = flops.kv_cache_bytes(config, bytes_per_element=4)
    for what, num_bytes, allowed in (
        ("rotary phases", 4 * config.max_seq_len * config.shape.head_width, weight_bytes),
        ("cache for a single text", cache_bytes, MAX_CACHE_SHARE * weight_bytes),
    ):
        if num_bytes > max(MAX_TABLE_BYTES, allowed):
            raise ValueError(
                f"{folder / CONFIG_FILE} claims {config.max_seq_len:,} positions, whose {what} "
                f"alone would take {format_bytes(num_bytes)}, while all weights take "
                f"{format_bytes(weight_bytes)}: lower {name} there"
            )


def _find_problems(kind: str, tree: Mapping[str, Any], length: int) -> Iterator[str]:
    """What our dense models cannot express, each as the end of a sentence."""
    for name in tree.get("architectures") or []:
        if not str(name).endswith("ForCausalLM"):
            yield f"the architecture '{name}': only language models (…ForCausalLM) can be read"
    if tree.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"the activation '{tree['hidden_act']}': only silu can be read"
    # Qwen2 has biases on queries, keys and values regardless of these
    for name in ("attention_bias", "mlp_bias"):
        if tree.get(name) and kind != "qwen2":
            yield f"{name} = true: such biases cannot be read"
    scaling, rope = _read_rope(tree)
    if scaling not in ROPES:
        yield f"rotary positions of type '{scaling}', which cannot be read"
    for name in ROPES.get(scaling, ()):
        if not isinstance(rope.get(name), int | float):
            yield f"rotary positions of type '{scaling}' and no number '{name}' for them"
    if rope.get("partial_rotary_factor", 1) != 1:
        yield "partial rotary positions, which cannot be read"
    # Mistral's default, if the configuration does not give it
    window = tree.get("sliding_window", 4096 if kind == "mistral" else None)
    if tree.get("use_sliding_window", kind == "mistral") and window and window < length:
        yield (
            f"attention in a sliding window of {window} tokens, which changes nothing up to that "
            f"length: give max_seq_len={window}"
        )


def _read_rope(tree: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Type and numbers of the rotary positions, from the two places where releases put them."""
    found = (tree.get(name) for name in ("rope_parameters", "rope_scaling"))
    newer, older = (each if isinstance(each, dict) else {} for each in found)
    chosen = older or newer
    return str(chosen.get("rope_type", chosen.get("type", "default"))), {**newer, **older}


def _get(folder: Path, tree: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(tree.get(name), kind):
        raise ValueError(f"{folder / CONFIG_FILE} does not say {name}: it is not a model's")
    return tree[name]


def read_weights(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The weights of a dense model by our names, in float32 on the CPU.

    Tensors that are missing, unexpected, or of another shape than `config` implies are refused by
    name.
    """
    from safetensors import SafetensorError, safe_open

    files = find_files(folder)
    entries = list(list_entries(config))
    with ExitStack() as stack:
        try:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in set(files.values())
            }
        except SafetensorError as error:
            raise ValueError(f"{folder} has a damaged file of weights: {error}") from error
        shapes = {}
        for name, path in files.items():
            if name not in opened[path].keys():  # noqa: SIM118
                raise ValueError(f"{path} does not have '{name}', which {INDEX_FILE} says is there")
            shapes[name] = tuple(opened[path].get_slice(name).get_shape())
        _check_shapes(folder, entries, shapes, tied=config.tied_head)

        def read(name: str) -> Tensor:
            value = opened[files[name]].get_tensor(name)
            _check_values(folder, name, value)
            return value.float()

        weights = {e.ours: torch.cat([read(name) for name in e.theirs]) for e in entries}
        (spare,) = TABLE["head.weight"]
        if config.tied_head and spare in files:
            _check_tied(folder, read(spare), weights["embedding.weight"])
    return weights


def _check_values(folder: Path, name: str, value: Tensor) -> None:
    """Refuse quantised weights, and weights that are not finite."""
    if value.dtype not in FLOATS:
        raise ValueError(
            f"'{name}' in {folder} is {value.dtype}: quantised weights cannot be read, use the "
            f"original ones"
        )
    # a sum needs no copy of a large tensor, and stays NaN or infinite
    if not math.isfinite(value.sum(dtype=torch.float64)) and not value.isfinite().all():
        raise ValueError(
            f"'{name}' in {folder} has weights that are NaN or infinite: the model is broken, get "
            f"another copy"
        )


def to_foreign(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a dense model by their names: the inverse of `read_weights`."""
    found = {}
    for entry in list_entries(config):
        parts = weights[entry.ours].split(entry.num_rows)
        found |= zip(entry.theirs, (part.contiguous() for part in parts), strict=True)
    return found


def list_entries(config: ModelConfig) -> Iterator[Entry]:
    """Every tensor of a dense model, and its sources; a tied head has no tensor of its own."""
    shape, width = config.shape, config.width
    query, key = config.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    # rows of each of theirs, and the width of a row; None for a vector
    sizes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "embedding.weight": ((config.vocab_size,), width),
        "norm.weight": ((width,), None),
        "norm_attention.weight": ((width,), None),
        "attention.w_qk.weight": ((query, key), width),
        "attention.w_value.weight": ((key,), width),
        "attention.w_out.weight": ((width,), query),
        "norm_mlp.weight": ((width,), None),
        "mlp.w_gate.weight": ((shape.mlp_width,), width),
        "mlp.w_up.weight": ((shape.mlp_width,), width),
        "mlp.w_out.weight": ((width,), shape.mlp_width),
    }
    if not config.tied_head:
        sizes["head.weight"] = sizes["embedding.weight"]
    if config.qkv_bias:
        sizes["attention.w_qk.bias"] = ((query, key), None)
        sizes["attention.w_value.bias"] = ((key,), None)
    if config.qk_norm:
        sizes["attention.norm_query.weight"] = ((shape.head_width,), None)
        sizes["attention.norm_key.weight"] = ((shape.head_width,), None)
    prefixes = [("", "", TABLE)]
    prefixes += [
        (f"layers.{n}.", f"model.layers.{n}.", BLOCK_TABLE) for n in range(config.num_layers)
    ]
    for ours, theirs, table in prefixes:
        for name, others in table.items():
            if name in sizes:
                rows, last = sizes[name]
                others = tuple(theirs + other for other in others)
                yield Entry(ours + name, others, rows, () if last is None else (last,))


def find_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor → its file."""
    from safetensors import safe_open

    if (folder / INDEX_FILE).is_file():
        try:
            index = parse_json((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(file) for name, file in index.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / INDEX_FILE} is damaged: {error}") from error
        for file in set(names.values()):
            # only a name: an index must not lead out of its folder
            if Path(file).name != file or not (folder / file).is_file():
                raise ValueError(f"{folder / INDEX_FILE} names '{file}', which is not there")
        return {name: folder / file for name, file in names.items()}
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickled = next((p.name for p in sorted(folder.glob("*.bin"))), None)
        hint = f" ({pickled} is pickled, and not read: save it as safetensors)" if pickled else ""
        raise ValueError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{hint}")
    with _explain_damage(path), safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn safetensors' refusal of a file into a sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"'{path.parent}' has a damaged file of weights: {path.name} is not a valid "
            f"safetensors file: {error}"
        ) from error


def _check_shapes(
    folder: Path, entries: list[Entry], shapes: dict[str, tuple[int, ...]], *, tied: bool
) -> None:
    wanted = dict(pair for entry in entries for pair in entry.list_shapes())
    spare = TABLE["head.weight"] if tied else ()
    present = {n: s for n, s in shapes.items() if not n.endswith(IGNORED) and n not in spare}
    for name in sorted(wanted.keys() | present.keys()):
        if wanted.get(name) != present.get(name):
            raise ValueError(
                f"the weights in {folder} do not fit its {CONFIG_FILE}: '{name}' is "
                f"{present.get(name, 'missing')} and should be {wanted.get(name, 'absent')}"
            )


def _check_tied(folder: Path, head: Tensor, embedding: Tensor) -> None:
    if not torch.equal(head, embedding):
        raise ValueError(
            f"{folder / CONFIG_FILE} says that the head is the embedding (tie_word_embeddings), "
            f"but the weights have a different head: set it to false there"
        )


def read_exported_config(folder: Path, *, max_seq_len: int | None = None) -> ModelConfig:
    """The model of an exported folder, whose `config.json` includes our fields."""
    tree = read_tree(folder)
    _refuse_unreadable(folder, tree)
    known = {name: tree[name] for name in fields.field_types(ModelConfig) if name in tree}
    try:
        config = ModelConfig.from_dict(known)
        if max_seq_len is not None:
            config = config.override({"max_seq_len": max_seq_len})
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE} does not make a model: {error}") from error
    _check_positions(folder, config, "max_seq_len")
    return config


def read_exported_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of an exported folder, in float32; `build_model` checks names and shapes."""
    from safetensors import safe_open

    weights = {}
    for path in sorted(set(find_files(folder).values())):
        with _explain_damage(path), safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, value in found.items():
            _check_values(folder, name, value)
            # in the class for transformers, our model is the attribute `model`
            weights[name.removeprefix("model.")] = align_weight(value.float())
    return weights
