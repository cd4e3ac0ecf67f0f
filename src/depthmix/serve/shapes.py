"""Requests and answers as they travel: OpenAI's shapes, and what we add to them.

Owns which parameters there are, what they may be, and the sentence for those that are not. A
parameter that is not supported is refused by its name and never ignored; null is the same as
leaving it out. Knows nothing of the engine but its `SamplingParams`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from depthmix.config.fields import Bounds
from depthmix.infer import SamplingParams
from depthmix.serve.limits import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
)
from depthmix.serve.problems import RefusedError

# OpenAI's default for completions; chats have none
COMPLETION_TOKENS = 16


def read_ids(value: Any) -> list[int]:
    """Token ids; checked by hand to get one error, not one for each of a million items."""
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise PydanticCustomError("ids", "must be a list of token ids")


def read_prompts(value: Any) -> list[str | list[int]]:
    """A prompt or several: each is text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item for item in value):
            return [read_ids(item) for item in value]
    raise PydanticCustomError(
        "prompt", "must be a text, a list of token ids, or a list of texts or of such lists"
    )


def read_stops(value: Any) -> list[str]:
    """A stop string or several."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a text or a list of texts")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop",
            "may have {count} texts of {length} characters at most",
            {"count": MAX_STOPS, "length": MAX_STOP_CHARS},
        )
    return stops


_TEXT: dict[str, Any] = {"type": "string"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]
}
_STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_STOP_CHARS},
        {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS},
    ]
}

Ids = Annotated[list[int], PlainValidator(read_ids), WithJsonSchema(_IDS)]
Prompts = Annotated[
    list[str | list[int]], PlainValidator(read_prompts), WithJsonSchema(_PROMPT_SCHEMA)
]
Stops = Annotated[list[str], PlainValidator(read_stops), WithJsonSchema(_STOP_SCHEMA)]
TokenId = Annotated[int, Field(ge=0)]
Real = Annotated[float, Field(allow_inf_nan=False)]


def take_field(name: str, **other: int) -> Any:
    """A field with the default and the bounds that the engine has for it, or `other` bounds."""
    (field,) = (field for field in fields(SamplingParams) if field.name == name)
    # in a union with None they are one level down
    kinds = (field.type, *get_args(field.type))
    metadata = [each for kind in kinds for each in getattr(kind, "__metadata__", ())]
    (bounds,) = (each for each in metadata if isinstance(each, Bounds))
    found = {"gt": bounds.above, "ge": bounds.least, "le": bounds.most, "lt": bounds.below}
    given: dict[str, Any] = {k: v for k, v in found.items() if math.isfinite(v)}
    given |= other
    return Field(field.default, **given)


class WishShape(BaseModel):
    """What all requests share: strict types, and only known names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, tree: Any) -> Any:
        """Treat null as missing, and refuse unknown names."""
        if not isinstance(tree, Mapping):
            raise PydanticCustomError("shape", "must be a JSON object")
        given = {name: value for name, value in tree.items() if value is not None}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            raise PydanticCustomError(
                "unsupported",
                "the parameter '{name}' is not supported: leave it out",
                # JSON names may hold half of a surrogate pair, which cannot be encoded
                {"name": str(unknown)[:100].encode("utf-8", "replace").decode()},
            )
        return given


class StreamOptions(WishShape):
    """What a stream sends besides the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Put the number of tokens so far into every piece."""


class SamplingShape(WishShape):
    """How tokens are drawn, and what is returned with them."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Real = take_field("temperature")
    top_p: Real = take_field("top_p")
    top_k: int = take_field("top_k", ge=-1)
    """0 and -1 mean all."""
    min_p: Real = take_field("min_p")
    repetition_penalty: Real = take_field("repetition_penalty")
    frequency_penalty: Real = take_field("frequency_penalty")
    presence_penalty: Real = take_field("presence_penalty")
    n: int = take_field("n")
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []
    ignore_eos: bool = False
    seed: int | None = take_field("seed")
    stream: bool = False
    stream_options: StreamOptions | None = None
    depth: bool = False
    """Return each token's path through the routed blocks."""

    @model_validator(mode="after")
    def check_stream_options(self) -> "SamplingShape":
        """Stream options need a stream."""
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported",
                "'{name}' is for streams: set stream, or leave it out",
                {"name": "stream_options"},
            )
        return self

    @property
    def scores_prompts(self) -> bool:
        """Whether the prompts' own log-probabilities are requested."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_usage(self) -> bool:
        """Whether every piece of a stream says what was used so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def count_logprobs(self) -> int | None:
        """Number of alternatives to return; None for no log-probabilities at all."""
        raise NotImplementedError

    def count_tokens(self) -> int | None:
        """Limit on the new tokens; None if the request sets none."""
        return self.max_tokens

    def make_params(self, *, room: int, end_tokens: Sequence[int]) -> SamplingParams:
        """The request as the engine takes it; `room` is the limit if the request sets none.

        The engine draws at least one token; if none is wanted, `Draft` hides it.
        """
        count = self.count_tokens()
        ends = () if self.ignore_eos else end_tokens
        try:
            return SamplingParams(
                max_tokens=room if count is None else max(1, count),
                temperature=self.temperature,
                top_k=max(self.top_k, 0),
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                stop_tokens=[*self.stop_token_ids, *ends],
                stop=self.stop,
                logprobs=self.count_logprobs(),
                n=self.n,
                seed=self.seed,
            )
        except ValueError as error:
            raise RefusedError(str(error)) from error


