"""Preparing: the same bytes whatever the workers or the kills, and sentences for mistakes."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from depthmix.data import encode
from depthmix.data import prepare as prepare_function
from depthmix.data.encode import Reading
from depthmix.data.manifest import MANIFEST_FILE, UNFINISHED_FILE
from depthmix.data.prepare import Progress, load_vocabulary, show_progress, train_vocabulary
from depthmix.data.shards import Corpus
from depthmix.data.sources import Unit, list_source
from depthmix.data.tokenizer import train_tokenizer

# the package exports the function under the module's name
prepare_module = sys.modules["depthmix.data.prepare"]

TEXTS = [f"# file {i}\n" + f"the value é{i} is {i * i}\n" * (1 + i % 9) for i in range(60)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Text, JSON lines and a marked text, with a few empty documents among them."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in [*TEXTS[1:30], ""]]
    (folder / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "c.md").write_text("\n<|endoftext|>\n".join(TEXTS[30:]), encoding="utf-8")
    (folder / "d.png").write_bytes(b"\xff\xfe\0")
    return folder


def prepare(source: Path | str, out: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"vocab_size": 300, "val_fraction": 0.2, "num_workers": 1, **options}
    return prepare_function([str(source)], out, **given)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_texts(folder: Path, split: str) -> list[str]:
    corpus = Corpus.open(folder, verify="full")
    tokenizer = corpus.load_tokenizer()
    found = corpus.split(split)
    documents = [found.read(number) for number in range(found.num_documents)]
    assert all(
        ids[-1] == corpus.end_token and corpus.end_token not in ids[:-1] for ids in documents
    )
    return [tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in documents]


def test_every_document_is_in_one_split(source: Path, tmp_path: Path) -> None:
    manifest = prepare(source, tmp_path / "out", shard_tokens=400)
    train, val = (read_texts(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted([*train, *val]) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train]
    assert 4 <= len(val) <= 24
    for split, texts in (("train", train), ("val", val)):
        assert manifest.splits[split].num_documents == len(texts)
        assert manifest.splits[split].num_bytes == sum(len(text.encode()) for text in texts)
    assert len(manifest.splits["train"].shards) > 2
    assert (manifest.vocab_size, manifest.end_token, manifest.dtype) == (300, 0, "uint16")
    assert (manifest.sources, manifest.num_skipped_files) == ((str(source),), 1)
    assert Corpus.open(tmp_path / "out").manifest == manifest
    assert not (tmp_path / "out" / UNFINISHED_FILE).exists()


@pytest.mark.parametrize("num_workers", [2, 5])
def test_the_result_does_not_depend_on_workers(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    prepare(source, tmp_path / "one")
    monkeypatch.setattr(encode, "PACKAGE_CHARS", 50)
    prepare(source, tmp_path / "many", num_workers=num_workers)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "many")


def test_the_seed_decides_the_split(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "a")
    prepare(source, tmp_path / "b", seed=1)
    assert read_texts(tmp_path / "a", "val") != read_texts(tmp_path / "b", "val")


def test_a_finished_folder_is_left_alone(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    reports: list[Progress] = []
    assert prepare(source, out, num_workers=2, progress=reports.append) == first
    assert [report.stage for report in reports] == ["check", "ready"]
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(ValueError, match=r"was prepared with --val-fraction 0.2, not 0.5"):
        prepare(source, out, val_fraction=0.5)
    (source / "new.txt").write_text("more")
    with pytest.raises(ValueError, match=r"holds data that was prepared with other sources"):
        prepare(source, out)


class Stop(BaseException):
    """Stands for a kill: nothing in the code may expect it."""


def stop_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Stop before the `count`-th time that something is made durable."""
    calls = 0

    def wrap(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count:
                raise Stop
            return function(*args)

        return call

    monkeypatch.setattr(os, "fsync", wrap(os.fsync))
    monkeypatch.setattr(os, "replace", wrap(os.replace))


def test_stopped_anywhere_it_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"shard_tokens": 900}
    monkeypatch.setattr(encode, "PACKAGE_CHARS", 200)
    prepare(source, tmp_path / "whole", **options)
    expected = snapshot(tmp_path / "whole")
    # a record after every document: the most places to go on from
    monkeypatch.setattr(prepare_module, "RECORD_SECONDS", 0.0)
    count, finished = 1, False
    while not finished:
        out = tmp_path / f"stopped-{count}"
        with monkeypatch.context() as patch:
            stop_at(patch, count)
            try:
                prepare(source, out, **options)
                finished = True
            except Stop:
                assert (
                    not (out / MANIFEST_FILE).exists() or snapshot(out).items() > expected.items()
                )
        prepare(source, out, **options)
        assert snapshot(out) == expected, f"stopped at step {count}"
        count += 17
    assert count > 200


