"""What goes out: OpenAI's objects, and how each of the two endpoints words an answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import BaseModel

from cluster.api import Usage
from router.catalog import ServedModel

FinishWord = Literal["stop", "length"]


class UsageAnswer(BaseModel):
    """Exact tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> UsageAnswer:
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.total_tokens,
        )


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: Literal[0] = 0
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishWord


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ChatChunkChoice(BaseModel):
    index: Literal[0] = 0
    delta: dict[Literal["role", "content"], str]
    logprobs: None = None
    finish_reason: FinishWord | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class TextChoice(BaseModel):
    index: Literal[0] = 0
    text: str
    logprobs: None = None
    finish_reason: FinishWord | None = None


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


Chunk = ChatChunk | TextCompletion


class ChatWording:
    """How /v1/chat/completions words one answer, in pieces or whole."""

    id_prefix = "chatcmpl-"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self) -> Chunk | None:
        """What a stream begins with, before any text."""
        return self._chunk(ChatChunkChoice(delta={"role": "assistant", "content": ""}))

    def piece(self, text: str) -> Chunk:
        """Some text."""
        return self._chunk(ChatChunkChoice(delta={"content": text}))

    def end(self, finish_reason: FinishWord) -> Chunk:
        """The end of the text."""
        return self._chunk(ChatChunkChoice(delta={}, finish_reason=finish_reason))

    def count(self, usage: UsageAnswer) -> Chunk:
        """The usage, after the end."""
        return ChatChunk(**asdict(self._head), choices=[], usage=usage)

    def whole(self, text: str, finish_reason: FinishWord, usage: UsageAnswer) -> BaseModel:
        """The answer in one piece."""
        choice = ChatChoice(message=ChatMessage(content=text), finish_reason=finish_reason)
        return ChatCompletion(**asdict(self._head), choices=[choice], usage=usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**asdict(self._head), choices=[choice])


class CompletionWording:
    """How /v1/completions does the same."""

    id_prefix = "cmpl-"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self) -> Chunk | None:
        return None

    def piece(self, text: str) -> Chunk:
        return self._chunk(TextChoice(text=text))

    def end(self, finish_reason: FinishWord) -> Chunk:
        return self._chunk(TextChoice(text="", finish_reason=finish_reason))

    def count(self, usage: UsageAnswer) -> Chunk:
        return TextCompletion(**asdict(self._head), choices=[], usage=usage)

    def whole(self, text: str, finish_reason: FinishWord, usage: UsageAnswer) -> BaseModel:
        choice = TextChoice(text=text, finish_reason=finish_reason)
        return TextCompletion(**asdict(self._head), choices=[choice], usage=usage)

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return TextCompletion(**asdict(self._head), choices=[choice])


Wording = ChatWording | CompletionWording
