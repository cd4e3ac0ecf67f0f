"""A conversation with a model: its history, the part that still fits, and its commands."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from depthmix.infer import SamplingParams
from depthmix.infer.results import Sample
from depthmix.models import Chat
from depthmix.models.chat import list_ends, render_chat
from depthmix.sample.sampler import Sampler
from depthmix.sample.show import (
    DepthText,
    Screen,
    Shader,
    choose_palette,
    hide_controls,
    summarize,
)

# the sampling parameters that `/settings` changes
SETTINGS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
NONE = "none"

HELP = """\
/depth                 shade answers by the routed blocks that each token used, or no longer
/settings              show the settings
/settings NAME=VALUE   change one, for example temperature=0.5; seed=none draws a new seed each time
/reset                 start a new conversation
/help                  this list
/quit                  quit, like Ctrl-D
//…                    a text that begins with a slash
A \\ at the end of a line continues it on the next one. Ctrl-C stops an answer."""


class Talk:
    """A conversation, with the model's chat template or as one text that the model continues."""

    def __init__(
        self,
        sampler: Sampler,
        params: SamplingParams,
        *,
        chat: Chat | None,
        system: str | None = None,
        color: bool = False,
        screen: Screen,
    ) -> None:
        """`system` is the system prompt; `color` shades answers from the start."""
        if system is not None and chat is None:
            raise ValueError("--system needs a chat template, and this model has none")
        self.sampler, self.params, self.chat, self.screen = sampler, params, chat, screen
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.text = ""
        """Without a template: everything so far."""
        self.shader: Shader | None = None
        self._reset()
        if color:
            self._toggle_depth()

    def begin(self) -> str:
        """The opening message."""
        how = (
            "Using the model's chat template."
            if self.chat is not None
            else "It has no chat template, so it continues your text; an empty line continues it."
        )
        return f"{how} /help lists commands; Ctrl-D quits."

    def command(self, line: str) -> str:
        """Run a line that begins with a slash; returns the message to print."""
        name, _, rest = line.partition(" ")
        match name:
            case "/help":
                return HELP
            case "/reset":
                self._reset()
                return "started a new conversation"
            case "/depth":
                return self._toggle_depth()
            case "/settings":
                return self._change(rest) if rest.strip() else self._list_settings()
        raise ValueError(f"unknown command {name}: /help lists the commands")

    def answer(self, text: str, stopped: Callable[[], object] = lambda: False) -> str:
        """Stream the model's answer to a text; returns a line of statistics.

        `stopped` is checked between steps; the part of a stopped answer that was generated stays in
        the conversation.
        """
        said, messages, notes = self.text + text, [*self.messages], []
        if self.chat is not None:
            messages.append({"role": "user", "content": text})
            prompt, num_left_out = self._fit_messages(self.chat, messages)
            if num_left_out:
                notes.append(f"the first {num_left_out} messages no longer fit and are left out")
        else:
            prompt, num_left_out = self._fit_text(said)
            if num_left_out:
                notes.append(f"the first {num_left_out} tokens no longer fit and are left out")
        ends = list_ends(self.sampler.vocabulary.end_token, self.chat)
        params = dataclasses.replace(self.params, stop_tokens=ends)
        sample = self._write(prompt, params, stopped)
        if sample.error is not None:
            raise ValueError(f"the answer could not be decoded: {sample.error}")
        # at the end, so that a refused text is not part of the conversation
        self.text = said + (sample.text or "")
        self.messages = [*messages, {"role": "assistant", "content": sample.text or ""}]
        summary = summarize([sample], self.sampler.engine.stats(), self.sampler.tokens_per_second)
        return "; ".join([summary, *notes])

    def _write(
        self, prompt: list[int], params: SamplingParams, stopped: Callable[[], object]
    ) -> Sample:
        sampler, found = self.sampler, None
        sampler.start_over()
        sampler.add(prompt, params)
        shaded, is_line_open = DepthText(), True

        def show(text: str) -> None:
            nonlocal is_line_open
            if text:
                # replace what a terminal's encoding does not have
                encoding = getattr(self.screen, "encoding", None) or "utf-8"
                self.screen.write(text.encode(encoding, "replace").decode(encoding))
                self.screen.flush()
                is_line_open = not text.endswith("\n")

        try:
            for events in sampler.run(stopped):
                for event in events:
                    found = event.result or found
                    if self.shader is None:
                        show(hide_controls(event.text))
                        continue
                    shaded.add_event(event)
                    pieces = shaded.take() if event.result is None else shaded.finish()
                    show("".join(map(self.shader.paint, pieces)))
        finally:
            # after any error, no request keeps running
            for request in sampler.requests:
                sampler.engine.cancel(request)
            if is_line_open:
                show("\n")
        assert found is not None
        return found

    def _fit_messages(self, chat: Chat, messages: list[dict[str, str]]) -> tuple[list[int], int]:
        """A conversation's tokens, without the oldest messages if they do not fit."""
        import jinja2

        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        num_left_out = 0
        while True:
            kept = [*first, *messages[num_left_out:]]
            try:
                text = render_chat(chat, kept, add_generation_prompt=True)
            except jinja2.TemplateError as error:
                raise ValueError(f"the chat template failed: {error}") from error
            tokens = self.sampler.vocabulary.tokenize(text)
            is_last = num_left_out + 1 >= len(messages)
            if len(tokens) + (0 if is_last else self._count_reserve()) <= self._longest:
                return tokens, num_left_out
            if is_last:
                raise ValueError(
                    f"this has {len(tokens)} tokens, and the model reads {self._longest}: shorten "
                    f"it"
                )
            # drop a question together with its answer
            num_left_out += 2

    def _fit_text(self, text: str) -> tuple[list[int], int]:
        """A text's tokens, without the oldest if they do not fit."""
        tokens = self.sampler.vocabulary.encode(text)
        most = self._longest - self._count_reserve()
        num_left_out = max(0, len(tokens) - most)
        return tokens[num_left_out:], num_left_out

    @property
    def _longest(self) -> int:
        return self.sampler.engine.config.max_seq_len

    def _count_reserve(self) -> int:
        """Room for an answer."""
        return min(self.params.max_tokens, self._longest // 2)

    def _reset(self) -> None:
        self.messages, self.text = [], ""

    def _toggle_depth(self) -> str:
        if self.shader is not None:
            self.shader = None
            return "answers are not shaded"
        num_blocks = len(self.sampler.engine.config.routed_layers)
        if not num_blocks:
            raise ValueError("this model has no routed blocks, so there is no depth to show")
        self.shader = Shader(num_blocks, choose_palette(self.screen))
        return self.shader.explain()

    def _list_settings(self) -> str:
        values = ((name, getattr(self.params, name)) for name in SETTINGS)
        return "  ".join(f"{name}={NONE if value is None else value}" for name, value in values)

    def _change(self, rest: str) -> str:
        changes: dict[str, Any] = {}
        for part in rest.split():
            name, equals, value = part.partition("=")
            name = name.replace("-", "_")
            if name not in SETTINGS:
                raise ValueError(f"unknown setting {name}: the settings are {', '.join(SETTINGS)}")
            if not equals:
                raise ValueError(f"{name} has no value: write /settings {name}=VALUE")
            is_none = name == "seed" and value == NONE
            changes[name] = None if is_none else _read_number(name, value)
        self.params = dataclasses.replace(self.params, **changes)
        return self._list_settings()


def _read_number(name: str, text: str) -> int | float:
    """A number, whole if written as one; `SamplingParams` checks that it may be."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise ValueError(f"{name}={text} does not fit: it must be a number")