def test_a_stopped_run_does_not_begin_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "RECORD_SECONDS", 0.0)
    monkeypatch.setattr(encode, "PACKAGE_CHARS", 100)
    with monkeypatch.context() as patch:
        stop_at(patch, 150)
        with pytest.raises(Stop):
            prepare(source, tmp_path / "out")
    with pytest.raises(ValueError, match="is half prepared with --seed 0, not 3"):
        prepare(source, tmp_path / "out", seed=3)
    with pytest.raises(ValueError, match="is not finished: run the same"):
        Corpus.open(tmp_path / "out")
    encoded = []
    real = encode.Encoder.encode_package

    def spy(self: encode.Encoder, package: Any) -> Any:
        encoded.extend(package)
        return real(self, package)

    monkeypatch.setattr(encode.Encoder, "encode_package", spy)
    reports: list[Progress] = []
    prepare(source, tmp_path / "out", progress=reports.append)
    assert 0 < len(encoded) < len(TEXTS) - 10
    # how often each is told depends on the machine
    assert list(dict.fromkeys(report.stage for report in reports)) == ["check", "encode"]


KILL = """
import os, signal, sys
from depthmix.data import encode, prepare
module = sys.modules["depthmix.data.prepare"]
module.RECORD_SECONDS, encode.PACKAGE_CHARS = 0.0, 200
num_left, real = int(sys.argv[3]), module.write_unfinished
def record(*args):
    global num_left
    real(*args)
    num_left -= 1
    if num_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
module.write_unfinished = record
prepare([sys.argv[1]], sys.argv[2], vocab_size=300, val_fraction=0.2, shard_tokens=900)
"""


@pytest.mark.skipif(not hasattr(os, "kill") or os.name == "nt", reason="needs SIGKILL")
def test_killed_again_and_again_it_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "whole", shard_tokens=900)
    command = [sys.executable, "-c", KILL, str(source), str(tmp_path / "out"), "19"]
    codes = []
    while 0 not in codes:
        codes.append(subprocess.run(command, check=False).returncode)
        assert len(codes) < 10
    assert codes == [-9, -9, -9, 0]
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_progress_rises_to_the_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "REPORT_SECONDS", 0.0)
    reports: list[Progress] = []
    manifest = prepare(source, tmp_path / "out", progress=reports.append)
    assert [report.stage for report in reports[:3]] == ["check", "tokenizer", "encode"]
    done = [report.done_bytes for report in reports[2:]]
    assert done == sorted(done)
    assert reports[-1].done_bytes == reports[-1].total_bytes > 0
    assert reports[-1].num_documents == len(TEXTS)
    assert reports[-1].num_tokens == sum(s.num_tokens for s in manifest.splits.values())


def test_a_given_tokenizer_is_copied(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(["other text"], 260, parallel=False).to_str(pretty=True))
    manifest = prepare(source, tmp_path / "out", tokenizer=path, vocab_size=None)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    assert manifest.vocab_size == 260
    assert sorted(read_texts(tmp_path / "out", "train") + read_texts(tmp_path / "out", "val")) == (
        sorted(TEXTS)
    )


def test_a_tokenizer_from_the_hub_is_stored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(["other text"], 260, parallel=False)
    monkeypatch.setattr(prepare_module, "load_tokenizer", lambda name: tokenizer)
    prepare(source, tmp_path / "out", tokenizer="owner/name", vocab_size=None)
    stored = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert stored.to_str() == tokenizer.to_str()


def test_ready_made_ids(tmp_path: Path) -> None:
    documents = [[5, 6], [7], [8, 9, 10], [11]]
    ids = [number for document in documents for number in [*document, 3]]
    (tmp_path / "a.u32").write_bytes(np.array(ids, dtype="<u4").tobytes())
    manifest = prepare(tmp_path / "a.u32", tmp_path / "out", vocab_size=None, end_token=3)
    assert (manifest.dtype, manifest.vocab_size, manifest.end_token) == ("uint16", 12, 3)
    assert manifest.tokenizer is None
    assert manifest.splits["train"].num_bytes is None
    corpus = Corpus.open(tmp_path / "out")
    splits = [corpus.split(name) for name in ("train", "val")]
    found = [s.read(n)[:-1].tolist() for s in splits for n in range(s.num_documents)]
    assert sorted(found) == sorted(documents)
    with pytest.raises(ValueError, match="prepared from ids without a tokenizer"):
        corpus.load_tokenizer()


