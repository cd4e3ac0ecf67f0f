"""Sources → a data folder: tokenised shards, their indices, and a manifest.

Coordinates the work: checks that tokenizer, vocabulary size, end token and given ids agree, resumes
an unfinished folder, and reports progress. Formats, splits, encoding and files are in the modules
that it calls.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from depthmix.data.encode import Encoder, Reading, ReadingPlace, sample_texts
from depthmix.data.manifest import (
    MANIFEST_FILE,
    SPLITS,
    TEST_SPLIT,
    Manifest,
    claim_folder,
    explain_writing,
    find_finished,
    forget_unfinished,
    write_file,
    write_unfinished,
)
from depthmix.data.shards import ShardWriter
from depthmix.data.sources import Unit, hash_units, list_source, read_documents
from depthmix.data.tokenizer import (
    TOKENIZER_FILE,
    check_vocab_size,
    count_ids,
    find_end_token,
    load_tokenizer,
    measure_tokens,
    train_tokenizer,
)
from depthmix.files import hash_content, lock_folder
from depthmix.progress import show_bar
from depthmix.units import format_number

if TYPE_CHECKING:
    import rich.console
    import tokenizers

Stage = Literal["check", "tokenizer", "encode", "ready"]

DEFAULT_VOCAB_SIZE = 4096
SHARD_TOKENS = 1 << 27
RECORD_SECONDS = 10.0
REPORT_SECONDS = 0.1

# a tokenizer is trained on at least this much text, and on this much per id
SAMPLE_BYTES = 1 << 23
SAMPLE_BYTES_PER_ID = 1 << 11
# at most this much is read to find the sample
READ_BYTES = 1 << 30


class Progress(NamedTuple):
    """One report: the stage and its progress."""

    stage: Stage
    """check (sources), tokenizer (training), encode, or ready (it already existed)."""
    done_bytes: int = 0
    """Bytes of the sources, on disk."""
    total_bytes: int = 0
    """0 if unknown."""
    num_tokens: int = 0
    num_documents: int = 0


Report = Callable[[Progress], None]

LABELS = {
    "check": "checking the sources",
    "tokenizer": "training a tokenizer",
    "encode": "tokenising",
    "ready": "already prepared",
}


@contextmanager
def show_progress(console: "rich.console.Console") -> Iterator[Report]:
    """A progress bar with the remaining time; yields the function to report to."""
    with show_bar(console) as bar:

        def report(progress: Progress) -> None:
            done, total = progress.done_bytes, progress.total_bytes
            words = []
            if progress.stage == "encode":
                # the size of some sources is unknown
                words += [f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"] if total else []
                words += [f"{format_number(progress.num_tokens)} tokens"]
            bar.update(
                LABELS[progress.stage], done, total or None, "  ".join(words), stage=progress.stage
            )

        yield report


class TokenizerFile(NamedTuple):
    """A tokenizer and its file's content (None if the sources are ids), its size and end token."""

    tokenizer: "tokenizers.Tokenizer | None"
    content: bytes | None
    size: int
    end_token: int

    @property
    def hash(self) -> str | None:
        """Sha256 of the tokenizer's file."""
        return None if self.content is None else hash_content(self.content)


