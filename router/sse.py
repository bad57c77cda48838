"""Server-sent events: the frames of one stream, as bytes.

Hundreds of frames a second differ in nothing but their text, so the rest of the JSON is serialised once per choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import cast

from router.answers import Chunk, FinishWord, UsageAnswer, Wording
from router.choice import TextDelta
from router.errors import ApiError

DONE = b"data: [DONE]\n\n"
MARK = "\0"
"""Stands for the text while the rest is serialised; no id or model name contains it."""


@dataclass(frozen=True, slots=True)
class _Around:
    """A piece of text as an event, without the text."""

    before: bytes
    after: bytes


class Frames:
    """The events of one request as bytes. With `include_usage` every chunk has the key, null in all but the last."""

    def __init__(self, wording: Wording, *, num_choices: int, include_usage: bool) -> None:
        self._wording = wording
        self._num_choices = num_choices
        self._include_usage = include_usage
        self._around: dict[int, _Around] = {}

    def opening(self) -> bytes:
        """What comes before the text."""
        chunks = (self._wording.opening(index) for index in range(self._num_choices))
        return b"".join(self._event(chunk) for chunk in chunks if chunk)

    def delta(self, delta: TextDelta) -> bytes:
        """Text if there is some; at the end of a choice its finish reason; and after all the usage if wanted, and
        [DONE]."""
        frames = b""
        if delta.scores:
            frames += self._event(self._wording.piece(delta.index, delta.text, delta.scores))
        elif delta.text:
            around = self._around.get(delta.index) or self._text_frame(delta.index)
            frames += around.before + json.dumps(delta.text, ensure_ascii=False).encode() + around.after
        if delta.finish_reason is not None:
            frames += self._event(self._wording.end(delta.index, cast(FinishWord, delta.finish_reason.value)))
        if delta.usage is not None:
            if self._include_usage:
                frames += self._event(self._wording.count(UsageAnswer.of(delta.usage)))
            frames += DONE
        return frames

    def _text_frame(self, index: int) -> _Around:
        around = _Around(*self._event(self._wording.piece(index, MARK)).split(json.dumps(MARK).encode()))
        self._around[index] = around
        return around

    def _event(self, chunk: Chunk) -> bytes:
        return event(chunk.model_dump_json(exclude=None if self._include_usage else {"usage"}).encode())


def error_frame(error: ApiError) -> bytes:
    """An error after the first byte. The stream ends with it, without [DONE]."""
    return event(error.body())


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, which has no line break of its own."""
    return b"data: " + data + b"\n\n"
