"""Plain data to frozen dataclasses and back, on a configuration of the tests' own."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import pytest

from depthmix.config import ExpertsConfig, ModelConfig, Recipe, RoutingConfig, fields


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
        pytest.param("count", "1" + "0" * 400, 10**400, id="count-huge"),
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
        pytest.param("inner.rate", 10**400, "it must be a number", id="rate-huge"),
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
def test_values_that_do_not_fit_are_refused_by_name(name: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fields.override(Outer(), {name: given})


def test_override_changes_only_the_named_fields() -> None:
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
def test_text_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FIELD=VALUE"):
        fields.parse_override(text)


FULL = Outer(count=7, label='quo"te\n', flag=True, size=4, inner=Inner(rate=1e-7, shape=(0.1, 1.0)))


@pytest.mark.parametrize("config", [Outer(), FULL], ids=["empty", "full"])
def test_text_forms_round_trip(config: Outer) -> None:
    assert fields.from_toml(Outer, fields.to_toml(config)) == config
    assert fields.from_json(Outer, fields.to_json(config)) == config


def test_toml_omits_empty_fields_and_json_has_null() -> None:
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
    assert fields.override(Recipe(), {"seed": "9007199254740991"}).seed == 9007199254740991
    assert fields.override(Recipe(), {"batch_size": "1e2"}).batch_size == 100


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A configuration whose fields say what they take."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"number": "count", "section": "part"}

    count: fields.Count = 1
    """How many."""
    few: Annotated[fields.Count, fields.Bounds(most=9)] = 1
    """Not many."""
    cost: fields.NotNegative[float] = 0.0
    rate: fields.Positive[float] | None = None
    share: fields.Share | tuple[fields.Share, ...] | Literal["half"] = 0.5
    part: Annotated[float, fields.Bounds(above=0, most=1, hint="1 is all")] = 1.0
    beta: Annotated[fields.Share, fields.Bounds(below=1)] = 0.0
    phase: Annotated[float, fields.Bounds(least=0, below=2)] = 0.0
    kind: Annotated[str, fields.Choices({"dog": "it barks", "cat": "it does not"})] = "cat"
    """What it is."""

    def __post_init__(self) -> None:
        fields.coerce(self, "b.")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 0, "b.count = 0 must be at least 1"),
        pytest.param("count", -(10**400), "must be at least 1", id="count-huge"),
        ("few", 0, "b.few = 0 must be at least 1"),
        ("few", 10, "b.few = 10 must not be more than 9"),
        ("cost", -0.5, "b.cost = -0.5 must be 0 or more"),
        ("cost", math.inf, "b.cost = inf must be a finite number, 0 or more"),
        ("cost", math.nan, "b.cost = nan must be a finite number, 0 or more"),
        ("rate", 0, "b.rate = 0.0 must be greater than 0"),
        ("rate", "inf", "b.rate = inf must be a finite number, greater than 0"),
        ("share", 1.5, "b.share = 1.5 must lie between 0 and 1"),
        ("share", math.nan, "b.share = nan must lie between 0 and 1"),
        ("share", [0.5, -0.5], "b.share = -0.5 must lie between 0 and 1"),
        ("part", 0, r"b.part = 0.0 must lie in \(0, 1\]: 1 is all"),
        ("beta", 1, "b.beta = 1.0 must be less than 1"),
        ("beta", 2, "b.beta = 2.0 must lie between 0 and 1"),
        ("phase", 2, r"b.phase = 2.0 must lie in \[0, 2\)"),
        ("kind", "cow", "b.kind = 'cow' does not fit: it must be one of 'dog', 'cat'"),
        ("kind", 3, "b.kind = 3 does not fit"),
    ],
)
def test_values_out_of_bounds_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bounded(**{name: value})
    with pytest.raises(ValueError, match=message):
        fields.build(Bounded, {name: value}, "b.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("count", 10**400, id="count-huge"),
        ("few", 9),
        ("cost", 0.0),
        ("rate", 5e-324),
        ("rate", None),
        ("share", 0.0),
        ("share", (0.0, 1.0)),
        ("share", ()),
        ("share", "half"),
        ("part", 1.0),
        ("beta", 0.0),
        ("kind", "dog"),
    ],
)
def test_limits_of_each_bound_are_allowed(name: str, value: Any) -> None:
    assert getattr(Bounded(**{name: value}), name) == value


def test_choices_are_listed_with_their_meanings() -> None:
    docs = fields.document_fields(Bounded)
    assert docs["kind"] == "What it is. dog: it barks; cat: it does not."
    assert docs["count"] == "How many."
    assert docs["share"] == ""


def test_fields_are_found_by_former_names() -> None:
    assert fields.build(Bounded, {"number": 4}) == Bounded(count=4)
    assert fields.override(Bounded(), {"number": "4", "section": 0.5}) == Bounded(count=4, part=0.5)
    assert fields.rename(Bounded, "number") == "count"
    assert fields.rename(Bounded, "count") == "count"
    assert fields.rename(Bounded, "nothing.number") == "nothing.number"
    with pytest.raises(
        ValueError, match=r"^b\.number is the former name of b\.count: leave it out"
    ):
        fields.build(Bounded, {"number": 4, "count": 5}, "b.")


@pytest.mark.parametrize("kind", [ModelConfig, RoutingConfig, ExpertsConfig, Recipe])
def test_every_number_has_bounds(kind: type) -> None:
    # those of these follow from other fields, which a rule says
    related = {"rope_factors", "layers", "capacity"} if kind is not RoutingConfig else {"layers"}
    for name, declared in fields.field_types(kind).items():
        options = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
        if name not in related:
            assert not {int, float, tuple[int, ...], tuple[float, ...]} & set(options), name
