"""Sources → a data folder: tokenised shards, their indices, a manifest.

Owns the order of the work, and what a second command on the same folder may do. Formats, splits,
encoding and files are the business of the modules it calls.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthmix.data.encode import Encoder
from depthmix.data.folder import (
    claim_folder,
    explain_writing,
    find_finished,
    forget_unfinished,
    hash_units,
    write_file,
    write_unfinished,
)
from depthmix.data.manifest import MANIFEST_FILE, SPLITS, Manifest
from depthmix.data.pieces import Reading, ReadingPlace
from depthmix.data.progress import Progress, Report
from depthmix.data.sources import list_source
from depthmix.data.tokenizer import TOKENIZER_FILE, measure_tokens
from depthmix.data.vocabulary import TokenizerFile, load_vocabulary, train_vocabulary
from depthmix.data.writer import ShardWriter
from depthmix.files import lock_folder

DEFAULT_VOCAB_SIZE = 4096
SHARD_TOKENS = 1 << 27
RECORD_SECONDS = 10.0
REPORT_SECONDS = 0.1


def prepare(
    sources: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    val_fraction: float = 0.02,
    val_sources: Sequence[str] = (),
    text_field: str = "text",
    token_dtype: str | None = None,
    end_token: int | None = None,
    num_workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
    progress: Report | None = None,
) -> Manifest:
    """Tokenise `sources` into the folder `out`; goes on where an earlier, killed call stopped.

    Without a `tokenizer` (a path or a hub name), one of `vocab_size` ids is trained. A document's
    content decides whether it is for validation, unless `val_sources` are given. The result does
    not depend on `num_workers` (None: every processor).
    """
    report: Report = progress or (lambda _: None)
    _check_options(sources, val_fraction, shard_tokens, num_workers)
    out = Path(out).expanduser()
    report(Progress("check"))
    listings = [
        [
            list_source(
                source, text_field=text_field, token_dtype=token_dtype, exclude=out.resolve()
            )
            for source in group
        ]
        for group in (sources, val_sources)
    ]
    units, val_units = ([unit for listing in group for unit in listing.units] for group in listings)
    given = load_vocabulary([*units, *val_units], tokenizer, vocab_size, end_token)
    reading = Reading(
        units=units,
        val_units=val_units,
        text_field=text_field,
        end_token=given.end_token if given else end_token,
        val_fraction=val_fraction,
        seed=seed,
    )
    request = {
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
    for group, found in ((sources, reading), (val_sources, replace(reading, units=val_units))):
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
            manifest = work.finish((*sources, *val_sources), num_skipped)
        finally:
            work.close()
        write_file(out / MANIFEST_FILE, manifest.to_json().encode())
        forget_unfinished(out)
    return manifest


class _Work:
    """The writers of both splits, with what is needed to go on after a kill."""

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
        for split in SPLITS:
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
        train, val = (self.writers[split] for split in SPLITS)
        # the hash may send every document of a small corpus the same way
        if self.reading.val_fraction and not self.reading.val_units:
            for giver, taker in ((train, val), (val, train)):
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
        )

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def count_processors() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _check_options(
    sources: Sequence[str], val_fraction: float, shard_tokens: int, num_workers: int | None
) -> None:
    if not sources:
        raise ValueError("nothing to prepare: name a file, a folder, hf:owner/name or stdlib")
    if not 0 <= val_fraction < 1:
        raise ValueError(
            f"val_fraction = {val_fraction} must lie in [0, 1): 0.02 keeps one document in fifty "
            f"for validation"
        )
    for name, value in (("shard_tokens", shard_tokens), ("num_workers", num_workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value} must be at least 1")