def test_large_ids_need_four_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.array([70000, 1, 0, 2, 0], dtype="<u4").tobytes())
    options = {"vocab_size": None, "end_token": 0, "token_dtype": "uint32", "val_fraction": 0.0}
    manifest = prepare(tmp_path / "a.bin", tmp_path / "out", **options)
    assert manifest.dtype == "uint32"
    assert Corpus.open(tmp_path / "out").split("train").read(0).tolist() == [70000, 1, 0]


def test_bytes_of_ready_made_ids_are_known_with_their_tokenizer(
    source: Path, tmp_path: Path
) -> None:
    first = prepare(source, tmp_path / "text")
    shard = tmp_path / "ids.u16"
    shard.write_bytes((tmp_path / "text" / "train-00000.bin").read_bytes())
    second = prepare(
        shard, tmp_path / "ids", tokenizer=tmp_path / "text", vocab_size=None, val_fraction=0.0
    )
    assert second.splits["train"] == first.splits["train"]


def test_validation_sources(source: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text("held out")
    manifest = prepare(source, tmp_path / "out", val_sources=[str(held)])
    assert read_texts(tmp_path / "out", "val") == ["held out"]
    assert manifest.splits["train"].num_documents == len(TEXTS)
    assert manifest.sources == (str(source), str(held))


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one<|endoftext|>two<|endoftext|>three")
    manifest = prepare(path, tmp_path / "out", val_fraction=fraction, shard_tokens=1)
    counts = [manifest.splits[split].num_documents for split in ("train", "val")]
    assert counts == ([2, 1] if fraction < 0.5 else [1, 2])
    texts = read_texts(tmp_path / "out", "train") + read_texts(tmp_path / "out", "val")
    assert sorted(texts) == ["one", "three", "two"]
    num_bytes = [manifest.splits[split].num_bytes for split in ("train", "val")]
    assert sum(num_bytes) == 11


def test_a_single_document_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # between its halves nothing may be recorded
    monkeypatch.setattr(prepare_module, "RECORD_SECONDS", 0.0)
    path = tmp_path / "a.txt"
    path.write_text("a line\n" * 100)
    prepare(path, tmp_path / "out", val_fraction=0.02)
    assert read_texts(tmp_path / "out", "train") == ["a line\n" * 98]
    assert read_texts(tmp_path / "out", "val") == ["a line\n" * 2]


def test_a_test_split_is_made_when_asked_for(source: Path, tmp_path: Path) -> None:
    plain = prepare(source, tmp_path / "plain")
    manifest = prepare(source, tmp_path / "out", test_fraction=0.2)
    assert plain.splits.keys() == {"train", "val"}
    assert manifest.splits.keys() == {"train", "val", "test"}
    train, val, test = (read_texts(tmp_path / "out", s) for s in ("train", "val", "test"))
    assert sorted([*train, *val, *test]) == sorted(TEXTS)
    # validation stays as it is without it: what is tested comes out of training
    assert val == read_texts(tmp_path / "plain", "val")
    assert set(test) < set(read_texts(tmp_path / "plain", "train"))
    assert 2 <= len(test) <= 24
    with pytest.raises(ValueError, match=r"has no test split: prepare .* --test-fraction 0.02"):
        Corpus.open(tmp_path / "plain").split("test")
    # the same command is the same folder, with and without it
    assert prepare(source, tmp_path / "out", test_fraction=0.2) == manifest
    assert prepare(source, tmp_path / "plain") == plain
    assert not {"test_fraction", "test_sources"} & plain.request.keys()
    with pytest.raises(ValueError, match=r"--test-fraction 0\.2, not None"):
        prepare(source, tmp_path / "out")
    for fraction in (-0.1, 0.8):
        with pytest.raises(ValueError, match=r"--test-fraction \S+ must lie in \[0, 0.8\)"):
            prepare(source, tmp_path / "other", test_fraction=fraction)


def test_test_sources_and_a_single_document(source: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.txt"
    held.write_text("held out")
    prepare(source, tmp_path / "a", test_sources=[str(held)], val_fraction=0.0)
    assert read_texts(tmp_path / "a", "test") == ["held out"]
    assert len(read_texts(tmp_path / "a", "train")) == len(TEXTS)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    prepare(path, tmp_path / "b", val_fraction=0.02, test_fraction=0.1)
    parts = [read_texts(tmp_path / "b", split) for split in ("train", "val", "test")]
    assert "".join(text for part in parts for text in part) == path.read_text()
    assert [part[0].count("\n") for part in parts] == [88, 2, 10]
    # three documents, one for each
    path.write_text("one<|endoftext|>two<|endoftext|>three")
    manifest = prepare(path, tmp_path / "c", val_fraction=1e-9, test_fraction=1e-9)
    assert [manifest.splits[s].num_documents for s in ("train", "val", "test")] == [1, 1, 1]


def test_no_validation(source: Path, tmp_path: Path) -> None:
    manifest = prepare(source, tmp_path / "out", val_fraction=0.0)
    assert manifest.splits["val"].num_documents == 0
    assert Corpus.open(tmp_path / "out", verify="full").split("val").num_tokens == 0


def test_the_output_may_lie_in_the_source(source: Path) -> None:
    first = prepare(source, source / "out")
    assert prepare(source, source / "out") == first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"val_fraction": 1.0}, r"--val-fraction 1.0 must lie in \[0, 1\)"),
        ({"shard_tokens": 0}, "must be at least 1"),
        ({"num_workers": 0}, "must be at least 1"),
        ({"vocab_size": 10}, "10 ids is too small"),
        ({"text_field": "body"}, r"b\.jsonl, line 1 has no field 'body'"),
        ({"tokenizer": "./gone.json"}, "there is no tokenizer at"),
        ({"val_sources": ["./gone.txt"]}, "there is no file or folder"),
    ],
)
def test_mistakes_are_found_before_any_work(
    source: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_to_prepare(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to prepare: name a file"):
        prepare_function([], tmp_path / "out")
    empty = tmp_path / "a.jsonl"
    empty.write_text('{"text": ""}\n{"text": null}')
    with pytest.raises(ValueError, match=r"there is no text in .*a\.jsonl"):
        prepare(empty, tmp_path / "out")
    with pytest.raises(ValueError, match=r"there is no text in .*a\.jsonl"):
        prepare(source, tmp_path / "out", val_sources=[str(empty)])
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_not_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="contains other files"):
        prepare(source, tmp_path)
    with pytest.raises(OSError, match=r"cannot write .*thesis\.tex \(File exists\)"):
        prepare(source, tmp_path / "thesis.tex")


@pytest.mark.parametrize("name", ["tokenizer.json", "train-00000.bin", "manifest.json"])
def test_a_full_disk_is_a_sentence_and_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prepare(source, tmp_path / "whole")
    real = os.replace

    def fail(old: Any, new: Any) -> None:
        if Path(new).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match=rf"cannot write .*{name} \(No space left on device\)"):
            prepare(source, tmp_path / "out")
    prepare(source, tmp_path / "out")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


