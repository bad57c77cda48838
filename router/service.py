"""The life of a request: `Service.run`. Everything else in this package serves it or shows it over HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from cluster.api import AdmissionAsk, LimitStatus, Permit, Refusal, Usage
from router.attempts import Attempts, TokenSource
from router.auth import Caller
from router.catalog import Catalog
from router.choice import TextDelta
from router.errors import ApiError, Fault, of_refusal
from router.fan_in import FanIn
from router.output import Output
from router.schemas import GenerationRequest
from router.work import Work, refuse_hopeless

DEFAULT_TIMEOUT_S = 600.0
"""Whole-request timeout where the client sets none, so that no request can stay for ever."""


class Admission(Protocol):
    """The admission controller, as an ingress reaches it."""

    async def admit(self, ask: AdmissionAsk) -> Permit | Refusal:
        """Wait for leave to run. Cancelling the wait withdraws the ask, also if it was granted at that moment."""

    def close(self, request_id: str, usage: Usage | None) -> None:
        """Give a permit back with what was used, None: nothing ran. Never blocks, idempotent; it is delivered later."""

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        """The rate limits of a tenant and its key now."""


class Replicas(TokenSource, Protocol):
    """The replicas of every model."""

    async def is_ready(self) -> bool:
        """Whether a request to any model would be served now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request was admitted, to `model`, and this is what the tenant's limits say after it."""

    model: str
    limits: LimitStatus


class Service:
    """Runs requests. One per ingress process; all of its methods belong to one event loop."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        admission: Admission,
        replicas: Replicas,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._catalog = catalog
        self._admission = admission
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._draw_seed = draw_seed
        self._background: set[asyncio.Task[None]] = set()
        self.draining = False
        """Set it to refuse new requests; open ones go on."""

    async def run(
        self, request: GenerationRequest, caller: Caller, request_id: str
    ) -> AsyncGenerator[Started | TextDelta, None]:
        """Serve one request: `Started`, then text. `request_id` is unique. Close the generator to end it early.

        Raises ApiError, TimeoutError and the engine's errors, at any point. Once admitted, the request is closed with
        what it used, exactly once, on every path.
        """
        if self.draining:
            raise ApiError(Fault.DRAINING, "this server is shutting down; send the request again")
        lane = caller.lane(request.priority)
        model = self._catalog.resolve(request.model, caller)
        deadline = asyncio.get_running_loop().time() + (request.timeout_s or self._timeout_s)
        refuse_hopeless(request, model)
        async with asyncio.timeout_at(deadline):
            prompts = await asyncio.to_thread(request.encode, model.codec)
            work = Work(
                request_id=request_id,
                tenant=caller.tenant,
                key=caller.key_id,
                lane=lane,
                request=request,
                model=model,
                prompts=tuple(prompts),
            )
            permit = await self._admission.admit(work.ask())
        if isinstance(permit, Refusal):
            raise of_refusal(permit, request.prompt_field)
        output = self._output(work, permit, deadline)
        try:
            yield Started(model=model.id, limits=permit.status)
            while (delta := await output.next()).usage is None:
                yield delta
        finally:
            await self._settle(request_id, output)
        yield delta  # after the permit is back: the client's next request must not find it taken

    async def settled(self) -> None:
        """Wait until what ended requests still have to tell replicas and admission has been said. Bounded."""
        while self._background:
            await asyncio.wait(self._background)

    def _output(self, work: Work, permit: Permit, deadline: float) -> Output:
        jobs = work.jobs(permit, self._draw_seed)
        source = FanIn([Attempts(self._replicas, work.model.id, job, deadline) for job in jobs])
        return Output(work, source, deadline, self._spawn)

    async def _settle(self, request_id: str, output: Output) -> None:
        """Close the permit: with the usage the client was told, or else with what the engine says that it was."""
        if output.usage is None:
            await asyncio.shield(self._spawn(self._close_abandoned(request_id, output)))
            return
        self._admission.close(request_id, output.usage)
        self._spawn(output.close())

    async def _close_abandoned(self, request_id: str, output: Output) -> None:
        usage: Usage | None = None
        try:
            usage = await output.abandon()
        finally:
            self._admission.close(request_id, usage)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` to its end even if the request's own task is cancelled."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
