"""The admission controller's desk: where ingresses and replicas hand in what they have to say.

The decision is `cluster.admission`; here are the clock, the registrations of ingresses, and the delivery of decisions
(see `deployments.admission_wire`). All of it lives in one Ray actor, on one event loop. When the actor dies, Ray starts
it anew with empty books, and ingresses and replicas fill them again within about a second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.admission import AdmissionController
from cluster.api import AdmissionAsk, AdmissionSnapshot, LimitStatus, Permit, Queued, Refusal, RefusalCode
from deployments.admission_wire import (
    CapacityReport,
    Close,
    Exchanged,
    Grants,
    Message,
    Reopen,
    Submit,
    Withdraw,
)

logger = logging.getLogger(__name__)

GRANTS_WAIT_S = 10.0
"""How long `grants` waits for something to say. It is also the ingress's sign of life, so well below its lease."""
SILENT_REPLICA_NS = 10_000_000_000
"""Replicas report every second. One that is silent for longer is dead or hung, and its successor may count already."""
DRAIN_RETRY_S = 5
TICK_S = 0.25


class _ReplicaName(NamedTuple):
    model: str
    replica: str


@dataclass(slots=True, kw_only=True)
class _Owner:
    """One registration of one ingress. `decisions` are those not yet acknowledged; the newest has number `last`."""

    epoch: str
    last: int = 0
    decisions: list[Permit | Refusal] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, decision: Permit | Refusal) -> None:
        self.decisions.append(decision)
        self.last += 1
        self.news.set()

    def acknowledge(self, upto: int) -> None:
        num_acknowledged = self.last - len(self.decisions)
        del self.decisions[: max(0, upto - num_acknowledged)]


class AdmissionDesk:
    """See the module. All methods belong to one event loop. `clock_ns`: monotonic nanoseconds."""

    def __init__(
        self,
        controller: AdmissionController,
        clock_ns: Callable[[], int],
        *,
        grants_wait_s: float = GRANTS_WAIT_S,
        new_epoch: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._controller = controller
        self._clock_ns = clock_ns
        self._grants_wait_s = grants_wait_s
        self._new_epoch = new_epoch
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[str, str] = {}
        """Who asked, for requests that wait in a queue."""
        self._reported_ns: dict[_ReplicaName, int] = {}
        self._draining = False

    # For ingresses.

    async def exchange(self, owner: str, epoch: str | None, messages: tuple[Message, ...]) -> Exchanged:
        """See `AdmissionLink.exchange`."""
        known = self._owners.get(owner)
        if known is None or known.epoch != epoch:
            if known is not None:
                known.news.set()
            self._owners[owner] = _Owner(epoch=self._new_epoch())
            return Exchanged(epoch=self._owners[owner].epoch, accepted=False)
        self._controller.renew(owner, self._clock_ns())
        for message in messages:
            self._take(message, owner)
        self._dispatch()
        return Exchanged(epoch=known.epoch, accepted=True)

    async def grants(self, owner: str, epoch: str, after: int) -> Grants:
        """See `AdmissionLink.grants`."""
        known = self._owners.get(owner)
        if known is None or known.epoch != epoch:
            return Grants(known=False, last=0)
        self._controller.renew(owner, self._clock_ns())
        known.acknowledge(after)
        if not known.decisions:
            known.news.clear()
            try:
                await asyncio.wait_for(known.news.wait(), self._grants_wait_s)
            except TimeoutError:
                self._controller.renew(owner, self._clock_ns())
        return Grants(known=self._owners.get(owner) is known, last=known.last, decisions=tuple(known.decisions))

    async def limits(self, tenant: str, key: str) -> LimitStatus:
        """See `AdmissionLink.limits`."""
        return self._controller.limits(tenant, self._clock_ns(), key)

    # For replicas.

    async def report(self, report: CapacityReport) -> None:
        """What a replica can hold; repeated every second by a live one."""
        now_ns = self._clock_ns()
        self._reported_ns[_ReplicaName(report.model, report.replica)] = now_ns
        self._controller.report_replica(report.model, report.replica, report.slots, report.kv_tokens, now_ns)
        self._dispatch()

    # For operators.

    async def snapshot(self) -> AdmissionSnapshot:
        """All counts now."""
        return self._controller.snapshot(self._clock_ns())

    async def drain(self) -> int:
        """Refuse new requests from now on; returns how many are open, waiting ones included."""
        self._draining = True
        return sum(tenant.open_reservations for tenant in (await self.snapshot()).tenants)

    # The steps.

    def tick(self) -> None:
        """Let time do its work: leases end, requests overstay, silent replicas are forgotten."""
        now_ns = self._clock_ns()
        for request_id in self._controller.expire(now_ns):
            # The ingress that asked is silent. Should it come back, it finds its epoch unknown and registers again.
            logger.warning("request %s is ended: its ingress has fallen silent", request_id)
            if owner := self._owner_of.pop(request_id, None):
                self._owners.pop(owner, None)
        for name, at_ns in list(self._reported_ns.items()):
            if now_ns - at_ns >= SILENT_REPLICA_NS:
                logger.warning("replica %s of %s has fallen silent", name.replica, name.model)
                self._controller.forget_replica(name.model, name.replica)
                del self._reported_ns[name]
        self._dispatch()

    async def tick_for_ever(self) -> None:
        """Call `tick` until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _take(self, message: Message, owner: str) -> None:
        match message:
            case Submit(ask=ask):
                self._submit(ask, owner)
            case Withdraw(request_id=request_id):
                self._owner_of.pop(request_id, None)
                self._controller.withdraw(request_id, self._clock_ns())
            case Close(request_id=request_id, usage=usage):
                self._owner_of.pop(request_id, None)
                self._controller.close(request_id, usage, self._clock_ns())
            case Reopen(permit=permit):
                self._reopen(permit, owner)

    def _submit(self, ask: AdmissionAsk, owner: str) -> None:
        if self._draining:
            decision: Permit | Refusal | Queued = self._refusal(ask, "the service is shutting down", DRAIN_RETRY_S)
        else:
            try:
                decision = self._controller.submit(ask, owner, self._clock_ns())
            except (ValueError, LookupError) as error:
                # A fault of the program or two configurations at once. The batch's other messages must not suffer.
                logger.exception("request %s cannot be decided", ask.request_id)
                decision = self._refusal(ask, str(error), None)
        if not isinstance(decision, Refusal):
            self._owner_of[ask.request_id] = owner
        if not isinstance(decision, Queued):
            self._owners[owner].tell(decision)

    def _reopen(self, permit: Permit, owner: str) -> None:
        try:
            self._controller.reopen(permit, owner, self._clock_ns())
        except (ValueError, LookupError):
            # It runs all the same; only its quota is not held. Again the batch's other messages must not suffer.
            logger.exception("the permit of request %s cannot be taken over", permit.request_id)
            return
        self._owner_of[permit.request_id] = owner

    def _refusal(self, ask: AdmissionAsk, message: str, retry_after_s: int | None) -> Refusal:
        return Refusal(
            request_id=ask.request_id,
            code=RefusalCode.NO_CAPACITY,
            message=message,
            retry_after_s=retry_after_s,
            status=LimitStatus(),
        )

    def _dispatch(self) -> None:
        for decision in self._controller.dispatch(self._clock_ns()):
            owner = self._owner_of[decision.request_id]
            if isinstance(decision, Refusal):
                del self._owner_of[decision.request_id]
            if owner in self._owners:
                self._owners[owner].tell(decision)
