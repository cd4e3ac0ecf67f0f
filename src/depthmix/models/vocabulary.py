"""A model's vocabulary: its tokenizer, the end token, and how a document begins.

Finds the tokenizer of a run or of a Hugging Face folder.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthmix.data.manifest import MANIFEST_FILE, Manifest, read_manifest
from depthmix.data.tokenizer import TOKENIZER_FILE, find_end_token, load_tokenizer
from depthmix.files import hash_file, parse_json
from depthmix.models.foreign import CONFIG_FILE, OWN_KIND, read_tree
from depthmix.runs.folder import RunDir

if TYPE_CHECKING:
    import tokenizers

# characters: a shorter one takes milliseconds
LONG_TEXT = 4096


class Vocabulary(NamedTuple):
    """A tokenizer and its end token."""

    tokenizer: "tokenizers.Tokenizer"
    end_token: int | None
    """Begins and ends a document; None if unknown."""

    def encode(self, text: str) -> list[int]:
        """A prompt's tokens, as a document begins in the training data.

        An empty text is the prompt for a new document.
        """
        ids = begin_document(self.tokenize(text), self.end_token)
        if not ids:
            raise ValueError(
                "this tokenizer has no end token to start a document with: give a prompt"
            )
        return ids

    def tokenize(self, text: str) -> list[int]:
        """A text's tokens and nothing else."""
        return self._read(text).ids

    def tokenize_start(self, text: str, max_tokens: int | None) -> tuple[list[int], int]:
        """A text's first tokens, at most `max_tokens`, and the number of characters in them."""
        found = self._read(text)
        ids = found.ids[:max_tokens]
        is_whole = len(ids) == len(found.ids)
        return ids, len(text) if is_whole else found.offsets[len(ids) - 1][1]

    def _read(self, text: str) -> "tokenizers.Encoding":
        if not isinstance(text, str):
            raise ValueError(f"only text has tokens, and {text!r:.60} is not text")
        try:
            # other threads run while a batch is encoded, even of one text, and not otherwise
            if len(text) >= LONG_TEXT:
                return self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
            return self.tokenizer.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise ValueError(f"the prompt {text!r:.60} is not valid UTF-8") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; an end token is written by its name."""
        if isinstance(tokens, str):
            raise ValueError(f"{tokens!r:.60} is text already: decode takes token ids")
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def begin_document(tokens: Sequence[int], end_token: int | None) -> list[int]:
    """A text's tokens as a document of the training data, which the end token begins, once."""
    if end_token is None or (tokens and tokens[0] == end_token):
        return list(tokens)
    return [end_token, *tokens]


def find_vocabulary(run: RunDir) -> Vocabulary:
    """The tokenizer in a run's folder, or the one that its data was prepared with."""
    starts = run.read_starts()
    if (run.path / TOKENIZER_FILE).is_file():
        return _read_copy(run.path / TOKENIZER_FILE, starts[-1]["data"] if starts else {})
    if not starts:
        raise ValueError(
            f"{run.path} does not record its data: give its tokenizer with --tokenizer"
        )
    used = starts[-1]["data"]
    folder = Path(used["folder"])
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(
            f"the tokenizer of {run.path} was in {folder}, which is no longer there: give "
            f"a {TOKENIZER_FILE}, or a folder with one, with --tokenizer"
        )
    manifest = read_manifest(folder)
    if manifest.hash != used["hash"]:
        raise ValueError(
            f"the data in {folder} is not what {run.path} was trained on, and may have another "
            f"tokenizer: name the right one with --tokenizer"
        )
    return _read_data(folder, manifest)


def read_vocabulary(place: str | Path) -> Vocabulary:
    """The tokenizer of a data folder, or anything that `load_tokenizer` takes."""
    if (Path(place) / MANIFEST_FILE).is_file():
        return _read_data(Path(place), read_manifest(Path(place)))
    tokenizer, end_token = load_tokenizer(place), None
    with suppress(ValueError):
        end_token = find_end_token(tokenizer)
    return Vocabulary(tokenizer, end_token)


def read_folder(folder: Path) -> Vocabulary:
    """The tokenizer in a Hugging Face folder."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise ValueError(f"{folder} has no {TOKENIZER_FILE}: name its tokenizer with --tokenizer")
    return Vocabulary(load_tokenizer(folder), find_end(folder))


def find_end(folder: Path) -> int | None:
    """The id that ends a document, by the files in a folder; None if unknown.

    An export records it. Otherwise the usual names in the tokenizer decide, then the configuration.
    """
    tree = read_tree(folder) if (folder / CONFIG_FILE).is_file() else {}
    noted = _find_noted(folder) if tree.get("model_type") == OWN_KIND else None
    if noted is not None:
        return noted
    if (folder / TOKENIZER_FILE).is_file():
        with suppress(ValueError):
            return find_end_token(load_tokenizer(folder))
    eos = tree.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    return eos if isinstance(eos, int) else None


def _find_noted(folder: Path) -> int | None:
    """The end token as our export writes it: as the token that begins a document."""
    try:
        noted = parse_json((folder / "generation_config.json").read_bytes())["bos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return noted if isinstance(noted, int) else None


def _read_data(folder: Path, manifest: Manifest) -> Vocabulary:
    if manifest.tokenizer is None:
        raise ValueError(
            f"the data in {folder} came as ids, without a tokenizer: name it with --tokenizer"
        )
    manifest.check_tokenizer(folder)
    return Vocabulary(load_tokenizer(folder / manifest.tokenizer), manifest.end_token)


def _read_copy(path: Path, used: Mapping[str, Any]) -> Vocabulary:
    """The tokenizer in a run's folder, whose hash and end token older releases did not record."""
    wanted = used.get("tokenizer_hash")
    if wanted is not None and hash_file(path) != wanted:
        raise ValueError(
            f"{path} is not the tokenizer that the run was trained with: put that one back, or "
            f"name it with --tokenizer"
        )
    found = read_vocabulary(path)
    return found._replace(end_token=used.get("end_token", found.end_token))