def prepare(
    sources: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    val_fraction: float = 0.02,
    val_sources: Sequence[str] = (),
    test_fraction: float = 0.0,
    test_sources: Sequence[str] = (),
    text_field: str = "text",
    token_dtype: str | None = None,
    end_token: int | None = None,
    num_workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    progress: Report | None = None,
) -> Manifest:
    """Tokenise `sources` into the folder `out`; resumes where an earlier call was interrupted.

    Without a `tokenizer` (a path or a hub name), one with `vocab_size` ids is trained. Documents
    for validation are chosen by their content, unless `val_sources` are given; so are those of a
    test split, which is made only if `test_fraction` or `test_sources` ask for it. The result does
    not depend on `num_workers` (default: one per processor).
    """
    report: Report = progress or (lambda _: None)
    _check_options(sources, val_fraction, test_fraction, shard_tokens, num_workers)
    out = Path(out).expanduser()
    report(Progress("check"))
    listings = [
        [
            list_source(
                source, text_field=text_field, token_dtype=token_dtype, exclude=out.resolve()
            )
            for source in group
        ]
        for group in (sources, val_sources, test_sources)
    ]
    units, val_units, test_units = (
        [unit for listing in group for unit in listing.units] for group in listings
    )
    given = load_vocabulary([*units, *val_units, *test_units], tokenizer, vocab_size, end_token)
    reading = Reading(
        units=units,
        val_units=val_units,
        test_units=test_units,
        text_field=text_field,
        end_token=given.end_token if given else end_token,
        val_fraction=val_fraction,
        test_fraction=test_fraction,
        seed=seed,
    )
    request: dict[str, Any] = {
        "sources": hash_units(units),
        "val_sources": hash_units(val_units),
        "tokenizer": given.hash if given else None,
        "vocab_size": given.size if given else vocab_size or DEFAULT_VOCAB_SIZE,
        "end_token": given.end_token if given else 0,
        "val_fraction": val_fraction,
        "text_field": text_field,
        "shard_tokens": shard_tokens,
        "seed": seed,
    }
    if test_fraction or test_sources:
        # left out if there is none, so that earlier requests stay the same
        request |= {"test_sources": hash_units(test_units), "test_fraction": test_fraction}
    groups = ((sources, units), (val_sources, val_units), (test_sources, test_units))
    for group, found in ((group, replace(reading, units=each)) for group, each in groups):
        if group and found.num_first == 0:
            raise ValueError(f"there is no text in {', '.join(group)}: nothing to prepare")
    with explain_writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out):
        finished = find_finished(out, request)
        if finished is not None:
            report(Progress("ready"))
            return finished
        state = claim_folder(out, request)
        num_workers = num_workers or count_processors()
        path = out / TOKENIZER_FILE
        vocabulary = given
        if vocabulary is None and path.exists():
            vocabulary = load_vocabulary((), path, None, None)
        if vocabulary is None:
            report(Progress("tokenizer"))
            vocabulary = train_vocabulary(reading, request["vocab_size"], num_workers)
        assert vocabulary is not None
        if vocabulary.content is not None:
            write_file(path, vocabulary.content)
        work = _Work(out, reading, vocabulary, request)
        try:
            work.open(state)
            work.encode(num_workers, report)
            num_skipped = sum(listing.num_skipped for group in listings for listing in group)
            manifest = work.finish((*sources, *val_sources, *test_sources), num_skipped)
        finally:
            work.close()
        write_file(out / MANIFEST_FILE, manifest.to_json().encode())
        forget_unfinished(out)
    return manifest


