"""One request's outputs as its client sees them, and the usage that is charged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

from cluster.api import Usage
from engine.api import EngineError
from router.choice import ChoiceOutput, TextDelta
from router.fan_in import Arrival, FanIn
from router.work import Work

logger = logging.getLogger(__name__)

ABANDON_TIMEOUT_S = 4.0
"""How long to wait for replicas to end a request and to say what they had generated for it."""

Spawn = Callable[[Coroutine[None, None, None]], object]
"""Runs something to its end in the background."""


class Output:
    """Tokens in, text out. `next` until a delta has the `usage`; it is then what the client was told."""

    def __init__(self, work: Work, source: FanIn, deadline: float, spawn: Spawn) -> None:
        """`deadline` is on the loop's clock."""
        self._work = work
        self._source = source
        self._deadline = deadline
        self._spawn = spawn
        n = work.request.n
        self._choices = [
            ChoiceOutput(index, work.request, work.prompts[index // n], work.model.codec)
            for index in range(work.request.num_outputs)
        ]
        self._num_open = work.request.num_outputs
        self._cached_tokens: dict[int, int] = {}
        """How much of each prompt was cached, once its engine has said so."""
        self.usage: Usage | None = None

    async def next(self) -> TextDelta:
        """The next text of some choice, or its end. Raises the engine's errors, TimeoutError at the deadline."""
        while True:
            async with asyncio.timeout_at(self._deadline):
                arrival = await self._source.next()
            assert arrival is not None, "the last choice to end has the usage"
            self._note_prompt(arrival)
            shown = self._choice(arrival).take(arrival.delta)
            if shown is not None:
                return shown if shown.finish_reason is None else self._ended(shown, arrival)

    async def abandon(self) -> Usage | None:
        """End the request where it runs; returns what it used so far, None if nothing ran. Bounded, never raises."""
        try:
            async with asyncio.timeout(ABANDON_TIMEOUT_S):
                await self._source.stop()
                await self._count_the_rest()
        except Exception:
            logger.warning("request %s: its last tokens are not known", self._work.request_id, exc_info=True)
        await self._source.close()
        ran = [number for number in range(len(self._work.prompts)) if self._source.ran(number)]
        return self._count(ran) if ran else None

    async def close(self) -> None:
        """Let go of the streams, after the end."""
        await self._source.close()

    def _note_prompt(self, arrival: Arrival) -> None:
        """The first delta of a job is about its prompt too."""
        if arrival.job not in self._cached_tokens:
            self._cached_tokens[arrival.job] = arrival.delta.num_cached_tokens
            n = self._work.request.n
            for choice in self._choices[arrival.job * n : (arrival.job + 1) * n]:
                choice.begin(arrival.delta.prompt_logprobs)

    def _choice(self, arrival: Arrival) -> ChoiceOutput:
        return self._choices[arrival.job * self._work.request.n + arrival.delta.index]

    def _ended(self, shown: TextDelta, arrival: Arrival) -> TextDelta:
        """A choice has ended: by itself, or by a stop string, of which the engine does not know."""
        if arrival.delta.finish_reason is None:
            self._spawn(self._source.end(arrival.job, arrival.delta.index))
        self._num_open -= 1
        if self._num_open:
            return shown
        self.usage = self._count(range(len(self._work.prompts)))
        return replace(shown, usage=self.usage)

    async def _count_the_rest(self) -> None:
        while True:
            try:
                arrival = await self._source.next()
            except EngineError:
                continue  # that job has ended; others may have something to tell
            if arrival is None:
                return
            self._choice(arrival).count(arrival.delta)

    def _count(self, jobs: range | list[int]) -> Usage:
        """What the prompts of `jobs`, and all outputs, come to."""
        return Usage(
            prompt_tokens=sum(len(self._work.prompts[job].token_ids) for job in jobs),
            completion_tokens=sum(choice.num_tokens for choice in self._choices) + self._source.num_unseen,
            cached_tokens=sum(self._cached_tokens.get(job, 0) for job in jobs),
        )
