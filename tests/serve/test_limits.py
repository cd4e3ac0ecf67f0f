"""Every limit is a number that can be met."""

from dataclasses import fields

import pytest

from depthmix.serve.limits import Limits


@pytest.mark.parametrize("name", [field.name for field in fields(Limits)])
def test_a_limit_is_positive(name: str) -> None:
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"{name} = .* must be a positive number"):
            Limits(**{name: wrong})
    if name in ("max_queue", "drain_seconds"):
        # no line, and no patience, are fine
        assert getattr(Limits(**{name: 0}), name) == 0
    else:
        with pytest.raises(ValueError, match=f"{name} = 0"):
            Limits(**{name: 0})
