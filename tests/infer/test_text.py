"""Streamed text equals the text of all tokens at once, however it is tokenized."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from depthmix.data.tokenizer import train_tokenizer
from depthmix.infer.text import TextStream

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# few letters, so that stop strings often begin and overlap
LETTERS = st.text("abé€😀\ufffd", max_size=30)
STOPS = st.lists(st.text("abé€😀\ufffd", min_size=1, max_size=4), max_size=3)
TOKENIZER = train_tokenizer(["the cat sat on the mat, déjà vu €5 😀😀\n" * 20], 320, parallel=False)


class Bytes:
    """A tokenizer whose tokens are given byte strings; counts the tokens it decodes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.num_decoded = 0

    def __call__(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string to complete, checked letter by letter."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def stream_pieces(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """The text emitted for every token and at the end."""
    stream = TextStream(Bytes(pieces), stop)
    told = [stream.add(token) for token in range(len(pieces))]
    return [*told, stream.finish()], stream.stopped


def split_bytes(data: bytes, draw: st.DataObject) -> list[bytes]:
    cuts = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    pieces, start = [], 0
    for end, here in enumerate(cuts):
        if here:
            pieces.append(data[start:end])
            start = end
    return [*pieces, data[start:]]


@settings(max_examples=300)
@given(TEXTS | LETTERS, STOPS, st.data())
def test_stream_equals_the_whole_text(text: str, stop: list[str], data: st.DataObject) -> None:
    told, stopped = stream_pieces(split_bytes(text.encode(), data), stop)
    assert ("".join(told), stopped) == cut(text, stop)


@given(st.binary(max_size=150), STOPS, st.data())
def test_bytes_that_are_no_text(raw: bytes, stop: list[str], data: st.DataObject) -> None:
    told, stopped = stream_pieces(split_bytes(raw, data), stop)
    assert ("".join(told), stopped) == cut(raw.decode(errors="replace"), stop)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(["€", "😀", "\ufffd", "a", b"\xe2", b"\x82", b"\xf0"])), STOPS)
def test_long_and_broken_text_in_single_bytes(items: list[str | bytes], stop: list[str]) -> None:
    raw = b"".join(i.encode() if isinstance(i, str) else i for i in items) * 3
    told, stopped = stream_pieces([bytes([byte]) for byte in raw], stop)
    assert ("".join(told), stopped) == cut(raw.decode(errors="replace"), stop)


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("aé€", []),
        ("x\ufffdé", ["\ufffd"]),
        ("\ufffd\ufffd", ["\ufffd\ufffd"]),
        ("😀ab", ["ab"]),
        ("ababac", ["abac"]),
        # one is a prefix of the other
        ("xabcd", ["abc", "ab"]),
        ("xabx", ["abc", "ab"]),
        # one lies inside the other, which is being held back when it completes
        ("xabcd", ["abcd", "bc"]),
        ("xabxy", ["abcd", "bx"]),
        ("aab€", ["b€", "aab€"]),
        ("xab", ["abc"]),
    ],
)
def test_every_split(text: str, stop: list[str]) -> None:
    raw = text.encode()
    for cuts in product([False, True], repeat=len(raw) - 1):
        ends = [end for end, here in enumerate(cuts, start=1) if here] + [len(raw)]
        pieces = [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        told, stopped = stream_pieces(pieces, stop)
        assert ("".join(told), stopped) == cut(text, stop), pieces


@given(TEXTS, STOPS)
@example("the cat sat on the mat, déjà vu", ["vu", "mat, d"])
def test_a_real_tokenizer(text: str, stop: list[str]) -> None:
    stream = TextStream(TOKENIZER.decode, stop)
    told = [stream.add(token) for token in TOKENIZER.encode(text, add_special_tokens=False).ids]
    assert ("".join(told) + stream.finish(), stream.stopped) == cut(text, stop)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    pieces = [b"a", b"b\xe2", b"\x82", b"\xacc", b"\xef\xbf\xbd", b"d"]
    assert stream_pieces(pieces)[0] == ["a", "b", "", "€c", "", "\ufffdd", ""]
    # only the longest prefix of a possible stop string is held back
    letters = [b"x", b"a", b"b", b"x", b"a"]
    assert stream_pieces(letters, ["abc"])[0] == ["x", "", "", "abx", "", "a"]
    assert stream_pieces([b"aaab", b"a"], ["aabc"])[0] == ["a", "aab", "a"]


def test_nothing_comes_after_a_stop_string() -> None:
    stream = TextStream(Bytes([b"one ", b"st", b"op two", b"three"]), ["stop"])
    assert [stream.add(0), stream.add(1), stream.stopped] == ["one ", "", False]
    assert [stream.add(2), stream.stopped] == ["", True]
    assert [stream.add(3), stream.finish()] == ["", ""]


def test_a_stop_string_may_be_complete_at_the_end_only() -> None:
    stream = TextStream(Bytes([b"a", b"\xe2\x82"]), ["a\ufffd"])
    assert [stream.add(0), stream.add(1), stream.stopped] == ["", "", False]
    assert [stream.finish(), stream.stopped] == ["", True]


def test_finish_tells_the_rest_once() -> None:
    stream = TextStream(Bytes([b"ab\xe2"]), ["bc", "b\ufffdc"])
    assert stream.add(0) == "a"
    assert stream.finish() == "b\ufffd"
    assert stream.finish() == ""
    assert not stream.stopped


@pytest.mark.parametrize(
    "raw",
    [
        b"plain text ",
        "€😀é".encode(),
        "\ufffd".encode(),
        b"\xff",
        b"\xe2\x82",
        b"\xf0\x9f\x98",
        b"\xe0\x80",
    ],
)
def test_work_is_linear_in_the_length(raw: bytes) -> None:
    pieces = [bytes([byte]) for byte in raw] * (4000 // len(raw))
    decode = Bytes(pieces)
    stream = TextStream(decode, ["never"])
    told = [stream.add(token) for token in range(len(pieces))]
    assert "".join(told) + stream.finish() == b"".join(pieces).decode(errors="replace")
    assert decode.num_decoded < 40 * len(pieces)


def test_tokens_without_text_change_nothing() -> None:
    # tokens without text may occur inside a character
    pieces = [b"a\xe2", *[b""] * 100, b"\x82\xac", *[b""] * 100, b"b"]
    told = stream_pieces(pieces)[0]
    assert "".join(told) == "a€b"
    assert told[101] == "€"


@pytest.mark.parametrize("before", range(10, 20))
def test_a_character_whose_middle_begins_the_window(before: int) -> None:
    pieces = [*[b"x"] * before, b"\xe2", b"\x82", *[b""] * 30, b"\xac"]
    assert "".join(stream_pieces(pieces)[0]) == "x" * before + "€"


def test_text_that_depends_on_what_came_before() -> None:
    def decode(tokens: list[int]) -> str:
        """Every third token is a quotation mark; they alternately open and close."""
        text = ""
        for token in tokens:
            text += "a" if token % 3 else "”" if text.count("“") > text.count("”") else "“"
        return text

    stream = TextStream(decode)
    told = [stream.add(token) for token in range(200)]
    assert "".join(told) == decode(list(range(200)))


def test_words_that_lose_a_leading_space() -> None:
    words = [" " + word for word in ("one", "two", "three", "four")] * 20

    def decode(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens).removeprefix(" ")

    stream = TextStream(decode)
    told = [stream.add(token) for token in range(len(words))]
    assert told == ["one", *words[1:]]


@pytest.mark.parametrize("stop", ["end", [""], ["a", ""]])
def test_bad_stop_strings_are_refused(stop: Sequence[str]) -> None:
    with pytest.raises(ValueError, match=r"stop = .* must be a list of non-empty strings"):
        TextStream(TOKENIZER.decode, stop)
