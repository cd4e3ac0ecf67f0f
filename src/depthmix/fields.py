"""Frozen dataclasses ⇄ plain data: strict building, dotted overrides, field documentation.

Owns the mechanics that every configuration shares. Does not know what any field means.
"""

import ast
import dataclasses
import difflib
import inspect
import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

C = TypeVar("C")


def build(kind: type[C], tree: Mapping[str, Any], prefix: str = "") -> C:
    """Make a `kind` of plain data; unknown names and wrong types are refused by name."""
    known = field_types(kind)
    for name in tree:
        if name not in known:
            raise ValueError(_unknown(prefix + name, [prefix + other for other in known]))
    # converted here and not only in `__post_init__`: runtime type checks look at what is passed
    return kind(**{name: _convert(known[name], v, prefix + name) for name, v in tree.items()})


def coerce(config: Any, prefix: str = "") -> None:
    """Bring a new dataclass's fields to their declared types: lists to tuples, tables to parts."""
    for name, declared in field_types(type(config)).items():
        value = _convert(declared, getattr(config, name), prefix + name)
        object.__setattr__(config, name, value)


def override(config: C, overrides: Mapping[str, Any]) -> C:
    """A copy of `config` with dotted fields replaced: `{"routing.capacity": 0.25}`.

    Values may be plain data or, as on a command line, their text.
    """
    tree = dataclasses.asdict(config)  # pyrefly: ignore[bad-argument-type]
    known = list(document_fields(type(config)))
    for dotted, value in overrides.items():
        node, path = tree, dotted.split(".")
        for parent in path[:-1]:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or path[-1] not in node:
            raise ValueError(_unknown(dotted, known))
        inner = node[path[-1]]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            value = {**inner, **value}
        node[path[-1]] = value
    return build(type(config), tree)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables in tables to dotted names: TOML reads `routing.every = 2` as a table."""
    flat = {}
    for name, value in tree.items():
        inside = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if inside else {prefix + name: value}
    return flat


def parse_override(text: str) -> tuple[str, str]:
    """Split `routing.capacity=0.25` into its dotted name and its value's text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(
            f"'{text}' is not an override: write it as FIELD=VALUE, for example width=768"
        )
    return name.strip(), value.strip()


def to_toml(config: Any) -> str:
    """TOML text; empty (None) fields are left out, as TOML has no null."""
    import tomli_w

    return tomli_w.dumps(_drop_none(dataclasses.asdict(config)))


def from_toml(kind: type[C], text: str) -> C:
    """Inverse of `to_toml`."""
    return build(kind, read_toml(text))


def read_toml(text: str) -> dict[str, Any]:
    """TOML text as plain data."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"this is not valid TOML: {error}") from error


def to_json(config: Any) -> str:
    """JSON text."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(kind: type[C], text: str) -> C:
    """Inverse of `to_json`."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ValueError(f"this is not valid JSON: {error}") from error
    if not isinstance(tree, Mapping):
        raise ValueError("this JSON is not a table of fields")
    return build(kind, tree)


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Name and annotated type of every field."""
    return {f.name: f.type for f in dataclasses.fields(kind)}


@cache
def document_fields(kind: type, prefix: str = "") -> dict[str, str]:
    """Dotted name of every field → its docstring, read from the class's source."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # pyrefly: ignore[missing-attribute]
    docs = {}
    for node, follower in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = getattr(getattr(follower, "value", None), "value", "")
            docs[node.target.id] = inspect.cleandoc(text).replace("\n", " ")
    listed = {}
    for name, declared in field_types(kind).items():
        if dataclasses.is_dataclass(declared) and isinstance(declared, type):
            listed |= document_fields(declared, f"{prefix}{name}.")
        else:
            listed[prefix + name] = docs.get(name, "")
    return listed


def suggest(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?' where something close is known."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _unknown(name: str, known: list[str]) -> str:
    hint = suggest(name, known) or f" The fields are: {', '.join(known)}."
    return f"there is no configuration field '{name}'.{hint}"


def _convert(declared: Any, value: Any, name: str) -> Any:
    """`value` as the declared type, from plain data or text; ValueError says what would fit."""
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        if isinstance(value, declared):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is a section of fields, not a value: set {name}.FIELD=…")
        return build(declared, value, f"{name}.")
    options = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
    for option in options:
        converted = _convert_to(option, value)
        if converted is not _NO:
            return converted
    fits = " or ".join(_describe(option) for option in options)
    raise ValueError(f"{name} = {value!r} does not fit: it must be {fits}")


_NO = object()
_WORDS = {"true": True, "false": False}


def _convert_to(option: Any, value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else None
    if get_origin(option) is Literal:
        return value if value in get_args(option) else _NO
    if get_origin(option) is tuple:
        if text is not None:
            value = text.strip("[]()").split(",") if "," in text or text[:1] in "[(" else None
        if not isinstance(value, list | tuple):
            return _NO
        items = [_convert_to(get_args(option)[0], item) for item in value if item != ""]
        return _NO if _NO in items else tuple(items)
    if option in (None, NoneType):
        return None if value is None or text in ("none", "null", "") else _NO
    if option is bool:
        return value if isinstance(value, bool) else _WORDS.get((text or "").lower(), _NO)
    if option is int and text is not None and text.lstrip("+-").isdecimal():
        # not by way of float, which has no room for large ones
        return int(text)
    if option in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            return _NO
        if option is float:
            return number
        exact = isinstance(value, int) or number.is_integer()
        return _NO if not exact else value if isinstance(value, int) else int(number)
    return value if option is str and isinstance(value, str) else _NO


def _describe(option: Any) -> str:
    if get_origin(option) is Literal:
        return "one of " + ", ".join(f"'{choice}'" for choice in get_args(option))
    if get_origin(option) is tuple:
        return "a list of numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(option, "empty (none)")


def _drop_none(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in tree.items() if value is not None}
    return {name: _drop_none(v) if isinstance(v, dict) else v for name, v in kept.items()}
