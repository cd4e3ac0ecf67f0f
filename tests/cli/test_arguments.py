"""What a command line says is read by itself, and a package that is missing is named."""

import pytest

from depthmix.cli.arguments import read_length, tell_missing


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
