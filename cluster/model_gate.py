"""The gate of one model: the queue in front of it, what its replicas hold, and whether the next one fits."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api import Lane, ModelSnapshot, QueuePolicy
from cluster.capacity import Fit, ModelCapacity, Need
from cluster.fair_queue import FairQueue, Waiter
from cluster.rate_window import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FullQueue:
    """No more may wait: `waiting` requests, of `tenant` or (None) of all, are the limit. A place is free after
    `wait_ns`, when the time of the oldest of them is over."""

    tenant: str | None
    waiting: int
    wait_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Who may run, and in which lane: the one that it named, or a higher one if it has waited long."""

    waiter: Waiter
    lane: Lane


class ModelGate:
    """Where requests for one model wait and pass. Its parts are public: the controller speaks to them directly."""

    def __init__(self, model: str, policy: QueuePolicy) -> None:
        self.model = model
        self.queue = FairQueue(aging_ns=round(policy.aging_s * NS_PER_S))
        self.capacity = ModelCapacity()
        self._policy = policy

    def fit(self, waiter: Waiter) -> Fit:
        """Whether the request could run, leaving aside who else waits."""
        return self.capacity.fit(self._need(waiter))

    def full(self, waiter: Waiter, now_ns: int) -> FullQueue | None:
        """Why `waiter` may not join the queue; None if it may, or need not because it can pass at once."""
        queue, policy = self.queue, self._policy
        if not queue and self.fit(waiter) is Fit.NOW:
            return None
        tenant = waiter.ask.tenant
        if queue.count_of(tenant) >= policy.max_waiting_per_tenant:
            oldest, whose, waiting = queue.oldest_of(tenant), tenant, policy.max_waiting_per_tenant
        elif len(queue) >= policy.max_waiting_per_model:
            oldest, whose, waiting = queue.oldest(), None, policy.max_waiting_per_model
        else:
            return None
        return FullQueue(tenant=whose, waiting=waiting, wait_ns=oldest.deadline_ns - now_ns if oldest else 0)

    def is_next(self, waiter: Waiter) -> bool:
        """Whether it is the turn of `waiter`, and it fits."""
        return self.queue.head() is waiter and self.fit(waiter) is Fit.NOW

    def pass_head(self) -> Passed:
        """Let the head of the queue through, whether it fits or not, and commit what it needs."""
        waiter = self.queue.head()
        assert waiter is not None, "nobody waits"
        need = self._need(waiter)
        self.queue.pop()
        self.capacity.commit(waiter.ask.request_id, need)
        return Passed(waiter=waiter, lane=need.lane)

    def snapshot(self) -> ModelSnapshot:
        """The counts now."""
        capacity = self.capacity
        return ModelSnapshot(
            model=self.model,
            waiting=self.queue.counts(),
            permits_open=capacity.permits,
            replicas=capacity.replicas,
            slots=capacity.slots,
            kv_tokens=capacity.kv_tokens,
            committed_slots=capacity.committed_slots,
            committed_kv_tokens=capacity.committed_kv_tokens,
        )

    def _need(self, waiter: Waiter) -> Need:
        """What the request reserves is what it needs: prompts once each, and the outputs."""
        ask = waiter.ask
        lane = self.queue.lane_of(waiter)
        return Need(
            lane=lane,
            sequences=ask.num_sequences,
            kv_tokens=waiter.tokens,
            indivisible_tokens=ask.indivisible_tokens,
            displaces=lane is ask.lane,
        )
