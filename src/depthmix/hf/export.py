"""A trained model ⇄ a folder that transformers opens: configuration, weights, tokenizer.

Weights are safetensors, and nothing in a folder is run when it is read. Leaves to `runs`
and `checkpoint` where a run keeps its files.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from depthmix.checkpoint import collect_tensors, sort_header
from depthmix.config import RunConfig
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.files import parse_json
from depthmix.hf.config import DepthmixConfig
from depthmix.hf.model import DepthmixForCausalLM
from depthmix.models.chat import Chat, find_chat
from depthmix.models.foreign import check_exported
from depthmix.models.write import UNFINISHED, fill_folder, write_run
from depthmix.nn import Transformer
from depthmix.runs.folder import RunDir

if TYPE_CHECKING:
    import tokenizers


def export_model(
    model: Transformer,
    out: Path,
    *,
    tokenizer: "tokenizers.Tokenizer | None" = None,
    end_token: int | None = None,
    chat: Chat | None = None,
    selector: str | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` open."""
    # what a killed export has left is overwritten
    if out.exists() and (not out.is_dir() or any(p.name != UNFINISHED for p in out.iterdir())):
        raise ValueError(f"'{out}' is there already: choose another --out")
    config = DepthmixConfig.from_model_config(model.config, selector=selector)
    with torch.device("meta"):
        shell = DepthmixForCausalLM(config)
    # the weights themselves, in their own type: nothing is copied
    shell.model = model
    # what ends an answer, then a document's end
    stops = () if chat is None else chat.stop_tokens
    ends = [token for token in dict.fromkeys((*stops, end_token)) if token is not None]
    shell.generation_config = GenerationConfig(
        bos_token_id=end_token,
        eos_token_id=ends if len(ends) > 1 else next(iter(ends), None),
        pad_token_id=end_token,
    )
    logging.disable_progress_bar()
    with fill_folder(out, "config.json") as new:
        shell.save_pretrained(new)
        for path in new.glob("*.safetensors"):
            sort_header(path)
        if tokenizer is not None:
            _export_tokenizer(tokenizer, end_token, chat, model.config.max_seq_len, new)


def _export_tokenizer(
    tokenizer: "tokenizers.Tokenizer",
    end_token: int | None,
    chat: Chat | None,
    max_tokens: int,
    out: Path,
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    copy, special = Tokenizer.from_str(tokenizer.to_str()), {}
    if end_token is not None:
        end = copy.id_to_token(end_token)
        special = {"bos_token": end, "eos_token": end, "pad_token": end}
        if copy.post_processor is None:
            # as a document begins in the training data, and as `depthmix sample` begins
            copy.post_processor = TemplateProcessing(
                single=f"{end} $A", special_tokens=[(end, end_token)]
            )
    if chat is not None:
        # names that its template may use
        named = {"bos_token": chat.bos_token, "eos_token": chat.eos_token}
        # one that it does not know would become a new id, which the model has not
        special |= {n: t for n, t in named.items() if t and copy.token_to_id(t) is not None}
        special["chat_template"] = chat.template
    PreTrainedTokenizerFast(
        tokenizer_object=copy,
        model_max_length=max_tokens,
        # a prompt's last token must stand last
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **special,
    ).save_pretrained(out)


def import_model(folder: Path, out: Path) -> RunDir:
    """Make a run of an exported folder, with the same weights and tokenizer."""
    RunDir(out).check_free()
    model = load_exported(folder)
    vocabulary, endings = folder / TOKENIZER_FILE, model.generation_config
    end_token = endings.eos_token_id
    if isinstance(end_token, list):
        # of several, the one that documents begin with, too
        end_token = endings.bos_token_id
    if vocabulary.is_file() and end_token is None:
        end_token = find_end_token(load_tokenizer(vocabulary))
    weights = collect_tensors(model.model, [])["model"]
    return write_run(
        out,
        RunConfig(model=model.config.to_model_config()),
        weights,
        source=folder,
        end_token=end_token,
        chat=find_chat(folder),
        reason=f"imported from {folder}",
    )


def load_exported(folder: Path) -> DepthmixForCausalLM:
    """The model of an exported folder, in its own type; refuses what is none by a sentence."""
    try:
        tree = parse_json((folder / "config.json").read_bytes())
        kind = tree.get("model_type")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"'{folder}' has no config.json: name an exported folder") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"'{folder / 'config.json'}' is not a JSON object: {error}") from error
    if kind != DepthmixConfig.model_type:
        raise ValueError(
            f"'{folder}' holds a model of type '{kind}', not a depthmix model: 'depthmix upcycle' "
            f"reads dense ones"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"'{folder}' has no weights as safetensors, and others are not read")
    check_exported(folder)
    _check_json(folder / "generation_config.json")
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    # its table of weights that do not fit says what the refusal says
    logging.set_verbosity_error()
    try:
        return DepthmixForCausalLM.from_pretrained(folder, dtype="auto")
    except SafetensorError as error:
        raise ValueError(f"'{folder}' has a damaged file of weights: {error}") from error
    finally:
        logging.set_verbosity(level)


def _check_json(path: Path) -> None:
    """Refuse a file of JSON that transformers would fail on."""
    try:
        found = parse_json(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"'{path}' is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"'{path}' is damaged: it is not a JSON object")
