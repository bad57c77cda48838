"""One engine behind Ray Serve: a replica of one model.

The engine owns all state; this class hands calls over and tells admission what the replica can hold. Serve's own
queue is kept empty: admission lets in no more than the replica's slots and a small read-ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from deployments.admission_wire import AdmissionUnreachableError, CapacityReport
from deployments.logs import log_to_stderr
from deployments.loopback import serve_on_loopback_only
from engine.api import Engine, EngineStats, Explanation, GenerateRequest, StepSummary, TokenDelta, start_engine
from engine.config import EngineConfig

logger = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0
Reporter = Callable[[CapacityReport], Awaitable[None]]
"""Delivers a report. Raises AdmissionUnreachableError."""


def num_slots(max_num_seqs: int) -> int:
    """How many requests admission may have in a replica: its batch, and an eighth more.

    The read-ahead waits inside the engine, so that a seat that becomes free is taken in the next step rather than after
    a round trip through admission. It is small because whoever waits there no longer waits in fair order.
    """
    return max_num_seqs + -(-max_num_seqs // 8)


def max_ongoing_requests(max_num_seqs: int) -> int:
    """Serve's bound on calls in a replica: well above what admission lets in, with room for cancels and statistics."""
    return 3 * num_slots(max_num_seqs) + 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What a replica is built from. `loopback_only`: keep its ports to this host."""

    model: str
    engine: EngineConfig
    loopback_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One replica's engine: its counts now, and what its last steps did."""

    model: str
    stats: EngineStats
    steps: tuple[StepSummary, ...]


class ModelReplica:
    """The deployment class; also usable bare, without Ray."""

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors; Python's type of __init__ does not know
        self, settings: ReplicaSettings, report: Reporter, replica_id: str | None = None
    ) -> None:
        log_to_stderr()
        if settings.loopback_only:
            serve_on_loopback_only()
        self._settings = settings
        self._report = report
        self._replica_id = replica_id or secrets.token_hex(8)
        # Seconds of reading weights: in a thread, so that Serve's calls are answered meanwhile.
        self._engine: Engine = await asyncio.to_thread(start_engine, settings.engine)
        self._reports = asyncio.create_task(self._report_for_ever())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See `engine.api.Engine.generate`. Closing or cancelling it ends the request in the engine."""
        async with contextlib.aclosing(cast(Any, self._engine.generate(request))) as deltas:
            async for delta in deltas:
                yield delta

    async def cancel(self, request_id: str, index: int | None = None) -> int | None:
        """See `engine.api.Engine.cancel`."""
        return await self._engine.cancel(request_id, index)

    async def explain(self, request_id: str) -> list[Explanation]:
        """See `engine.api.Engine.explain`."""
        return await self._engine.explain(request_id)

    async def report(self, num_steps: int) -> ReplicaReport:
        """What operators ask: the engine's counts and its last `num_steps` steps, oldest first."""
        steps = self._engine.recent_steps()
        last = steps[max(0, len(steps) - num_steps) :]
        return ReplicaReport(model=self._settings.model, stats=self._engine.stats(), steps=tuple(last))

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that keeps raising."""
        self._engine.check_health()
        if self._reports.done():
            raise RuntimeError("the capacity reports have stopped")

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let open requests finish, stop. Serve drains by itself; this is for users without Serve."""
        self._reports.cancel()
        await asyncio.gather(self._reports, return_exceptions=True)
        await self._engine.drain(timeout_s)

    async def _report_for_ever(self) -> None:
        while True:
            stats = self._engine.stats()
            report = CapacityReport(
                replica=self._replica_id,
                model=self._settings.model,
                slots=num_slots(stats.max_num_seqs),
                kv_tokens=stats.num_blocks * stats.block_size,
            )
            try:
                await self._report(report)
            except AdmissionUnreachableError as error:
                logger.warning("capacity report not delivered: %s", error)
            await asyncio.sleep(REPORT_PERIOD_S)
