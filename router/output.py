"""One request's output as its client sees it: text, an end, and the usage that is charged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.api import Usage
from engine.api import FinishReason, TextStream
from router.attempts import Attempts
from router.errors import ApiError, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """Text since the last event. The last event has the finish reason (STOP or LENGTH) and the exact usage."""

    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class Output:
    """Tokens in, text out. `next` until a delta has a finish reason; then `usage` is what the client was told."""

    def __init__(self, attempts: Attempts, text: TextStream, prompt_tokens: int) -> None:
        self._attempts = attempts
        self._text = text
        self._prompt_tokens = prompt_tokens
        self.usage: Usage | None = None
        self.runs_on = False
        """Whether the engine has not ended the request by itself: a stop string ends it for the client only."""

    async def next(self, deadline: float) -> TextDelta:
        """The next text, or the end. Raises the engine's errors, TimeoutError at `deadline` (the loop's clock)."""
        while True:
            async with asyncio.timeout_at(deadline):
                delta = await self._attempts.next()
            text = self._text.push(delta.token_ids)
            if self._text.stopped or delta.finish_reason is not None:
                return self._end(text, delta.finish_reason)
            if text:
                return TextDelta(text=text)

    async def abandon(self) -> Usage | None:
        """End the request where it runs; returns what it used so far, None if nothing ran. Bounded, never raises."""
        num_tokens = await self._attempts.stop()
        return None if num_tokens is None else Usage(prompt_tokens=self._prompt_tokens, completion_tokens=num_tokens)

    def _end(self, text: str, reason: FinishReason | None) -> TextDelta:
        if reason is FinishReason.ERROR:
            raise ApiError(Fault.ENGINE_FAILED, "the engine failed while it generated this answer")
        self.runs_on = reason is None
        if not self._text.stopped:
            text += self._text.flush()
        if self._text.stopped or reason is None:
            reason = FinishReason.STOP
        self.usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._text.num_tokens)
        return TextDelta(text=text, finish_reason=reason, usage=self.usage)
