from __future__ import annotations

import pytest

from cluster.account import Shortfall
from cluster.api import Directory, LimitKind, LimitStatus, ModelTerms, Tenant, TenantSnapshot, WallClock
from cluster.ledger import OWNER_LEASE_NS, WRITE_OFF_MEMORY_NS, Claim, Ledger
from tests.cluster.makers import MODEL, OWNER, S, tenant, used


def ledger(*tenants: Tenant) -> Ledger:
    return Ledger(Directory(tenants=tenants, models=[ModelTerms(id=MODEL)]), WallClock(wall_ns=0, now_ns=0))


def claim(request_id: str, tenant_id: str = "a", *, prompt: int = 10, tokens: int = 30) -> Claim:
    return Claim(
        request_id=request_id,
        tenant=tenant_id,
        key=None,
        model=MODEL,
        prompt_tokens=prompt,
        output_tokens=tokens - prompt,
    )


def account(book: Ledger, tenant_id: str = "a", now_ns: int = 0) -> TenantSnapshot:
    return next(each for each in book.snapshot(now_ns) if each.tenant == tenant_id)


def tokens_left(book: Ledger, now_ns: int = 0) -> int:
    status = book.status("a", None, MODEL, now_ns).tokens
    assert status is not None
    return status.remaining


def requests_left(book: Ledger, now_ns: int = 0) -> int:
    status = book.status("a", None, MODEL, now_ns).requests
    assert status is not None
    return status.remaining


def binding(book: Ledger, wanted: Claim, now_ns: int = 0) -> Shortfall:
    shortfall = book.shortfall(wanted, now_ns)
    assert shortfall is not None
    return shortfall


def test_reservation_takes_from_every_scope_and_settling_charges_what_was_used() -> None:
    book = ledger(tenant(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=2))
    book.reserve(claim("r"), OWNER, 0)
    assert (requests_left(book), tokens_left(book)) == (9, 70)
    assert (account(book).open_reservations, account(book).reserved_tokens) == (1, 30)
    assert book.settle("r", used(10, 5), 0)
    assert (requests_left(book), tokens_left(book)) == (9, 85)
    after = account(book)
    assert (after.open_reservations, after.reserved_tokens, after.used_requests, after.used_tokens) == (0, 0, 1, 15)


def test_request_of_which_nothing_ran_gives_back_everything() -> None:
    book = ledger(tenant(requests_per_minute=10, tokens_per_minute=100))
    book.reserve(claim("r"), OWNER, 0)
    book.settle("r", None, 0)
    assert (requests_left(book), tokens_left(book)) == (10, 100)
    assert (account(book).used_requests, account(book).used_tokens) == (0, 0)


def test_second_settle_does_nothing() -> None:
    book = ledger(tenant(tokens_per_minute=100))
    book.reserve(claim("r"), OWNER, 0)
    assert book.settle("r", used(10, 5), 0)
    assert not book.settle("r", used(10, 20), 0)
    assert not book.settle("never heard of", None, 0)
    assert (tokens_left(book), account(book).used_tokens) == (85, 15)


def test_overrun_is_charged() -> None:
    book = ledger(tenant(tokens_per_minute=100))
    book.reserve(claim("r"), OWNER, 0)
    book.settle("r", used(10, 80), 0)
    assert (tokens_left(book), account(book).used_tokens) == (10, 90)


def test_reserving_an_open_claim_again_only_changes_its_owner() -> None:
    book = ledger(tenant(requests_per_minute=10, tokens_per_minute=100))
    book.reserve(claim("r"), "first", 0)
    book.reserve(claim("r"), "second", 20 * S)
    assert account(book).open_reservations == 1
    assert book.lapsed(OWNER_LEASE_NS) == []
    assert [each.owner for each in book.lapsed(OWNER_LEASE_NS + 20 * S)] == ["second"]


@pytest.mark.parametrize(
    ("limits", "kind", "retry_ns"),
    [
        ({"requests_per_minute": 1, "tokens_per_minute": 100}, LimitKind.REQUESTS_PER_MINUTE, 60 * S),
        ({"requests_per_minute": 100, "tokens_per_minute": 40}, LimitKind.TOKENS_PER_MINUTE, 30 * S),
        ({"concurrent_requests": 1}, LimitKind.CONCURRENT_REQUESTS, 1 * S),
        ({"requests_per_minute": 1, "concurrent_requests": 1}, LimitKind.REQUESTS_PER_MINUTE, 60 * S),
        (
            {"requests_per_minute": 1, "tokens_per_minute": 30, "concurrent_requests": 1},
            LimitKind.REQUESTS_PER_MINUTE,
            60 * S,
        ),
    ],
)
def test_the_limit_that_binds_longest_is_named(limits: dict[str, int], kind: LimitKind, retry_ns: int) -> None:
    book = ledger(tenant(**limits))
    book.reserve(claim("r"), OWNER, 0)
    shortfall = binding(book, claim("s"))
    assert (shortfall.kind, shortfall.retry_after_ns) == (kind, retry_ns)


