"""One of the models that are served, with the worker that runs it.

Owns what a request needs of its model before it is put in line: tokens of its prompt, and whether
they fit. Does not know routes, nor the other models.
"""

import asyncio
from collections.abc import Sequence

import jinja2

from depthmix.models.chat import render_chat
from depthmix.serve.answers import ServedModel
from depthmix.serve.limits import Limits
from depthmix.serve.problems import RefusedError
from depthmix.serve.shapes import ChatMessage, ModelCard
from depthmix.serve.worker import Worker

# texts as long as this are encoded in a thread, so that others need not wait
LONG_TEXT = 16_384


class Lane:
    """A model and the line of its requests."""

    def __init__(self, model: ServedModel, worker: Worker, limits: Limits) -> None:
        self.model, self.worker, self.limits = model, worker, limits

    async def encode(self, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens; it begins as a document does, unless it is tokens already."""
        if isinstance(prompt, str):
            tokens = await self.encode_text(prompt, begin=True)
        else:
            self.check_ids(prompt)
            tokens = prompt
        self._check_length(tokens)
        return tokens

    async def encode_text(self, text: str, *, begin: bool) -> list[int]:
        """A text's tokens, of any number."""
        encode = self.model.vocabulary.encode if begin else self.model.vocabulary.tokenize
        try:
            if len(text) < LONG_TEXT:
                return encode(text)
            return await asyncio.to_thread(encode, text)
        except ValueError as error:
            raise RefusedError(str(error)) from error

    async def encode_messages(self, messages: Sequence[ChatMessage]) -> list[int]:
        """A conversation's tokens, by the model's own chat template."""
        chat = self.model.chat
        if chat is None:
            raise RefusedError(
                f"'{self.model.name}' has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        told = [message.read() for message in messages]
        try:
            text = render_chat(chat, told, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise RefusedError(
                f"the chat template does not take these messages: {error}", param="messages"
            ) from error
        tokens = await self.encode_text(text, begin=False)
        self._check_length(tokens)
        return tokens

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Refuse what is no token of this model."""
        size = self.model.config.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RefusedError(f"{wrong} is no token: they are 0 to {size - 1}")

    def count_room(self, num_prompt: int) -> int:
        """Tokens that may follow so long a prompt in the model and in the cache."""
        config, pages = self.model.config, self.worker.check_open().pages
        room = pages.num_pages // config.num_layers * pages.page_size
        return max(1, min(config.max_seq_len, room) - num_prompt + 1)

    def make_card(self) -> ModelCard:
        """What clients are told of the model."""
        model = self.model
        return ModelCard(
            id=model.name,
            created=model.created,
            max_model_len=model.config.max_seq_len,
            num_blocks=model.config.num_layers,
            routed_blocks=list(model.config.routed_layers),
            has_chat_template=model.chat is not None,
        )

    def _check_length(self, tokens: Sequence[int]) -> None:
        longest = self.model.config.max_seq_len
        if self.limits.max_prompt_tokens is not None:
            longest = min(longest, self.limits.max_prompt_tokens)
        if len(tokens) > longest:
            raise RefusedError(
                f"the prompt has {len(tokens)} tokens, and {longest} are allowed: shorten it",
                code="context_length_exceeded",
            )
