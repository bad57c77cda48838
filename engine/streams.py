"""What the consumers of open requests have not seen yet. Loop side of the engine; no locks, one event loop.

A stream whose consumer is slower than the engine finds all tokens since its last look in a single delta, so memory is
bounded by the output itself and events by what is consumed.
"""

from __future__ import annotations

import asyncio

from engine.api import EngineDeadError, GenerateRequest, TokenDelta


class Unseen:
    """What the consumer of one choice has not seen yet."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.ended = asyncio.Event()
        self.num_tokens = 0

    def put(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.ended.set()

    def take(self) -> TokenDelta:
        """All that has come since the last look, as one delta."""
        deltas, self.deltas = self.deltas, []
        if len(deltas) == 1:
            return deltas[0]
        return TokenDelta(
            index=deltas[0].index,
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finish_reason=deltas[-1].finish_reason,
            logprobs=tuple(each for delta in deltas for each in delta.logprobs),
            prompt_logprobs=deltas[0].prompt_logprobs,
            num_cached_tokens=deltas[0].num_cached_tokens,
        )


class Stream:
    """What one consumer has not seen yet, of all choices of its request. Loop side only."""

    def __init__(self, request: GenerateRequest) -> None:
        self.choices = {choice.index: Unseen() for choice in request.choices}
        self.ended = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._news: dict[int, None] = {}  # indices with something unseen, oldest first
        self._has_news = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices.values())

    def put(self, delta: TokenDelta) -> None:
        self.choices[delta.index].put(delta)
        self._news[delta.index] = None
        self._has_news.set()
        if all(choice.ended.is_set() for choice in self.choices.values()):
            self.ended.set()

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self.ended.set()
        for choice in self.choices.values():
            choice.ended.set()
        self._has_news.set()

    async def next(self) -> TokenDelta | None:
        """What is new for one of the choices, None: all have ended and have been seen."""
        if not self._news and self.ended.is_set() and self._error is None:
            return None
        await self._has_news.wait()
        if self._error is not None:
            raise self._error
        index = next(iter(self._news))
        del self._news[index]
        if not self._news:
            self._has_news.clear()
        return self.choices[index].take()
