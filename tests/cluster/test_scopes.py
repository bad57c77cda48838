"""Limits of several scopes: all are asked before any is touched, and the one that binds is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.admission import AdmissionController
from cluster.api import (
    PICO,
    Directory,
    KeyTerms,
    Level,
    Limits,
    ModelTerms,
    Organisation,
    Permit,
    QueuePolicy,
    Refusal,
    RefusalCode,
    Scope,
    Usage,
    WallClock,
)
from tests.cluster.makers import MINUTE, OWNER, S, ask, permit, refusal, tenant, used

UNLIMITED = Limits()
DAY_LEFT = 14 * 3600
DECEMBER_5_10H_NS = 1_796_464_800 * S


def door(directory: Directory) -> AdmissionController:
    made = AdmissionController(directory, QueuePolicy(), WallClock(wall_ns=DECEMBER_5_10H_NS, now_ns=0))
    for model in directory.models:
        made.report_replica(model, f"{model}-1", 1000, 10**9, 0)
    return made


def two_keys(of_key: Limits, of_tenant: Limits, of_organisation: Limits = UNLIMITED) -> Directory:
    return Directory(
        organisations=[Organisation(id="org", name="Org", limits=of_organisation)],
        tenants=[replace(tenant("a", parent="org"), limits=of_tenant)],
        keys=[KeyTerms(id="k1", tenant="a", limits=of_key), KeyTerms(id="k2", tenant="a", limits=of_key)],
        models=[ModelTerms(id="m"), ModelTerms(id="n")],
    )


def send(controller: AdmissionController, request_id: str, key: str, tokens: int, now_ns: int = 0) -> Permit | Refusal:
    wanted = replace(ask(request_id, prompt=tokens, output=0), key=key)
    decision = controller.submit(wanted, OWNER, now_ns)
    assert isinstance(decision, Permit | Refusal)
    return decision


def test_p_quo_05_each_level_binds_and_is_named() -> None:
    gate = door(two_keys(Limits(tokens_per_minute=500), Limits(tokens_per_minute=800)))
    for number in range(5):
        permit(send(gate, f"one{number}", "k1", 100))
    refused = refusal(send(gate, "one5", "k1", 100))
    assert (refused.code, refused.scope) == (RefusalCode.TOKENS_PER_MINUTE, Scope(level=Level.KEY, id="k1"))
    assert "tokens_per_minute of key 'k1' is 500" in refused.message
    for number in range(3):
        permit(send(gate, f"two{number}", "k2", 100))
    refused = refusal(send(gate, "two3", "k2", 100))
    assert refused.scope == Scope(level=Level.TENANT, id="a")
    assert refused.status.tokens is not None
    assert (refused.status.tokens.remaining, refused.status.tokens.scope) == (0, Scope(level=Level.TENANT, id="a"))
    own = gate.limits("a", 0, "k2").tokens
    assert own is not None and own.remaining == 0


def test_p_quo_05_a_child_with_more_than_its_parent_stops_at_the_parent() -> None:
    gate = door(two_keys(Limits(tokens_per_minute=2000), Limits(tokens_per_minute=800)))
    admitted = [isinstance(send(gate, str(number), "k1", 100), Permit) for number in range(10)]
    assert admitted == [True] * 8 + [False] * 2


@pytest.mark.parametrize("binding", [Level.ORGANISATION, Level.TENANT, Level.KEY])
def test_p_quo_05_a_refused_request_takes_nothing_from_any_level(binding: Level) -> None:
    limits = {level: Limits(requests_per_minute=2 if level is binding else 5) for level in Level}
    gate = door(two_keys(limits[Level.KEY], limits[Level.TENANT], limits[Level.ORGANISATION]))
    permit(send(gate, "1", "k1", 1))
    permit(send(gate, "2", "k1", 1))
    for number in range(20):
        refusal(send(gate, f"refused{number}", "k1", 1))
    gate.check_integrity()
    # Three minutes later two more are admitted at every level: none has lost anything to the refusals.
    permit(send(gate, "3", "k1", 1, MINUTE // 2))


@pytest.mark.parametrize(
    ("limits", "code", "message"),
    [
        (Limits(tokens_per_day=100), RefusalCode.TOKENS_PER_DAY, "tokens_per_day of tenant 'a' is 100"),
        (Limits(tokens_per_month=100), RefusalCode.TOKENS_PER_MONTH, "tokens_per_month of tenant 'a' is 100"),
        (Limits(budget_per_month=PICO // 10), RefusalCode.BUDGET, "budget_per_month of tenant 'a' is 0.1"),
    ],
)
def test_what_a_day_or_month_allows(limits: Limits, code: RefusalCode, message: str) -> None:
    directory = Directory(
        tenants=[replace(tenant("a"), limits=limits)],
        models=[ModelTerms(id="m", prompt_price=PICO // 1000, completion_price=PICO // 1000)],
    )
    gate = door(directory)
    permit(gate.submit(ask("1", prompt=50, output=50), OWNER, 0))
    refused = refusal(gate.submit(ask("2", prompt=1, output=0), OWNER, 0))
    assert refused.code is code
    assert message in refused.message
    days_left = 0 if code is RefusalCode.TOKENS_PER_DAY else 26
    assert refused.retry_after_s == DAY_LEFT + days_left * 24 * 3600
    gate.close("1", used(50, 20), 1)
    permit(gate.submit(ask("3", prompt=30, output=0), OWNER, 1))
    refusal(gate.submit(ask("4", prompt=1, output=0), OWNER, 1))
    refused = refusal(gate.submit(ask("5", prompt=101, output=0), OWNER, 1))
    assert (refused.code, refused.retry_after_s) == (RefusalCode.EXCEEDS_LIMIT, None)


def test_a_budget_is_charged_by_the_kind_of_token() -> None:
    terms = ModelTerms(id="m", prompt_price=10, cached_price=1, completion_price=100, cached_percent=25)
    charge = terms.charge(prompt_tokens=50, completion_tokens=7, cached_tokens=33)
    assert charge.money == 17 * 10 + 33 * 1 + 7 * 100
    assert charge.tokens == 17 + 9 + 7  # a quarter of 33, rounded up


def test_cached_tokens_are_given_back_as_the_model_says() -> None:
    directory = Directory(tenants=[tenant("a", tokens_per_minute=100)], models=[ModelTerms(id="m", cached_percent=0)])
    gate = door(directory)
    permit(gate.submit(ask("1", prompt=90, output=10), OWNER, 0))
    gate.close("1", Usage(prompt_tokens=90, completion_tokens=10, cached_tokens=80), 0)
    limits = gate.limits("a", 0).tokens
    assert limits is not None and limits.remaining == 80


def test_limits_for_one_model_leave_the_others_alone() -> None:
    directory = Directory(
        tenants=[tenant("a", requests_per_minute=10, model_limits={"m": Limits(requests_per_minute=1)})],
        models=[ModelTerms(id="m"), ModelTerms(id="n", limits=Limits(concurrent_requests=2))],
    )
    gate = door(directory)
    permit(gate.submit(ask("1", model="m"), OWNER, 0))
    refused = refusal(gate.submit(ask("2", model="m"), OWNER, 0))
    assert refused.scope == Scope(level=Level.TENANT, id="a", model="m")
    assert "requests_per_minute of tenant 'a' for model 'm' is 1" in refused.message
    permit(gate.submit(ask("3", model="n"), OWNER, 0))
    permit(gate.submit(ask("4", model="n"), OWNER, 0))
    assert refusal(gate.submit(ask("5", model="n"), OWNER, 0)).scope == Scope(level=Level.MODEL, id="n")


def test_an_expected_output_is_kept_within_every_limit() -> None:
    limits = Limits(tokens_per_minute=200, tokens_per_day=150, budget_per_month=1000)
    directory = Directory(
        tenants=[replace(tenant("a"), limits=limits)],
        models=[ModelTerms(id="m", prompt_price=1, completion_price=10)],
    )
    granted = permit(door(directory).submit(ask("1", prompt=40, output=None), OWNER, 0))
    assert granted.reserved_tokens == 40 + 96  # 96 x 10 + 40 x 1 is what the budget holds


def test_limits_that_change_are_in_force_at_once_and_forget_nothing() -> None:
    directory = two_keys(Limits(), Limits(tokens_per_minute=1000))
    gate = door(directory)
    permit(send(gate, "1", "k1", 600))
    directory.tenants["a"] = replace(directory.tenants["a"], limits=Limits(tokens_per_minute=700))
    gate.put_in_force(0)
    refusal(send(gate, "2", "k1", 101))
    permit(send(gate, "3", "k1", 100))
    directory.tenants["a"] = replace(directory.tenants["a"], limits=Limits())
    gate.put_in_force(0)
    permit(send(gate, "4", "k1", 10**6))
    directory.tenants["a"] = replace(directory.tenants["a"], limits=Limits(tokens_per_minute=0))
    gate.put_in_force(0)
    assert refusal(send(gate, "5", "k1", 1)).retry_after_s is None
    for request_id in ("1", "3", "4"):
        assert gate.close(request_id, used(1, 0), 0)
    gate.check_integrity()


def test_a_tenant_that_moves_settles_what_it_began_where_it_began() -> None:
    directory = two_keys(Limits(), Limits(), Limits(tokens_per_minute=100))
    directory.organisations["other"] = Organisation(id="other", name="Other", limits=Limits(tokens_per_minute=50))
    gate = door(directory)
    permit(send(gate, "1", "k1", 100))
    directory.tenants["a"] = replace(directory.tenants["a"], parent="other")
    gate.put_in_force(0)
    permit(send(gate, "2", "k1", 50))
    gate.close("1", used(40, 0), 0)
    directory.tenants["a"] = replace(directory.tenants["a"], parent="org")
    gate.put_in_force(0)
    permit(send(gate, "3", "k1", 60))
    gate.check_integrity()


def test_a_revoked_key_settles_what_it_began() -> None:
    directory = two_keys(Limits(tokens_per_minute=100), Limits(tokens_per_minute=100))
    gate = door(directory)
    permit(send(gate, "1", "k1", 100))
    del directory.keys["k1"]
    gate.put_in_force(0)
    gate.close("1", used(10, 0), 0)
    permit(send(gate, "2", "k2", 90))
    gate.check_integrity()


LEVEL_LIMITS = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(0, 8),
    tokens_per_minute=st.none() | st.integers(0, 300),
    concurrent_requests=st.none() | st.integers(0, 5),
    tokens_per_day=st.none() | st.integers(0, 500),
)


@given(
    limits=st.fixed_dictionaries(dict.fromkeys(Level, LEVEL_LIMITS)),
    requests=st.lists(
        st.tuples(st.sampled_from(["k1", "k2"]), st.integers(0, 80), st.integers(0, 80), st.integers(0, 20 * S)),
        max_size=30,
    ),
)
def test_no_level_ever_holds_more_than_it_allows(
    limits: dict[Level, Limits], requests: list[tuple[str, int, int, int]]
) -> None:
    """Reserved and used stay within every calendar and concurrency limit of every level, and what one level refuses
    is refused whatever the others say: the outcome is the conjunction of four controllers with one level each."""

    def directory(levels: set[Level]) -> Directory:
        def of(level: Level) -> Limits:
            return limits[level] if level in levels else Limits()

        made = two_keys(of(Level.KEY), of(Level.TENANT), of(Level.ORGANISATION))
        made.models["m"] = ModelTerms(id="m", limits=of(Level.MODEL))
        return made

    whole = door(directory(set(Level)))
    alone = {level: door(directory({level})) for level in Level}
    now_ns = 0
    for number, (key, prompt, output, wait_ns) in enumerate(requests):
        now_ns += wait_ns
        wanted = replace(ask(str(number), prompt=prompt, output=output), key=key)
        fits = {level: gate.submit(wanted, OWNER, now_ns) for level, gate in alone.items()}
        decision = whole.submit(wanted, OWNER, now_ns)
        assert isinstance(decision, Permit) == all(isinstance(each, Permit) for each in fits.values())
        admitted = isinstance(decision, Permit)
        for level, gate in alone.items():
            # Each single controller is kept at what all of them together let through.
            if isinstance(fits[level], Permit):
                gate.close(wanted.request_id, used(prompt, output // 2) if admitted else None, now_ns)
        if admitted:
            whole.close(wanted.request_id, used(prompt, output // 2), now_ns)
        else:
            assert isinstance(decision, Refusal) and decision.scope is not None
            assert isinstance(fits[decision.scope.level], Refusal)
        whole.check_integrity()
