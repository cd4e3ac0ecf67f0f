"""One of the models that are served, with the worker that runs it.

Owns what a request needs from its model before it is put in line: the prompt's tokens, and whether
they fit. Does not know routes or other models.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jinja2

from depthmix.models.chat import render_chat
from depthmix.serve.answers import ServedModel
from depthmix.serve.limits import Limits
from depthmix.serve.problems import RefusedError
from depthmix.serve.shapes import ChatMessage, ModelCard
from depthmix.serve.worker import Worker

# more characters, or items, than this take milliseconds
LONG = 4096

Result = TypeVar("Result")


async def run_sized(size: int, work: Callable[[], Result]) -> Result:
    """Do some work, in a thread if it is long, so that other requests need not wait."""
    return work() if size < LONG else await asyncio.to_thread(work)


class Lane:
    """A model and the line of its requests."""

    def __init__(self, model: ServedModel, worker: Worker, limits: Limits) -> None:
        self.model, self.worker, self.limits = model, worker, limits

    async def encode_prompts(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Prompts' tokens; they begin as documents do, unless they are tokens already."""
        size = sum(map(len, prompts))
        return await run_sized(size, lambda: [self._encode(prompt) for prompt in prompts])

    async def encode_text(self, text: str, *, begin: bool) -> list[int]:
        """A text's tokens, of any number."""
        return await run_sized(len(text), partial(self._encode_text, text, begin=begin))

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, of any number."""

        def decode() -> str:
            self._check_ids(tokens)
            return self.model.vocabulary.decode(tokens)

        return await run_sized(len(tokens), decode)

    async def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation's tokens, by the model's own chat template."""
        chat = self.model.chat
        if chat is None:
            raise RefusedError(
                f"'{self.model.name}' has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        texts = [message.read() for message in messages]

        def encode() -> list[int]:
            try:
                text = render_chat(chat, texts, add_generation_prompt=True)
            except jinja2.TemplateError as error:
                raise RefusedError(
                    f"the chat template does not take these messages: {error}", param="messages"
                ) from error
            return self._encode_text(text, begin=False)

        # a template does some work for each message
        size = sum(64 + len(each["content"]) for each in texts)
        tokens = await run_sized(size, encode)
        self._check_length(tokens)
        return tokens

    def count_room(self, num_prompt: int) -> int:
        """Tokens that may follow so long a prompt in the model and in the cache."""
        config, pages = self.model.config, self.worker.check_open().pages
        room = pages.num_pages // config.num_layers * pages.page_size
        return max(1, min(config.max_seq_len, room) - num_prompt + 1)

    def make_card(self) -> ModelCard:
        """What clients can learn about the model."""
        model = self.model
        return ModelCard(
            id=model.name,
            created=model.created,
            max_model_len=model.config.max_seq_len,
            num_blocks=model.config.num_layers,
            routed_blocks=list(model.config.routed_layers),
            has_chat_template=model.chat is not None,
        )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        tokens = self._encode_text(prompt, begin=True) if isinstance(prompt, str) else prompt
        self._check_length(tokens)
        if not isinstance(prompt, str):
            self._check_ids(tokens)
        return tokens

    def _encode_text(self, text: str, *, begin: bool) -> list[int]:
        vocabulary = self.model.vocabulary
        try:
            return vocabulary.encode(text) if begin else vocabulary.tokenize(text)
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self.model.config.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RefusedError(f"{wrong} is not a token: they are 0 to {size - 1}")

    def _check_length(self, tokens: Sequence[int]) -> None:
        longest = self.model.config.max_seq_len
        if self.limits.max_prompt_tokens is not None:
            longest = min(longest, self.limits.max_prompt_tokens)
        if len(tokens) > longest:
            raise RefusedError(
                f"the prompt has {len(tokens)} tokens, and {longest} are allowed: shorten it",
                code="context_length_exceeded",
            )
