"""Several jobs, one reader: the deltas of all of them as they come.

Each job has one read under way at most, in a task of its own: a reader that gives up waiting loses nothing of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from engine.api import TokenDelta
from router.attempts import Attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What job number `job` has to say."""

    job: int
    delta: TokenDelta


class FanIn:
    """Use it from one task at a time."""

    def __init__(self, jobs: Sequence[Attempts]) -> None:
        self._jobs = tuple(jobs)
        self._reads: dict[int, asyncio.Task[TokenDelta | None]] = {}  # by job; the longest untouched one first

    def ran(self, job: int) -> bool:
        """Whether a replica may have computed the job's prompt."""
        return self._jobs[job].ran

    @property
    def num_unseen(self) -> int:
        """Tokens generated until `stop` that no `next` has told, in all jobs."""
        return sum(job.num_unseen for job in self._jobs)

    async def next(self) -> Arrival | None:
        """The next tokens of any job, None: all have ended. Raises what a job raises; the others can go on."""
        while True:
            for number, job in enumerate(self._jobs):
                if number not in self._reads and not job.ended:
                    self._reads[number] = asyncio.create_task(job.next())
            if not any(read.done() for read in self._reads.values()):
                if all(job.ended for job in self._jobs):
                    return None
                await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
            number = next(number for number, read in self._reads.items() if read.done())
            read = self._reads.pop(number)
            if read.cancelled():  # not by us: whoever carries the call has seen the client leave before we did
                self._jobs[number].break_off()
                continue
            delta = read.result()
            if delta is not None:
                return Arrival(job=number, delta=delta)

    def end(self, job: int, index: int) -> Coroutine[None, None, None]:
        """See `Attempts.end`."""
        return self._jobs[job].end(index)

    async def stop(self) -> None:
        """End all that is open; `next` then tells what was generated until then. Bounded, never raises."""
        await asyncio.gather(*(job.stop() for job in self._jobs))

    async def close(self) -> None:
        """Stop reading, whatever is still to come."""
        for read in self._reads.values():
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await asyncio.gather(*(job.close() for job in self._jobs), return_exceptions=True)
