"""The decision: who may run, when, and why not. One controller per cluster; one caller at a time.

A request's life here is short. `submit` reserves its quota and lets it wait; if it is next and fits, it is granted at
once, else a later `dispatch` grants it, or refuses it when its time is over. `close` ends it wherever it is and settles
what it used. In between it is in exactly one of two places: waiting at its model's gate, or open with a permit.

Quota is reserved before a request waits: whoever waits is within its limits, and only the model can keep it out. The
price is that waiting counts as a concurrent request.

Every method takes the time, in monotonic nanoseconds; time that goes backwards stands still. Call `dispatch` after
anything that may free or add capacity (`close`, `withdraw`, `report_replica`, `expire`), and every fraction of a second
for those whose time is over. A tenant or model that was not announced to the controller raises LookupError.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from cluster import refusals
from cluster.api import (
    AdmissionAsk,
    AdmissionSnapshot,
    Directory,
    LimitStatus,
    Permit,
    Queued,
    QueuePolicy,
    Refusal,
    Usage,
    WallClock,
)
from cluster.capacity import Fit, Need
from cluster.fair_queue import Waiter
from cluster.ledger import Claim, Ledger
from cluster.model_gate import ModelGate
from cluster.rate_window import NS_PER_S

EXPECTED_OUTPUT_TOKENS = 256
"""What a sequence without a bound is expected to generate: a typical chat answer. Settling corrects it."""


class AdmissionController:
    """Quota, fairness, priority and capacity in one place. Holds no lock, reads no clock, does no I/O."""

    def __init__(self, directory: Directory, policy: QueuePolicy, clock: WallClock) -> None:
        self._directory = directory
        self._policy = policy
        self._clock = clock
        self._ledger = Ledger(directory, clock)
        self._gates = {model: ModelGate(model, policy) for model in directory.models}
        self._waiting: dict[str, Waiter] = {}
        self._permits: dict[str, Permit] = {}
        self._latest_ns = 0

    # The life of a request.

    def submit(self, ask: AdmissionAsk, owner: str, now_ns: int) -> Permit | Refusal | Queued:
        """Decide at once if possible. A refusal leaves no trace; asking again for an open request repeats the answer.

        Raises ValueError if the request id is open for something else.
        """
        now_ns = self._advance(now_ns)
        gate = self._gate(ask.model)
        waiter = self._waiter(ask, now_ns)
        if ask.request_id in self._waiting or ask.request_id in self._permits:
            return self._repeat(gate, waiter, owner, now_ns)
        refusal = self._refusal_by_quota(waiter, now_ns) or self._refusal_by_model(gate, waiter, now_ns)
        if refusal:
            return refusal
        self._ledger.reserve(_claim(waiter), owner, now_ns)
        self._enqueue(gate, waiter, now_ns)
        return self._grant_head(gate, now_ns) if gate.is_next(waiter) else _queued(gate, waiter)

    def dispatch(self, now_ns: int) -> list[Permit | Refusal]:
        """All that can be decided now: refusals of those whose time is over, and grants in the order of the queues."""
        now_ns = self._advance(now_ns)
        decisions: list[Permit | Refusal] = []
        for gate in self._gates.values():
            decisions += self._refuse_overdue(gate, now_ns)
            gate.queue.age(now_ns)
            decisions += self._grant_what_fits(gate, now_ns)
        return decisions

    def withdraw(self, request_id: str, now_ns: int) -> bool:
        """The client is gone and nothing ran: end the request even if its permit was granted at this very moment."""
        return self.close(request_id, None, now_ns)

    def close(self, request_id: str, usage: Usage | None, now_ns: int) -> bool:
        """End a request and charge what it used; None = nothing ran. False if it is not open, so that twice is once."""
        now_ns = self._advance(now_ns)
        if request_id in self._waiting:
            usage = None
        self._leave(request_id)
        return self._ledger.settle(request_id, usage, now_ns)

    # Owners and replicas come, go, and fall silent.

    def reopen(self, permit: Permit, owner: str, now_ns: int) -> None:
        """Take over a permit that was granted before this controller lived, or whose owner was thought dead.

        Its quota is reserved again, into debt if need be, and it is committed whether it fits or not.
        Raises ValueError if the request waits.
        """
        now_ns = self._advance(now_ns)
        gate = self._gate(permit.model)
        if permit.request_id in self._waiting:
            raise ValueError(f"request {permit.request_id!r} waits; it has no permit to reopen")
        claim = Claim(
            request_id=permit.request_id,
            tenant=permit.tenant,
            key=permit.key,
            model=permit.model,
            prompt_tokens=permit.prompt_tokens,
            output_tokens=permit.reserved_tokens - permit.prompt_tokens,
        )
        self._ledger.reserve(claim, owner, now_ns)
        if permit.request_id not in self._permits:
            self._permits[permit.request_id] = permit
            need = Need(lane=permit.lane, sequences=permit.num_sequences, kv_tokens=permit.reserved_tokens)
            gate.capacity.commit(permit.request_id, need)

    def renew(self, owner: str, now_ns: int) -> None:
        """The owner lives. To be repeated well within `ledger.OWNER_LEASE_NS`."""
        self._ledger.renew(owner, self._advance(now_ns))

    def report_replica(self, model: str, replica: str, slots: int, kv_tokens: int, now_ns: int) -> None:
        """What a live replica can hold at most. To be repeated well within `capacity.REPLICA_LEASE_NS`."""
        self._gate(model).capacity.report(replica, slots, kv_tokens, self._advance(now_ns))

    def forget_replica(self, model: str, replica: str) -> None:
        """The replica is gone. Permits that ran on it stay open until their owners close them."""
        self._gate(model).capacity.forget(replica)

    def expire(self, now_ns: int) -> list[str]:
        """End what silent owners hold and forget silent replicas; returns the requests that were ended.

        A request with a permit is charged its prompt; see `cluster.ledger` for why, and for an owner that comes back.
        """
        now_ns = self._advance(now_ns)
        for gate in self._gates.values():
            gate.capacity.expire(now_ns)
        lapsed = self._ledger.lapsed(now_ns)
        for reservation in lapsed:
            ran = reservation.claim.request_id in self._permits
            self._leave(reservation.claim.request_id)
            self._ledger.write_off(reservation, ran, now_ns)
        return [reservation.claim.request_id for reservation in lapsed]

    # Terms change.

    def put_in_force(self, now_ns: int) -> None:
        """The directory has changed. Open requests go on; what was used under the old limits counts under the new."""
        self._ledger.put_in_force(self._advance(now_ns))

    def correct_clock(self, wall_ns: int, now_ns: int) -> None:
        """The wall clock says `wall_ns`; see `cluster.calendar_window` for how far it is believed."""
        self._clock.correct(wall_ns, self._advance(now_ns))

    # What others may see.

    def limits(self, tenant: str, now_ns: int, key: str | None = None) -> LimitStatus:
        """The rate limits of a tenant and its key now, leaving aside those for single models."""
        return self._ledger.status(tenant, key, None, self._advance(now_ns))

    def snapshot(self, now_ns: int) -> AdmissionSnapshot:
        """Every model and every tenant, for operators."""
        return AdmissionSnapshot(
            models=tuple(gate.snapshot() for gate in self._gates.values()),
            tenants=self._ledger.snapshot(self._advance(now_ns)),
        )

    def check_integrity(self) -> None:
        """Assert that every open request is in exactly one place and that all counts agree."""
        assert not self._waiting.keys() & self._permits.keys()
        self._ledger.check_integrity(self._waiting.keys() | self._permits.keys())
        for model, gate in self._gates.items():
            gate.queue.check_integrity({i for i, waiter in self._waiting.items() if waiter.ask.model == model})
            gate.capacity.check_integrity({i for i, permit in self._permits.items() if permit.model == model})

    # The steps.

    def _waiter(self, ask: AdmissionAsk, now_ns: int) -> Waiter:
        """The request with what it reserves: an expected output is kept within what its limits could ever hold."""
        output = ask.max_output_tokens
        if output is None:
            room = self._ledger.output_room(ask.tenant, ask.key, ask.model, ask.prompt_tokens)
            expected = EXPECTED_OUTPUT_TOKENS * ask.num_sequences
            output = expected if room is None else min(expected, room)
        return Waiter(
            ask=ask,
            weight=self._directory.tenant(ask.tenant).weight,
            tokens=ask.prompt_tokens + output,
            deadline_ns=now_ns + round(self._policy.max_wait_s * NS_PER_S),
        )

    def _repeat(self, gate: ModelGate, waiter: Waiter, owner: str, now_ns: int) -> Permit | Queued:
        """The answer to an ask that came before: messages may be delivered twice."""
        request_id = waiter.ask.request_id
        permit = self._permits.get(request_id)
        known = permit or self._waiting[request_id].ask
        if _identity(known) != _identity(waiter.ask):
            raise ValueError(f"request id {request_id!r} is open for another request: {known}")
        self._ledger.reserve(_claim(waiter), owner, now_ns)
        return permit or _queued(gate, self._waiting[request_id])

    def _refusal_by_quota(self, waiter: Waiter, now_ns: int) -> Refusal | None:
        shortfall = self._ledger.shortfall(_claim(waiter), now_ns)
        if shortfall is None:
            return None
        output = waiter.tokens - waiter.ask.prompt_tokens
        return refusals.of_shortfall(waiter.ask, shortfall, output, self._status(waiter, now_ns))

    def _refusal_by_model(self, gate: ModelGate, waiter: Waiter, now_ns: int) -> Refusal | None:
        """The request could never run, or would have to wait where no more may."""
        if gate.fit(waiter) is Fit.NEVER:
            return self._never_fits(gate, waiter, now_ns)
        full = gate.full(waiter, now_ns)
        return refusals.queue_full(waiter.ask, full, self._status(waiter, now_ns)) if full else None

    def _enqueue(self, gate: ModelGate, waiter: Waiter, now_ns: int) -> None:
        gate.queue.push(waiter, now_ns)
        self._waiting[waiter.ask.request_id] = waiter

    def _refuse_overdue(self, gate: ModelGate, now_ns: int) -> Iterator[Refusal]:
        while (waiter := gate.queue.oldest()) and waiter.deadline_ns <= now_ns:
            self.close(waiter.ask.request_id, None, now_ns)
            status = self._status(waiter, now_ns)
            yield refusals.waited_in_vain(waiter.ask, self._policy.max_wait_s, gate.capacity.replicas, status)

    def _grant_what_fits(self, gate: ModelGate, now_ns: int) -> Iterator[Permit | Refusal]:
        """From the head, until one has to wait: what is behind it waits too (see `cluster.fair_queue`)."""
        while waiter := gate.queue.head():
            match gate.fit(waiter):
                case Fit.LATER:
                    return
                case Fit.NOW:
                    yield self._grant_head(gate, now_ns)
                case Fit.NEVER:
                    self.close(waiter.ask.request_id, None, now_ns)
                    yield self._never_fits(gate, waiter, now_ns)

    def _grant_head(self, gate: ModelGate, now_ns: int) -> Permit:
        passed = gate.pass_head()
        waiter, ask = passed.waiter, passed.waiter.ask
        del self._waiting[ask.request_id]
        permit = Permit(
            request_id=ask.request_id,
            tenant=ask.tenant,
            model=ask.model,
            lane=passed.lane,
            prompt_tokens=ask.prompt_tokens,
            reserved_tokens=waiter.tokens,
            status=self._status(waiter, now_ns),
            num_sequences=ask.num_sequences,
            weight=waiter.weight,
            key=ask.key,
        )
        self._permits[ask.request_id] = permit
        return permit

    def _leave(self, request_id: str) -> None:
        """Take the request out of the place where it is, if it is in any."""
        if waiter := self._waiting.pop(request_id, None):
            self._gates[waiter.ask.model].queue.remove(request_id)
        elif permit := self._permits.pop(request_id, None):
            self._gates[permit.model].capacity.release(request_id)

    def _never_fits(self, gate: ModelGate, waiter: Waiter, now_ns: int) -> Refusal:
        return refusals.never_fits(waiter.ask, gate.capacity.largest_kv_tokens, self._status(waiter, now_ns))

    def _status(self, waiter: Waiter, now_ns: int) -> LimitStatus:
        ask = waiter.ask
        return self._ledger.status(ask.tenant, ask.key, ask.model, now_ns)

    def _gate(self, model: str) -> ModelGate:
        try:
            return self._gates[model]
        except KeyError:
            raise LookupError(f"no model {model!r}; there are {sorted(self._gates)}") from None

    def _advance(self, now_ns: int) -> int:
        self._latest_ns = max(self._latest_ns, now_ns)
        return self._latest_ns


_identity = attrgetter("tenant", "key", "model", "prompt_tokens", "num_sequences")
"""What two messages about one request must agree in, asks and permits alike. A permit's lane may be a higher one."""


def _claim(waiter: Waiter) -> Claim:
    ask = waiter.ask
    return Claim(
        request_id=ask.request_id,
        tenant=ask.tenant,
        key=ask.key,
        model=ask.model,
        prompt_tokens=ask.prompt_tokens,
        output_tokens=waiter.tokens - ask.prompt_tokens,
    )


def _queued(gate: ModelGate, waiter: Waiter) -> Queued:
    return Queued(
        request_id=waiter.ask.request_id,
        waiting=len(gate.queue),
        waiting_of_tenant=gate.queue.count_of(waiter.ask.tenant),
        deadline_ns=waiter.deadline_ns,
    )
