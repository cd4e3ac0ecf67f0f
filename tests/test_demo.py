"""The demonstration trains both models at equal compute and reports what it measured."""

import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from depthmix import flops
from depthmix.cli import main
from depthmix.config import load_config, load_preset
from depthmix.data.prepare import prepare
from depthmix.data.shards import Corpus
from depthmix.demo import plan_twins, read_held_out, run_demo
from depthmix.models import open as opening
from depthmix.models.vocabulary import find_vocabulary
from depthmix.runs.folder import RunDir
from tiny_runs import write_data

BUDGET = 3e10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """`tiny`, with room for the ids of a byte-level tokenizer."""
    path = tmp_path / "small-mod.toml"
    path.write_text(load_preset("tiny", vocab_size=300).to_toml())
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    lines = (f"line {i} says {i * i} and no more\n" for i in range(4000))
    text.write_text("<|endoftext|>".join(lines))
    prepare([str(text)], tmp_path / "data", vocab_size=300, num_workers=1)
    return tmp_path / "data"


def test_demo_compares_at_equal_compute(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()

    def count(name: str) -> None:
        real = getattr(opening, name)

        def work(*args: Any) -> Any:
            read[name] += 1
            return real(*args)

        monkeypatch.setattr(opening, name, work)

    for name in ("read_config", "build_model", "find_vocabulary"):
        count(name)
    file = io.StringIO()
    console = Console(file=file, width=80)
    out = tmp_path / "out"
    result = run_demo(console, preset=str(model), flops=BUDGET, data=data, out=out, device="cpu")
    assert result is not None
    dense, routed = result
    assert (dense.name, routed.name) == ("small-dense", "small-mod")
    spent = [run.last["flops"] for run in result]
    assert max(spent) <= BUDGET
    assert min(spent) > 0.9 * BUDGET
    assert routed.last["tokens"] > dense.last["tokens"]
    printed = file.getvalue()
    for run in result:
        first, last = run.curve[0][1], run.curve[-1][1]
        assert first is not None
        assert last is not None
        assert first > last
        assert run.curve[-1] == (run.last["flops"], run.last["loss"])
    assert read == {"read_config": 1, "build_model": 1, "find_vocabulary": 1}
    losses = rf"{dense.val['loss']:.3f} +{routed.val['loss_topk']:.3f}"
    assert re.search(rf"validation loss +{losses}", printed)
    assert re.search(rf"under causal routing +{routed.val['loss_causal']:.3f}", printed)
    config = load_preset("tiny", vocab_size=300)
    batch_size = dense.folder.read_config()["train"]["batch_size"]
    twins = (config.dense_twin(), config)
    steps = [flops.executed_flops(each, "muon", batch_size=batch_size) for each in twins]
    ratio = steps[0] / steps[1]
    assert re.search(rf"by FLOPs +{ratio:.2f} x", printed)
    assert "…" not in printed
    assert (out / "losses.png").read_bytes()[:4] == b"\x89PNG"
    pages = {"report", "routing.html"}
    assert {path.name for path in out.iterdir()} == {"dense", "mod", "losses.png", *pages}
    # a text by the routed model, and the way to more
    sample, _, after = printed.split("A sample of small-mod")[1].partition("\n\nThe report")
    shown, told, more = sample.strip().rsplit("\n", 2)
    assert len(shown.split(":\n", 1)[1].strip()) > 9
    assert re.fullmatch(r"32 tokens, [\d.,]+ tokens/s; [\d.]+% of blocks executed, .* KiB", told)
    assert more == f"more: depthmix sample {routed.folder.path} --color"
    # it ends with two pages, a sentence each, and with what was shown
    pages_told, _, shown = after.strip().partition("\n\n")
    report, routing = pages_told.splitlines()
    words = " ".join(shown.split())
    assert words.startswith("What this shows: both models had the same training compute")
    assert "In 2 of the routed model's 4 blocks, a router picks the tokens" in words
    more = routed.last["tokens"] / dense.last["tokens"]
    assert f"read {more:.1f} times as much text" in words
    ours, theirs = routed.val["loss_causal"], dense.val["loss"]
    side = f"{abs(ours / theirs - 1):.1%}".replace("%", " %")
    side += " lower" if ours < theirs else " higher"
    assert f"is {side} than that of its dense twin ({ours:.3f} against {theirs:.3f})" in words
    assert max(map(len, shown.splitlines())) <= 80
    assert report.endswith(f": {out / 'report' / 'report.html'}")
    assert routing.endswith(f": {out / 'routing.html'}")
    page = (out / "report" / "report.html").read_text()
    assert re.findall(r'<figure id="([a-z-]+)">', page) == ["training", "heads"]
    for name in ("training", "heads"):
        assert (out / "report" / f"{name}.png").exists()
    assert "small-mod" not in page.partition("</p>")[0]
    assert "mod ends with a validation loss" in page.partition("</p>")[0]
    assert f"<td>depthmix report {out}</td>" in page
    words = (out / "routing.html").read_text()
    trace = json.loads(words.partition('id="trace">')[2].partition("</script>")[0])
    assert f"{len(trace['tokens'])} tokens" in routing
    assert trace["rules"].keys() == {"topk", "causal"}
    assert trace["origin"]["run"] == str(routed.folder.path)
    assert "".join(trace["texts"]) == read_held_out(routed.folder, find_vocabulary(routed.folder))


def test_held_out_text_is_of_the_validation_split(data: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(data)
    run = RunDir.create(tmp_path / "run", "", {"data": corpus.describe_origin()})
    decode = corpus.load_tokenizer().decode
    texts = {}
    for name in ("train", "val"):
        split = corpus.split(name)
        texts[name] = [decode(split.read(i)[:-1].tolist()) for i in range(split.num_documents)]
    found = read_held_out(run, find_vocabulary(run))
    assert found in texts["val"]
    assert found not in texts["train"]
    # the longest there is says most
    lengths = corpus.split("val").document_lengths
    assert len(corpus.load_tokenizer().encode(found).ids) == lengths.max() - 1


def test_demo_without_a_tokenizer_or_matplotlib_has_no_sample_and_no_picture(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = io.StringIO()
    data = write_data(tmp_path / "data")
    out = tmp_path / "out"
    options = {"preset": str(model), "flops": BUDGET, "data": data, "out": out, "device": "cpu"}
    assert run_demo(Console(file=file, width=80), **options) is not None
    assert "no sample: the data in" in file.getvalue()
    assert "without a tokenizer" in file.getvalue()
    assert "no routing page: the data in" in file.getvalue()
    assert not (out / "routing.html").exists()
    assert (out / "report" / "report.html").exists()
    told = "no picture: pictures need matplotlib: pip install 'depthmix[plot]'"
    assert file.getvalue().splitlines().count(told) == 1
    assert "The report compares the two runs, in tables: " in file.getvalue()
    assert {path.name for path in out.iterdir()} == {"dense", "mod", "report"}


def test_a_second_demo_in_the_same_place_is_refused_in_its_own_words(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "dense").mkdir(parents=True)
    args = ["demo", "--preset", str(model), "--data", str(data), "--out", str(out)]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "already contains a demo: choose another --out" in error
    # nothing that only `train` has
    assert set(re.findall(r"--[a-z-]+", error)) == {"--out"}
    assert list(out.iterdir()) == [out / "dense"]
    (tmp_path / "file").write_text("")
    assert main([*args[:-1], str(tmp_path / "file")]) == 2
    assert "is a file: choose another --out" in capsys.readouterr().err


def test_both_twins_have_the_recipe_of_their_preset(tmp_path: Path) -> None:
    found = {}
    for preset in ("demo", "demo-paper"):
        runs = plan_twins(load_config(preset), preset, 1e11)
        assert list(runs) == [f"{preset}-dense", f"{preset}-mod"]
        dense, routed = runs.values()
        assert dense.train == routed.train
        assert dense.model == routed.model.dense_twin()
        found[preset] = dense
    assert found["demo"].train.optimizer == "muon"
    assert found["demo"].model.qk_norm
    assert found["demo-paper"].train.optimizer == "adamw"


def test_demo_needs_a_routed_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--preset", "tiny-dense"]) == 2
    assert "'tiny-dense' has no routed block" in capsys.readouterr().err


def test_demo_refuses_a_budget_of_nothing(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--data", str(data), "--out", str(tmp_path / "out")]
    assert main(["demo", "--preset", str(model), "--flops", "1", *place]) == 2
    assert "depthmix: --flops 1 is less than one step" in capsys.readouterr().err
    assert main(["demo", "--preset", str(model), "--flops", "0", *place]) == 2
    assert capsys.readouterr().err == "depthmix: --flops 0.0 must be greater than 0\n"
    assert not (tmp_path / "out").exists()
