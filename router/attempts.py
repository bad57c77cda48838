"""The tokens of one request, whichever replicas they come from.

A replica that dies takes its open streams along. Sampling is keyed by (seed, position), so another replica that is
given the prompt and the tokens so far goes on as the first one would have: the reader sees one unbroken stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from engine.api import EngineDeadError, FinishReason, GenerateRequest, RequestRefusedError, TokenDelta

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""New attempts before the first token. A request that kills every replica it meets must not meet many."""
MAX_RESUMES = 2
"""New attempts after the first token."""
STOP_TIMEOUT_S = 2.0
"""How long to wait for a replica to say how much it had generated."""


class TokenSource(Protocol):
    """The replicas, as far as one request needs them."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Run a request on some replica of `model`. Raises the engine's errors, EngineDeadError also if it is gone."""

    async def cancel(self, model: str, request_id: str) -> int | None:
        """End a request; returns the tokens that its last attempt generated. None: no replica knows it."""


class Attempts:
    """One request's stream of tokens. `next` until a delta has a finish reason, or `stop`."""

    def __init__(self, source: TokenSource, model: str, request: GenerateRequest) -> None:
        self._source = source
        self._model = model
        self._request = request
        self._stream: AsyncIterator[TokenDelta] | None = None
        self._received: list[int] = []
        self._num_restarts = 0
        self._num_resumes = 0
        self._failed = False

    async def next(self) -> TokenDelta:
        """The next tokens. Raises EngineDeadError once no attempt is left, RequestRefusedError."""
        while True:
            try:
                return await self._read()
            except EngineDeadError:
                if not self._may_try_again():
                    self._failed = True
                    raise
                self._request = replace(self._request, resumed_token_ids=tuple(self._received))
                self._stream = None
            except RequestRefusedError:
                self._failed = True
                raise

    async def stop(self) -> int | None:
        """End the request where it runs; returns the tokens generated for it in all, None if it never ran.

        Never raises: where the replica cannot be asked in time, what has been received is what is known.
        """
        if self._stream is None or (self._failed and not self._received):
            return None
        counted: int | None = None
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                counted = await self._source.cancel(self._model, self._request.request_id)
                if hasattr(self._stream, "aclose"):
                    await self._stream.aclose()
        except Exception:
            logger.warning("request %s: no word from its replica", self._request.request_id, exc_info=True)
        before = len(self._request.resumed_token_ids)
        return max(len(self._received), before + (counted or 0))

    async def _read(self) -> TokenDelta:
        if self._stream is None:
            self._stream = self._source.generate(self._model, self._request)
        try:
            delta = await anext(self._stream)
        except StopAsyncIteration:
            raise EngineDeadError("the replica ended the stream before the request was finished") from None
        self._received.extend(delta.token_ids)
        if delta.finish_reason is FinishReason.CANCELLED:
            # Not by us, who would not be reading: the replica is shutting down. Its stream ends here; the next read
            # finds that out and goes on elsewhere.
            return TokenDelta(token_ids=delta.token_ids)
        self._failed = delta.finish_reason is FinishReason.ERROR
        return delta

    def _may_try_again(self) -> bool:
        if self._received:
            self._num_resumes += 1
            return self._num_resumes <= MAX_RESUMES
        self._num_restarts += 1
        return self._num_restarts <= MAX_RESTARTS
