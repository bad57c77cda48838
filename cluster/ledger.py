"""Quota: what each tenant may use, has reserved and has used.

A request is charged in two steps, for its output is not known when it is admitted. `reserve` takes one request, its
prompt and the output that it asked for out of the tenant's rate windows, and one of its concurrent requests; `settle`
replaces the reservation by what was really used. `shortfall` looks at all scopes before any is touched, so that a
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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf

from cluster.api import LimitStatus, Tenant, TenantSnapshot, Usage
from cluster.rate_window import NS_PER_S, Debit, RateWindow

OWNER_LEASE_NS = 30 * NS_PER_S
"""Several heartbeats missed, and still under the minute after which phantom reservations are felt."""
WRITE_OFF_MEMORY_NS = 600 * NS_PER_S
CONCURRENCY_RETRY_NS = NS_PER_S
"""Nobody knows when a running request ends: the shortest wait that can be told to a client."""


class Scope(Enum):
    """What a tenant's quota counts."""

    REQUESTS_PER_MINUTE = auto()
    TOKENS_PER_MINUTE = auto()
    CONCURRENT_REQUESTS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one request reserves: itself, and `tokens` tokens of which `prompt_tokens` are its prompt."""

    request_id: str
    tenant: str
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The scope that binds longest. `capacity`: what it can hold at most. `retry_after_ns` None: waiting is no use."""

    scope: Scope
    limit: int
    capacity: int
    asked: int
    left: int
    retry_after_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """An open claim. `prepaid`: its request and its prompt were charged already, when its owner was thought dead."""

    claim: Claim
    owner: str
    request_debit: Debit | None
    token_debit: Debit | None
    prepaid: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOff:
    reservation: Reservation
    at_ns: int


@dataclass(slots=True, kw_only=True)
class _Account:
    """Windows are None where the tenant is unlimited."""

    concurrent_requests: int | None
    requests: RateWindow | None
    tokens: RateWindow | None
    open: int = 0
    reserved_tokens: int = 0
    used_requests: int = 0
    used_tokens: int = 0


