"""What clients may send. A field that is not offered is refused by name, never dropped in silence.

Defaults and ranges are OpenAI's. Beyond them: `priority`, `timeout_s`, `top_k` (0 and -1 mean off), `min_p`,
`min_tokens`, `ignore_eos`, `stop_token_ids`, `repetition_penalty`, `prompt_logprobs`, and prompts as token ids. `user`
and `metadata` are taken and change nothing.

Fields that contradict each other raise ApiError, which pydantic lets through.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from engine.api import SamplingParams, TextCodec
from router.errors import Fault, invalid
from router.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_STOP_TOKENS,
    MAX_TIMEOUT_S,
    Body,
    LogitBias,
    Messages,
    Metadata,
    Prompts,
    ResponseFormat,
    Stop,
    StreamOptions,
    Text,
    TokenIds,
    neutral,
    refuse,
)
from router.prompts import EncodedPrompt, check_vocabulary, encode_prompt

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions endpoint generates when max_tokens is absent."""

Penalty = Annotated[float, Field(ge=-2, le=2)]


class GenerationRequest(Body):
    """What both endpoints have in common."""

    default_max_tokens: ClassVar[int | None] = None
    """Output bound where the client sets none; None: up to the end of the context."""
    prompt_field: ClassVar[str]

    model: Annotated[Text, Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """The bounds keep logits within the range of every precision."""
    logit_bias: LogitBias = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = ()
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Literal["interactive", "standard", "batch"] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    user: Text | None = None
    metadata: Metadata | None = None

    ttft_slo_s: Annotated[float | None, neutral()] = None

    @abstractmethod
    def encode(self, codec: TextCodec) -> list[EncodedPrompt]:
        """The prompts' tokens. CPU work, longer for longer prompts. Raises ApiError, ChatTemplateError."""

    @property
    @abstractmethod
    def num_chars(self) -> int:
        """Characters of text that every tokenisation of the longest prompt must cover; 0 for token ids."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens to show beside each generated one; None: no log-probabilities."""

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer shows the prompt's tokens with log-probabilities, as if they had been generated."""
        return False

    @property
    def num_outputs(self) -> int:
        """Of all prompts together."""
        return self.n

    @property
    def output_limit(self) -> int | None:
        """The bound that the client has set on each output, in tokens."""
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        """The field in which it is set."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check_vocabulary(self, codec: TextCodec) -> None:
        """Raise ApiError if a field names a token that the model does not have."""
        check_vocabulary(self.stop_token_ids or (), codec, "stop_token_ids")
        check_vocabulary([bias.token_id for bias in self.logit_bias], codec, "logit_bias")

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        """How to choose tokens; `seed` is for a request that brings none."""
        prompt_logprobs = [self.prompt_logprobs, self.num_logprobs if self.scores_prompt else None]
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            top_p=self.top_p,
            min_p=self.min_p,
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed if self.seed is None else self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_logprobs,
            prompt_logprobs=max((wanted for wanted in prompt_logprobs if wanted is not None), default=None),
        )

    @model_validator(mode="after")
    def _common_fields_agree(self) -> Self:
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            raise invalid("min_tokens", f"{self.min_tokens} is more than {self.output_limit_field}, {limit}")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", 'only a stream takes it; send it with "stream": true')
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", 'only a whole answer has them; send it with "stream": false')
        return self


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    tools: Annotated[list[object], neutral([])] | None = None
    tool_choice: Annotated[object, neutral("none", "auto")] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[object], neutral([])] | None = None
    function_call: Annotated[object, neutral("none", "auto")] = None
    response_format: ResponseFormat | None = None
    store: Annotated[bool, neutral(False)] = False

    def encode(self, codec: TextCodec) -> list[EncodedPrompt]:
        token_ids = codec.encode_chat([message.for_template() for message in self.messages])
        return [EncodedPrompt(token_ids=tuple(token_ids))]

    @property
    def num_chars(self) -> int:
        # Templates may trim what they are given.
        return sum(len(message.for_template()["content"].strip()) for message in self.messages)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            reason = f"{self.max_completion_tokens} contradicts max_tokens, {self.max_tokens}; send one of the two"
            raise invalid("max_completion_tokens", reason)
        if self.output_limit == 0:
            raise invalid(self.output_limit_field, "should be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", 'send it with "logprobs": true')
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=1)] | None = None

    suffix: Annotated[Text, neutral("")] = ""

    def encode(self, codec: TextCodec) -> list[EncodedPrompt]:
        return [encode_prompt(prompt, codec, echo=self.echo) for prompt in self.prompt]

    @property
    def num_chars(self) -> int:
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_outputs(self) -> int:
        return len(self.prompt) * self.n

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", 'should be at least 1; 0 is for "echo": true, where the prompt is the answer')
        if self.best_of is not None and self.best_of != self.n:
            reason = f"outputs are not ranked here; leave it out, and n alone ({self.n}) says how many there are"
            raise invalid("best_of", reason, Fault.UNSUPPORTED_PARAMETER)
        if self.num_outputs > MAX_SEQUENCES:
            reason = f"{len(self.prompt)} prompts with {self.n} outputs each are {self.num_outputs} outputs"
            raise invalid("n", f"{reason}; at most {MAX_SEQUENCES} are taken")
        return self


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
            raise invalid("prompt", "send either prompt or messages")
        return codec.encode(self.prompt)


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: Annotated[Text, Field(min_length=1)] | None = None
    tokens: TokenIds

    def decode(self, codec: TextCodec) -> str:
        """The text. CPU work. Raises ApiError for an id that the vocabulary does not have."""
        check_vocabulary(self.tokens, codec, "tokens")
        return codec.decode(self.tokens)
