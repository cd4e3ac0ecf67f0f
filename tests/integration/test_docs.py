"""The documentation: its example model file loads, and its API page is complete."""

import re
from pathlib import Path

import pytest

import depthmix
from depthmix.config import ModelConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_model_file_loads() -> None:
    text = (DOCS / "using.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert ModelConfig.from_toml(example).routed_layers == (3, 5, 7, 9, 11)


@pytest.mark.parametrize("name", depthmix.__all__)
def test_every_export_has_an_entry_and_a_docstring(name: str) -> None:
    assert f"\n::: depthmix.{name}\n" in (DOCS / "api.md").read_text(encoding="utf-8")
    assert getattr(depthmix, name).__doc__