class _Work:
    """The writers of all splits, which record what is needed to resume after a kill."""

    def __init__(
        self,
        out: Path,
        reading: Reading,
        vocabulary: TokenizerFile,
        request: dict[str, Any],
    ) -> None:
        self.out, self.reading, self.vocabulary, self.request = out, reading, vocabulary, request
        self.dtype = "uint16" if vocabulary.size <= 1 << 16 else "uint32"
        self.start = ReadingPlace(0, 0)
        self.writers: dict[str, ShardWriter] = {}

    def open(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.start = ReadingPlace(*state["place"])
        has_test = "test_fraction" in self.request
        for split in (*SPLITS, *([TEST_SPLIT] if has_test else [])):
            self.writers[split] = ShardWriter(
                self.out,
                split,
                dtype=self.dtype,
                end_token=self.vocabulary.end_token,
                shard_tokens=self.request["shard_tokens"],
                state=state["splits"][split] if state else None,
            )

    def encode(self, num_workers: int, report: Report) -> None:
        tokenizer = self.vocabulary.tokenizer
        token_bytes = measure_tokens(tokenizer) if tokenizer else None
        encoder = Encoder(tokenizer, dtype=self.dtype, token_bytes=token_bytes)
        pieces = self.reading.read_pieces(self.start)
        recorded = reported = time.monotonic()
        for piece, ids, num_bytes in encoder.encode_pieces(pieces, num_workers):
            writer = self.writers[piece.split]
            writer.append(ids, num_bytes)
            if not piece.ends_document:
                continue
            writer.end_document()
            now = time.monotonic()
            if piece.place is not None and now - recorded >= RECORD_SECONDS:
                self.record(piece.place)
                recorded = time.monotonic()
            if now - reported >= REPORT_SECONDS:
                report(self.measure(piece.done_bytes))
                reported = now
        report(self.measure(self.reading.total_bytes))

    def measure(self, done_bytes: int) -> Progress:
        return Progress(
            "encode",
            done_bytes,
            self.reading.total_bytes,
            sum(writer.num_tokens for writer in self.writers.values()),
            sum(writer.num_documents for writer in self.writers.values()),
        )

    def record(self, place: ReadingPlace) -> None:
        splits = {split: writer.record() for split, writer in self.writers.items()}
        write_unfinished(self.out, self.request, {"place": list(place), "splits": splits})

    def finish(self, sources: Sequence[str], num_skipped_files: int) -> Manifest:
        # hashing may put every document of a small corpus into the same split
        hashed = ["train", *(split for split, share in self.reading.shares.items() if share)]
        for taker in (self.writers[split] for split in hashed[1:] + hashed[:1]):
            giver = max((self.writers[s] for s in hashed), key=lambda writer: writer.num_documents)
            if taker.num_documents == 0 and giver.num_documents > 1:
                taker.append(*giver.take_last())
                taker.end_document()
        return Manifest(
            dtype=self.dtype,
            vocab_size=self.vocabulary.size,
            end_token=self.vocabulary.end_token,
            tokenizer=TOKENIZER_FILE if self.vocabulary.content is not None else None,
            sources=tuple(sources),
            num_skipped_files=num_skipped_files,
            request=self.request,
            splits={split: writer.finish() for split, writer in self.writers.items()},
            tokenizer_sha256=self.vocabulary.hash,
        )

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def count_processors() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _check_options(
    sources: Sequence[str],
    val_fraction: float,
    test_fraction: float,
    shard_tokens: int,
    num_workers: int | None,
) -> None:
    if not sources:
        raise ValueError("nothing to prepare: name a file, a folder, hf:owner/name or stdlib")
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"--val-fraction {val_fraction} must lie in [0, 1): 0.02 keeps one document in fifty "
            f"for validation"
        )
    if not 0 <= test_fraction < 1 - val_fraction:
        raise ValueError(
            f"--test-fraction {test_fraction} must lie in [0, {1 - val_fraction:g}), beside the "
            f"fraction for validation: 0.02 keeps one document in fifty for testing"
        )
    for name, value in (("shard_tokens =", shard_tokens), ("--workers", num_workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value} must be at least 1")


def load_vocabulary(
    units: Sequence[Unit],
    tokenizer: str | Path | None,
    vocab_size: int | None,
    end_token: int | None,
) -> TokenizerFile | None:
    """The given vocabulary; None if a tokenizer is to be trained.

    `tokenizer`, `vocab_size` and `end_token` are the user's; `units` must agree with them.
    """
    ready = [unit for unit in units if unit.kind == "tokens"]
    largest = max(ready, key=lambda unit: unit.largest_id, default=None)
    loaded = content = None
    if tokenizer is not None:
        loaded = load_tokenizer(tokenizer)
        path = Path(tokenizer).expanduser()
        path = path / TOKENIZER_FILE if path.is_dir() else path
        # the file as it is, to keep settings that are not read here
        content = path.read_bytes() if path.is_file() else loaded.to_str(pretty=True).encode()
        size = count_ids(loaded)
        if vocab_size is not None and vocab_size < size:
            raise ValueError(
                f"the tokenizer has {size} ids, more than --vocab-size {vocab_size}: leave out "
                f"--vocab-size, or raise it"
            )
        size = vocab_size or size
        end_token = find_end_token(loaded) if end_token is None else end_token
    elif largest is None:
        if end_token not in (None, 0):
            raise ValueError(
                "a new tokenizer ends documents with id 0: leave out --end-token, "
                "or give a --tokenizer"
            )
        if vocab_size is not None:
            check_vocab_size(vocab_size)
        return None
    else:
        if len(ready) < len(units):
            raise ValueError(
                f"{largest.name} contains ids and other sources contain text: give the tokenizer "
                f"that made the ids with --tokenizer"
            )
        if end_token is None:
            raise ValueError(
                f"{largest.name} does not record which id ends a document: add --end-token, or "
                f"--tokenizer with the tokenizer that made it"
            )
        size = vocab_size or max(largest.largest_id, end_token) + 1
    if largest is not None and largest.largest_id >= size:
        raise ValueError(
            f"{largest.name} contains the id {largest.largest_id}, but the vocabulary has {size} "
            f"ids: give the tokenizer that made it, and check the ids' size (--token-dtype)"
        )
    if not 0 <= end_token < size:
        raise ValueError(f"--end-token {end_token} is not one of the {size} ids")
    return TokenizerFile(loaded, content, size, end_token)


def train_vocabulary(reading: Reading, vocab_size: int, num_workers: int) -> TokenizerFile:
    """Train a tokenizer on a sample spread over all of the text."""
    budget = max(SAMPLE_BYTES, SAMPLE_BYTES_PER_ID * vocab_size)
    # the library's threads pay off only for a large sample, and a process that has used them warns
    # when it forks
    parallel = num_workers > 1 and budget > SAMPLE_BYTES
    tokenizer = train_tokenizer(_sample(reading, budget), vocab_size, parallel=parallel)
    content = tokenizer.to_str(pretty=True).encode()
    return TokenizerFile(tokenizer, content, count_ids(tokenizer), find_end_token(tokenizer))


def _sample(reading: Reading, budget_bytes: int) -> Iterator[str]:
    total_bytes = max(1, sum(unit.num_bytes for unit in reading.units))
    share = min(1.0, READ_BYTES / total_bytes)

    def read() -> Iterator[str]:
        for unit in reading.units:
            num_chars = 0
            for document in read_documents(unit, text_field=reading.text_field):
                assert isinstance(document.content, str)
                yield document.content
                num_chars += len(document.content)
                enough = unit.num_bytes * share if unit.num_bytes else budget_bytes
                if (document.offset_bytes if unit.num_bytes else num_chars) >= enough:
                    break

    return sample_texts(read(), min(1.0, budget_bytes / (total_bytes * share)))
