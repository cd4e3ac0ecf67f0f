"""Plain data to frozen dataclasses and back, on a configuration of the tests' own."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from depthmix import fields


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    rate: float = 0.5
    """How fast."""
    shape: float | tuple[float, ...] | Literal["round", "flat"] = "round"
    """One of three forms,
    over two lines."""

    def __post_init__(self) -> None:
        fields.coerce(self, "inner.")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A configuration."""

    count: int = 3
    """How many."""
    label: str = "a"
    """What it is called."""
    flag: bool = False
    """Whether."""
    size: int | None = None
    """How large; empty means nothing."""
    inner: Inner = field(default_factory=Inner)
    """The section."""
    bare: int = 0

    def __post_init__(self) -> None:
        fields.coerce(self)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("count", "4", 4),
        ("count", "4.0", 4),
        ("count", "1e3", 1000),
        ("count", 4.0, 4),
        ("count", " 4 ", 4),
        ("count", 2**60 + 1, 2**60 + 1),
        ("label", "text", "text"),
        ("label", "", ""),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", True, True),
        ("size", "none", None),
        ("size", "null", None),
        ("size", "", None),
        ("size", "7", 7),
        ("size", None, None),
        ("inner.rate", "0.25", 0.25),
        ("inner.rate", 1, 1.0),
        ("inner.rate", "1e-3", 0.001),
        ("inner.shape", "flat", "flat"),
        ("inner.shape", "0.5", 0.5),
        ("inner.shape", "0.5,0.25", (0.5, 0.25)),
        ("inner.shape", "[0.5, 0.25]", (0.5, 0.25)),
        ("inner.shape", "(0.5,)", (0.5,)),
        ("inner.shape", [1, 0.25], (1.0, 0.25)),
        ("inner.shape", (0.5, "0.25"), (0.5, 0.25)),
        ("inner", {"rate": 2}, Inner(rate=2.0)),
        ("inner", Inner(rate=0.1, shape="flat"), Inner(rate=0.1, shape="flat")),
    ],
)
def test_values_become_their_declared_types(name: str, given: Any, expected: Any) -> None:
    config = fields.override(Outer(), {name: given})
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("count", "4.5", r"count = '4\.5' does not fit: it must be a whole number"),
        ("count", "many", "count = 'many' does not fit"),
        ("count", True, "count = True does not fit"),
        ("count", None, "count = None does not fit"),
        ("count", "inf", "count = 'inf' does not fit"),
        ("count", [1], "does not fit"),
        ("label", 3, "label = 3 does not fit: it must be text"),
        ("flag", "yes", "flag = 'yes' does not fit: it must be true or false"),
        ("flag", 1, "flag = 1 does not fit"),
        ("size", "big", "a whole number or empty"),
        ("inner.rate", "fast", r"inner\.rate = 'fast' does not fit: it must be a number"),
        ("inner.shape", "square", "a number or a list of numbers or one of 'round', 'flat'"),
        ("inner.shape", "0.5,big", "does not fit"),
        ("inner.shape", ["a"], "does not fit"),
        ("inner", "0.5", r"inner is a section of fields, not a value: set inner\.FIELD"),
        ("inner", {"rat": 1}, r"no configuration field 'inner\.rat'. Did you mean 'inner\.rate'"),
        ("coutn", 1, "no configuration field 'coutn'. Did you mean 'count'"),
        ("inner.rte", 1, r"no configuration field 'inner\.rte'. Did you mean 'inner\.rate'"),
        ("count.deeper", 1, r"no configuration field 'count\.deeper'"),
        ("nowhere.rate", 1, r"no configuration field 'nowhere\.rate'"),
        ("zzz", 1, "The fields are: count, label, flag, size, inner.rate, inner.shape, bare"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fields.override(Outer(), {name: given})


def test_overriding_leaves_the_original_and_the_other_fields_alone() -> None:
    before = Outer(count=5, inner=Inner(rate=0.1, shape="flat"))
    after = fields.override(before, {"inner": {"rate": 0.9}, "size": 2})
    assert after == Outer(count=5, size=2, inner=Inner(rate=0.9, shape="flat"))
    assert before == Outer(count=5, inner=Inner(rate=0.1, shape="flat"))


def test_build_is_strict() -> None:
    assert fields.build(Outer, {"inner": {"shape": [1, 2]}}).inner.shape == (1.0, 2.0)
    with pytest.raises(ValueError, match="no configuration field 'cuont'"):
        fields.build(Outer, {"cuont": 1})
    with pytest.raises(ValueError, match=r"count = 'x' does not fit"):
        fields.build(Outer, {"count": "x"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width=768", ("width", "768")),
        (" width = 768 ", ("width", "768")),
        ("a.b=x=y", ("a.b", "x=y")),
        ("size=", ("size", "")),
    ],
)
def test_overrides_are_split_at_the_first_sign(text: str, expected: tuple[str, str]) -> None:
    assert fields.parse_override(text) == expected


@pytest.mark.parametrize("text", ["width", "=3", ""])
def test_text_that_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        fields.parse_override(text)


FULL = Outer(count=7, label='quo"te\n', flag=True, size=4, inner=Inner(rate=1e-7, shape=(0.1, 1.0)))


@pytest.mark.parametrize("config", [Outer(), FULL], ids=["empty", "full"])
def test_text_forms_round_trip(config: Outer) -> None:
    assert fields.from_toml(Outer, fields.to_toml(config)) == config
    assert fields.from_json(Outer, fields.to_json(config)) == config


def test_toml_leaves_empty_fields_out_and_json_says_null() -> None:
    assert "size" not in fields.to_toml(Outer())
    assert '"size": null' in fields.to_json(Outer())


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (fields.from_toml, "count = ", "this is not valid TOML"),
        (fields.from_json, "{", "this is not valid JSON"),
        (fields.from_json, "[1, 2]", "this JSON is not a table of fields"),
        (fields.from_toml, "[outer]\ncount = 1", "no configuration field 'outer'"),
    ],
)
def test_bad_text_is_refused(read: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(Outer, text)


def test_documentation_comes_from_the_source() -> None:
    assert fields.document_fields(Outer) == {
        "count": "How many.",
        "label": "What it is called.",
        "flag": "Whether.",
        "size": "How large; empty means nothing.",
        "inner.rate": "How fast.",
        "inner.shape": "One of three forms, over two lines.",
        "bare": "",
    }


def test_field_types_are_the_annotations() -> None:
    assert fields.field_types(Outer)["count"] is int
    assert list(fields.field_types(Inner)) == [f.name for f in dataclasses.fields(Inner)]


def test_suggestions_need_something_close() -> None:
    assert fields.suggest("widht", ["width", "depth"]) == " Did you mean 'width'?"
    assert fields.suggest("xyz", ["width", "depth"]) == ""


def test_whole_numbers_as_text_keep_every_digit() -> None:
    from depthmix.recipe import Recipe

    assert fields.override(Recipe(), {"seed": "9007199254740991"}).seed == 9007199254740991
    assert fields.override(Recipe(), {"batch_size": "1e2"}).batch_size == 100
