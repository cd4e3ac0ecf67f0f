"""The table says what the counts say, and nothing in it is cut short."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from depthmix import flops
from depthmix.config import ModelConfig, load_config, load_preset, preset_names
from depthmix.report.describe import (
    describe_model,
    format_ranges,
    list_presets,
    list_rows,
    print_tables,
    to_json,
)
from depthmix.units import format_bytes, format_flops, format_number


def render(*names: str, width: int = 80, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    models = [describe_model(name, load_config(name)) for name in names]
    print_tables(models, Console(file=file, width=width))
    file.seek(0)
    return file.read()


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        ((), ""),
        ((3,), "3"),
        ((1, 3), "1, 3"),
        ((0, 1, 2, 3), "0-3"),
        ((1, 3, 5), "1-5 by 2"),
        ((1, 2, 5), "1, 2, 5"),
    ],
)
def test_ranges_are_short(numbers: tuple[int, ...], written: str) -> None:
    assert format_ranges(numbers) == written


def test_rows_show_the_counts() -> None:
    config = load_preset("60m")
    rows = list_rows(describe_model("60m", config, 1024))
    assert rows["layers"] == "14"
    assert rows["parameters"] == format_number(flops.num_parameters(config).total)
    assert rows["  active for a token"] == format_number(flops.num_parameters(config).active)
    per_token = flops.flops_per_token(config, seq_len=1024)
    dense_per_token = flops.flops_per_token(config.dense_twin(), seq_len=1024)
    assert rows["forward pass per token"] == format_flops(per_token)
    assert rows["training per token"] == format_flops(3 * per_token)
    assert rows["  of its dense twin"] == f"{per_token / dense_per_token:.1%}"
    # 14 blocks of 1024 tokens against 7 of 1024 and 7 of 128; 2 · 512 numbers of 2 bytes each
    assert rows["KV cache (16 bit)"] == format_bytes((7 * 1024 + 7 * 128) * 2 * 512 * 2)
    assert rows["  of the twin's cache"] == "56.2%"
    assert rows["routed blocks"] == "7 of 14: 1-13 by 2"
    assert rows["  map, first to last"] == "·▮·▮·▮·▮·▮·▮·▮"
    assert rows["strategy"] == "expert_choice"
    assert rows["capacity"] == "0.125"
    assert rows["gate"] == "tanh1"
    assert rows["causal head"] == f"predictor, width {config.routing.predictor_width}"
    assert rows["experts"] == "none"


@pytest.mark.parametrize(
    ("overrides", "label", "written"),
    [
        ({"routing.capacity": "cosine"}, "capacity", "cosine, 0.85 to 0.15"),
        ({"routing.capacity": [0.5, 0.25]}, "capacity", "0.5, 0.25"),
        ({"routing.kv_capacity": 0.5}, "capacity", "0.125; keys and values 0.5"),
        ({"routing.predictor": False}, "causal head", "none"),
        ({"routing.predictor": False, "routing.aux_loss_weight": 0.1}, "causal head", "router"),
        ({"routing.strategy": "none"}, "routed blocks", "none"),
        ({"routing.strategy": "none"}, "  map, first to last", "····"),
        ({"num_layers": 300}, "  map, first to last", "too deep to draw"),
        (
            {"experts.strategy": "token_choice", "experts.num_noop": 1, "experts.every": 2},
            "experts",
            "8 + 1 no-op of width 256 in blocks 1, 3; token_choice, 1 per token, capacity 1",
        ),
    ],
)
def test_rows_tell_the_variant(overrides: dict[str, object], label: str, written: str) -> None:
    config = load_preset("tiny").override(overrides)
    assert list_rows(describe_model("tiny", config))[label] == written


def test_table_holds_two_models_in_80_columns() -> None:
    text = render("1b-dense", "1b-mod")
    heading = text.splitlines()[1].split()
    assert heading == ["1b-dense", "1b-mod"]
    assert text.count("layers") == 1
    assert max(map(len, text.splitlines())) <= 80
    totals = [format_number(flops.num_parameters(load_preset(n)).total) for n in heading]
    assert re.search(rf"parameters +{totals[0]} +{totals[1]}", text)


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    names = preset_names()
    text = render(*names, width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    # what is left when folds are undone: every model's map is there in full
    marks = "".join(re.findall(r"[·▮]", text))
    blocks = sum(load_preset(name).num_layers for name in names)
    routed = sum(len(load_preset(name).routed_layers) for name in names)
    assert (len(marks), marks.count("▮")) == (blocks, routed)


def test_models_that_do_not_fit_go_to_further_tables() -> None:
    text = render("tiny", "demo", "60m", "220m", "1b")
    assert text.count("vocabulary") > 1
    headings = [line.split() for line in text.splitlines() if re.match(r" +[a-z0-9]", line)]
    shown = [name for heading in headings for name in heading if name in ("tiny", "demo", "1b")]
    assert sorted(shown) == ["1b", "demo", "tiny"]
    assert render("tiny", "demo", "60m", "220m", "1b", width=300).count("vocabulary") == 1


def test_long_names_fold() -> None:
    config = load_preset("tiny")
    file = io.StringIO()
    name = "a" * 50 + ".toml"
    print_tables([describe_model(name, config)], Console(file=file, width=60))
    assert file.getvalue().count("a" * 10) >= 2
    assert "…" not in file.getvalue()


def test_table_prints_where_only_ascii_does() -> None:
    text = render("tiny", encoding="ascii")
    assert ".#.#" in text


def test_json_holds_raw_numbers_and_the_configuration() -> None:
    config = load_preset("60m")
    (found,) = json.loads(to_json([describe_model("60m", config, 512)]))
    assert ModelConfig.from_dict(found["config"]) == config
    assert found["name"] == "60m"
    assert found["seq_len"] == 512
    assert found["forward_flops"] == flops.forward_flops(config, seq_len=512)
    assert sum(found["forward_flops_parts"].values()) == found["forward_flops"]
    assert found["forward_flops_per_token"] == found["forward_flops"] / 512
    assert found["training_flops_per_token"] == 3 * found["forward_flops"] / 512
    assert found["parameters"] == flops.num_parameters(config)._asdict()
    assert found["kv_bytes"] == flops.kv_cache_bytes(config, seq_len=512)
    assert found["relative_kv_bytes"] == 0.5625
    assert found["routed_layers"] == [1, 3, 5, 7, 9, 11, 13]
    assert found["capacities"] == [0.125] * 7


def test_presets_have_a_line_each() -> None:
    heading, *lines = list_presets()
    assert "parameters" in heading
    assert [line.split()[0] for line in lines] == preset_names()
    assert max(map(len, [heading, *lines])) <= 80
    total = format_number(flops.num_parameters(load_preset("60m")).total)
    (line,) = [line for line in lines if line.startswith("60m-mod")]
    assert f" {total} " in line
    assert line.endswith("7 of 14")


def test_models_load_from_files(tmp_path: Path) -> None:
    config = load_preset("tiny", **{"routing.capacity": 0.5})
    path = tmp_path / "mine.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(str(path)) == config
    assert load_config(str(path), {"width": "128"}) == config.override({"width": 128})
    assert load_config("tiny-dense") == load_preset("tiny-dense")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"width = ", "in '.*bad.toml': this is not valid TOML"),
        (b"widht = 4", "in '.*bad.toml': there is no configuration field 'widht'"),
        (b"width = 0", "in '.*bad.toml': width = 0 must be at least 1"),
        (b"\xff\xfe", "cannot read '.*bad.toml': it is not UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        load_config(str(path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read '.*none.toml': No such file"):
        load_config(str(tmp_path / "none.toml"))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"cannot read '.*folder.toml'"):
        load_config(str(folder))
    other = tmp_path / "config.yaml"
    other.touch()
    with pytest.raises(ValueError, match=r"must end in \.toml"):
        load_config(str(other))
    with pytest.raises(ValueError, match="there is no preset '61m'"):
        load_config("61m")


@pytest.mark.parametrize(
    "overrides", [{"width": 10**300, "head_width": 16}, {"max_seq_len": 10**200}]
)
def test_sizes_beyond_floats_are_refused(overrides: dict[str, int]) -> None:
    config = load_preset("tiny", **overrides)
    with pytest.raises(ValueError, match="big is too large to count"):
        describe_model("big", config)


def test_a_runs_configuration_is_its_model(tmp_path: Path) -> None:
    from depthmix.config import RunConfig

    run = RunConfig(model=load_preset("tiny", width=48))
    path = tmp_path / "config.toml"
    path.write_text(run.to_toml())
    assert load_config(str(path)) == run.model


def test_a_memory_is_counted_apart() -> None:
    place = {"memory.place": "blocks", "memory.every": 2, "memory.num_rows": 1000}
    model = describe_model("m", load_preset("tiny", **place))
    cell = list_rows(model)["memory"]
    # 64 numbers for each of 1,000 rows of all four tables
    assert cell == "64.0 K parameters in 4 tables of 1000 rows, after blocks 1, 3"
    assert model.to_dict()["memory_parameters"] == 64_000
    routed = load_preset("tiny", **{"routing.bypass": "lookup", "memory.place": "input"})
    end = "at the input and for tokens that skip a block"
    assert list_rows(describe_model("m", routed))["memory"].endswith(end)
    assert list_rows(describe_model("m", load_preset("tiny")))["memory"] == "none"
