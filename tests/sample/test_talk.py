"""A conversation: what the model reads of it, what commands do, and what stops an answer."""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from depthmix.infer import SamplingParams
from depthmix.models import Chat, Vocabulary
from depthmix.sample import Sampler
from depthmix.sample.show import hide_controls
from depthmix.sample.talk import Talk
from served_models import CHAT, END, make_network, make_tokenizer

VOCABULARY = Vocabulary(make_tokenizer(), END)
PARAMS = SamplingParams(max_tokens=8, seed=3)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TERM", "NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


class Scene:
    """A conversation, what the engine was asked, and what was printed."""

    def __init__(
        self, chat: Chat | None = CHAT, params: SamplingParams = PARAMS, **options: Any
    ) -> None:
        self.screen = io.StringIO()
        self.sampler = Sampler(make_network(), VOCABULARY, max_batch=1)
        self.asked: list[str] = []
        add = self.sampler.add

        def listen(prompt: Any, params: SamplingParams) -> int:
            self.asked.append(VOCABULARY.decode(prompt))
            self.params = params
            return add(prompt, params)

        self.sampler.add = listen
        self.talk = Talk(self.sampler, params, chat=chat, screen=self.screen, **options)

    def say(self, text: str, stopped: Callable[[], object] = lambda: False) -> str:
        """Returns what was printed."""
        before = self.screen.tell()
        self.told = self.talk.answer(text, stopped)
        return self.screen.getvalue()[before:]

    def generate(self, text: str, *, begin: bool) -> str:
        """The engine's own text after another."""
        encode = VOCABULARY.encode if begin else VOCABULARY.tokenize
        params = replace(PARAMS, stop_tokens=[END])
        engine = Sampler(make_network(), VOCABULARY, max_batch=1).engine
        return engine.generate([encode(text)], params)[0].samples[0].text or ""


def test_chat_keeps_history() -> None:
    scene = Scene(system="be kind")
    prompt = "[system]be kind\n[user]hi\n[assistant]"
    answer = scene.generate(prompt, begin=False)
    assert scene.say("hi") == hide_controls(answer) + "\n"
    assert re.match(r"8 tokens, [\d.,]+ tokens/s; [\d.]+% of blocks executed", scene.told)
    scene.say("more")
    more = f"{prompt}{answer}\n[user]more\n[assistant]"
    assert scene.asked == [prompt, more]
    assert END in scene.params.stop_tokens
    assert scene.talk.command("/reset") == "started a new conversation"
    scene.say("hi")
    assert scene.asked[-1] == prompt


def test_without_a_template_the_text_goes_on() -> None:
    scene = Scene(chat=None)
    answer = scene.generate("once", begin=True)
    scene.say("once")
    scene.say("")
    scene.say(" and")
    start, second, third = (asked.removeprefix("<|endoftext|>") for asked in scene.asked)
    assert (start, second) == ("once", f"once{answer}")
    assert third.startswith(second)
    assert third.endswith(" and")
    assert "no chat template" in scene.talk.begin()
    with pytest.raises(ValueError, match="--system needs a chat template"):
        Scene(chat=None, system="be kind")


def test_stopped_answer_is_kept() -> None:
    scene = Scene(params=SamplingParams(max_tokens=100, seed=3))
    steps: list[int] = []
    printed = scene.say("hi", lambda: len(steps) > 4 or steps.append(1))
    assert scene.told.startswith("5 tokens")
    assert scene.sampler.engine.pages.num_used == 0
    (said, kept) = scene.talk.messages
    assert said == {"role": "user", "content": "hi"}
    assert printed == hide_controls(kept["content"]) + "\n"
    scene.say("more", lambda: True)
    assert f"[assistant]{kept['content']}\n[user]more" in scene.asked[-1]


def test_history_that_does_not_fit_is_left_out() -> None:
    # the model reads 512 tokens, of which a byte is one
    scene = Scene()
    for letter in "abcd":
        scene.say(letter * 150)
    first, *_, last = scene.asked
    assert "a" * 150 in first
    assert "a" * 150 not in last
    assert last.startswith("[user]")
    assert last.endswith("d" * 150 + "\n[assistant]")
    assert "the first 4 messages no longer fit and are left out" in scene.told
    with pytest.raises(ValueError, match="this has 618 tokens, and the model reads 512: shorten"):
        scene.say("e" * 600)
    # what was refused has not been said
    assert scene.talk.messages[-2]["content"] == "d" * 150

    text = Scene(chat=None)
    text.say("x" * 600)
    assert len(VOCABULARY.tokenize(text.asked[0])) == 512 - 8
    assert "the first 97 tokens no longer fit and are left out" in text.told


def test_depth_is_shaded_on_request() -> None:
    scene = Scene()
    plain = scene.say("hi")
    scene.talk.command("/reset")
    assert scene.talk.command("/depth").startswith("[token]N used N of the 2 routed")
    shaded = scene.say("hi")
    assert re.search(r"\[[^\]]+\][12]", shaded)
    assert re.sub(r"\[(.+?)\][12]|↵", r"\1", shaded, flags=re.DOTALL) == plain
    assert scene.talk.command("/depth") == "answers are not shaded"
    scene.talk.command("/reset")
    assert scene.say("hi") == plain
    assert Scene(color=True).talk.shader is not None


def test_settings_are_shown_and_changed() -> None:
    scene = Scene()
    assert "max_tokens=8  temperature=1.0" in scene.talk.command("/settings")
    told = scene.talk.command("/settings max-tokens=3 temperature=0.5 seed=none")
    assert "max_tokens=3  temperature=0.5" in told
    assert "seed=none" in told
    scene.say("hi")
    assert (scene.params.max_tokens, scene.params.temperature, scene.params.seed) == (3, 0.5, None)
    for line, sentence in (
        ("/settings colour=1", "unknown setting colour: the settings are max_tokens, temperature"),
        ("/settings top_k=many", "top_k=many does not fit: it must be a number"),
        ("/settings temperature 1", "temperature has no value: write /settings temperature=VALUE"),
        ("/settings top_p=2", "top_p = 2"),
        ("/nope", "unknown command /nope: /help lists the commands"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            scene.talk.command(line)
    assert scene.talk.params.max_tokens == 3
    for name in ("/depth", "/settings", "/reset", "/quit"):
        assert name in scene.talk.command("/help")


def test_error_of_template_is_reported() -> None:
    refusing = Chat("{{ raise_exception('no users') }}", (END,))
    with pytest.raises(ValueError, match="the chat template failed: no users"):
        Scene(chat=refusing).say("hi")


def test_a_failing_step_leaves_nothing_behind() -> None:
    scene = Scene()
    step = scene.sampler.engine.step

    def fail() -> Any:
        raise RuntimeError("no")

    scene.sampler.engine.step = fail
    with pytest.raises(RuntimeError, match="no"):
        scene.say("hi")
    assert not scene.sampler.engine.has_work
    assert scene.talk.messages == []
    scene.sampler.engine.step = step
    scene.say("hi")
    assert scene.asked[0] == scene.asked[1]
