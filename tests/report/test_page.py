"""The page holds every run, needs nothing from outside, and says what it does not know."""

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from depthmix.report.page import summarize, write_report
from depthmix.report.traces import write_trace
from hand_traces import make_trace
from synthetic_runs import DENSE, MOD, Bowl, count_parameters, write_bowl, write_run

CENTER = count_parameters({**DENSE, "width": 64}) * 1.1
# elements that have no end
VOID = {"meta", "br", "link", "img"}


class Reader(HTMLParser):
    """Checks that elements close in order, and keeps what they hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.cells: list[str] = []
        self.links: list[str | None] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def read_page(path: Path) -> tuple[str, Reader]:
    text = path.read_text(encoding="utf-8")
    return text, Reader(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bowl(tmp_path / "runs", "dense", DENSE, Bowl(CENTER, 4.0), seeds=(0, 1, 2), noise=0.01)
    write_bowl(tmp_path / "runs", "mod", MOD, Bowl(CENTER, 3.9), routed=True)
    return tmp_path / "runs"


def test_a_page_with_everything(folder: Path) -> None:
    write_run(folder / "half", DENSE, 3.0, state="interrupted", reason="Ctrl-C")
    report = write_report(folder, command="depthmix report 'my runs'")
    assert report.page == folder / "report" / "report.html"
    text, page = read_page(report.page)
    names = {path.name for path in folder.iterdir()} - {"report"}
    assert len(names) == 21
    assert names <= set(page.cells), "every run has its line"
    # and every finished one a point to hover over
    assert all(f"<title>{name}\n" in text for name in names - {"half"})
    assert {image.name for image in report.images} == {
        *("isoflop.png", "training.png", "relative-flops.png"),
        *("time.png", "causal.png", "heads.png"),
    }
    assert all(image.exists() for image in report.images)
    assert page.tags.count("figure") == len(report.images)
    words = "".join(page.words).replace("\xa0", " ")
    assert "mod is 2.50 ± 0.00 % below dense (3.9000 against 4.0000)" in words
    assert "20 finished runs. 1 left out." in words
    assert "ended at step 100 of 100: Ctrl-C" in page.cells
    assert "depthmix report 'my runs'" in page.cells
    assert "-2.50 ± 0.00 %" in page.cells
    assert "0.0100" in page.cells, "the spread over seeds"
    assert "depthmix 0.1.0, torch 2.13.0" in page.cells
    assert "bracketed" in page.cells


def test_a_page_loads_nothing(folder: Path) -> None:
    text, page = read_page(write_report(folder).page)
    # a mark that is drawn in several places is looked up in the page itself
    assert set(page.links) == {f"#{name}" for name in re.findall(r'<path id="([^"]*)"', text)}
    assert "://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"\{\{\w+\}\}", text), "every place is filled"


def test_a_minimum_that_is_not_bracketed_is_not_compared(tmp_path: Path) -> None:
    write_bowl(tmp_path, "dense", DENSE, Bowl(CENTER, 4.0))
    write_bowl(tmp_path, "mod", MOD, Bowl(9e9, 3.0), routed=True)
    text, page = read_page(write_report(tmp_path).page)
    assert "not yet bracketed: the minimum lies beyond the largest size" in page.cells
    assert "Minima not yet bracketed: mod: the minimum lies beyond the largest size." in text


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (2.7, "a validation loss 10.0 % lower than that of dense (2.700 against 3.000)"),
        (3.3, "a validation loss 10.0 % higher than that of dense (3.300 against 3.000)"),
        (3.0, "a validation loss equal to that of dense (3.000 against 3.000)"),
    ],
)
def test_two_runs_are_compared_in_a_sentence(tmp_path: Path, loss: float, told: str) -> None:
    write_run(tmp_path / "dense", DENSE, 3.0)
    write_run(tmp_path / "mod", MOD, 2.5, causal=loss)
    report = write_report(tmp_path)
    (line,) = summarize(report.runs, report.comparisons)
    assert line.startswith("Trained with the same compute (1e12 FLOPs), mod ends with ")
    assert told in line
    share = report.comparisons[0].relative_flops
    assert f"takes {100 * share:.0f} % of its FLOPs to process a token" in line
    assert line.endswith("This is one run of each, not the best model of each kind.")
    text, _ = read_page(report.page)
    assert "mod ends with a validation loss" in text
    # a third run makes it a comparison like any other
    write_run(tmp_path / "third", MOD, 2.5, causal=loss, recipe={"seed": 1})
    report = write_report(tmp_path)
    assert summarize(report.runs, report.comparisons)[0] == "3 finished runs."


def test_test_losses_stand_beside_validation(tmp_path: Path) -> None:
    for seed in (0, 1):
        for name, fields, loss in (("dense", DENSE, 4.0), ("mod", MOD, 3.0)):
            causal = 3.5 if name == "mod" else None
            path = tmp_path / f"{name}-{seed}"
            run = write_run(path, fields, loss, causal=causal, recipe={"seed": seed})
            losses = {"loss": 4.1 + 0.2 * seed}
            if causal:
                losses = {"loss_topk": 3.2, "loss_causal": 3.36 + 0.02 * seed}
            if name == "dense" or seed == 0:
                run.append_metrics({"step": 100, "kind": "test", **losses})
                run.close()
    run.append_metrics({"step": 50, "kind": "test", **losses})
    run.close()
    text, page = read_page(write_report(tmp_path).page)
    assert page.cells[page.cells.index("4.2000") + 1] == "4.0000"
    assert "3.3700" not in page.cells, "one of its runs was tested only before it was extended"
    run.append_metrics({"step": 100, "kind": "test", **losses})
    run.close()
    text, page = read_page(write_report(tmp_path).page)
    # 3.37 against 4.2; two seeds 0.02 and 0.2 apart have errors of 0.01 and 0.1
    error = 100 * 3.37 / 4.2 * math.hypot(0.01 / 3.37, 0.1 / 4.2)
    assert f"{100 * (3.37 / 4.2 - 1):+.2f} ± {error:.2f} %" in page.cells
    assert "Test split" in text


def test_a_trace_in_a_runs_folder_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "one", MOD, 3.0, causal=3.0)
    write_trace(make_trace(), tmp_path / "one" / "trace.json")
    for folder in (tmp_path, tmp_path / "one"):
        names = {image.name for image in write_report(folder, tmp_path / "out").images}
        assert {"router.png", "depth-map.png"} <= names


def test_nothing_finished_is_a_page_too(tmp_path: Path) -> None:
    write_run(tmp_path / "a", DENSE, 3.0, state="failed", reason="no room on the disk")
    report = write_report(tmp_path, tmp_path / "elsewhere" / "deep")
    assert report.page == tmp_path / "elsewhere" / "deep" / "report.html"
    assert report.images == []
    text, page = read_page(report.page)
    assert "No run is finished: there is nothing to compare yet. 1 left out." in text
    assert "ended at step 100 of 100: no room on the disk" in page.cells


def test_names_are_escaped_and_never_filled_in(tmp_path: Path) -> None:
    names = ("<script>alert(1)<", "{{runs}}", "a&b\"c'")
    for seed, name in enumerate(names):
        write_run(tmp_path / name, DENSE, 3.0 + seed, recipe={"seed": seed})
    text, page = read_page(write_report(tmp_path).page)
    assert set(names) <= set(page.cells)
    assert text.count("<script") == 1, "ours"


def test_runs_that_cannot_be_compared_bring_a_warning(folder: Path) -> None:
    assert 'class="warning"' not in read_page(write_report(folder).page)[0]
    write_run(folder / "other", DENSE, 3.0, data="other")
    text, _ = read_page(write_report(folder).page)
    assert "These runs were trained on 2 different data folders" in text


def test_without_matplotlib_there_are_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = write_report(folder)
    assert report.images == []
    assert report.problem == "pictures need matplotlib: pip install 'depthmix[plot]'"
    _, page = read_page(report.page)
    assert report.problem in page.words
    assert "figure" not in page.tags
    assert {path.name for path in folder.iterdir()} - {"report"} <= set(page.cells)
    assert [path.name for path in report.page.parent.iterdir()] == ["report.html"]


def test_a_file_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "report").write_text("")
    with pytest.raises(ValueError, match="is a file: choose another --out"):
        write_report(folder)


def test_a_browser_shows_the_run_under_the_pointer(
    browser: Any, folder: Path, tmp_path: Path
) -> None:
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url))
    path = write_report(folder, tmp_path / "out").page
    page.goto(path.as_uri())
    tip = page.locator("#tip")
    assert not tip.is_visible()
    page.locator("#isoflop .panels .dots use").last.hover()
    told = tip.inner_text().splitlines()
    assert (folder / told[0] / "config.toml").is_file()
    assert "parameters" in told[1]
    page.locator("h1").hover()
    assert not tip.is_visible()
    assert problems == [path.as_uri()], "it makes no requests, and has no errors"
