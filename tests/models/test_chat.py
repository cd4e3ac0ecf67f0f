"""How a model is talked to stays with its run, and with the model when it is converted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthmix.data.tokenizer import load_tokenizer
from depthmix.hf.export import export_model
from depthmix.models import open_model
from depthmix.models.chat import CHAT_FILE, Chat, find_chat, list_ends, read_chat, write_chat
from depthmix.models.upcycle import upcycle
from depthmix.models.write import import_model
from text_runs import write_text_run

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
MESSAGES = [{"role": "user", "content": "line 3"}]
CHAT = Chat("{% for m in messages %}{{ m.content }}→\n{% endfor %}", (2, 7), "<s>", None)


def test_chat_round_trips(tmp_path: Path) -> None:
    assert read_chat(tmp_path) is None
    write_chat(tmp_path, CHAT)
    assert read_chat(tmp_path) == CHAT


def test_run_and_checkpoint_have_the_chat(tmp_path: Path) -> None:
    run = write_text_run(tmp_path)
    assert open_model(run).chat is None
    write_chat(run, CHAT)
    assert open_model(run).chat == CHAT
    assert open_model(run / "checkpoints" / "step-00000004").chat == CHAT


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"template": "x"}', '{"template": "x", "stop_tokens": ["a"]}']
)
def test_damaged_chat_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / CHAT_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{CHAT_FILE} is damaged .*restore a copy, or remove it"):
        read_chat(tmp_path)


def test_nothing_is_escaped(tmp_path: Path) -> None:
    write_chat(tmp_path, CHAT)
    assert "→" in (tmp_path / CHAT_FILE).read_text(encoding="utf-8")
    assert json.loads((tmp_path / CHAT_FILE).read_text(encoding="utf-8"))["stop_tokens"] == [2, 7]


def write(folder: Path, name: str, **tree: Any) -> None:
    (folder / name).write_text(json.dumps(tree))


def test_places_of_templates(tmp_path: Path) -> None:
    assert find_chat(tmp_path) is None
    assert find_chat(tmp_path / "nowhere") is None
    write(tmp_path, "tokenizer_config.json", chat_template=TEMPLATE)
    assert find_chat(tmp_path) == Chat(TEMPLATE, ())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    write(tmp_path, "tokenizer_config.json", chat_template=named)
    assert find_chat(tmp_path) == Chat("yes", ())
    write(tmp_path, "tokenizer_config.json", chat_template=named[:1])
    assert find_chat(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert find_chat(tmp_path) is None
    # a file of its own goes before
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert find_chat(tmp_path) == Chat(TEMPLATE, ())


def test_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8"):
        find_chat(tmp_path)


def test_special_token_unknown_to_tokenizer_is_left_out(taught: Path, tmp_path: Path) -> None:
    chat = Chat(TEMPLATE, (9,), "<unheard of>", "<too>")
    export_model(
        open_model(taught).network,
        tmp_path / "out",
        tokenizer=load_tokenizer(taught),
        end_token=0,
        chat=chat,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(tokenizer) == 300
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)


def test_names_that_templates_use(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    told = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    write(tmp_path, "tokenizer_config.json", **told)
    assert find_chat(tmp_path) == Chat(TEMPLATE, (), "<s>", "</s>")
    write(tmp_path, "tokenizer_config.json", bos_token=None, eos_token=3)
    assert find_chat(tmp_path) == Chat(TEMPLATE, ())


def test_what_ends_an_answer(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    write(tmp_path, "config.json", eos_token_id=5)
    assert find_chat(tmp_path) == Chat(TEMPLATE, (5,))
    write(tmp_path, "generation_config.json", eos_token_id=[7, 8])
    assert find_chat(tmp_path) == Chat(TEMPLATE, (7, 8))
    write(tmp_path, "generation_config.json", eos_token_id=None)
    assert find_chat(tmp_path) == Chat(TEMPLATE, (5,))


@pytest.fixture
def taught(llama: Path) -> Path:
    """A dense model that answers, whose answers end with another token than documents."""
    (llama / "chat_template.jinja").write_text(TEMPLATE)
    write(llama, "generation_config.json", eos_token_id=9)
    ids = load_tokenizer(llama)
    write(
        *(llama, "tokenizer_config.json"),
        bos_token=ids.id_to_token(8),
        eos_token=ids.id_to_token(9),
    )
    return llama


def test_chat_survives_upcycling_export_and_import(taught: Path, tmp_path: Path) -> None:
    ids = load_tokenizer(taught)
    chat = Chat(TEMPLATE, (9,), ids.id_to_token(8), ids.id_to_token(9))
    run, out = tmp_path / "run", tmp_path / "out"
    made = upcycle(open_model(taught), run, {"routing.capacity": 0.5})
    assert made.source.chat == open_model(run).chat == read_chat(run) == chat
    export_model(
        open_model(run).network,
        out,
        tokenizer=load_tokenizer(run),
        end_token=0,
        chat=read_chat(run),
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    wanted = f"{ids.id_to_token(8)}<user>line 3\n"
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == wanted
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (9, 0)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == [9, 0]
    # documents still end as they did
    back = import_model(open_model(out), tmp_path / "back")
    assert back.read_starts()[-1]["data"]["end_token"] == 0
    assert read_chat(back.path) == chat._replace(stop_tokens=(9, 0))


def test_generate_ends_with_the_answer(taught: Path, tmp_path: Path) -> None:
    upcycle(open_model(taught), tmp_path / "run", {"routing.capacity": 0.5})
    model = open_model(tmp_path / "run").network
    with torch.no_grad():
        # nothing but the end of an answer
        model.head.weight.zero_()
        model.head.weight[9] = model.norm.weight
    out = tmp_path / "out"
    export_model(model, out, end_token=0, chat=read_chat(tmp_path / "run"))
    found = AutoModelForCausalLM.from_pretrained(out).generate(
        torch.tensor([[1, 2]]), max_length=30
    )
    assert found[0, -1] == 9
    assert found.shape[1] < 30


def test_answer_ends_come_before_document_end() -> None:
    assert list_ends(None) == []
    assert list_ends(0) == [0]
    assert list_ends(0, Chat("", (9, 0, 9))) == [9, 0]
