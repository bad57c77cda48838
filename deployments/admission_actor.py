"""The admission desk as a Ray actor, and how ingresses, replicas and the console of a service reach it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from cluster.admission import AdmissionController
from cluster.api import AdmissionSnapshot, Directory, LimitStatus, QueuePolicy, WallClock
from deployments.admission import GRANTS_WAIT_S, AdmissionDesk
from deployments.admission_wire import (
    AdmissionUnreachableError,
    CapacityReport,
    Exchanged,
    Grants,
    Message,
)
from deployments.logs import log_to_stderr

NAMESPACE = "roulant"
ACTOR_NAME = "admission"
CALL_TIMEOUT_S = 5.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """What the controller starts with."""

    directory: Directory
    policy: QueuePolicy


class AdmissionActor(AdmissionDesk):
    """A desk with a clock of its own. All methods run on the actor's event loop."""

    async def __init__(self, settings: AdmissionSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        log_to_stderr()
        clock = WallClock(wall_ns=time.time_ns(), now_ns=time.monotonic_ns())
        controller = AdmissionController(settings.directory, settings.policy, clock)
        super().__init__(controller, time.monotonic_ns)
        self._ticking = asyncio.create_task(self.tick_for_ever())


class AdmissionActorLink:
    """Implements `deployments.admission_wire.AdmissionLink` over Ray. Travels between processes; connects when used.

    The actor is made by whoever calls first. It is detached and restarts for ever: it lives as long as its cluster.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._actor: Any = None

    def __reduce__(self) -> tuple[type[AdmissionActorLink], tuple[AdmissionSettings]]:
        return AdmissionActorLink, (self._settings,)

    async def exchange(self, owner: str, epoch: str | None, messages: tuple[Message, ...]) -> Exchanged:
        """See AdmissionLink."""
        return await self._answer(self._get().exchange.remote(owner, epoch, messages))

    async def grants(self, owner: str, epoch: str, after: int) -> Grants:
        """See AdmissionLink."""
        return await self._answer(self._get().grants.remote(owner, epoch, after), GRANTS_WAIT_S + CALL_TIMEOUT_S)

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        """See AdmissionLink."""
        return await self._answer(self._get().limits.remote(tenant, key))

    async def report(self, report: CapacityReport) -> None:
        """Hand in what a replica can hold. Raises AdmissionUnreachableError."""
        await self._answer(self._get().report.remote(report))

    async def snapshot(self) -> AdmissionSnapshot:
        """The controller's counts now. Raises AdmissionUnreachableError."""
        return await self._answer(self._get().snapshot.remote())

    def drain_blocking(self) -> int:
        """Refuse new requests from now on; returns how many are open. For the process that stops a service.

        Raises AdmissionUnreachableError.
        """
        try:
            return int(ray.get(self._get().drain.remote(), timeout=CALL_TIMEOUT_S))
        except RayError as error:
            raise AdmissionUnreachableError(str(error)) from error

    def _get(self) -> Any:
        if self._actor is None:
            actor_class = ray.remote(AdmissionActor)
            self._actor = actor_class.options(
                name=ACTOR_NAME,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                max_restarts=-1,
                num_cpus=0,
            ).remote(self._settings)
        return self._actor

    async def _answer(self, call: Awaitable[Answer], timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        try:
            return await asyncio.wait_for(call, timeout_s)
        except (RayError, TimeoutError) as error:
            self._actor = None
            raise AdmissionUnreachableError(f"{type(error).__name__}: {error}") from error
