"""The standard library as a corpus: what belongs to it, and that it is the same every time."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from depthmix.data import stdlib
from depthmix.data.sources import list_source, read_documents
from depthmix.data.stdlib import find_files, render_module, render_topics

HASH_MODULES = (
    "import hashlib; from depthmix.data.stdlib import MODULES, render_module;"
    "text = ''.join(render_module(name) for name in MODULES);"
    "print(hashlib.sha256(text.encode()).hexdigest())"
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files, which would fail if they were run."""
    root = tmp_path / "python"
    files = {
        "b.py": b"raise SystemExit",
        "a/__init__.py": b"",
        "a/x.py": "é = 1".encode(),
        "latin.py": b"# \xe9",
        "note.txt": b"no",
        "site-packages/p.py": b"no",
        "a/__pycache__/c.py": b"no",
        "pydoc_data/topics.py": b"# made\ntopics = {'if': 'The if\\n', 'def': 'The def\\n'}\n",
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(stdlib, "MODULES", ("math", "no_such_module"))
    return root


def test_sources_then_topics_then_modules(library: Path) -> None:
    texts = [d.content for unit in list_source("stdlib").units for d in read_documents(unit)]
    assert texts[:4] == ["é = 1", "raise SystemExit", "The def\n", "The if\n"]
    assert len(texts) == 5
    assert "cos(x, /)" in texts[4]


def test_files_are_listed_with_their_sizes(library: Path) -> None:
    assert [(name, size) for name, _, size in find_files()] == [
        ("a/__init__.py", 0),
        ("a/x.py", 6),
        ("b.py", 16),
        ("latin.py", 3),
        ("pydoc_data/topics.py", 55),
    ]


def test_a_python_without_sources_is_a_sentence(library: Path) -> None:
    for path in library.rglob("*.py"):
        path.unlink()
    with pytest.raises(ValueError, match=r"there are no source files in .* give a text file"):
        list_source("stdlib")


def test_topics_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "topics.py"
    path.write_text("other = 1")
    assert render_topics(path) == []


def test_documentation_has_no_trace_of_the_process() -> None:
    text = render_module("builtins")
    assert "class int(object)" in text
    assert "Built-in subclasses" not in text
    assert " at 0x" not in text
    assert "\nDATA\n" not in text
    assert "\nFILE\n" not in text
    assert render_module("no_such_module") == ""


@pytest.mark.slow
def test_documentation_is_the_same_in_every_process() -> None:
    digests = set()
    bare = f"import sys; sys.path += {sys.path!r};"
    for options, before in (
        ("-IS", bare),
        ("-O", "import asyncio, decimal, signal, xml.dom, unittest.mock, numpy, tokenizers;"),
    ):
        command = [sys.executable, options, "-c", before + HASH_MODULES]
        done = subprocess.run(command, capture_output=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1


def test_the_real_library_is_large() -> None:
    found = find_files()
    assert "os.py" in {name for name, _, _ in found}
    assert not any("site-packages" in name for name, _, _ in found)
    # 10 MB with its tests, which some distributions leave out
    assert sum(size for _, _, size in found) > 5e6
