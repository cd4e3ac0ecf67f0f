"""Fixtures that write tiny data folders."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hand_corpora import write_folder

FolderMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def folder_writer() -> FolderMaker:
    """`write_folder`, for tests that make many folders of their own."""
    return write_folder


@pytest.fixture
def make_folder(tmp_path: Path) -> FolderMaker:
    def make(documents: Sequence[Sequence[int]], name: str = "data", **options: object) -> Path:
        return write_folder(tmp_path / name, documents, **options)  # pyrefly: ignore

    return make
