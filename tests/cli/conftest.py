"""What the verbs' tests share."""

from collections.abc import Callable

import pytest

from depthmix.cli import main

Refuse = Callable[[list[str], str], None]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Asserts that a command ends as a mistake does: one line on stderr, which has `sentence`."""

    def refuse(arguments: list[str], sentence: str) -> None:
        assert main(arguments) == 2
        printed, errors = capsys.readouterr()
        assert printed == ""
        assert sentence in errors
        assert len(errors.splitlines()) == 1

    return refuse
