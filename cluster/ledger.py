"""Quota: what each scope may use, has reserved and has used.

A request falls into several scopes: its model, its tenant's organisation, its tenant and its key, and each of the last
three once more for this model (see `cluster.directory`). It is charged in two steps, for its output is not known when
it is admitted. `reserve` takes one request, its prompt and the output that it asked for out of every limit of every
scope; `settle` replaces that by what was really used. `shortfall` looks at all of them before any is touched, so that a
refused request leaves no mark anywhere. Every reservation is settled exactly once, by the id of its request. What it
did not use goes back at once; a request of which nothing ran gives back all of it, itself included.

**Leases.** Each reservation has an owner, the process that will settle it. An owner not heard of for `OWNER_LEASE_NS`
is taken for dead, and `lapsed` says what it held. How much its requests generated is then not known, so `write_off`
charges what is certain to have been spent: the prompt of a request that ran, nothing for one that only waited. The
doubt is the tenant's gain. If the owner was merely slow and comes back within `WRITE_OFF_MEMORY_NS`, its requests are
reserved again as prepaid, and settling charges the difference: nothing is lost, and nothing charged twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from math import inf

from cluster.account import Account, MeterDebit, Shortfall, units
from cluster.api import LimitStatus, TenantSnapshot, Usage, WindowStatus
from cluster.calendar_window import WallClock
from cluster.directory import Charge, Directory, Level, LimitKind, Scope, ScopeTerms
from cluster.rate_window import NS_PER_S

OWNER_LEASE_NS = 30 * NS_PER_S
"""Several heartbeats missed, and still under the minute after which phantom reservations are felt."""
WRITE_OFF_MEMORY_NS = 600 * NS_PER_S
NOTHING = Charge()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one request reserves: itself, its prompt, and the output that it may have."""

    request_id: str
    tenant: str
    key: str | None
    model: str
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An open claim. `prepaid`: what was charged already, when its owner was thought dead."""

    claim: Claim
    owner: str
    charge: Charge
    prepaid: Charge
    accounts: tuple[Account, ...]
    debits: tuple[MeterDebit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOff:
    reservation: Reservation
    at_ns: int


class Ledger:
    """The accounts of all scopes of a directory. An unknown tenant or model raises LookupError.

    An account is opened when it is first needed: a tenant that never comes costs nothing.
    """

    def __init__(self, directory: Directory, clock: WallClock) -> None:
        self._directory = directory
        self._clock = clock
        self._accounts: dict[Scope, Account] = {}
        self._chains: dict[tuple[str, str | None, str | None], tuple[Account, ...]] = {}
        self._open: dict[str, Reservation] = {}
        self._heard_ns: dict[str, int] = {}
        self._written_off: OrderedDict[str, _WrittenOff] = OrderedDict()

    def output_room(self, tenant: str, key: str | None, model: str, prompt_tokens: int) -> int | None:
        """The most output tokens that a request with such a prompt could ever reserve; None = any number."""
        terms = self._directory.model(model)
        rooms = [
            account.output_room(prompt_tokens, terms.prompt_price, terms.completion_price)
            for account in self._chain(tenant, key, model)
        ]
        return min((room for room in rooms if room is not None), default=None)

    def shortfall(self, claim: Claim, now_ns: int) -> Shortfall | None:
        """Why `claim` cannot be reserved now: what binds longest. None: it can.

        When the answer's time is over, all limits of all scopes have room.
        """
        charge = self._charge(claim)
        found = [
            shortfall
            for account in self._chain(claim.tenant, claim.key, claim.model)
            for shortfall in account.shortfalls(charge, now_ns)
        ]
        return max(found, key=lambda s: inf if s.retry_after_ns is None else s.retry_after_ns, default=None)

    def reserve(self, claim: Claim, owner: str, now_ns: int) -> None:
        """Take what `claim` needs, into debt if need be: who may not go into debt asks `shortfall` first.

        A claim that is open already only changes its owner.
        """
        accounts = self._chain(claim.tenant, claim.key, claim.model)
        self.renew(owner, now_ns)
        known = self._open.get(claim.request_id)
        if known is not None:
            self._open[claim.request_id] = replace(known, owner=owner)
            return
        charge = self._charge(claim)
        prepaid = self._charge_of_prompt(claim) if self._written_off.pop(claim.request_id, None) else NOTHING
        due = charge.less(prepaid)
        self._open[claim.request_id] = Reservation(
            claim=claim,
            owner=owner,
            charge=charge,
            prepaid=prepaid,
            accounts=accounts,
            debits=tuple(debit for account in accounts for debit in account.reserve(charge, due, now_ns)),
        )

    def settle(self, request_id: str, usage: Usage | None, now_ns: int) -> bool:
        """Charge what was used (None: nothing ran) in place of what was reserved. False: not open, nothing done."""
        if request_id in self._written_off:
            late = self._written_off[request_id].reservation
            self.reserve(late.claim, late.owner, now_ns)
        reservation = self._open.pop(request_id, None)
        if reservation is None:
            return False
        used = self._charge_of_usage(reservation.claim, usage) if usage else NOTHING
        # Of what was prepaid nothing goes back into the windows: how much they have forgotten of it is not known.
        due = used.less(reservation.prepaid)
        for debit in reservation.debits:
            debit.settle(units(debit.kind, due), now_ns)
        for account in reservation.accounts:
            account.settle(reservation.charge, used, reservation.prepaid)
        return True

    def renew(self, owner: str, now_ns: int) -> None:
        """The owner lives."""
        self._heard_ns[owner] = now_ns

    def lapsed(self, now_ns: int) -> list[Reservation]:
        """What silent owners hold. They are forgotten, so each reservation is to be written off."""
        while self._written_off:
            oldest = next(iter(self._written_off.values()))
            if now_ns - oldest.at_ns < WRITE_OFF_MEMORY_NS:
                break
            self._written_off.popitem(last=False)
        silent = {owner for owner, heard_ns in self._heard_ns.items() if now_ns - heard_ns >= OWNER_LEASE_NS}
        for owner in silent:
            del self._heard_ns[owner]
        return [reservation for reservation in self._open.values() if reservation.owner in silent]

    def write_off(self, reservation: Reservation, ran: bool, now_ns: int) -> None:
        """Settle a lapsed reservation: at its prompt if the request `ran`, else at nothing."""
        claim = reservation.claim
        usage = Usage(prompt_tokens=claim.prompt_tokens, completion_tokens=0) if ran else None
        self.settle(claim.request_id, usage, now_ns)
        if ran:
            self._written_off[claim.request_id] = _WrittenOff(reservation=reservation, at_ns=now_ns)

    def status(self, tenant: str, key: str | None, model: str | None, now_ns: int) -> LimitStatus:
        """The rate limits as the client may see them: of each kind that of the scope with the least left."""
        return LimitStatus(
            requests=self._binding(LimitKind.REQUESTS_PER_MINUTE, tenant, key, model, now_ns),
            tokens=self._binding(LimitKind.TOKENS_PER_MINUTE, tenant, key, model, now_ns),
        )

    def snapshot(self, now_ns: int) -> tuple[TenantSnapshot, ...]:
        """Every tenant."""
        return tuple(self._of_tenant(tenant, now_ns) for tenant in self._directory.tenants)

    def put_in_force(self, now_ns: int) -> None:
        """The directory has changed: what is open stays as it was reserved, all limits are the new ones from now on."""
        self._chains.clear()
        for account in self._accounts.values():
            terms = self._directory.terms(account.scope)
            if terms is not None:
                account.put_in_force(terms, now_ns)

    def check_integrity(self, open_requests: set[str]) -> None:
        """Assert that exactly `open_requests` are reserved and that every account agrees with its reservations."""
        assert set(self._open) == open_requests
        assert all(reservation.owner in self._heard_ns for reservation in self._open.values())
        for account in self._accounts.values():
            mine = [each for each in self._open.values() if account in each.accounts]
            account.check_integrity([each.charge for each in mine], [debit for each in mine for debit in each.debits])

    def _of_tenant(self, tenant: str, now_ns: int) -> TenantSnapshot:
        account = self._accounts.get(Scope(level=Level.TENANT, id=tenant))
        return TenantSnapshot(
            tenant=tenant,
            open_reservations=account.open if account else 0,
            reserved_tokens=account.reserved_tokens if account else 0,
            used_requests=account.used.requests if account else 0,
            used_tokens=account.used.tokens if account else 0,
            limits=self.status(tenant, None, None, now_ns),
        )

    def _binding(
        self, kind: LimitKind, tenant: str, key: str | None, model: str | None, now_ns: int
    ) -> WindowStatus | None:
        found = [
            window
            for account in self._chain(tenant, key, model)
            if (window := account.window_status(kind, now_ns)) is not None
        ]
        return min(found, key=lambda window: (window.remaining, -window.reset_s), default=None)

    def _chain(self, tenant: str, key: str | None, model: str | None) -> tuple[Account, ...]:
        """The accounts of every scope that a request falls into."""
        chain = self._chains.get((tenant, key, model))
        if chain is None:
            chain = tuple(self._account(terms) for terms in self._directory.scopes(tenant, key, model))
            self._chains[tenant, key, model] = chain
        return chain

    def _account(self, terms: ScopeTerms) -> Account:
        account = self._accounts.get(terms.scope)
        if account is None:
            account = self._accounts[terms.scope] = Account(terms, self._clock)
        return account

    def _charge(self, claim: Claim) -> Charge:
        return self._directory.model(claim.model).charge(claim.prompt_tokens, claim.output_tokens)

    def _charge_of_prompt(self, claim: Claim) -> Charge:
        return self._directory.model(claim.model).charge(claim.prompt_tokens, 0)

    def _charge_of_usage(self, claim: Claim, usage: Usage) -> Charge:
        terms = self._directory.model(claim.model)
        return terms.charge(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
