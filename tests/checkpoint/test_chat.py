"""How a model is talked to stays with its run."""

import json
from pathlib import Path

import pytest

from depthmix.checkpoint.chat import CHAT_FILE, Chat, read_chat, write_chat
from depthmix.checkpoint.source import open_run
from text_runs import write_text_run

CHAT = Chat("{% for m in messages %}{{ m.content }}→\n{% endfor %}", (2, 7), "<s>", None)


def test_it_comes_back(tmp_path: Path) -> None:
    assert read_chat(tmp_path) is None
    write_chat(tmp_path, CHAT)
    assert read_chat(tmp_path) == CHAT


def test_a_run_and_its_checkpoint_have_it(tmp_path: Path) -> None:
    run = write_text_run(tmp_path)
    assert open_run(run).chat is None
    write_chat(run, CHAT)
    assert open_run(run).chat == CHAT
    assert open_run(run / "checkpoints" / "step-00000004").chat == CHAT


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"template": "x"}', '{"template": "x", "stop_tokens": ["a"]}']
)
def test_a_damaged_one_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / CHAT_FILE).write_text(text)
    with pytest.raises(
        ValueError, match=rf"{CHAT_FILE} is damaged .*put back a copy, or remove it"
    ):
        read_chat(tmp_path)


def test_nothing_is_escaped(tmp_path: Path) -> None:
    write_chat(tmp_path, CHAT)
    assert "→" in (tmp_path / CHAT_FILE).read_text(encoding="utf-8")
    assert json.loads((tmp_path / CHAT_FILE).read_text(encoding="utf-8"))["stop_tokens"] == [2, 7]