def test_when_the_wait_is_over_all_rate_scopes_have_room() -> None:
    book = ledger(tenant(requests_per_minute=6, tokens_per_minute=60))
    for name in "abc":
        book.reserve(claim(name, tokens=20), OWNER, 0)
    wait_ns = binding(book, claim("s", tokens=20)).retry_after_ns
    assert wait_ns == 20 * S
    assert book.shortfall(claim("s", tokens=20), wait_ns) is None
    assert book.shortfall(claim("s", tokens=20), wait_ns - 1) is not None


@pytest.mark.parametrize("kind", list(LimitKind))
def test_zero_allows_nothing_and_no_wait_helps(kind: LimitKind) -> None:
    book = ledger(tenant(**{kind: 0}))
    shortfall = binding(book, claim("r"))
    assert (shortfall.kind, shortfall.limit, shortfall.retry_after_ns) == (kind, 0, None)


def test_what_can_never_fit_binds_before_what_only_has_to_wait() -> None:
    book = ledger(tenant(requests_per_minute=1, tokens_per_minute=100))
    book.reserve(claim("r"), OWNER, 0)
    shortfall = binding(book, claim("s", tokens=101))
    assert (shortfall.kind, shortfall.capacity, shortfall.asked) == (LimitKind.TOKENS_PER_MINUTE, 100, 101)
    assert shortfall.retry_after_ns is None


def test_shortfall_changes_nothing() -> None:
    book = ledger(tenant(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=1))
    book.reserve(claim("r"), OWNER, 0)
    before = book.snapshot(0)
    assert book.shortfall(claim("s"), 0) is not None
    assert book.snapshot(0) == before


def test_no_limit_means_no_shortfall_and_no_status() -> None:
    book = ledger(tenant())
    for number in range(1000):
        book.reserve(claim(str(number), tokens=10**9), OWNER, 0)
    assert book.shortfall(claim("r", tokens=10**12), 0) is None
    assert book.status("a", None, MODEL, 0) == LimitStatus(requests=None, tokens=None)
    assert book.output_room("a", None, MODEL, 10) is None


def test_unknown_tenant_is_named() -> None:
    book = ledger(tenant("a"), tenant("b"))
    with pytest.raises(LookupError, match="no tenant 'x'"):
        book.reserve(claim("r", "x"), OWNER, 0)
    book.check_integrity(set())


def test_only_owners_that_fell_silent_lapse_and_a_renewal_keeps_them() -> None:
    book = ledger(tenant())
    book.reserve(claim("r"), "silent", 0)
    book.reserve(claim("s"), "alive", 0)
    book.renew("alive", 1 * S)
    assert book.lapsed(OWNER_LEASE_NS - 1) == []
    lapsed = book.lapsed(OWNER_LEASE_NS)
    assert [each.claim.request_id for each in lapsed] == ["r"]


def test_written_off_request_is_charged_its_prompt_if_it_ran_and_else_nothing() -> None:
    book = ledger(tenant(requests_per_minute=10, tokens_per_minute=100))
    book.reserve(claim("ran"), OWNER, 0)
    book.reserve(claim("waited"), OWNER, 0)
    for reservation in book.lapsed(OWNER_LEASE_NS):
        book.write_off(reservation, reservation.claim.request_id == "ran", OWNER_LEASE_NS)
    book.check_integrity(set())
    assert (account(book).used_requests, account(book).used_tokens) == (1, 10)


def slow_owner(book: Ledger) -> int:
    """An owner that is written off; returns the time just after."""
    book.reserve(claim("r"), OWNER, 0)
    for reservation in book.lapsed(OWNER_LEASE_NS):
        book.write_off(reservation, True, OWNER_LEASE_NS)
    return OWNER_LEASE_NS


def test_owner_that_was_only_slow_is_charged_the_difference() -> None:
    """No usage is lost and none is charged twice, with the permit reserved again or not."""
    for reserves_again in (True, False):
        book = ledger(tenant(requests_per_minute=60, tokens_per_minute=6000))
        now_ns = slow_owner(book)
        if reserves_again:
            book.reserve(claim("r"), OWNER, now_ns)
            assert account(book).reserved_tokens == 30
        assert book.settle("r", used(10, 15), now_ns)
        assert not book.settle("r", used(10, 15), now_ns)
        assert (account(book).used_requests, account(book).used_tokens) == (1, 25)
        book.check_integrity(set())


def test_written_off_is_forgotten_after_a_while() -> None:
    book = ledger(tenant())
    now_ns = slow_owner(book) + WRITE_OFF_MEMORY_NS
    assert book.lapsed(now_ns) == []
    assert not book.settle("r", used(10, 15), now_ns)
    assert account(book).used_tokens == 10
