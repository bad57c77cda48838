"""What clients may send. A field that is not offered is refused by name, never dropped in silence.

Defaults and ranges are OpenAI's. Beyond them: `priority`, `timeout_s`, `top_k` (0 and -1 mean off), `min_p`,
`min_tokens`, `ignore_eos`, `stop_token_ids`, and prompts as token ids. `user` and `metadata` are taken and change
nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from engine.api import SamplingParams, TextCodec
from router.errors import ApiError, Fault
from router.fields import (
    MAX_STOP_TOKENS,
    MAX_TIMEOUT_S,
    Body,
    Messages,
    Metadata,
    PromptField,
    ResponseFormat,
    Stop,
    StreamOptions,
    Text,
    TokenIds,
    neutral,
    refuse,
)

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions endpoint generates when max_tokens is absent."""


class GenerationRequest(Body):
    """What both endpoints have in common."""

    default_max_tokens: ClassVar[int | None] = None
    """Output bound where the client sets none; None: up to the end of the context."""
    prompt_field: ClassVar[str]

    model: Annotated[Text, Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    user: Text | None = None
    metadata: Metadata | None = None

    n: Annotated[int, Field(ge=1, le=128), neutral(1)] = 1
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), neutral(0)] = 0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), neutral(0)] = 0
    repetition_penalty: Annotated[float, Field(gt=0), neutral(1)] = 1
    logit_bias: Annotated[dict[str, object], neutral({})] | None = None
    prompt_logprobs: Annotated[int | None, neutral()] = None
    ttft_slo_s: Annotated[float | None, neutral()] = None

    @abstractmethod
    def encode(self, codec: TextCodec) -> list[int]:
        """The prompt's tokens. CPU work, longer for a longer prompt. Raises ApiError, ChatTemplateError."""

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Characters of text that every tokenisation of the prompt must cover; 0 for token ids."""

    @property
    def output_limit(self) -> int | None:
        """The bound that the client has set on the output, in tokens."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field in which it is set."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How to choose tokens; `seed` is for a request that brings none."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed if self.seed is None else self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )

    @field_validator("stream_options")
    @classmethod
    def _only_for_streams(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream", True):
            refuse("stream_options", 'only a stream takes it; send it with "stream": true')
        return value

    @field_validator("min_tokens")
    @classmethod
    def _below_the_maximum(cls, value: int, info: ValidationInfo) -> int:
        limit = info.data.get("max_tokens")
        if limit is not None and value > limit:
            refuse("min_tokens", f"{value} is more than max_tokens, {limit}")
        return value


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    logprobs: Annotated[bool, neutral(False)] = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), neutral(0)] = 0
    tools: Annotated[list[object], neutral([])] | None = None
    tool_choice: Annotated[object, neutral("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[object], neutral([])] | None = None
    function_call: Annotated[object, neutral("none", "auto")] = None
    response_format: ResponseFormat | None = None
    store: Annotated[bool, neutral(False)] = False

    def encode(self, codec: TextCodec) -> list[int]:
        return codec.encode_chat([message.for_template() for message in self.messages])

    @property
    def num_chars(self) -> int:
        # Templates may trim what they are given.
        return sum(len(message.for_template()["content"].strip()) for message in self.messages)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees_with_the_rest(cls, value: int, info: ValidationInfo) -> int:
        older = info.data.get("max_tokens")
        if older is not None and value != older:
            refuse("max_completion_tokens", f"{value} contradicts max_tokens, {older}; send one of the two")
        least = info.data.get("min_tokens", 0)
        if value < least:
            refuse("max_completion_tokens", f"{value} is less than min_tokens, {least}")
        return value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS

    prompt: PromptField

    best_of: Annotated[int, Field(ge=1, le=20), neutral(1)] = 1
    logprobs: Annotated[int | None, neutral()] = None
    echo: Annotated[bool, neutral(False)] = False
    suffix: Annotated[Text, neutral("")] = ""

    def encode(self, codec: TextCodec) -> list[int]:
        if isinstance(self.prompt, str):
            return codec.encode(self.prompt)
        check_vocabulary(self.prompt, codec, "prompt")
        return list(self.prompt)

    @property
    def num_chars(self) -> int:
        return len(self.prompt) if isinstance(self.prompt, str) else 0


class TokenizeRequest(Body):
    """POST /tokenize: a text, or a conversation as the chat endpoint would render it."""

    model: Annotated[Text, Field(min_length=1)] | None = None
    prompt: Text | None = None
    messages: Messages | None = None

    @field_validator("messages")
    @classmethod
    def _one_of_two(cls, value: Messages, info: ValidationInfo) -> Messages:
        if info.data.get("prompt") is not None:
            refuse("messages", "send either prompt or messages, not both")
        return value

    def encode(self, codec: TextCodec) -> list[int]:
        """The tokens. CPU work. Raises ApiError, ChatTemplateError."""
        if self.messages is not None:
            return codec.encode_chat([message.for_template() for message in self.messages])
        if self.prompt is None:
            raise ApiError(Fault.INVALID_REQUEST, "prompt: send either prompt or messages", param="prompt")
        return codec.encode(self.prompt)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Annotated[Text, Field(min_length=1)] | None = None
    tokens: TokenIds

    def decode(self, codec: TextCodec) -> str:
        """The text. CPU work. Raises ApiError for an id that the vocabulary does not have."""
        check_vocabulary(self.tokens, codec, "tokens")
        return codec.decode(self.tokens)


def check_vocabulary(token_ids: list[int], codec: TextCodec, param: str) -> None:
    """Raise ApiError if a token id does not exist; the model would use it as an index."""
    worst = max(token_ids, default=0)
    if worst >= codec.vocab_size:
        message = f"{param}: token id {worst} does not exist; the vocabulary has {codec.vocab_size} tokens"
        raise ApiError(Fault.INVALID_REQUEST, message, param=param)
