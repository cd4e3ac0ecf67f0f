"""Every limit is a number that can be met."""

from dataclasses import fields
from typing import Any

import pytest

from depthmix.serve.limits import Limits


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_a_limit_is_positive(name: str) -> None:
    wrong: list[Any] = [-1]
    if name.endswith("_seconds"):
        wrong += [float("inf"), float("nan")]
    for value in wrong:
        with pytest.raises(ValueError, match=f"{name} = .* must be "):
            Limits(**{name: value})
    if name in ("max_queue", "drain_seconds"):
        # no line, and no patience, are fine
        assert getattr(Limits(**{name: 0}), name) == 0
    else:
        with pytest.raises(ValueError, match=f"{name} = 0"):
            Limits(**{name: 0})
