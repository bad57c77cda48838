"""Virtual time: who is furthest behind for its weight goes first, and idle time is not saved up."""

from __future__ import annotations

from engine.tenant_shares import TenantShares


def test_a_token_counts_less_for_who_weighs_more() -> None:
    shares = TenantShares()
    shares.open("small", 1)
    shares.open("large", 4)
    for tenant in ("small", "large"):
        shares.charge(tenant, 8)
    assert (shares.clock("small"), shares.clock("large")) == (8.0, 2.0)


def test_a_newcomer_starts_where_the_one_furthest_behind_is() -> None:
    shares = TenantShares()
    shares.open("a", 1)
    shares.open("b", 1)
    shares.charge("a", 10)
    shares.charge("b", 6)
    shares.open("new", 1)
    assert shares.clock("new") == 6.0


def test_a_pause_saves_nothing_up_and_pays_nothing_back() -> None:
    shares = TenantShares()
    for tenant in ("steady", "ahead", "behind"):
        shares.open(tenant, 1)
    shares.charge("ahead", 100)
    shares.close("ahead")
    shares.close("behind")
    shares.charge("steady", 40)
    shares.open("ahead", 1)
    shares.open("behind", 1)
    assert (shares.clock("ahead"), shares.clock("behind")) == (100.0, 40.0)


def test_a_tenant_is_in_until_its_last_sequence_has_ended() -> None:
    shares = TenantShares()
    shares.open("other", 1)
    shares.open("twice", 1)
    shares.open("twice", 1)
    shares.charge("other", 10)
    shares.close("twice")
    shares.open("twice", 1)
    assert shares.clock("twice") == 0.0


def test_once_nobody_is_there_everything_is_forgotten() -> None:
    shares = TenantShares()
    shares.open("a", 1)
    shares.charge("a", 50)
    shares.close("a")
    shares.open("b", 1)
    shares.open("a", 1)
    assert (shares.clock("a"), shares.clock("b")) == (0.0, 0.0)


def test_the_newest_weight_is_the_one_that_counts() -> None:
    shares = TenantShares()
    shares.open("a", 1)
    shares.open("a", 2)
    shares.charge("a", 8)
    assert shares.clock("a") == 4.0
