"""The documentation: its example loads, its API page is complete, the files it names are there."""

import re
from pathlib import Path

import pytest

import depthmix
from depthmix.config import ModelConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# what a path may be written below
BASES = (ROOT, ROOT / "src" / "depthmix")
# names that no file shall have, and a folder that only a command makes
NOT_THERE = {"utils.py", "common.py", "helpers.py", "htmlcov/"}


def test_the_example_model_file_loads() -> None:
    text = (DOCS / "using.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert ModelConfig.from_toml(example).routed_layers == (3, 5, 7, 9, 11)


@pytest.mark.parametrize("name", depthmix.__all__)
def test_every_export_has_an_entry_and_a_docstring(name: str) -> None:
    assert f"\n::: depthmix.{name}\n" in (DOCS / "api.md").read_text(encoding="utf-8")
    assert getattr(depthmix, name).__doc__


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_named_files_are_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = set(re.findall(r"`([\w./-]+(?:\.py|/))`", text)) - NOT_THERE
    assert len(paths) > 20
    missing = [path for path in paths if not any((base / path).exists() for base in BASES)]
    assert missing == []