class CompletionWish(SamplingShape):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool = False
    """Put the prompt before the text."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def check_echo(self) -> "CompletionWish":
        """Refuse a request for an empty answer."""
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "unsupported",
                "'{name}' = 0 needs echo: set echo to true, or ask for a token",
                {"name": "max_tokens"},
            )
        return self

    @property
    def scores_prompts(self) -> bool:
        """Whether the prompts' own log-probabilities are requested."""
        return self.echo and self.logprobs is not None

    def count_logprobs(self) -> int | None:
        """As many alternatives as `logprobs` says."""
        return self.logprobs

    def count_tokens(self) -> int | None:
        """OpenAI's default."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TextPart(WishShape):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


def name_content(value: Any) -> str | None:
    """Which kind of content it is: errors are then about that kind only."""
    return "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None


Content = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES), Tag("parts")],
    Discriminator(
        name_content,
        custom_error_type="content",
        custom_error_message="must be a text or a list of text parts",
    ),
]


class ChatMessage(WishShape):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def read(self) -> dict[str, str]:
        """As templates take it."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatWish(SamplingShape):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def check_max_tokens(self) -> "ChatWish":
        """Two names of one limit."""
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise PydanticCustomError(
                "unsupported",
                "'{name}' and 'max_tokens' differ, and mean the same: give one of them",
                {"name": "max_completion_tokens"},
            )
        return self

    @model_validator(mode="after")
    def check_top_logprobs(self) -> "ChatWish":
        """Alternatives need the token's own log-probability."""
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "unsupported", "'{name}' needs logprobs: set it to true", {"name": "top_logprobs"}
            )
        return self

    def count_logprobs(self) -> int | None:
        """As many alternatives as `top_logprobs` says, where `logprobs` asks for them."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def count_tokens(self) -> int | None:
        """By either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeWish(WishShape):
    """`POST /tokenize`: a text as a prompt, or messages by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Begin a text as a document, as completions do."""

    @model_validator(mode="after")
    def check_one(self) -> "TokenizeWish":
        """Require exactly one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("choice", "give either prompt or messages")
        return self


class DetokenizeWish(WishShape):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids


class DepthUsage(BaseModel):
    """Where the compute of an answer went, prompt and all samples together."""

    blocks_executed: int
    """Blocks that were run, once for each token."""
    blocks: int
    """The same if every token went through every block."""
    flops: int
    flops_saved: int
    """Of a model that runs every block; below 0 where routers cost more than was skipped."""


class TokenUsage(BaseModel):
    """What an answer used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    depth: DepthUsage | None
    """None until the end."""


class TokenPaths(BaseModel):
    """Which routed blocks tokens went through: a 1 or a 0 for each block, in order."""

    routed_blocks: list[int]
    """Which of the model's blocks these are, from 0."""
    prompt: list[str]
    completion: list[str | None]
    """The last token is returned and never computed: it has no path."""


class StepPath(BaseModel):
    """A token in a stream, and the path of the token before it, which is known by now."""

    token: int
    previous: str


class CompletionLogprobs(BaseModel):
    """The log-probabilities of a completion, as lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """A prompt's first token has none."""
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One sample."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    depth: TokenPaths | StepPath | None = None


class CompletionAnswer(BaseModel):
    """A completion, or a piece of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class TopLogprob(TypedDict):
    """An alternative; a plain dict, as an answer may have a million of them."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogprob(TopLogprob):
    """A token that was drawn."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of an answer."""

    content: list[TokenLogprob]


class AssistantMessage(BaseModel):
    """The model's answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    depth: TokenPaths | None = None


class ChatAnswer(BaseModel):
    """An answer of a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatDelta(BaseModel):
    """A piece of one sample."""

    index: int
    delta: dict[Literal["role", "content"], str]
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    depth: StepPath | None = None


class ChatChunk(BaseModel):
    """A piece of an answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: TokenUsage | None = None


class Problem(BaseModel):
    """What is wrong, and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemAnswer(BaseModel):
    """An answer that is an error."""

    error: Problem


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "depthmix"
    max_model_len: int
    num_blocks: int
    routed_blocks: list[int]
    """Which of the blocks are routed, from 0."""
    has_chat_template: bool


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """A text's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str


HealthStatus = Literal["ok", "failing", "loading", "draining", "broken"]


class HealthAnswer(BaseModel):
    """Whether the server works."""

    status: HealthStatus
    running: int
    waiting: int
    failed_steps: int
    """The current number in a row."""
    message: str | None = None


def encode_shape(shape: BaseModel) -> bytes:
    """An answer, or a piece of one, as JSON."""
    return shape.model_dump_json().encode()


def explain_errors(errors: Sequence[Mapping[str, Any]]) -> RefusedError:
    """The first error of a request, as a sentence that names the parameter."""
    error = errors[0]
    # the first part is always 'body', and the last ones may name a type
    parts = [str(part) for part in error["loc"][1:]]
    kind, sentence = error["type"], str(error["msg"])
    if kind == "json_invalid":
        return RefusedError("the body is not valid JSON: check its quotes, commas and brackets")
    if kind == "unsupported":
        return RefusedError(sentence, param=error["ctx"]["name"], code="unsupported_parameter")
    if not parts:
        whole = "the body must be a JSON object, sent as application/json"
        return RefusedError(sentence if kind == "choice" else whole)
    name = ".".join(parts)[:200]
    if kind == "missing":
        return RefusedError(f"'{name}' is missing: it is required", param=parts[0])
    return RefusedError(f"'{name}' does not fit: {sentence}", param=parts[0])
