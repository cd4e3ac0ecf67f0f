"""Checks at run time find what they are there for, although nothing is checked twice."""

from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from type_checks import check


@jaxtyped(typechecker=check)
def turn(x: Float[Tensor, "A B"], scale: float, result: Any = None) -> Float[Tensor, "B A"]:
    """What it returns is `result`, where one is given."""
    return x.T * scale if result is None else result


def test_what_fits_passes() -> None:
    assert turn(torch.ones(2, 3), 2.0).shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((torch.ones(2), 1.0), "parameters"),
        ((torch.ones(2, 3), "much"), "parameters"),
        ((torch.ones(2, 3), 1.0, "text"), "return value"),
        ((torch.ones(2, 3), 1.0, torch.ones(3, 2).long()), "return value"),
        # its dimensions are those of the parameter
        ((torch.ones(2, 3), 1.0, torch.ones(2, 3)), "return value"),
    ],
)
def test_what_does_not_fit_is_named(arguments: Any, part: str) -> None:
    with pytest.raises(TypeCheckError, match=f"whilst checking the {part}"):
        turn(*arguments)
