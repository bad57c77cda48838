"""What goes out: OpenAI's objects, and how each of the two endpoints words an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import BaseModel

from cluster.api import Usage
from router.catalog import ServedModel
from router.logprobs import ChatLogprobs, PromptLogprobs, Scores, TextLogprobs, prompt_logprobs

FinishWord = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """How many of the prompt's tokens the prefix cache had; they are charged like the others."""

    cached_tokens: int


class UsageAnswer(BaseModel):
    """Exact tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageAnswer:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        )


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[Literal["role", "content"], str]
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishWord | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishWord | None = None
    prompt_logprobs: PromptLogprobs = None


class TextCompletion(BaseModel):
    """A completion, and a chunk of one: OpenAI gives both the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageAnswer | None = None


class ModelAnswer(BaseModel):
    """A model. `max_model_len` and `vocab_size` are ours."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, model: ServedModel) -> ModelAnswer:
        return cls(
            id=model.id,
            created=model.created,
            owned_by=model.owned_by,
            max_model_len=model.max_model_len,
            vocab_size=model.codec.vocab_size,
        )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str


class HealthAnswer(BaseModel):
    status: Literal["live", "ready"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of one answer have in common. `created` is in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One choice from its beginning to its end. `scores` None: the client did not ask for log-probabilities."""

    index: int
    text: str
    scores: Scores | None
    finish_reason: FinishWord
    prompt_scores: Scores


Chunk = ChatChunk | TextCompletion


class ChatWording:
    """How /v1/chat/completions words one answer, in pieces or whole."""

    id_prefix = "chatcmpl-"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int) -> Chunk | None:
        """What the stream of a choice begins with, before any text."""
        return self._chunk(ChatChunkChoice(index=index, delta={"role": "assistant", "content": ""}))

    def piece(self, index: int, text: str, scores: Scores = ()) -> Chunk:
        """Some text."""
        logprobs = ChatLogprobs.of(scores) if scores else None
        return self._chunk(ChatChunkChoice(index=index, delta={"content": text}, logprobs=logprobs))

    def end(self, index: int, finish_reason: FinishWord) -> Chunk:
        """The end of a choice."""
        return self._chunk(ChatChunkChoice(index=index, delta={}, finish_reason=finish_reason))

    def count(self, usage: UsageAnswer) -> Chunk:
        """The usage, after the end of all."""
        return ChatChunk(**asdict(self._head), choices=[], usage=usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageAnswer) -> BaseModel:
        """The answer in one piece."""
        return ChatCompletion(
            **asdict(self._head),
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content=choice.text),
                    logprobs=None if choice.scores is None else ChatLogprobs.of(choice.scores),
                    finish_reason=choice.finish_reason,
                )
                for choice in choices
            ],
            usage=usage,
            prompt_logprobs=prompt_logprobs(choices[0].prompt_scores),
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**asdict(self._head), choices=[choice])


class CompletionWording:
    """How /v1/completions does the same."""

    id_prefix = "cmpl-"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int) -> Chunk | None:  # noqa: ARG002  # the other endpoint's needs it
        return None

    def piece(self, index: int, text: str, scores: Scores = ()) -> Chunk:
        logprobs = TextLogprobs.of(scores) if scores else None
        return self._chunk(TextChoice(index=index, text=text, logprobs=logprobs))

    def end(self, index: int, finish_reason: FinishWord) -> Chunk:
        return self._chunk(TextChoice(index=index, text="", finish_reason=finish_reason))

    def count(self, usage: UsageAnswer) -> Chunk:
        return TextCompletion(**asdict(self._head), choices=[], usage=usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageAnswer) -> BaseModel:
        return TextCompletion(
            **asdict(self._head),
            choices=[
                TextChoice(
                    index=choice.index,
                    text=choice.text,
                    logprobs=None if choice.scores is None else TextLogprobs.of(choice.scores),
                    finish_reason=choice.finish_reason,
                    prompt_logprobs=prompt_logprobs(choice.prompt_scores),
                )
                for choice in choices
            ],
            usage=usage,
        )

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return TextCompletion(**asdict(self._head), choices=[choice])


Wording = ChatWording | CompletionWording
