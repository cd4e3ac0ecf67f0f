"""The documentation: its example model file loads, its API page is complete, its script runs."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import depthmix
from depthmix.config import ModelConfig
from text_runs import write_text_run

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_model_file_loads() -> None:
    text = (DOCS / "using.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert ModelConfig.from_toml(example).routed_layers == (3, 5, 7, 9, 11)


@pytest.mark.parametrize("name", depthmix.__all__)
def test_every_export_has_an_entry_and_a_docstring(name: str) -> None:
    assert f"\n::: depthmix.{name}\n" in (DOCS / "api.md").read_text(encoding="utf-8")
    assert getattr(depthmix, name).__doc__


def test_the_picture_is_drawn_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    run = write_text_run(tmp_path, "max_seq_len=8")
    before = {path: path.read_bytes() for path in DOCS.glob("*.png")}
    arguments = [str(run), "--start", "1", "--count", "4"]
    monkeypatch.setattr(sys, "argv", ["draw_depth.py", *arguments])
    runpy.run_path(str(DOCS / "draw_depth.py"), run_name="__main__")
    assert (run / "depth.png").read_bytes().startswith(b"\x89PNG")
    # tracked files stay as they are
    assert {path: path.read_bytes() for path in DOCS.glob("*.png")} == before
