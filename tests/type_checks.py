"""The checker of types at run time: beartype, but for what jaxtyping would have it check twice.

Where a test runs under `--jaxtyping-packages=depthmix,type_checks.check`, every function of the
package passes through here.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for a function, as jaxtyping calls it: before the real one, and after it.

    The one for after takes the parameters again, whose types and dimensions are known by then, so
    that only the result is left to check.
    """
    hints = function.__annotations__
    if hints.get("return", Any) is not Any:
        function.__annotations__ = {"return": hints["return"]}
    return beartype(function)
