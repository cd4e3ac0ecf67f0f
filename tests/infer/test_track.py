"""A sample during generation: why it ends, what it emits, and what it holds back."""

from typing import Any

import numpy as np
import pytest
import torch

from depthmix.infer.depth import DepthMeter
from depthmix.infer.results import Alternative
from depthmix.infer.sampling import SamplingParams
from depthmix.infer.text import TextStream
from depthmix.infer.track import Track
from variants import make_config

LETTERS = "abcdefgh"


def make_track(*, text: bool = True, penalty: bool = False, **params: Any) -> Track:
    """A sample with a prompt of two tokens; token n is the letter n."""
    wish = SamplingParams(**params)
    decode = TextStream(lambda tokens: "".join(LETTERS[t] for t in tokens), wish.stop)
    return Track(
        request=3,
        number=0,
        params=wish,
        seed=0,
        prompt=np.array([0, 1]),
        max_new=4,
        meter=DepthMeter(make_config("mod")),
        stream=decode if text else None,
        seen=torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]) if penalty else None,
    )


def test_tokens_are_the_prompts_then_those_generated() -> None:
    track = make_track()
    for token in (5, 6, 7):
        track.take(token, 0.0)
    known = [0, 1, 5, 6, 7]
    for start in range(6):
        for count in range(1, 7):
            # those past the end are not known yet
            assert list(track.list_tokens(start, count)) == known[start : start + count]


def test_it_ends_by_length() -> None:
    track = make_track()
    ends = [track.take(token, -0.5) for token in (2, 3, 2, 5)]
    assert ends == [("c", None), ("d", None), ("c", None), ("f", "length")]
    assert track.num_new == 4
    assert track.flush() == ""
    sample = track.end("length")
    assert (sample.text, sample.tokens) == ("cdcf", (2, 3, 2, 5))
    assert sample.finish == "length"
    # not requested
    assert sample.logprobs is None
    assert sample.top_logprobs is None


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_stop_token_is_a_token_and_no_text(num_before: int) -> None:
    """Even if it is the last token allowed."""
    track = make_track(stop_tokens=[7])
    for _ in range(num_before):
        assert track.take(2, 0.0) == ("c", None)
    assert track.take(7, 0.0) == ("", "stop")
    sample = track.end("stop")
    assert sample.tokens == (*[2] * num_before, 7)
    assert sample.text == "c" * num_before


def test_a_stop_string_is_held_back_and_cut() -> None:
    track = make_track(stop=["de"])
    assert track.take(2, 0.0) == ("c", None)
    assert track.take(3, 0.0) == ("", None)
    assert track.take(4, 0.0) == ("", "stop")
    assert track.flush() == ""
    assert track.end("stop").text == "c"


def test_what_was_held_back_is_told_at_the_end() -> None:
    track = make_track(stop=["de"])
    track.take(3, 0.0)
    assert track.flush() == "d"
    sample = track.end("cancelled")
    assert (sample.text, sample.finish) == ("d", "cancelled")


def test_without_a_decoder_there_is_no_text() -> None:
    track = make_track(text=False)
    assert track.take(2, 0.0) == ("", None)
    assert track.flush() == ""
    assert track.end("cancelled").text is None


def test_occurrences_are_counted_for_penalties() -> None:
    track = make_track(penalty=True)
    for token in (5, 1, 5):
        track.take(token, 0.0)
    assert track.seen is not None
    assert track.seen.tolist() == [1, 3, 0, 0, 0, 4, 0, 0]


@pytest.mark.parametrize("wish", [0, 1, 2])
def test_as_many_alternatives_as_were_asked_for(wish: int) -> None:
    """The batch may have requested more."""
    track = make_track(logprobs=wish)
    for token, logprob in ((2, -1.0), (3, -2.0)):
        track.take(token, logprob, ([token, 6, 7], [logprob, -5.0, -6.0]))
    sample = track.end("cancelled")
    assert sample.logprobs == (-1.0, -2.0)
    places = [
        (Alternative(2, -1.0), Alternative(6, -5.0)),
        (Alternative(3, -2.0), Alternative(6, -5.0)),
    ]
    assert sample.top_logprobs == (tuple(p[:wish] for p in places) if wish else None)
