"""Server-sent events: the frames of one stream, as bytes.

Hundreds of frames a second differ in nothing but their text, so the rest of the JSON is serialised once per stream.
"""

from __future__ import annotations

import json
from typing import cast

from router.answers import Chunk, FinishWord, UsageAnswer, Wording
from router.errors import ApiError
from router.output import TextDelta

DONE = b"data: [DONE]\n\n"
MARK = "\0"
"""Stands for the text while the rest is serialised; no id or model name contains it."""


class Frames:
    """The events of one request as bytes. With `include_usage` every chunk has the key, null in all but the last."""

    def __init__(self, wording: Wording, *, include_usage: bool) -> None:
        self._wording = wording
        self._include_usage = include_usage
        before, after = self._event(wording.piece(MARK)).split(json.dumps(MARK).encode())
        self._before_text, self._after_text = before, after

    def opening(self) -> bytes:
        """What comes before the text."""
        chunk = self._wording.opening()
        return self._event(chunk) if chunk else b""

    def delta(self, delta: TextDelta) -> bytes:
        """Text if there is some; and at the end the finish reason, the usage if wanted, and [DONE]."""
        frames = b""
        if delta.text:
            frames = self._before_text + json.dumps(delta.text, ensure_ascii=False).encode() + self._after_text
        if delta.finish_reason is not None and delta.usage is not None:
            frames += self._event(self._wording.end(cast(FinishWord, delta.finish_reason.value)))
            if self._include_usage:
                frames += self._event(self._wording.count(UsageAnswer.of(delta.usage)))
            frames += DONE
        return frames

    def _event(self, chunk: Chunk) -> bytes:
        return event(chunk.model_dump_json(exclude=None if self._include_usage else {"usage"}).encode())


def error_frame(error: ApiError) -> bytes:
    """An error after the first byte. The stream ends with it, without [DONE]."""
    return event(error.body())


def event(data: bytes) -> bytes:
    """One event. `data` is JSON, which has no line break of its own."""
    return b"data: " + data + b"\n\n"
