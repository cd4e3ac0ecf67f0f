"""A trained model → a folder that transformers opens: configuration, weights, tokenizer.

Weights are safetensors. The way back needs no transformers: `models` opens such a folder, and makes
a run of it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from depthmix.checkpoint import sort_header
from depthmix.hf.config import DepthmixConfig
from depthmix.hf.model import DepthmixForCausalLM
from depthmix.models.chat import Chat, list_ends
from depthmix.models.write import UNFINISHED, fill_folder
from depthmix.nn import Transformer

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
        raise ValueError(f"'{out}' already exists: choose another --out")
    config = DepthmixConfig.from_model_config(model.config, selector=selector)
    with torch.device("meta"):
        shell = DepthmixForCausalLM(config)
    # the weights themselves, in their own type: nothing is copied
    shell.model = model
    ends = list_ends(end_token, chat)
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
