"""What operators see: admission's side and the engines' side of every model, at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.api import AdmissionSnapshot, ModelSnapshot, TenantSnapshot
from deployments.handles import ServeReplicas
from deployments.replica import ReplicaReport
from engine.api import EngineError, EngineStats, Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQueue:
    """One model: what admission says, and each replica's engine. No engines: they do not answer."""

    admission: ModelSnapshot
    engines: tuple[EngineStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """All queues."""

    models: tuple[ModelQueue, ...]
    tenants: tuple[TenantSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasView:
    """All replicas that answer."""

    replicas: tuple[ReplicaReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainView:
    """One request that an engine holds: why each of its sequences runs or waits."""

    request_id: str
    model: str
    sequences: tuple[Explanation, ...]


class ServeViews:
    """Implements `router.api.OperatorViews`."""

    def __init__(self, snapshot: Callable[[], Awaitable[AdmissionSnapshot]], replicas: ServeReplicas) -> None:
        self._snapshot = snapshot
        self._replicas = replicas

    async def queue(self) -> QueueView:
        snapshot = await self._snapshot()
        engines = await asyncio.gather(*(self._engines(model.model) for model in snapshot.models))
        models = (
            ModelQueue(admission=model, engines=tuple(report.stats for report in reports))
            for model, reports in zip(snapshot.models, engines, strict=True)
        )
        return QueueView(models=tuple(models), tenants=snapshot.tenants)

    async def replicas(self, num_steps: int) -> ReplicasView:
        engines = await asyncio.gather(*(self._engines(model, num_steps) for model in self._replicas.models))
        return ReplicasView(replicas=tuple(report for reports in engines for report in reports))

    async def explain(self, request_id: str) -> ExplainView | None:
        answers = await asyncio.gather(*(self._explanations(model, request_id) for model in self._replicas.models))
        for model, sequences in zip(self._replicas.models, answers, strict=True):
            if sequences:
                return ExplainView(request_id=request_id, model=model, sequences=tuple(sequences))
        return None

    async def _explanations(self, model: str, request_id: str) -> list[Explanation]:
        try:
            return await self._replicas.explain(model, request_id)
        except EngineError:
            return []

    async def _engines(self, model: str, num_steps: int = 0) -> list[ReplicaReport]:
        try:
            return await self._replicas.reports(model, num_steps)
        except EngineError:
            return []
