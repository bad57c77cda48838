"""Small makers: what a test does not name does not matter to it."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

from cluster.admission import AdmissionController
from cluster.api import (
    AdmissionAsk,
    AdmissionSnapshot,
    Directory,
    Lane,
    Limits,
    ModelTerms,
    Permit,
    Queued,
    QueuePolicy,
    Refusal,
    Tenant,
    Usage,
    WallClock,
)
from cluster.fair_queue import Waiter

S = 1_000_000_000
MINUTE = 60 * S
MODEL = "m"
OWNER = "ingress-1"


def ask(
    request_id: str,
    tenant: str = "a",
    *,
    model: str = MODEL,
    lane: Lane = Lane.STANDARD,
    prompt: int = 10,
    output: int | None = 10,
    sequences: int = 1,
    longest_prompt: int | None = None,
) -> AdmissionAsk:
    return AdmissionAsk(
        request_id=request_id,
        tenant=tenant,
        model=model,
        lane=lane,
        prompt_tokens=prompt,
        max_output_tokens=output,
        num_sequences=sequences,
        longest_prompt_tokens=longest_prompt,
    )


def waiter(
    request_id: str,
    tenant: str = "a",
    *,
    lane: Lane = Lane.STANDARD,
    tokens: int = 100,
    weight: int = 1,
    deadline: int = 0,
) -> Waiter:
    return Waiter(
        ask=ask(request_id, tenant, lane=lane, prompt=tokens, output=0),
        weight=weight,
        tokens=tokens,
        deadline_ns=deadline,
    )


LIMITS = {each.name for each in fields(Limits)}


def tenant(tenant_id: str = "a", /, **terms: Any) -> Tenant:
    """Terms are fields of `Tenant`, or of its `Limits`."""
    limits = Limits(**{name: value for name, value in terms.items() if name in LIMITS})
    others = {name: value for name, value in terms.items() if name not in LIMITS}
    return Tenant(id=tenant_id, name=tenant_id, limits=limits, **others)


def controller(
    *tenants: Tenant,
    slots: int = 4,
    kv_tokens: int = 10_000,
    models: tuple[str, ...] = (MODEL,),
    policy: QueuePolicy | None = None,
) -> AdmissionController:
    """A controller with one replica per model, reported at time 0 (none if `slots` is 0)."""
    directory = Directory(
        tenants=tenants or (tenant("a"), tenant("b")), models=[ModelTerms(id=model) for model in models]
    )
    made = AdmissionController(directory, policy or QueuePolicy(), WallClock(wall_ns=0, now_ns=0))
    for model in models if slots else ():
        made.report_replica(model, f"{model}-1", slots, kv_tokens, 0)
    return made


def used(prompt: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


def permit(outcome: object) -> Permit:
    assert isinstance(outcome, Permit), outcome
    return outcome


def refusal(outcome: object) -> Refusal:
    assert isinstance(outcome, Refusal), outcome
    return outcome


def queued(outcome: object) -> Queued:
    assert isinstance(outcome, Queued), outcome
    return outcome


def ids(decisions: list[Permit | Refusal]) -> list[str]:
    return [decision.request_id for decision in decisions]


def assert_nothing_open(snapshot: AdmissionSnapshot) -> None:
    for model in snapshot.models:
        assert (model.waiting, model.permits_open, model.committed_slots, model.committed_kv_tokens) == ((), 0, 0, 0)
    for account in snapshot.tenants:
        assert (account.open_reservations, account.reserved_tokens) == (0, 0)


class Replay:
    """A rate limit by brute force: the whole history is kept with what was really used, and replayed when asked.

    It says what is missing from a full bucket, in units. Every debit is an amount that may be corrected later.
    """

    def __init__(self, limit: int, burst_s: int) -> None:
        self.limit = limit
        self.capacity = max(Fraction(limit * burst_s, 60), Fraction(1)) if limit else Fraction(0)
        self._debits: list[tuple[int, int]] = []

    def debit(self, units: int, now_ns: int) -> int:
        """Returns the number by which the debit can be corrected."""
        self._debits.append((now_ns, units))
        return len(self._debits) - 1

    def correct(self, number: int, units: int) -> None:
        self._debits[number] = (self._debits[number][0], units)

    def missing(self, now_ns: int) -> Fraction:
        missing, at_ns = Fraction(0), 0
        for debit_ns, units in self._debits:
            missing = self._refilled(missing, debit_ns - at_ns) + units
            at_ns = debit_ns
        return self._refilled(missing, now_ns - at_ns)

    def fits(self, units: int, now_ns: int) -> bool:
        return self.missing(now_ns) + units <= self.capacity

    def _refilled(self, missing: Fraction, elapsed_ns: int) -> Fraction:
        return max(Fraction(0), missing - Fraction(elapsed_ns * self.limit, MINUTE))
