"""A real browser for the pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from browsers import start_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of a file."""
    with start_browser() as browser:
        yield browser
