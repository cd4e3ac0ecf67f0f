"""What a SOURCE can be, and what is said of one that cannot, before any work."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from depthmix.data import sources
from depthmix.data.sources import list_source


def keys(source: str, **options: object) -> list[str]:
    listing = list_source(source, **options)  # pyrefly: ignore[bad-argument-type]
    return [unit.key for unit in listing.units]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "sources"
    files = {
        "b.txt": b"b",
        "a/z.md": b"z",
        "a/y.jsonl": b'{"text": "y"}',
        "a-b.py": b"print()",
        "no_suffix": b"plain",
        "packed.txt.gz": gzip.compress(b"packed", mtime=0),
        "c4.json.gz": gzip.compress(b'{"text": "c4"}', mtime=0),
        "settings.json": b'{\n "indent": 2\n}',
        "empty.txt": b"",
        ".hidden": b"no",
        ".git/config": b"no",
        "image.png": b"\x89PNG\xff\xfe",
        "zeros.dat": b"abc\0def",
        "ids.u16": b"\1\0",
        "model.bin": b"\1\0",
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def test_a_folder_is_read_in_a_fixed_order_without_what_is_no_text(folder: Path) -> None:
    listing = list_source(str(folder))
    assert [(unit.key, unit.kind) for unit in listing.units] == [
        ("a/y.jsonl", "jsonl"),
        ("a/z.md", "text"),
        ("a-b.py", "text"),
        ("b.txt", "text"),
        ("c4.json.gz", "jsonl"),
        ("no_suffix", "text"),
        ("packed.txt.gz", "text"),
        ("settings.json", "text"),
    ]
    assert listing.num_skipped == 4


def test_the_folder_that_is_written_is_left_out(folder: Path) -> None:
    assert keys(str(folder), exclude=(folder / "a").resolve()) == [
        key for key in keys(str(folder)) if not key.startswith("a/")
    ]


def test_keys_do_not_depend_on_where_a_source_lies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute = keys(str(folder)), keys(str(folder / "b.txt"))
    monkeypatch.chdir(folder)
    assert (keys("."), keys("b.txt")) == absolute


def test_a_home_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert keys("~/b.txt") == ["b.txt"]


def test_token_files(tmp_path: Path) -> None:
    for name, dtype, option in (
        ("a.u16", "<u2", None),
        ("a.u32", "<u4", None),
        ("a.bin", "<u2", "uint16"),
        ("b.bin", "<u4", "uint32"),
    ):
        path = tmp_path / name
        path.write_bytes(np.array([3, 700, 0], dtype=dtype).tobytes())
        (unit,) = list_source(str(path), token_dtype=option).units
        assert (unit.kind, unit.dtype, unit.largest_id) == ("tokens", dtype, 700)


def test_stdlib_and_the_hub_are_no_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "list_stdlib", lambda: [])
    assert keys("stdlib") == []
    assert keys("hf:owner/name") == ["hf:owner/name"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), "empty.txt.gz is empty"),
        ("empty.jsonl", b"\n\n", "empty.jsonl is empty"),
        ("empty.u16.gz", gzip.compress(b"", mtime=0), "empty.u16.gz is empty"),
        ("a.txt", b"abc\xff", "a.txt is not UTF-8 text"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}', "a.jsonl, line 2 has no field 'text'"),
        ("a.json", b'{\n"a": 1}', "a.json, line 1 is not JSON"),
        ("a.u16", b"abc", "a.u16 does not hold a whole number of 2-byte ids"),
        ("a.u32", b"abcdef", "a.u32 does not hold a whole number of 4-byte ids"),
        ("a.bin", b"ab", "a.bin does not say how large its ids are: add --token-dtype"),
        ("a.parquet.gz", b"ab", "a.parquet.gz is a packed Parquet file"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words):
        list_source(str(path))


def test_a_wrong_token_dtype(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"ab")
    with pytest.raises(ValueError, match="there is no token dtype 'int8': use uint16 or uint32"):
        list_source(str(path), token_dtype="int8")


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file or folder .*gone.* hf:owner/name"):
        list_source(str(tmp_path / "gone"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="neither a file nor a folder"):
            list_source(str(tmp_path / "pipe"))


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no text: it needs"):
        list_source(str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"holds no text \(1 binary files were skipped\)"):
        list_source(str(tmp_path))


def test_wrong_lines_in_a_folder_are_named(folder: Path) -> None:
    (folder / "a" / "y.jsonl").write_text('{"body": "b"}')
    with pytest.raises(ValueError, match=r"y\.jsonl, line 1 has no field"):
        list_source(str(folder))


def test_a_damaged_file_in_a_folder_is_not_taken_for_a_binary_one(folder: Path) -> None:
    path = folder / "packed.txt.gz"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"packed\.txt\.gz is damaged"):
        list_source(str(folder))


def test_a_huge_file_is_checked_at_its_beginning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHECK_BYTES", 10)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "long enough"}\nnot looked at')
    assert keys(str(path)) == ["a.jsonl"]
