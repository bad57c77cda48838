"""The tokens of one prompt's choices, whichever replicas they come from.

A replica that dies takes its open streams along. Sampling is keyed by (seed, choice, position), so another replica that
is given the prompt and the tokens so far goes on as the first one would have: the reader sees one unbroken stream. Only
choices that have not ended are given to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Protocol

from engine.api import Choice, EngineDeadError, FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""New attempts before the first token. A request that kills every replica it meets must not meet many."""
MAX_RESUMES = 2
"""New attempts after the first token."""
CANCEL_TIMEOUT_S = 2.0
"""How long to wait for a replica to say that it has ended something."""


class TokenSource(Protocol):
    """The replicas, as far as one request needs them."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Run a request on some replica of `model`. Raises the engine's errors, EngineDeadError also if it is gone."""

    async def cancel(self, model: str, request_id: str, index: int | None = None) -> int | None:
        """End a request or one of its choices; its stream then tells the last tokens, if it still can.

        Returns what this attempt has generated for all choices; None: no replica knows it.
        """


class Attempts:
    """The token deltas of one job. `next` until it has `ended`."""

    def __init__(self, source: TokenSource, model: str, job: GenerateRequest, deadline: float) -> None:
        """`deadline` is on the loop's clock; each attempt is given the time that is left."""
        self._source = source
        self._model = model
        self._job = job
        self._deadline = deadline
        self._stream: AsyncIterator[TokenDelta] | None = None
        self._open: dict[int, list[int]] = {choice.index: [] for choice in job.choices}
        """The tokens so far of the choices that go on."""
        self._begun = False
        self._num_received = 0  # from the present replica
        self._num_generated = 0  # there, when it was told to stop
        self._failed = False
        self._stopping = False
        self._num_restarts = 0
        self._num_resumes = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: every choice has ended, or an error was raised."""
        return self._failed or not self._open

    @property
    def ran(self) -> bool:
        """Whether a replica may have computed the prompt."""
        return self._begun or (self._stream is not None and not self._failed)

    async def next(self) -> TokenDelta | None:
        """The next tokens of a choice, None: nothing of interest. Raises EngineDeadError once no attempt is left."""
        if self.ended:
            return None
        try:
            return await self._read()
        except EngineDeadError:
            self._stream = None
            if not self._may_try_again():
                self._failed = True
                raise
        except Exception:
            self._failed = True
            raise
        return None

    @property
    def num_unseen(self) -> int:
        """Tokens that were generated until the stop and did not come out of `next`, because the stream broke first."""
        return max(0, self._num_generated - self._num_received)

    def break_off(self) -> None:
        """Nothing more will come: the call to the replica was taken back."""
        self._open.clear()

    def end(self, index: int) -> Coroutine[None, None, None]:
        """One choice is done for its reader, from now on. The replica hears of it from what is returned, which is
        bounded and never raises."""
        del self._open[index]
        return self._tell(index)

    async def stop(self) -> None:
        """End all that is open. Bounded, never raises. What was generated until then still comes out of `next`, unless
        no replica knows of the request."""
        self._stopping = True
        num_generated = None if self._stream is None else await self._cancel(None)
        if num_generated is None:
            self._open.clear()
        else:
            self._num_generated = num_generated

    async def close(self) -> None:
        """Let go of the stream."""
        if self._stream is not None and hasattr(self._stream, "aclose"):
            await self._stream.aclose()

    async def _read(self) -> TokenDelta | None:
        if self._stream is None:
            self._num_received = 0
            self._stream = self._source.generate(self._model, self._attempt())
        try:
            delta = await anext(self._stream)
        except StopAsyncIteration:
            raise EngineDeadError("the replica ended the stream before the request was finished") from None
        self._begun = True
        self._num_received += len(delta.token_ids)
        tokens = self._open.get(delta.index)
        if tokens is None:  # the rest of a choice that was ended from here
            return None
        tokens.extend(delta.token_ids)
        if delta.finish_reason is FinishReason.HANDED_BACK:
            # The replica is shutting down. Its stream ends here; the next read finds that out and goes on elsewhere.
            return replace(delta, finish_reason=None)
        if delta.finish_reason is not None:
            del self._open[delta.index]
        return delta

    def _attempt(self) -> GenerateRequest:
        """The job as another replica takes it over."""
        sampling = self._job.sampling
        if self._begun:  # what concerns the prompt has been told
            sampling = replace(sampling, prompt_logprobs=None)
        choices = tuple(Choice(index=index, resumed_token_ids=tuple(ids)) for index, ids in self._open.items())
        timeout_s = max(0.0, self._deadline - asyncio.get_running_loop().time())
        return replace(self._job, sampling=sampling, choices=choices, timeout_s=timeout_s)

    def _may_try_again(self) -> bool:
        if self._stopping:
            return False
        if self._begun:
            self._num_resumes += 1
            return self._num_resumes <= MAX_RESUMES
        self._num_restarts += 1
        return self._num_restarts <= MAX_RESTARTS

    async def _tell(self, index: int) -> None:
        await self._cancel(index)

    async def _cancel(self, index: int | None) -> int | None:
        """How much the replica has generated in this attempt, None: none knows the request."""
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                return await self._source.cancel(self._model, self._job.request_id, index)
        except Exception:
            logger.warning("request %s: no word from its replica", self._job.request_id, exc_info=True)
            return None
