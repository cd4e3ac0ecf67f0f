"""What goes together, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from depthmix.eval.options import EvalOptions
from test_architecture import modules_loaded_by


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"texts": ["a"], "data": Path("d")}, "give --text or --data, not both"),
        ({"limit": 2}, "--limit is for --tasks"),
        ({"selector": "all", "num_fewshot": 0}, "--fewshot, --selector is for --tasks"),
        ({"tasks": ["x"], "seq_len": 2}, "--seq-len is for --text or --data"),
        ({"test": True, "texts": ["a"]}, "--test is for data with a test split"),
        ({"keep": True}, "give --test"),
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"tasks": ["x"], "num_fewshot": -1}, "num_fewshot = -1 must be 0 or more"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EvalOptions(**options)


def test_texts_are_not_read_by_the_checks() -> None:
    options = EvalOptions(texts=(1 / 0 for _ in "x"))  # pyrefly: ignore[bad-argument-type]
    assert options.reads
    assert not EvalOptions(tasks=["x"]).reads
    assert EvalOptions(tasks=["x"], data=Path("d")).reads


def test_options_need_no_torch() -> None:
    assert "torch" not in modules_loaded_by("import depthmix.eval.options")
