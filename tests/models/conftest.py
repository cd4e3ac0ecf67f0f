"""Folders of dense models, as transformers writes them."""

from pathlib import Path

import pytest

from foreign_models import KINDS, write_foreign


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    return {kind: write_foreign(folder / kind, kind) for kind in KINDS}


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for path in folders["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path
