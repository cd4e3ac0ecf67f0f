"""A plan's file: what it may say, and how mistakes are told."""

from pathlib import Path
from typing import Any

import pytest

from depthmix.sweep.plan_file import format_budget, load_plan, plan_names, read_plan


def test_dotted_fields_seeds_and_defaults(tree: dict[str, Any]) -> None:
    tree["sizes"] = [
        {"width": 32, "seeds": 3, "variants": ["mod"]},
        {"width": 64, "name": "wide", "routing": {"capacity": [0.5, 0.25]}, "budgets": [4e9]},
    ]
    plan = read_plan({**tree, "budgets": [1e9, 4e9], "seeds": [7]})
    assert plan.common == {"train.batch_size": 2}
    assert plan.variants["dense"] == {"routing.strategy": "none"}
    first, second = plan.sizes
    assert first == ({"width": 32}, None, ("mod",), (1e9, 4e9), (0, 1, 2))
    fields = {"width": 64, "routing.capacity": [0.5, 0.25]}
    assert second == (fields, "wide", ("dense", "mod"), (4e9,), (7,))


def test_fields_by_their_old_names(tree: dict[str, Any]) -> None:
    tree["common"] = {"train": {"batch_size": 2, "clip": 2.0}}
    tree["scale"] = {"smoke": {"common": {"train.max_grad_norm": 3.0}}}
    tree["variants"]["mod"]["train"] = {"warmup": 0.5}
    tree["sizes"] = [{"width": 32, "train": {"accumulate": 2}}]
    plan = read_plan(tree)
    # the scale's word goes before the top's, by whatever name
    assert plan.common == {"train.batch_size": 2, "train.max_grad_norm": 3.0}
    assert plan.variants["mod"]["train.warmup_share"] == 0.5
    assert plan.sizes[0].fields == {"width": 32, "train.num_micro_batches": 2}


def test_a_scale_goes_before_the_top(tree: dict[str, Any]) -> None:
    small = {"budgets": [1e8], "common": {"train": {"seq_len": 8}}, "vocab_size": 512}
    small |= {"tflops": 1}
    tree["scale"] = {"gpu": {"seeds": 2}, "smoke": small}
    plan = read_plan(tree)
    assert (plan.scale, plan.budgets, plan.sizes[0].seeds) == ("smoke", (1e8,), (0,))
    assert plan.common == {"train.batch_size": 2, "train.seq_len": 8}
    assert (plan.vocab_size, plan.tflops) == (512, 1.0)
    other = read_plan(tree, "gpu")
    assert (other.scale, other.budgets, other.sizes[0].seeds) == ("gpu", (1e9,), (0, 1))
    assert other.common == {"train.batch_size": 2}
    assert (other.vocab_size, other.tflops) == (None, None)
    del tree["scale"]["smoke"]
    assert read_plan(tree).scale == "gpu"


def test_files_are_looked_for_beside_the_plan(tmp_path: Path) -> None:
    text = (
        'preset = "my.toml"\ndata = "corpus"\nbudgets = 1e9\n[variants.a]\n[[sizes]]\nwidth = 8\n'
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    plan = load_plan(str(path))
    assert plan.name == "mine"
    assert plan.preset == str(tmp_path / "my.toml")
    assert plan.data == str(tmp_path / "corpus")
    assert plan.variants == {"a": {}}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"budget": [1e9]}, "a plan has no 'budget'. Did you mean 'budgets'?"),
        ({"scale": {"smoke": {"size": []}}}, "a scale has no 'size'. Did you mean 'sizes'?"),
        ({"scale": {"gpu": 3}}, "gpu must be a table of fields"),
        ({"variants": {}}, "a plan needs variants"),
        ({"variants": {"a/b": {}}}, "'a/b' names a folder"),
        ({"name": ".."}, "'..' names a folder"),
        ({"name": 3}, "name = 3 must be text"),
        ({"budgets": []}, "budgets must be FLOPs greater than 0"),
        ({"budgets": [0]}, "budgets must be FLOPs greater than 0"),
        ({"budgets": [float("inf")]}, "budgets must be FLOPs greater than 0"),
        ({"budgets": True}, "budgets must be FLOPs greater than 0"),
        ({"seeds": 0}, "seeds must be a number of seeds"),
        ({"seeds": [0.5]}, "seeds must be a number of seeds"),
        ({"sizes": []}, "sizes must be a list of tables"),
        ({"sizes": [3]}, "sizes must be a list of tables"),
        ({"sizes": [{"variants": ["mode"]}]}, "names the variant 'mode'. Did you mean 'mod'?"),
        ({"vocab_size": 0}, "vocab_size = 0 must be a number of ids"),
        ({"tflops": 0}, "tflops = 0 must be TFLOP/s greater than 0"),
        ({"tflops": "fast"}, "tflops = 'fast' must be TFLOP/s greater than 0"),
        ({"vocab_size": "512"}, "vocab_size = '512' must be a number of ids"),
        ({"sizes": [{"budgets": [2e9]}]}, "names the budget 2e9, which is none of 1e9"),
    ],
)
def test_mistakes(tree: dict[str, Any], change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared)
        read_plan({**tree, **change})
    assert sentence in str(caught.value)


def test_unknown_scales(tree: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one size only: leave out --size gpu"):
        read_plan(tree, "gpu")
    tree["scale"] = {"smoke": {}, "gpu": {}}
    with pytest.raises(ValueError, match="no size 'cpu': choose one of smoke, gpu"):
        read_plan(tree, "cpu")


def test_plans_by_name(tmp_path: Path) -> None:
    names = ["capacity-frequency", "controls", "experts", "isoflop", "placement", "shapes"]
    assert plan_names() == names
    with pytest.raises(ValueError, match=r"no plan 'isoflops'\. Did you mean 'isoflop'"):
        load_plan("isoflops")
    with pytest.raises(ValueError, match=r"cannot read 'nowhere\.toml': No such file"):
        load_plan("nowhere.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ValueError, match=r"bad\.toml': this is not valid TOML"):
        load_plan(str(tmp_path / "bad.toml"))
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        load_plan(str(tmp_path / "latin.toml"))


def test_budgets_as_folders() -> None:
    budgets = (1e15, 4e15, 1.6e16, 6, 123456789)
    assert [format_budget(b) for b in budgets] == ["1e15", "4e15", "1.6e16", "6e0", "1.23456789e8"]
