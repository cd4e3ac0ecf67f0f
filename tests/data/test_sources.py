"""What a SOURCE can be, what is said of one that cannot, and documents in every format."""

import gzip
import json
import lzma
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.data import sources
from depthmix.data.sources import (
    Kind,
    Unit,
    hash_units,
    list_source,
    read_documents,
    split_hub_name,
)


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


def test_a_folder_is_read_in_a_fixed_order_without_binary_files(folder: Path) -> None:
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


def test_stdlib_and_the_hub_are_not_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_list_stdlib", lambda: [])
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
        ("a.u16", b"abc", "a.u16 does not contain a whole number of 2-byte ids"),
        ("a.u32", b"abcdef", "a.u32 does not contain a whole number of 4-byte ids"),
        ("a.bin", b"ab", "a.bin does not record the size of its ids: add --token-dtype"),
        ("a.parquet.gz", b"ab", "a.parquet.gz is a compressed Parquet file"),
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
    with pytest.raises(ValueError, match="unknown token dtype 'int8': use uint16 or uint32"):
        list_source(str(path), token_dtype="int8")


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file or folder .*gone.* hf:owner/name"):
        list_source(str(tmp_path / "gone"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ValueError, match="neither a file nor a folder"):
            list_source(str(tmp_path / "pipe"))


def test_a_folder_without_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no text: it needs"):
        list_source(str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"has no text \(1 binary files were skipped\)"):
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


def unit_of(path: Path, kind: Kind, dtype: str = "") -> Unit:
    size = path.stat().st_size
    return Unit(kind=kind, name=str(path), key=path.name, num_bytes=size, path=path, dtype=dtype)


def contents(unit: Unit, **options: Any) -> list[Any]:
    found = [document.content for document in read_documents(unit, **options)]
    return [c.tolist() if isinstance(c, np.ndarray) else c for c in found]


def write(path: Path, data: bytes) -> Path:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    path.write_bytes(packers.get(path.suffix, bytes)(data))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz"])
def test_a_text_is_one_document(tmp_path: Path, name: str) -> None:
    text = "é\r\n\tline\n\n"
    assert contents(unit_of(write(tmp_path / name, text.encode()), "text")) == [text]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")
    assert contents(unit_of(path, "text")) == ["hello"]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 16, 1 << 22])
def test_marks_are_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    data = "\né<|endoftext|>\nb<|endof\r\n<|endoftext|>\r\n\nc\n\n<|endoftext|>\n"
    path = write(tmp_path / "a.txt", data.encode())
    # one line end beside a mark belongs to the mark, others are text
    assert contents(unit_of(path, "text")) == ["\né", "b<|endof", "\nc\n", ""]


@given(st.lists(st.text("ab<|é", max_size=20), min_size=1, max_size=6), st.integers(1, 40))
def test_documents_between_marks_come_back(texts: list[str], block: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK_BYTES", block)
        path = write(Path(folder, "a.txt"), "<|endoftext|>".join(texts).encode())
        assert contents(unit_of(path, "text")) == texts


@pytest.mark.parametrize("block", [2, 1 << 22])
def test_bytes_that_are_not_text_are_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    path = write(tmp_path / "a.txt", b"abcd\xc3\xa9\xffx")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text \(see byte 6\)"):
        contents(unit_of(path, "text"))


@pytest.mark.parametrize("name", ["cut.txt.gz", "cut.txt.xz"])
def test_damaged_packing_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"hello world, hello world")
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        contents(unit_of(path, "text"))
    path.write_bytes(b"this is not packed at all")
    with pytest.raises(ValueError, match=rf"{name} is damaged"):
        contents(unit_of(path, "text"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz"])
def test_lines_of_json(tmp_path: Path, name: str) -> None:
    lines = [{"text": "one\n"}, {"text": "zwei é", "n": 1}, {"text": None}, {"text": ""}]
    data = "\n\n".join(json.dumps(line) for line in lines)
    assert contents(unit_of(write(tmp_path / name, data.encode()), "jsonl")) == [
        "one\n",
        "zwei é",
        "",
        "",
    ]


def test_another_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "no", "body": "yes"}')
    assert contents(unit_of(path, "jsonl"), text_field="body") == ["yes"]


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rb'{"text": "a\ud800b \ud83d\ude42"}')
    assert contents(unit_of(path, "jsonl")) == ["a\ufffdb 🙂"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"body": "x", "id": 1}', r"line 2 has no field 'text' \(its fields are body, id\)"),
        (b'{"text": 5}', r"line 2: the field 'text' is not text but int"),
        (b'{"text": "x"', r"line 2 is not JSON"),
        (b'{"text": "\xff"}', r"line 2 is not JSON"),
        (b'["text"]', r"line 2 is not a JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=rf"a\.jsonl, {words}"):
        contents(unit_of(path, "jsonl"))


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"document {i} é" for i in range(2500)]
    parquet.write_table(pa.table({"text": [*texts, None], "n": [0] * 2501}), path)
    unit = unit_of(path, "parquet")
    assert contents(unit) == [*texts, ""]
    assert contents(unit, num_skipped=2400) == [*texts[2400:], ""]
    assert list(read_documents(unit))[-1].offset_bytes == unit.num_bytes
    with pytest.raises(ValueError, match=r"no column 'body' \(its columns are text, n\)"):
        contents(unit, text_field="body")
    with pytest.raises(ValueError, match=r"row 1: the field 'n' is not text but int"):
        contents(unit, text_field="n")


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = write(tmp_path / "a.parquet", b"this is not it")
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        contents(unit_of(path, "parquet"))


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write(tmp_path / "a.parquet", b"")
    with pytest.raises(ValueError, match=r"pip install 'depthmix\[parquet\]'"):
        contents(unit_of(path, "parquet"))


