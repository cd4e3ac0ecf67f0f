"""Frozen dataclasses ⇄ plain data: strict parsing, bounds, dotted overrides, documentation.

The mechanics that all configurations share, independent of what the fields mean. A field's
annotation gives the numbers (`Bounds`) or names (`Choices`) it takes, and its class the former
names of its fields (`OLD_NAMES`).
"""

import ast
import dataclasses
import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from depthmix.files import parse_json

FEW_FIELDS = 12
"""At most so many are listed where a name is like none of them."""

C = TypeVar("C")
N = TypeVar("N", int, float)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The numbers that a field takes, given in its annotation; they are always finite."""

    above: int | float = -math.inf
    least: int | float = -math.inf
    most: int | float = math.inf
    below: int | float = math.inf
    hint: str = ""
    """The end of the error message."""

    def find_problem(self, name: str, value: int | float) -> str | None:
        """The error message for a number that is not allowed; None if it is."""
        if self.above < value < self.below and self.least <= value <= self.most:
            return None
        # a whole number may be too large to convert
        finite = isinstance(value, int) or math.isfinite(value)
        hint = f": {self.hint}" if self.hint else ""
        return f"{name} = {value} must {self._say(finite)}{hint}"

    def _say(self, finite: bool) -> str:
        low, high = max(self.above, self.least), min(self.most, self.below)
        first, last = "[" if self.least == low else "(", "]" if self.most == high else ")"
        if -math.inf < low and high < math.inf:
            if first + last == "[]":
                return f"lie between {low} and {high}"
            return f"lie in {first}{_write_limit(low)}, {_write_limit(high)}{last}"
        if high < math.inf:
            return f"not be more than {high}" if last == "]" else f"be less than {high}"
        limit = f"greater than {low}" if first == "(" else f"at least {low}" if low else "0 or more"
        return f"be {limit}" if finite else f"be a finite number, {limit}"


def _write_limit(limit: int | float) -> str:
    """A limit as text, as a power of two if that is clearer."""
    power = int(abs(limit)).bit_length() - 1
    sign = "-" if limit < 0 else ""
    return f"{sign}2^{power}" if power >= 32 and abs(limit) == 1 << power else str(limit)


class Choices(NamedTuple):
    """The names that a field takes, given in its annotation."""

    meanings: Mapping[str, str]
    """Each name → its meaning, for `--help`."""

    # annotations must be hashable
    def __hash__(self) -> int:
        return hash(tuple(self.meanings.items()))


# the most common bounds
Count = Annotated[int, Bounds(least=1)]
NotNegative = Annotated[N, Bounds(least=0)]
Positive = Annotated[N, Bounds(above=0)]
Share = Annotated[float, Bounds(least=0, most=1)]


def build(kind: type[C], tree: Mapping[str, Any], prefix: str = "") -> C:
    """Build a `kind` from plain data; errors name unknown fields and wrong types."""
    known, tree = field_types(kind), _rename_all(kind, tree, prefix)
    for name in tree:
        if name not in known:
            raise ValueError(_unknown(prefix + name, [prefix + other for other in known]))
    # converted before `__post_init__` does it: runtime type checks see the arguments
    return kind(**{name: _convert(known[name], v, prefix + name) for name, v in tree.items()})


def coerce(config: Any, prefix: str = "") -> None:
    """Convert a new dataclass's fields to their declared types: lists to tuples, dicts to parts."""
    for name, declared in field_types(type(config)).items():
        value = _convert(declared, getattr(config, name), prefix + name)
        object.__setattr__(config, name, value)


def check_bounds(config: Any) -> None:
    """Refuse numbers outside of their fields' bounds; types are neither checked nor converted."""
    for name, declared in field_types(type(config)).items():
        check_value(name, getattr(config, name), declared)


def check_value(name: str, value: Any, declared: Any) -> None:
    """Refuse a number outside of the bounds of an annotated type, such as `Count`; None passes."""
    if value is not None:
        for option in _list_options(declared):
            _check(option, value, name)


def override(config: C, overrides: Mapping[str, Any]) -> C:
    """A copy of `config` with dotted fields replaced: `{"routing.capacity": 0.25}`.

    Values may be plain data or, as on a command line, their text.
    """
    tree = dataclasses.asdict(config)  # pyrefly: ignore[bad-argument-type]
    known = list(document_fields(type(config)))
    for dotted, value in overrides.items():
        node, path = tree, rename(type(config), dotted).split(".")
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


def rename(kind: type, dotted: str) -> str:
    """The current name of a field, given its current or former dotted name."""
    head, dot, rest = dotted.partition(".")
    head = getattr(kind, "OLD_NAMES", {}).get(head, head)
    section = field_types(kind).get(head)
    if dot and isinstance(section, type) and dataclasses.is_dataclass(section):
        rest = rename(section, rest)
    return head + dot + rest


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted names: TOML reads `routing.every = 2` as a table."""
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
    """TOML text; fields that are None are left out, because TOML has no null."""
    import tomli_w

    return tomli_w.dumps(_drop_none(dataclasses.asdict(config)))


def from_toml(kind: type[C], text: str) -> C:
    """Inverse of `to_toml`."""
    return build(kind, read_toml(text))


def read_toml(text: str) -> dict[str, Any]:
    """Parse TOML to plain data."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"this is not valid TOML: {error}") from error
    except RecursionError as error:
        raise ValueError("this TOML is nested too deeply") from error


