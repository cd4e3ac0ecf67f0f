"""How a model that was taught to answer is talked to: kept in a run's folder, for who exports it.

Knows nothing of templates' language, and runs none.
"""

import json
from pathlib import Path
from typing import NamedTuple

from depthmix.files import replace_file

CHAT_FILE = "chat.json"


class Chat(NamedTuple):
    """A chat template and what ends an answer."""

    template: str
    """Jinja text that makes a prompt of messages."""
    stop_tokens: tuple[int, ...]
    """Ids of which each ends an answer."""
    bos_token: str | None = None
    """What the template means by this name, where it has it."""
    eos_token: str | None = None


def write_chat(folder: Path, chat: Chat) -> None:
    """Put it into a run's folder."""
    replace_file(folder / CHAT_FILE, json.dumps(chat._asdict(), ensure_ascii=False, indent=1))


def read_chat(folder: Path) -> Chat | None:
    """What a run's folder holds of it; None where it holds nothing."""
    path = folder / CHAT_FILE
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        stop_tokens = tuple(int(token) for token in tree["stop_tokens"])
        return Chat(tree["template"], stop_tokens, tree.get("bos_token"), tree.get("eos_token"))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): put back a copy, or remove it") from error
