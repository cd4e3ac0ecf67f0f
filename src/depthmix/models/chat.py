"""Chat templates: where runs and Hugging Face folders keep them, and how messages become prompts.

A template is untrusted code, so it is run in a sandbox.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix.files import parse_json, replace_file

if TYPE_CHECKING:
    import jinja2

CHAT_FILE = "chat.json"
TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
# the first file with end tokens counts, as in `generate()`
ENDINGS = ("generation_config.json", "config.json")


class Chat(NamedTuple):
    """A chat template, and the tokens that end an answer."""

    template: str
    """Jinja text that turns messages into a prompt."""
    stop_tokens: tuple[int, ...]
    """Ids that end an answer."""
    bos_token: str | None = None
    """The text that the template gets by this name, if there is one."""
    eos_token: str | None = None


def list_ends(end_token: int | None, chat: Chat | None = None) -> list[int]:
    """Tokens that end what a model writes: those of an answer, then that of a document."""
    stops = () if chat is None else chat.stop_tokens
    return [token for token in dict.fromkeys((*stops, end_token)) if token is not None]


def write_chat(folder: Path, chat: Chat) -> None:
    """Write it into a run's folder."""
    replace_file(folder / CHAT_FILE, json.dumps(chat._asdict(), ensure_ascii=False, indent=1))


def read_chat(folder: Path) -> Chat | None:
    """The chat template in a run's folder; None if there is none."""
    path = folder / CHAT_FILE
    if not path.is_file():
        return None
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
        stop_tokens = tuple(int(token) for token in tree["stop_tokens"])
        return Chat(tree["template"], stop_tokens, tree.get("bos_token"), tree.get("eos_token"))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): restore a copy, or remove it") from error


def find_chat(folder: Path) -> Chat | None:
    """The chat template of a folder's model; None if it has none."""
    template = _find_template(folder)
    if template is None:
        return None
    tree = _read(folder / TOKENIZER_CONFIG)
    named = {name: _read_token(tree.get(name)) for name in ("bos_token", "eos_token")}
    return Chat(template, next(_list_endings(folder), ()), **named)


def render_chat(
    chat: Chat, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The prompt that a template makes of messages, in a sandbox."""
    return _compile_template(chat.template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=chat.bos_token or "",
        eos_token=chat.eos_token or "",
        strftime_now=lambda form: datetime.now().strftime(form),
    )


# a server needs the same one for every conversation
@lru_cache(maxsize=8)
def _compile_template(template: str) -> "jinja2.Template":
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= {"raise_exception": refuse}  # pyrefly: ignore
    return sandbox.from_string(template)


def _find_template(folder: Path) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error
    found = _read(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):
        # several, by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _list_endings(folder: Path) -> Iterator[tuple[int, ...]]:
    for name in ENDINGS:
        found = _read(folder / name).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if ids and all(isinstance(token, int) for token in ids):
            yield tuple(ids)


def _read_token(value: Any) -> str | None:
    """A special token's text, which may be part of an object with its properties."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none, as a model can be read without it."""
    try:
        tree = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}