LIMITED = """
import resource, sys
from depthmix.data import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    prepare([sys.argv[1]], sys.argv[2], vocab_size=300, val_fraction=0.0)
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a limit on files")
def test_a_write_that_the_system_refuses_is_a_sentence(source: Path, tmp_path: Path) -> None:
    (source / "long.txt").write_text("\n".join(f"{i * i}" for i in range(3000)))
    prepare(source, tmp_path / "whole", val_fraction=0.0)
    # enough for the tokenizer, too little for the shard
    limit = (tmp_path / "whole" / "tokenizer.json").stat().st_size + 100
    assert limit < (tmp_path / "whole" / "train-00000.bin").stat().st_size
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out"), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.match(
        r"cannot write .*train-00000\.bin \(File too large\): free some space", done.stdout
    )
    assert done.stderr == ""
    prepare(source, tmp_path / "out", val_fraction=0.0)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_processors_are_counted() -> None:
    assert 1 <= prepare_module.count_processors() <= (os.cpu_count() or 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    # a detail that the library would not write itself
    path.write_text(train_tokenizer(["abab"], 258, parallel=False).to_str() + "\n\n")
    return path


@pytest.fixture
def ids(tmp_path: Path) -> Unit:
    file = tmp_path / "a.u16"
    file.write_bytes(np.array([3, 257, 0], dtype="<u2").tobytes())
    return list_source(str(file)).units[0]


TEXT = Unit(kind="made", name="text", key="text", make=lambda: ["some text"])


def test_a_tokenizer_is_taken_as_it_is(path: Path, ids: Unit) -> None:
    found = load_vocabulary([TEXT, ids], path, None, None)
    assert found is not None
    assert (found.size, found.end_token, found.content) == (258, 0, path.read_bytes())
    in_folder = load_vocabulary([TEXT], path.parent, None, None)
    assert in_folder is not None
    assert in_folder.hash == found.hash


def test_a_vocabulary_may_be_larger_than_its_tokenizer(path: Path) -> None:
    found = load_vocabulary([TEXT], path, 320, 5)
    assert found is not None
    assert (found.size, found.end_token) == (320, 5)


def test_text_alone_is_for_training() -> None:
    assert load_vocabulary([TEXT], None, 300, None) is None
    assert load_vocabulary([TEXT], None, None, 0) is None


def test_ids_alone_need_no_tokenizer(ids: Unit) -> None:
    found = load_vocabulary([ids], None, None, 0)
    assert found is not None
    assert found[:] == (None, None, 258, 0)
    assert found.hash is None
    rare = load_vocabulary([ids], None, None, 400)
    assert rare is not None
    assert rare.size == 401
    given = load_vocabulary([ids], None, 512, 0)
    assert given is not None
    assert given.size == 512


@pytest.mark.parametrize(
    ("with_ids", "with_text", "with_path", "vocab_size", "end_token", "words"),
    [
        (False, True, False, 100, None, "100 ids is too small"),
        (False, True, False, None, 7, "ends documents with id 0"),
        (False, True, True, 257, None, "has 258 ids, more than --vocab-size 257"),
        (False, True, True, None, 258, "--end-token 258 is not one of the 258 ids"),
        (True, True, False, None, 0, "a.u16 contains ids and other sources contain text"),
        (True, False, False, None, None, "a.u16 does not record which id ends a document"),
        (True, False, False, 257, 0, "a.u16 contains the id 257, but the vocabulary has 257 ids"),
    ],
)
def test_arguments_that_do_not_agree_are_refused(
    path: Path,
    ids: Unit,
    with_ids: bool,
    with_text: bool,
    with_path: bool,
    vocab_size: int | None,
    end_token: int | None,
    words: str,
) -> None:
    units = [ids] * with_ids + [TEXT] * with_text
    with pytest.raises(ValueError, match=words):
        load_vocabulary(units, path if with_path else None, vocab_size, end_token)


def test_training_sees_all_of_a_small_corpus() -> None:
    unit = Unit(kind="made", name="m", key="m", make=lambda: ["abcabc " * 9, "xyzxyz " * 9])
    found = train_vocabulary(Reading(units=[unit]), 262, 1)
    assert (found.size, found.end_token) == (262, 0)
    assert found.tokenizer is not None
    assert found.content == found.tokenizer.to_str(pretty=True).encode()
    assert {"abcabc", "xyzxyz"} & set(found.tokenizer.get_vocab()) or found.size == 262


def test_a_sample_reads_the_beginning_of_each_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letter in (("1.jsonl", "a"), ("2.jsonl", "b")):
        lines = [f'{{"text": "{letter}{i:03d}"}}' for i in range(1000)]
        (tmp_path / name).write_text("\n".join(lines))
    monkeypatch.setattr("depthmix.data.sources.BLOCK_BYTES", 64)
    monkeypatch.setattr(prepare_module, "READ_BYTES", 18)
    reading = Reading(units=list_source(str(tmp_path)).units)
    texts = list(prepare_module._sample(reading, 10**9))
    assert texts[0] == "a000"
    assert "b000" in texts
    assert len(texts) < 2000
    monkeypatch.setattr(prepare_module, "READ_BYTES", 1 << 30)
    half = list(prepare_module._sample(reading, reading.total_bytes // 2))
    assert len(half) == 1000


def test_the_bar_shows_stage_share_and_tokens() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, width=100, force_terminal=True)) as report:
        report(Progress("check"))
        report(Progress("encode", 1_000_000, 8_000_000, 250_000, 3))
        report(Progress("encode", 8_000_000, 8_000_000, 2_000_000, 24))
    text = output.getvalue()
    assert "tokenising" in text
    assert "8.0 of 8.0 MB" in text
    assert "2.00 M tokens" in text
    # before anything is read there is nothing to count
    assert "0 of 0" not in text


def test_an_unknown_total() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, width=100, force_terminal=True)) as report:
        report(Progress("encode", 3_000_000, 0, 500_000, 3))
    assert "tokenising" in output.getvalue()
    assert "500 K tokens" in output.getvalue()
    assert "?" not in output.getvalue().replace("\x1b[?25", "")
    assert "MB" not in output.getvalue()


def test_a_small_file_is_counted_in_parts() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output, width=100, force_terminal=True)) as report:
        report(Progress("encode", 200_000, 400_000, 0, 0))
    assert "0.2 of 0.4 MB" in output.getvalue()
