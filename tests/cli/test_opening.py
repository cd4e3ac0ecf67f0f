"""What RUN|DIR means, also where an extra is not installed."""

import sys
from pathlib import Path

import pytest

from depthmix.cli.opening import open_model, read_length, tell_missing
from text_runs import write_text_run


def test_runs_open_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_text_run(tmp_path)
    monkeypatch.setitem(sys.modules, "depthmix.hf.source", None)
    assert open_model(run).kind == "depthmix"
    assert open_model(run, max_seq_len=8).config.max_seq_len == 8
    with pytest.raises(ValueError, match=r"pip install 'depthmix\[hf\]'"):
        open_model(tmp_path)


def test_a_missing_package_is_named() -> None:
    with (
        pytest.raises(
            ValueError, match=r"needs the package 'lm_eval': pip install 'depthmix\[eval"
        ),
        tell_missing("eval"),
    ):
        raise ModuleNotFoundError(name="lm_eval")


def test_lengths_among_fields() -> None:
    assert read_length({"max_seq_len": "64"}) == 64
    assert read_length({"max_seq_len": "long"}) is None
    assert read_length({}) is None
