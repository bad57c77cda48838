"""An ingress's side of admission: many requests on one event loop, few calls to the actor, nothing lost.

While one `exchange` is under way the messages of the next tick gather; so the number of calls follows the round-trip
time, not the load. What has been sent and not acknowledged is sent again. When the actor has started anew
(see `deployments.admission_wire`) everything is said again from three tables: waiting, open, closing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from cluster.api import AdmissionAsk, LimitStatus, Permit, Refusal, Usage
from deployments.admission_wire import (
    AdmissionLink,
    AdmissionUnreachableError,
    Close,
    Message,
    Reopen,
    Submit,
    Withdraw,
)

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    ask: AdmissionAsk
    decided: asyncio.Future[Permit | Refusal]


class AdmissionClient:
    """Implements `router.service.Admission`. Use on one event loop: `start` there, `aclose` at the end."""

    def __init__(self, link: AdmissionLink, *, owner: str | None = None) -> None:
        self._link = link
        self._owner = owner or secrets.token_hex(8)
        self._epoch: str | None = None
        self._registered = asyncio.Event()
        self._outgoing: list[Message] = []
        self._news = asyncio.Event()
        self._acknowledged = 0
        self._waiting: dict[str, _Waiting] = {}
        self._open: dict[str, Permit] = {}
        self._closing: dict[str, Usage | None] = {}
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin talking to the actor. Idempotent; needs a running event loop."""
        if not self._tasks:
            self._news.set()
            self._tasks = [asyncio.create_task(self._send_for_ever()), asyncio.create_task(self._receive_for_ever())]

    async def aclose(self, timeout_s: float = 2.0) -> None:
        """Deliver outstanding closes for at most `timeout_s` and stop talking."""
        try:
            await asyncio.wait_for(self._all_closed.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d closes were not delivered; the lease returns their permits", len(self._closing))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_health(self) -> None:
        """Raise RuntimeError if a loop has died, which only a programming error can make it do."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                raise RuntimeError("the admission client has stopped") from task.exception()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Permits held here, those whose close is not yet acknowledged included."""
        return len(self._open)

    async def admit(self, ask: AdmissionAsk) -> Permit | Refusal:
        """Leave to run, or why not. Waits for its turn; when it is cancelled, the request is withdrawn."""
        self.start()
        waiting = _Waiting(ask=ask, decided=asyncio.get_running_loop().create_future())
        self._waiting[ask.request_id] = waiting
        self._post(Submit(ask=ask))
        try:
            return await waiting.decided
        except asyncio.CancelledError:
            # The permit may have arrived at this very moment: a withdrawal ends the request at any stage.
            self._waiting.pop(ask.request_id, None)
            self._open.pop(ask.request_id, None)
            self._post(Withdraw(request_id=ask.request_id))
            raise

    def close(self, request_id: str, usage: Usage | None) -> None:
        """Give a permit back with the exact usage, None: nothing ran. Returns at once, twice is once.

        It is delivered until it is acknowledged.
        """
        if request_id not in self._open or request_id in self._closing:
            return
        self._closing[request_id] = usage
        self._all_closed.clear()
        self._post(_ending(request_id, usage))

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        """The rate limits of a tenant and its key now; empty (no headers) while the actor cannot be asked."""
        try:
            return await self._link.limits(tenant, key)
        except AdmissionUnreachableError:
            return LimitStatus()

    def _post(self, message: Message) -> None:
        self._outgoing.append(message)
        self._news.set()

    async def _send_for_ever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._retrying(self._send_once)

    async def _send_once(self) -> None:
        sent = tuple(self._outgoing)
        self._outgoing.clear()
        try:
            answer = await self._link.exchange(self._owner, self._epoch, sent)
        except AdmissionUnreachableError:
            # A submit that was answered meanwhile must not be asked again.
            kept = [each for each in sent if not isinstance(each, Submit) or each.ask.request_id in self._waiting]
            self._outgoing[:0] = kept
            raise
        if not answer.accepted:
            self._begin_epoch(answer.epoch)
            return
        for message in sent:
            if isinstance(message, Close | Withdraw) and message.request_id in self._closing:
                del self._closing[message.request_id]
                del self._open[message.request_id]
        if not self._closing:
            self._all_closed.set()

    def _begin_epoch(self, epoch: str) -> None:
        """Say everything again: the actor knows nothing of us. A withdrawal needs no repeating."""
        self._epoch = epoch
        self._acknowledged = 0
        self._outgoing = [
            *(Reopen(permit=permit) for permit in self._open.values()),
            *(Submit(ask=waiting.ask) for waiting in self._waiting.values()),
            *(_ending(request_id, usage) for request_id, usage in self._closing.items()),
        ]
        self._registered.set()
        if self._outgoing:
            self._news.set()

    async def _receive_for_ever(self) -> None:
        while True:
            await self._registered.wait()
            await self._retrying(self._receive_once)

    async def _receive_once(self) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        grants = await self._link.grants(self._owner, epoch, self._acknowledged)
        if epoch != self._epoch:
            return
        if not grants.known:
            self._epoch = None
            self._registered.clear()
            self._news.set()
            return
        self._acknowledged = max(self._acknowledged, grants.last)
        for decision in grants.decisions:
            self._take(decision)

    def _take(self, decision: Permit | Refusal) -> None:
        waiting = self._waiting.pop(decision.request_id, None)
        if waiting is not None and not waiting.decided.done():
            if isinstance(decision, Permit):
                self._open[decision.request_id] = decision
            waiting.decided.set_result(decision)
        elif isinstance(decision, Permit) and decision.request_id not in self._open:
            # Nobody waits for it: it was withdrawn, or this is a repetition.
            self._post(Withdraw(request_id=decision.request_id))

    async def _retrying(self, attempt: Callable[[], Coroutine[None, None, None]]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                return await attempt()
            except AdmissionUnreachableError as error:
                logger.warning("admission does not answer (%s); trying again in %.2f s", error, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)


def _ending(request_id: str, usage: Usage | None) -> Close | Withdraw:
    return Withdraw(request_id=request_id) if usage is None else Close(request_id=request_id, usage=usage)
