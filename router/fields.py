"""The kinds of field that requests are made of: what each takes, and what it says when it does not.

Types are strict (no ``"10"``, no ``true`` for a number, no ``1.0`` for an integer) and unknown keys are refused.
``null`` is the same as absence, for every key of every object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal, NoReturn, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.api import TokenBias

MAX_CHOICES = 16
"""Of one prompt, ``n``."""
MAX_PROMPTS = 32
MAX_SEQUENCES = 64
"""Outputs of one request in all, prompts times ``n``: each takes a slot of the batch."""
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
"""OpenAI's bound."""
MAX_BIAS = 100
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000
MAX_STOP_TOKENS = 64
MAX_TIMEOUT_S = 86_400.0
MAX_KEYS = 100
MAX_SHOWN_CHARS = 100
MAX_METADATA = 16
"""OpenAI's bound."""


class Body(BaseModel):
    """A JSON object from outside."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if isinstance(value, dict):
            if len(value) > MAX_KEYS:
                refuse("too_many_keys", f"has {len(value)} keys; at most {MAX_KEYS} are taken")
            return {key: item for key, item in value.items() if item is not None}
        return value


def refuse(kind: str, reason: str) -> NoReturn:
    """Fail the validation of the field at hand; `router.errors` maps `kind` to a fault."""
    raise PydanticCustomError(kind, "{reason}", {"reason": reason})


def neutral(*values: object) -> AfterValidator:
    """For a field of the OpenAI interface that is not offered: only the values that change nothing are taken."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            allowed = " or ".join(json.dumps(item) for item in values) or "null"
            refuse("unsupported_parameter", f"not offered by this server; leave it out or send {allowed}")
        return value

    return AfterValidator(check)


def _encodable(value: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            refuse("invalid_text", "holds half of a surrogate pair, which is no character")
    return value


Text = Annotated[str, AfterValidator(_encodable)]
"""Any text that has a UTF-8 form. U+0000 is a character like any other: it reaches the tokenizer."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class Message(Body):
    """One turn. The model's chat template decides which roles it takes, and in which order."""

    role: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
    content: Content
    name: Text | None = None

    def for_template(self) -> Mapping[str, str]:
        """The turn as templates know it. Parts are joined with nothing between; `developer` is OpenAI's newer word for
        `system`, which open models were not trained on."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        turn = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return turn if self.name is None else {**turn, "name": self.name}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class StreamOptions(Body):
    """Extras of a stream."""

    include_usage: bool = False


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        refuse("stop", "should be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        refuse("stop", f"at most {MAX_STOP_STRINGS} stop strings are taken, not {len(strings)}")
    if not all(strings):
        refuse("stop", "an empty stop string would stop everything")
    if any(len(item) > MAX_STOP_CHARS for item in strings):
        refuse("stop", f"a stop string has at most {MAX_STOP_CHARS} characters")
    return tuple(_encodable(item) for item in strings)


Stop = Annotated[tuple[str, ...], BeforeValidator(_stop)]

Prompt: TypeAlias = str | list[int]


def _prompts(value: object) -> tuple[Prompt, ...]:
    """One prompt or a list of them. A list of numbers is one prompt."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return (_prompt(value, ""),)
    if len(value) > MAX_PROMPTS:
        refuse("prompt", f"at most {MAX_PROMPTS} prompts are taken, not {len(value)}")
    return tuple(_prompt(item, f"[{number}] " if len(value) > 1 else "") for number, item in enumerate(value))


def _prompt(value: object, which: str) -> Prompt:
    """A prompt as text or token ids. `which` it is, for the message."""
    if not value:
        refuse("prompt", f"{which}is empty")
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return value
    refuse("prompt", f"{which}should be a string or a list of token ids")


def _logit_bias(value: object) -> tuple[TokenBias, ...]:
    if not isinstance(value, dict):
        refuse("logit_bias", "should be an object that gives token ids a number each")
    if len(value) > MAX_LOGIT_BIAS:
        refuse("logit_bias", f"at most {MAX_LOGIT_BIAS} tokens are taken, not {len(value)}")
    return tuple(_bias(key, item) for key, item in value.items() if item is not None)


def _bias(key: str, value: object) -> TokenBias:
    if not TOKEN_ID.fullmatch(key):
        refuse("logit_bias", f"{key[:MAX_SHOWN_CHARS]!r} is not a token id")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_BIAS <= value <= MAX_BIAS:
        refuse("logit_bias", f"the value of {key!r} should be a number from -{MAX_BIAS} to {MAX_BIAS}")
    return TokenBias(token_id=int(key), bias=float(value))


LogitBias = Annotated[tuple[TokenBias, ...], PlainValidator(_logit_bias)]


def _metadata(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        refuse("metadata", f"has {len(value)} keys; at most {MAX_METADATA} are taken")
    return value


Metadata = Annotated[dict[Text, Text], BeforeValidator(_metadata)]

Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]


class ResponseFormat(Body):
    """Only plain text is offered."""

    type: Annotated[Literal["text", "json_object", "json_schema"], neutral("text")]
    json_schema: Annotated[dict[str, object] | None, neutral()] = None