class Ledger:
    """The accounts of a fixed set of tenants. An unknown tenant raises LookupError."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._accounts = {tenant_id: _account(tenant) for tenant_id, tenant in tenants.items()}
        self._open: dict[str, Reservation] = {}
        self._heard_ns: dict[str, int] = {}
        self._written_off: OrderedDict[str, _WrittenOff] = OrderedDict()

    def token_capacity(self, tenant: str) -> int | None:
        """The most tokens that one request of the tenant can ever reserve; None = any number."""
        window = self._account(tenant).tokens
        return window.capacity if window else None

    def shortfall(self, claim: Claim, now_ns: int) -> Shortfall | None:
        """Why `claim` cannot be reserved now, None if it can. When the answer's time is over, all scopes have room."""
        account = self._account(claim.tenant)
        found = [
            _window_shortfall(Scope.REQUESTS_PER_MINUTE, account.requests, 1, now_ns),
            _window_shortfall(Scope.TOKENS_PER_MINUTE, account.tokens, claim.tokens, now_ns),
            _concurrency_shortfall(account),
        ]
        binding = [shortfall for shortfall in found if shortfall is not None]
        return max(binding, key=lambda s: inf if s.retry_after_ns is None else s.retry_after_ns, default=None)

    def reserve(self, claim: Claim, owner: str, now_ns: int) -> None:
        """Take what `claim` needs, into debt if need be: who may not go into debt asks `shortfall` first.

        A claim that is open already only changes its owner.
        """
        account = self._account(claim.tenant)
        self.renew(owner, now_ns)
        known = self._open.get(claim.request_id)
        if known is not None:
            self._open[claim.request_id] = replace(known, owner=owner)
            return
        prepaid = self._written_off.pop(claim.request_id, None) is not None
        tokens = claim.tokens - (claim.prompt_tokens if prepaid else 0)
        self._open[claim.request_id] = Reservation(
            claim=claim,
            owner=owner,
            request_debit=account.requests.debit(1, now_ns) if account.requests and not prepaid else None,
            token_debit=account.tokens.debit(tokens, now_ns) if account.tokens else None,
            prepaid=prepaid,
        )
        account.open += 1
        account.reserved_tokens += claim.tokens

    def settle(self, request_id: str, usage: Usage | None, now_ns: int) -> bool:
        """Charge what was used (None: nothing ran) in place of what was reserved. False: not open, nothing done."""
        if request_id in self._written_off:
            late = self._written_off[request_id].reservation
            self.reserve(late.claim, late.owner, now_ns)
        reservation = self._open.pop(request_id, None)
        if reservation is None:
            return False
        claim = reservation.claim
        account = self._accounts[claim.tenant]
        account.open -= 1
        account.reserved_tokens -= claim.tokens
        requests = (usage is not None) - reservation.prepaid
        tokens = (usage.total_tokens if usage else 0) - (claim.prompt_tokens if reservation.prepaid else 0)
        account.used_requests += requests
        account.used_tokens += tokens
        # Of what was prepaid nothing goes back into the windows: how much they have forgotten of it is not known.
        if account.requests and reservation.request_debit:
            account.requests.settle(reservation.request_debit, requests, now_ns)
        if account.tokens and reservation.token_debit:
            account.tokens.settle(reservation.token_debit, max(0, tokens), now_ns)
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

    def status(self, tenant: str, now_ns: int) -> LimitStatus:
        """The tenant's rate limits as it may see them."""
        account = self._account(tenant)
        return LimitStatus(
            requests=account.requests.status(now_ns) if account.requests else None,
            tokens=account.tokens.status(now_ns) if account.tokens else None,
        )

    def snapshot(self, now_ns: int) -> tuple[TenantSnapshot, ...]:
        """Every account."""
        return tuple(
            TenantSnapshot(
                tenant=tenant,
                open_reservations=account.open,
                reserved_tokens=account.reserved_tokens,
                used_requests=account.used_requests,
                used_tokens=account.used_tokens,
                limits=self.status(tenant, now_ns),
            )
            for tenant, account in self._accounts.items()
        )

    def check_integrity(self, open_requests: set[str]) -> None:
        """Assert that exactly `open_requests` are reserved and that every account agrees with its reservations."""
        assert set(self._open) == open_requests
        assert all(reservation.owner in self._heard_ns for reservation in self._open.values())
        for tenant, account in self._accounts.items():
            mine = [each for each in self._open.values() if each.claim.tenant == tenant]
            assert account.open == len(mine)
            assert account.reserved_tokens == sum(each.claim.tokens for each in mine)
            if account.requests:
                account.requests.check_integrity(sum(each.request_debit is not None for each in mine))
            if account.tokens:
                account.tokens.check_integrity(sum(each.token_debit is not None for each in mine))

    def _account(self, tenant: str) -> _Account:
        try:
            return self._accounts[tenant]
        except KeyError:
            raise LookupError(f"no tenant {tenant!r}; there are {sorted(self._accounts)}") from None


def _account(tenant: Tenant) -> _Account:
    limits = tenant.limits
    per_minute = [
        None if limit is None else RateWindow(limit=limit, burst_s=limits.burst_s)
        for limit in (limits.requests_per_minute, limits.tokens_per_minute)
    ]
    return _Account(concurrent_requests=limits.concurrent_requests, requests=per_minute[0], tokens=per_minute[1])


def _window_shortfall(scope: Scope, window: RateWindow | None, asked: int, now_ns: int) -> Shortfall | None:
    retry_after_ns = window.retry_after_ns(asked, now_ns) if window else 0
    if window is None or retry_after_ns == 0:
        return None
    return Shortfall(
        scope=scope,
        limit=window.limit,
        capacity=window.capacity,
        asked=asked,
        left=window.status(now_ns).remaining,
        retry_after_ns=retry_after_ns,
    )


def _concurrency_shortfall(account: _Account) -> Shortfall | None:
    limit = account.concurrent_requests
    if limit is None or account.open < limit:
        return None
    return Shortfall(
        scope=Scope.CONCURRENT_REQUESTS,
        limit=limit,
        capacity=limit,
        asked=1,
        left=0,
        retry_after_ns=CONCURRENCY_RETRY_NS if limit else None,
    )