def to_json(config: Any) -> str:
    """JSON text."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def from_json(kind: type[C], text: str) -> C:
    """Inverse of `to_json`."""
    try:
        tree = parse_json(text)
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
            text = follower.value if isinstance(follower, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) else ""
            docs[node.target.id] = inspect.cleandoc(str(doc)).replace("\n", " ")
    listed = {}
    for name, declared in field_types(kind).items():
        if dataclasses.is_dataclass(declared) and isinstance(declared, type):
            listed |= document_fields(declared, f"{prefix}{name}.")
        else:
            listed[prefix + name] = " ".join(
                (docs.get(name, ""), *_describe_choices(declared))
            ).strip()
    return listed


def format_defaults(kind: type, prefix: str = "") -> dict[str, str]:
    """Dotted name of every field → its default as text; empty if it is None."""
    listed = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            listed |= format_defaults(field.type, f"{prefix}{field.name}.")
        else:
            known = field.default not in (None, dataclasses.MISSING)
            listed[prefix + field.name] = write_value(field.default) if known else ""
    return listed


def write_value(value: Any) -> str:
    """A field's value as one writes it in FIELD=VALUE."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(write_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def suggest(name: str, known: Iterable[str]) -> str:
    """' Did you mean …?', if there is a close match."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _describe_choices(declared: Any) -> list[str]:
    """A sentence that lists a field's choices and their meanings, if they have any."""
    found = [part for part in _split(declared)[1] if isinstance(part, Choices)]
    return [
        "; ".join(f"{name}: {meaning}" for name, meaning in choices.meanings.items()) + "."
        for choices in found
    ]


def _rename_all(kind: type, tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    old: Mapping[str, str] = getattr(kind, "OLD_NAMES", {})
    for before, now in old.items():
        if before in tree and now in tree:
            raise ValueError(f"{prefix}{before} is the former name of {prefix}{now}: leave it out")
    return {old.get(name, name): value for name, value in tree.items()}


def _unknown(name: str, known: list[str]) -> str:
    hint = suggest(name, known)
    if not hint and len(known) <= FEW_FIELDS:
        hint = f" The fields are: {', '.join(known)}."
    elif not hint:
        nearest = difflib.get_close_matches(name, known, n=3, cutoff=0)
        hint = f" The nearest are: {', '.join(nearest)}."
    return f"there is no configuration field '{name}'.{hint}"


def _convert(declared: Any, value: Any, name: str) -> Any:
    """Convert plain data or text to the declared type; the ValueError says what would fit."""
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        if isinstance(value, declared):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is a section of fields, not a value: set {name}.FIELD=…")
        return build(declared, value, f"{name}.")
    options = _list_options(declared)
    for option in options:
        converted = _convert_to(option, value)
        if converted is not _NO:
            _check(option, converted, name)
            return converted
    fits = " or ".join(_describe(option) for option in options)
    raise ValueError(f"{name} = {value!r} does not fit: it must be {fits}")


@cache
def _list_options(declared: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def _check(option: Any, value: Any, name: str) -> None:
    """Refuse a number out of bounds, alone or in a list."""
    if isinstance(value, tuple):
        for item in value:
            _check(get_args(option)[0], item, name)
        return
    for bounds in _split(option)[1]:
        problem = bounds.find_problem(name, value) if isinstance(bounds, Bounds) else None
        if problem is not None:
            raise ValueError(problem)


@cache
def _split(option: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type and its annotations."""
    if get_origin(option) is Annotated:
        return option.__origin__, option.__metadata__
    return option, ()


@cache
def _list_choices(option: Any) -> tuple[Any, ...]:
    """The values of a type with a closed set of them; otherwise empty."""
    plain, said = _split(option)
    if get_origin(plain) is Literal:
        return get_args(plain)
    return tuple(name for part in said if isinstance(part, Choices) for name in part.meanings)


_NO = object()
_WORDS = {"true": True, "false": False}


def _convert_to(option: Any, value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else None
    if choices := _list_choices(option):
        return value if value in choices else _NO
    option, _ = _split(option)
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
    if option in (int, float) and not isinstance(value, bool):
        # not through float, which cannot represent large integers
        if option is int and isinstance(value, int):
            return value
        if option is int and text is not None and text.lstrip("+-").isdecimal():
            return int(text)
        try:
            number = float(value)
        except (OverflowError, TypeError, ValueError):
            return _NO
        return number if option is float else int(number) if number.is_integer() else _NO
    return value if option is str and isinstance(value, str) else _NO


def _describe(option: Any) -> str:
    if choices := _list_choices(option):
        return "one of " + ", ".join(f"'{choice}'" for choice in choices)
    option, _ = _split(option)
    if get_origin(option) is tuple:
        return "a list of numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(option, "empty (none)")


def _drop_none(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in tree.items() if value is not None}
    return {name: _drop_none(v) if isinstance(v, dict) else v for name, v in kept.items()}
