"""The toy plan, fresh for each test."""

import copy
from pathlib import Path
from typing import Any

import pytest

from depthmix.sweep.plan import PlannedRun, expand_plan, read_plan
from toy_sweeps import TREE, Fake


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@pytest.fixture
def tree() -> dict[str, Any]:
    return copy.deepcopy(TREE)


@pytest.fixture
def runs() -> list[PlannedRun]:
    return expand_plan(read_plan(TREE))
