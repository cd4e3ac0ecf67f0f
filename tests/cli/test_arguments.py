"""What a command line says is read by itself, and a package that is missing is named."""

import pytest

from depthmix.cli.arguments import (
    check_counts,
    name_flags,
    name_missing_extra,
    split_arguments,
)


def test_a_missing_package_is_named() -> None:
    with (
        pytest.raises(
            ValueError, match=r"needs the package 'lm_eval': pip install 'depthmix\[eval"
        ),
        name_missing_extra("eval"),
    ):
        raise ModuleNotFoundError(name="lm_eval")


def test_fields_by_their_old_names() -> None:
    given = ["train.clip=2", "--train.accumulate=4", "train.warmup_share=0.1", "train.warmup=0.2"]
    assert split_arguments(given, train=True).overrides == {
        "train.max_grad_norm": "2",
        "train.num_micro_batches": "4",
        "train.warmup_share": "0.2",
    }
    with pytest.raises(ValueError, match=r"write '--train.clip 3' as train.max_grad_norm=3"):
        split_arguments(["--train.clip", "3"], train=True)


def test_counts_and_renamed_flags_are_named() -> None:
    check_counts(batch=1, cache_tokens=None)
    with pytest.raises(ValueError, match=r"^--cache-tokens 0 must be at least 1$"):
        check_counts(batch=1, cache_tokens=0)
    with (
        pytest.raises(ValueError, match=r"^--jobs 0 must be at least 1, not steps = 3$"),
        name_flags("seq_len", jobs="num_jobs"),
    ):
        raise ValueError("num_jobs = 0 must be at least 1, not steps = 3")