@pytest.mark.parametrize("block", [4, 8, 1 << 22])
@pytest.mark.parametrize(
    ("name", "dtype"), [("a.u16", "<u2"), ("a.u32.xz", "<u4"), ("a.bin", "<u4")]
)
def test_ids_end_with_the_end_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, block: int
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    ids = np.array([9, 8, 7, 6, 5, 9, 9, 1, 2, 3, 9, 4], dtype=dtype)
    unit = unit_of(write(tmp_path / name, ids.tobytes()), "tokens", dtype)
    expected = [[], [8, 7, 6, 5], [], [1, 2, 3], [4]]
    assert contents(unit, end_token=9) == expected
    assert contents(unit, end_token=9, num_skipped=3) == expected[3:]


def test_half_an_id_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.u16", b"abc")
    with pytest.raises(ValueError, match="does not contain a whole number of 2-byte ids"):
        contents(unit_of(path, "tokens", "<u2"), end_token=0)


@pytest.mark.parametrize("count", range(4))
def test_the_first_documents_can_be_skipped(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "a.txt", b"a<|endoftext|>b<|endoftext|>c")
    assert contents(unit_of(path, "text"), num_skipped=count) == ["a", "b", "c"][count:]


class FakeDataset(list[dict[str, Any]]):
    def skip(self, count: int) -> "FakeDataset":
        return FakeDataset(self[count:])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A `datasets` package whose one dataset has five records; collects what was asked for."""
    asked = []

    def load_dataset(name: str, config: str | None, **options: Any) -> FakeDataset:
        asked.append((name, config, options))
        if name == "owner/gone":
            raise ConnectionError("no route to host\nmore")
        return FakeDataset({"text": f"record {i}"} for i in range(5))

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # pyrefly: ignore[missing-attribute]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def hub_unit(name: str) -> Unit:
    return Unit(kind="hub", name=name, key=name)


def test_hub_datasets_are_streamed(hub: list[Any]) -> None:
    assert contents(hub_unit("hf:owner/name")) == [f"record {i}" for i in range(5)]
    assert contents(hub_unit("hf:owner/name:en:test"), num_skipped=3) == ["record 3", "record 4"]
    assert hub == [
        ("owner/name", None, {"split": "train", "streaming": True}),
        ("owner/name", "en", {"split": "test", "streaming": True}),
    ]


def test_hub_mistakes_are_sentences(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"could not be read .* \(no route to host\)"):
        contents(hub_unit("hf:owner/gone"))
    with pytest.raises(ValueError, match=r"record 1 has no field 'body' \(its fields are text\)"):
        contents(hub_unit("hf:owner/name"), text_field="body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'depthmix\[datasets\]'"):
        contents(hub_unit("hf:owner/name"))


@pytest.mark.slow
def test_the_real_datasets_library_streams_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    unit = hub_unit(f"hf:{tmp_path}")
    assert contents(unit) == ["one", "two"]
    assert contents(unit, num_skipped=1) == ["two"]


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:c", ("a/b", "c", "train")),
        ("hf:a/b::test", ("a/b", None, "test")),
    ],
)
def test_hub_names(source: str, parts: tuple[str, str | None, str]) -> None:
    assert split_hub_name(source) == parts


@pytest.mark.parametrize("source", ["hf:", "hf:a/b:c:d:e"])
def test_wrong_hub_names(source: str) -> None:
    with pytest.raises(ValueError, match="is not a dataset: write hf:owner/name"):
        split_hub_name(source)


def test_units_are_named_by_key_and_size() -> None:
    unit = Unit(kind="text", name="/here/a.txt", key="a.txt", num_bytes=3)
    moved = Unit(kind="text", name="/there/a.txt", key="a.txt", num_bytes=3)
    grown = Unit(kind="text", name="/here/a.txt", key="a.txt", num_bytes=4)
    assert hash_units([unit]) == hash_units([moved]) != hash_units([grown])
    assert hash_units([]) is None
