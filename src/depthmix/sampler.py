"""A run on disk → an engine that takes and gives text: checkpoint, tokenizer, end token.

Owns where a run's tokenizer is looked for, and what a prompt's first token is. Knows nothing of how
samples are shown.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from depthmix.checkpoint import load_model
from depthmix.checkpoint.folder import list_checkpoints, name_checkpoint
from depthmix.checkpoint.weights import choose_checkpoint
from depthmix.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.files import hash_file
from depthmix.infer import Engine, Event, SamplingParams
from depthmix.rundir import RunDir

if TYPE_CHECKING:
    import tokenizers


# enough for a prompt's step and for those of single tokens
WARM_TOKENS = 3


class Vocabulary(NamedTuple):
    """A run's tokenizer."""

    tokenizer: "tokenizers.Tokenizer"
    end_token: int | None
    """What stands at a document's start and end; None where nobody knows."""


class Sampler:
    """An engine with a tokenizer, and a clock."""

    def __init__(
        self,
        model: torch.nn.Module,
        vocabulary: Vocabulary,
        *,
        selector: str | None = None,
        max_batch: int = 8,
    ) -> None:
        self.vocabulary = vocabulary
        self.engine = Engine(
            model,  # pyrefly: ignore[bad-argument-type]
            selector=selector,
            decode=self.decode,
            max_batch=max_batch,
        )
        self.load_seconds = self.compile_seconds = 0.0
        self.requests: list[int] = []
        self._num_later = 0
        self._first = self._last = 0.0

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as a document begins in the training data: with the end token.

        No text at all is then the prompt for a new document.
        """
        end, ids = self.vocabulary.end_token, self.tokenize(text)
        if not ids and end is None:
            raise ValueError(
                "this tokenizer has no end token to begin a document with: give a prompt"
            )
        return ids if end is None or ids[:1] == [end] else [end, *ids]

    def tokenize(self, text: str) -> list[int]:
        """A text's tokens and nothing else."""
        try:
            return self.vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(f"the prompt {text!r:.60} is not valid UTF-8") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; an end token inside it is told by its name."""
        return self.vocabulary.tokenizer.decode(list(tokens), skip_special_tokens=False)

    def warm_up(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        progress: Callable[[], object] | None = None,
    ) -> None:
        """Compile and record now what these requests would else wait for; a CPU has none of it.

        They are begun and thrown away: the engine's own `warm_up` is for requests of any kind, and
        takes longer. `progress` is called as it begins. The time is in `compile_seconds`.
        """
        if self.engine.model.embedding.weight.device.type != "cuda":
            return
        start = time.perf_counter()
        if progress is not None:
            progress()
        few = min(params.max_tokens, WARM_TOKENS)
        self.engine.generate(prompts, replace(params, max_tokens=few))
        self.compile_seconds += time.perf_counter() - start

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Put a request in line."""
        request = self.engine.add(prompt, params)
        self.requests.append(request)
        return request

    def run(self, stopped: Callable[[], object] = lambda: False) -> Iterator[list[Event]]:
        """Each step's events, until all requests are done; `stopped` is asked between steps."""
        while self.engine.has_work:
            if stopped():
                yield [event for number in self.requests for event in self.engine.cancel(number)]
                return
            events = self.engine.step()
            if events:
                self._last = time.perf_counter()
                # a first token is the prompt's affair
                if self._first:
                    self._num_later += sum(event.token is not None for event in events)
                else:
                    self._first = self._last
            yield events

    @property
    def tokens_per_second(self) -> float | None:
        """Speed since the first tokens were there; None where they were the last, too.

        Neither loading nor the prompt is in it, nor compiling after a `warm_up`.
        """
        seconds = self._last - self._first
        return self._num_later / seconds if self._num_later and seconds else None


def open_sampler(
    path: Path,
    *,
    checkpoint: str | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    selector: str | None = None,
    max_batch: int = 8,
) -> Sampler:
    """Load a run's model for sampling, on a GPU if there is one.

    `checkpoint` is best, newest, a name or a step; empty means the best where there are scores.
    `tokenizer` is for a run whose data is gone. The sampler knows how long it took.
    """
    start = time.perf_counter()
    run = RunDir.open(path)
    kind = choose_device(device)
    chosen = find_checkpoint(run, checkpoint)
    vocabulary = find_vocabulary(run, tokenizer)
    model = load_model(chosen, device=kind)
    if kind == "cuda":
        # as training computes there; routers score in float32 all the same
        model = model.to(torch.bfloat16)
    sampler = Sampler(model, vocabulary, selector=selector, max_batch=max_batch)
    sampler.load_seconds = time.perf_counter() - start
    return sampler


def choose_device(wanted: str | None) -> str:
    """The device that is asked for, or a GPU if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible to torch: leave out --device cuda")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def find_checkpoint(run: RunDir, name: str | None) -> Path:
    """The folder of the checkpoint that `name` means."""
    if name is None or name in ("best", "newest"):
        return choose_checkpoint(run.path, name)  # pyrefly: ignore[bad-argument-type]
    present = {place.name: place for place in list_checkpoints(run.checkpoints).values()}
    # a path to it is a name too
    wanted = name_checkpoint(int(name)) if name.isdecimal() else Path(name).name
    if wanted not in present:
        known = ", ".join(["best", "newest", *present]) if present else "none is there"
        raise ValueError(f"{run.path} has no checkpoint '{name}': choose among {known}")
    return present[wanted]


def find_vocabulary(run: RunDir, given: str | None = None) -> Vocabulary:
    """The tokenizer that was given, that lies in the run's folder, or that its data was made by."""
    if given is not None:
        if (Path(given) / MANIFEST_FILE).is_file():
            return _read_data(Path(given), read_manifest(Path(given)))
        return _read_tokenizer(given)
    starts = run.read_starts()
    if (run.path / TOKENIZER_FILE).is_file():
        return _read_copy(run.path / TOKENIZER_FILE, starts[-1]["data"] if starts else {})
    if not starts:
        raise ValueError(
            f"{run.path} does not say what data it was trained on: name its tokenizer with "
            f"--tokenizer"
        )
    used = starts[-1]["data"]
    folder = Path(used["folder"])
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(
            f"the tokenizer of {run.path} was in {folder}, and that data is no longer there: name "
            f"a {TOKENIZER_FILE}, or a folder that holds one, with --tokenizer"
        )
    manifest = read_manifest(folder)
    if manifest.hash != used["hash"]:
        raise ValueError(
            f"the data in {folder} is not what {run.path} was trained on, and its tokenizer may be "
            f"another: name the right one with --tokenizer"
        )
    return _read_data(folder, manifest)


def _read_data(folder: Path, manifest: Manifest) -> Vocabulary:
    if manifest.tokenizer is None:
        raise ValueError(
            f"the data in {folder} came as ids, without a tokenizer: name it with --tokenizer"
        )
    return Vocabulary(load_tokenizer(folder / manifest.tokenizer), manifest.end_token)


def _read_copy(path: Path, used: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer in a run's folder; runs of older releases note neither hash nor end token."""
    wanted = used.get("tokenizer_hash")
    if wanted is not None and hash_file(path) != wanted:
        raise ValueError(
            f"{path} is not the tokenizer that the run was trained with: put that one back, or "
            f"name it with --tokenizer"
        )
    found = _read_tokenizer(path)
    return found._replace(end_token=used.get("end_token", found.end_token))


def _read_tokenizer(place: str | Path) -> Vocabulary:
    tokenizer, end_token = load_tokenizer(place), None
    with suppress(ValueError):
        end_token = find_end_token(tokenizer)
    return Vocabulary(tokenizer, end_token)
