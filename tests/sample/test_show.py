"""Depth made visible: every character once, with the depth of its token."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthmix.infer.depth import Depth
from depthmix.infer.results import Alternative, Event, Sample, Stats
from depthmix.infer.text import TextStream
from depthmix.sample.show import (
    DepthText,
    ShadedText,
    Shader,
    choose_palette,
    hide_controls,
    shade_tokens,
    summarize,
    to_dict,
)

TEXT = "aé€𝄞\nb"


def decode(tokens: list[int]) -> str:
    """Each token is a byte."""
    return bytes(tokens).decode(errors="replace")


def take_depths(pieces: list[ShadedText]) -> list[tuple[str, int | None]]:
    return [(char, piece.depth) for piece in pieces for char in piece.text]


@given(st.lists(st.tuples(st.sampled_from(TEXT), st.integers(0, 3))), st.booleans())
def test_character_has_depth_of_deepest_byte(
    chars: list[tuple[str, int]], last_computed: bool
) -> None:
    tokens, paths = [], []
    for char, depth in chars:
        count = len(char.encode())
        tokens += char.encode()
        # its first byte is the deepest
        paths += [(True,) * depth + (False,) * (3 - depth), *[(False,) * 3] * (count - 1)]
    text = "".join(char for char, _ in chars)
    shown = take_depths(shade_tokens(decode, tokens, paths if last_computed else paths[:-1], text))
    wanted: list[tuple[str, int | None]] = list(chars)
    if wanted and not last_computed:
        wanted[-1] = (wanted[-1][0], None)
    assert shown == wanted


@given(
    st.lists(st.sampled_from(TEXT), max_size=20).map("".join), st.sampled_from(["b", "é\n", "\n"])
)
def test_streamed_pieces_are_the_text_up_to_a_stop_string(text: str, stop: str) -> None:
    stream, own, joined = TextStream(decode, [stop]), TextStream(decode), DepthText()
    shown, waiting = "", None
    for token in text.encode():
        if stream.stopped:
            break
        joined.add_text(stream.add(token))
        if waiting is not None:
            joined.add_token(own.add(waiting), (True,))
        waiting = token
        shown += "".join(piece.text for piece in joined.take())
    joined.add_text(stream.finish())
    shown += "".join(piece.text for piece in joined.finish())
    assert shown == text.split(stop)[0]


def test_text_waits_for_its_depth() -> None:
    joined = DepthText()
    joined.add_text("a")
    assert joined.take() == []
    joined.add_token("a", (True, False))
    assert joined.take() == [ShadedText("a", 1)]
    joined.add_text("b")
    assert joined.finish() == [ShadedText("b", None)]
    assert joined.finish() == []


def test_depth_waits_for_its_text() -> None:
    joined = DepthText()
    joined.add_token("ab", (True,))
    joined.add_text("a")
    assert joined.take() == []
    # cut inside the token by a stop string
    assert joined.finish() == [ShadedText("a", 1)]


@given(
    st.lists(st.tuples(st.sampled_from(TEXT), st.integers(0, 3)), min_size=1),
    st.sampled_from([None, "b", "é\n"]),
    st.booleans(),
)
def test_events_shade_as_whole_samples_do(
    chars: list[tuple[str, int]], stop: str | None, cancelled: bool
) -> None:
    """Whatever stop strings hold back, and without decoding twice where there are none."""
    tokens = [(token, depth) for char, depth in chars for token in char.encode()]
    stream = TextStream(decode, [stop] if stop else [])
    joined = DepthText(TextStream(decode) if stop else None)
    shown, seen, path, text = [], [], (), ""
    for i, (token, depth) in enumerate(tokens):
        more = stream.add(token)
        ended = stream.stopped or (i == len(tokens) - 1 and not cancelled)
        more += stream.finish() if ended else ""
        joined.add_event(Event(0, 0, token, more, path, None))
        shown += joined.take()
        path, text = (True,) * depth + (False,) * (3 - depth), text + more
        seen.append((token, path))
        if ended:
            break
    else:
        rest = stream.finish()
        joined.add_event(Event(0, 0, None, rest, (), None))
        text += rest
    shown += joined.finish()
    # the last token was never computed
    told, paths = [token for token, _ in seen], [path for _, path in seen[:-1]]
    assert take_depths(shown) == take_depths(shade_tokens(decode, told, paths, text))
    assert "".join(piece.text for piece in shown) == text


def test_brackets_name_the_depth() -> None:
    shader = Shader(4, None)
    shown = [ShadedText("def", 0), ShadedText(" f", 3), ShadedText("()", 1), ShadedText(":", None)]
    assert "".join(map(shader.paint, shown)) == "def[ f]3[()]1:"
    assert shader.paint(ShadedText("\n  ", 2)) == "[↵\n  ]2"
    assert "4 routed blocks" in shader.explain()


@pytest.mark.parametrize("palette", ["rgb", "256"])
def test_colours_go_from_light_to_strong(palette: str) -> None:
    shader = Shader(5, palette)  # pyrefly: ignore[bad-argument-type]
    painted = [shader.paint(ShadedText("x", depth)) for depth in range(6)]
    assert len(set(painted)) == 6
    assert all(re.fullmatch(r"\x1b\[48[0-9;]+mx\x1b\[0m", text) for text in painted)
    # dark letters on light, light letters on dark
    light, dark = (
        ("38;2;0;0;0", "38;2;255;255;255") if palette == "rgb" else ("38;5;16", "38;5;231")
    )
    assert light in painted[0]
    assert dark in painted[-1]
    assert shader.paint(ShadedText("x", None)) == "x"
    if palette == "rgb":
        reds = [int(text.split(";")[2]) for text in painted]
        assert reds == sorted(reds, reverse=True)


def test_no_background_crosses_the_end_of_a_line() -> None:
    painted = Shader(1, "256").paint(ShadedText("a\n\nb", 1))
    for line in painted.split("\n"):
        assert line.count("\x1b[48") == line.count("\x1b[0m") == 1
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == "a↵\n↵\nb"


def test_a_legend_has_both_ends_and_stays_short() -> None:
    for num_blocks in (1, 8, 9, 40):
        told = re.sub(r"\x1b\[[0-9;]*m", "", Shader(num_blocks, "256").explain())
        steps = [int(number) for number in re.findall(r" (\d+) ", told.split(" of ")[0] + " ")]
        assert (steps[0], steps[-1]) == (0, num_blocks)
        assert len(steps) <= 9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("settings", "terminal", "wanted"),
    [
        ({}, True, "256"),
        ({"COLORTERM": "truecolor"}, True, "rgb"),
        ({}, False, None),
        ({"FORCE_COLOR": "1"}, False, "256"),
        ({"NO_COLOR": "1"}, True, None),
        ({"NO_COLOR": ""}, True, "256"),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, None),
        ({"TERM": "dumb"}, True, None),
    ],
)
def test_the_environment_chooses_the_palette(
    settings: dict[str, str], terminal: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert choose_palette(Terminal() if terminal else io.StringIO()) == wanted


def test_control_characters_are_hidden_on_a_terminal() -> None:
    hidden = hide_controls("a\x1b[2J\x07\x9b\x7f\r\n\tb")
    assert hidden == "a␛[2J␇\ufffd␡␍\n\tb"
    assert Shader(1, None).paint(ShadedText("\x1b", 0)) == "␛"


DEPTH = Depth(((True, False), (False, False)), 60, 100, 5, 8)
SAMPLE = Sample((7, 8), "hi", "length", (-1.0, -2.0), ((Alternative(7, -1.0),),) * 2, DEPTH)
STATS = Stats(0, 0, 0, 0, 2048, 4096)


def test_summary_reports_savings() -> None:
    told = summarize([SAMPLE, SAMPLE], STATS, 12.34)
    assert told == (
        "4 tokens, 12.3 tokens/s; 62.5% of blocks executed, 40.0% of the dense FLOPs saved; cache "
        "2.00 KiB"
    )
    assert summarize([SAMPLE._replace(tokens=(7,))], STATS, None).startswith("1 token; 62.5%")


def test_a_sample_as_plain_data() -> None:
    tree = to_dict("a", [1, 2], 3, SAMPLE, lambda tokens: f"<{tokens[0]}>")
    assert tree == {
        "prompt": "a",
        "prompt_tokens": [1, 2],
        "sample": 3,
        "text": "hi",
        "tokens": [7, 8],
        "finish": "length",
        "logprobs": [-1.0, -2.0],
        "top_logprobs": [[{"token": 7, "text": "<7>", "logprob": -1.0}]] * 2,
        "depth": {
            "routed_blocks": 2,
            "used_by_token": [1, 0],
            "share_executed": 0.625,
            "share_saved": 0.4,
            "flops": 60,
            "dense_flops": 100,
        },
    }
