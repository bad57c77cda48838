from __future__ import annotations

from itertools import count

import pytest

from cluster.admission import EXPECTED_OUTPUT_TOKENS
from cluster.api import (
    AdmissionAsk,
    Lane,
    Limits,
    Permit,
    Queued,
    QueuePolicy,
    Refusal,
    RefusalCode,
    Usage,
    WaitingCount,
)
from cluster.capacity import REPLICA_LEASE_NS
from cluster.ledger import OWNER_LEASE_NS
from tests.cluster.makers import (
    MINUTE,
    MODEL,
    OWNER,
    S,
    ask,
    assert_nothing_open,
    controller,
    ids,
    permit,
    queued,
    refusal,
    tenant,
    used,
)

# A request that passes at once.


def test_request_that_fits_is_granted_at_once_with_what_it_reserves_and_what_is_left() -> None:
    door = controller(tenant(requests_per_minute=10, tokens_per_minute=1000))
    granted = permit(door.submit(ask("r", prompt=100, output=50), OWNER, 0))
    assert (granted.request_id, granted.prompt_tokens, granted.reserved_tokens) == ("r", 100, 150)
    assert granted.status.requests is not None and granted.status.requests.remaining == 9
    assert granted.status.tokens is not None and granted.status.tokens.remaining == 850
    door.check_integrity()


def test_close_charges_exactly_what_was_used_and_only_once() -> None:
    door = controller(tenant(tokens_per_minute=1000))
    door.submit(ask("r", prompt=100, output=50), OWNER, 0)
    assert door.close("r", used(100, 7), 0)
    assert not door.close("r", used(100, 50), 0)
    snapshot = door.snapshot(0)
    assert_nothing_open(snapshot)
    assert (snapshot.tenants[0].used_requests, snapshot.tenants[0].used_tokens) == (1, 107)
    limits = door.limits("a", 0)
    assert limits.tokens is not None and limits.tokens.remaining == 893


def test_close_without_usage_gives_everything_back() -> None:
    door = controller(tenant(requests_per_minute=10, tokens_per_minute=1000))
    before = door.snapshot(0)
    door.submit(ask("r"), OWNER, 0)
    assert door.close("r", None, 0)
    assert door.snapshot(0) == before


@pytest.mark.parametrize(
    ("tokens_per_minute", "prompt", "reserved"),
    [(None, 10, 10 + EXPECTED_OUTPUT_TOKENS), (1000, 10, 10 + EXPECTED_OUTPUT_TOKENS), (100, 10, 100), (100, 100, 100)],
)
def test_unbounded_output_reserves_an_expectation_that_the_tenant_could_be_given(
    tokens_per_minute: int | None, prompt: int, reserved: int
) -> None:
    door = controller(tenant(tokens_per_minute=tokens_per_minute))
    assert permit(door.submit(ask("r", prompt=prompt, output=None), OWNER, 0)).reserved_tokens == reserved


def test_expected_output_does_not_keep_a_prompt_out_that_fits_the_replica() -> None:
    door = controller(kv_tokens=100)
    permit(door.submit(ask("r", prompt=90, output=None), OWNER, 0))
    assert door.snapshot(0).models[0].committed_kv_tokens == 100


# Refused by quota.


@pytest.mark.parametrize(
    ("limits", "code", "retry_after_s", "message"),
    [
        (
            {"requests_per_minute": 1},
            RefusalCode.REQUESTS_PER_MINUTE,
            60,
            "requests_per_minute of tenant 'a' is 1: the request needs 1, 0 are left; retry in 60 s",
        ),
        (
            {"tokens_per_minute": 25},
            RefusalCode.TOKENS_PER_MINUTE,
            36,
            "tokens_per_minute of tenant 'a' is 25: the request needs 20 (10 prompt + 10 output), 5 are left; "
            "retry in 36 s",
        ),
        (
            {"concurrent_requests": 1},
            RefusalCode.CONCURRENT_REQUESTS,
            1,
            "concurrent_requests of tenant 'a' is 1: the request needs 1, 0 are left; retry in 1 s",
        ),
        (
            {"tokens_per_minute": 0},
            RefusalCode.TOKENS_PER_MINUTE,
            None,
            "tokens_per_minute of tenant 'a' is 0: nothing is allowed",
        ),
        (
            {"requests_per_minute": 0},
            RefusalCode.REQUESTS_PER_MINUTE,
            None,
            "requests_per_minute of tenant 'a' is 0: nothing is allowed",
        ),
        (
            {"concurrent_requests": 0},
            RefusalCode.CONCURRENT_REQUESTS,
            None,
            "concurrent_requests of tenant 'a' is 0: nothing is allowed",
        ),
        (
            {"tokens_per_minute": 19},
            RefusalCode.EXCEEDS_LIMIT,
            None,
            "tokens_per_minute of tenant 'a' is 19, at most 19 at once, and the request needs 20 "
            "(10 prompt + 10 output): it can never be admitted",
        ),
    ],
)
def test_refusal_by_quota_says_which_limit_what_was_asked_what_is_left_and_when_to_retry(
    limits: dict[str, int], code: RefusalCode, retry_after_s: int | None, message: str
) -> None:
    door = controller(tenant(**limits))
    door.submit(ask("r"), OWNER, 0)
    refused = refusal(door.submit(ask("s"), OWNER, 0))
    assert (refused.request_id, refused.code, refused.retry_after_s, refused.message) == (
        "s",
        code,
        retry_after_s,
        message,
    )


def test_prompt_larger_than_the_limit_never_fits_even_without_a_bound_on_the_output() -> None:
    refused = refusal(controller(tenant(tokens_per_minute=100)).submit(ask("r", prompt=101, output=None), OWNER, 0))
    assert (refused.code, refused.retry_after_s) == (RefusalCode.EXCEEDS_LIMIT, None)
    assert "needs 101 (101 prompt + 0 expected output)" in refused.message


@pytest.mark.parametrize(
    "limits", [{"requests_per_minute": 7}, {"tokens_per_minute": 140}, {"requests_per_minute": 90, "burst_s": 1}]
)
def test_retry_after_is_true(limits: dict[str, int]) -> None:
    """Twenty times: use the limit up, wait as long as told and no longer, and be admitted."""
    door = controller(tenant(**limits), slots=1000, kv_tokens=10**6)
    name = (f"r{n}" for n in count())
    now_ns = 0
    for _ in range(20):
        while isinstance(outcome := door.submit(ask(next(name)), OWNER, now_ns), Permit):
            pass
        retry_after_s = refusal(outcome).retry_after_s
        assert retry_after_s is not None and retry_after_s >= 1
        now_ns += retry_after_s * S
        permit(door.submit(ask(next(name)), OWNER, now_ns))


def test_half_of_retry_after_is_too_early() -> None:
    door = controller(tenant(tokens_per_minute=140))
    door.submit(ask("r", prompt=140, output=0), OWNER, 0)
    retry_after_s = refusal(door.submit(ask("s"), OWNER, 0)).retry_after_s
    assert retry_after_s == 9  # 20 tokens at 140 per minute: 8.57 s
    refusal(door.submit(ask("s"), OWNER, retry_after_s * S // 2))


def test_refused_request_takes_nothing_from_any_scope() -> None:
    door = controller(tenant(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=1))
    door.submit(ask("r"), OWNER, 0)
    before = door.snapshot(0)
    refusal(door.submit(ask("s"), OWNER, 0))
    assert door.snapshot(0) == before
    door.check_integrity()


def test_burst_of_fifty_at_once_stays_within_the_limit() -> None:
    door = controller(tenant(tokens_per_minute=1000), slots=100)
    outcomes = [door.submit(ask(f"{n}", prompt=40, output=60), OWNER, 0) for n in range(50)]
    assert [type(outcome) for outcome in outcomes] == [Permit] * 10 + [Refusal] * 40


def test_long_stream_of_refunds_never_lets_more_through_than_limit_and_burst() -> None:
    """Reserving a lot and using little must not mint: a minute uses its rate and the burst at most."""
    door = controller(tenant(tokens_per_minute=600), slots=100, kv_tokens=10**6)
    name = (f"r{n}" for n in count())
    for tick in range(120):
        now_ns = tick * S // 2
        opened = []
        while isinstance(outcome := door.submit(ask(next(name), prompt=10, output=90), OWNER, now_ns), Permit):
            opened.append(outcome)
        for each in opened:
            door.close(each.request_id, used(10, 5), now_ns)
    (account,) = door.snapshot(MINUTE).tenants
    assert 600 <= account.used_tokens <= 600 + 600


# Waiting for the model.


def test_request_that_does_not_fit_waits_and_is_granted_when_another_ends() -> None:
    door = controller(slots=1)
    permit(door.submit(ask("r"), OWNER, 0))
    waits = queued(door.submit(ask("s"), OWNER, 0))
    assert waits == Queued(request_id="s", waiting=1, waiting_of_tenant=1, deadline_ns=60 * S)
    assert door.dispatch(1 * S) == []
    door.close("r", used(10, 10), 1 * S)
    assert ids(door.dispatch(1 * S)) == ["s"]
    door.check_integrity()


def test_arrival_does_not_pass_those_who_wait_even_if_a_slot_is_free() -> None:
    door = controller(slots=1)
    door.submit(ask("r"), OWNER, 0)
    door.submit(ask("s"), OWNER, 0)
    door.close("r", None, 0)
    queued(door.submit(ask("t"), OWNER, 0))
    assert ids(door.dispatch(0)) == ["s"]


def test_higher_lane_passes_a_lower_one_at_once() -> None:
    door = controller(slots=1)
    door.submit(ask("r"), OWNER, 0)
    door.submit(ask("low", lane=Lane.BATCH), OWNER, 0)
    door.close("r", None, 0)
    permit(door.submit(ask("high", lane=Lane.INTERACTIVE), OWNER, 0))
    assert door.dispatch(0) == []


def test_large_head_is_not_passed_by_small_ones_behind_it() -> None:
    door = controller(slots=4, kv_tokens=100)
    door.submit(ask("r", prompt=50, output=10), OWNER, 0)
    queued(door.submit(ask("large", prompt=40, output=10), OWNER, 0))
    queued(door.submit(ask("small", prompt=1, output=1), OWNER, 0))
    queued(door.submit(ask("small in a lower lane", prompt=1, output=1, lane=Lane.BATCH), OWNER, 0))
    assert door.dispatch(0) == []
    door.close("r", None, 0)
    assert ids(door.dispatch(0)) == ["large", "small", "small in a lower lane"]


def test_request_that_no_replica_could_hold_is_refused_for_good() -> None:
    door = controller(tenant(tokens_per_minute=10_000), slots=4, kv_tokens=100)
    before = door.snapshot(0)
    refused = refusal(door.submit(ask("r", prompt=101, output=0), OWNER, 0))
    assert (refused.code, refused.retry_after_s) == (RefusalCode.KV_CAPACITY_EXCEEDED, None)
    assert refused.message == (
        "the prompt has 101 tokens and the KV memory of the largest replica of model 'm' holds 100: "
        "it can never run there"
    )
    assert door.snapshot(0) == before


def test_request_whose_output_may_outgrow_the_memory_gets_all_there_is() -> None:
    door = controller(slots=4, kv_tokens=100)
    granted = permit(door.submit(ask("r", prompt=100, output=5000), OWNER, 0))
    assert granted.reserved_tokens == 5100
    assert door.snapshot(0).models[0].committed_kv_tokens == 100
    queued(door.submit(ask("s"), OWNER, 0))
    door.close("r", used(100, 1), 0)
    assert ids(door.dispatch(0)) == ["s"]


def test_prompts_of_one_request_fit_if_the_longest_of_them_does() -> None:
    door = controller(slots=8, kv_tokens=100)
    granted = permit(door.submit(ask("r", prompt=300, output=0, sequences=3, longest_prompt=100), OWNER, 0))
    assert granted.num_sequences == 3
    model = door.snapshot(0).models[0]
    assert (model.permits_open, model.committed_slots, model.committed_kv_tokens) == (1, 3, 100)
    refused = refusal(door.submit(ask("s", prompt=300, sequences=3, longest_prompt=101), OWNER, 0))
    assert refused.code is RefusalCode.KV_CAPACITY_EXCEEDED
    assert "101 tokens" in refused.message


def test_request_with_more_sequences_than_slots_waits_until_it_can_have_them_all() -> None:
    door = controller(slots=4)
    permit(door.submit(ask("small"), OWNER, 0))
    queued(door.submit(ask("many", sequences=9), OWNER, 0))
    queued(door.submit(ask("behind"), OWNER, 0))
    assert door.dispatch(0) == []
    door.close("small", used(1, 1), 0)
    assert ids(door.dispatch(0)) == ["many"]
    assert door.snapshot(0).models[0].committed_slots == 4
    door.close("many", used(1, 1), 0)
    assert ids(door.dispatch(0)) == ["behind"]


def test_unbounded_request_is_expected_to_write_as_much_in_each_of_its_outputs() -> None:
    door = controller(tenant(tokens_per_minute=1000))
    assert permit(door.submit(ask("r", prompt=10, output=None, sequences=2), OWNER, 0)).reserved_tokens == 10 + 512
    assert permit(door.submit(ask("s", prompt=8, output=None), OWNER, 0)).reserved_tokens == 8 + 256


def test_permit_carries_the_weight_of_its_tenant() -> None:
    door = controller(tenant("a", weight=7))
    assert permit(door.submit(ask("r"), OWNER, 0)).weight == 7


def test_reopened_permit_holds_as_many_slots_as_before() -> None:
    granted = permit(controller(slots=8).submit(ask("r", sequences=3), OWNER, 0))
    door = controller(slots=8)
    door.reopen(granted, OWNER, 0)
    assert door.snapshot(0).models[0].committed_slots == 3
    door.check_integrity()


def test_request_that_waits_and_turns_out_too_large_does_not_block_the_queue() -> None:
    door = controller(tenant(tokens_per_minute=10_000), slots=0)
    door.submit(ask("huge", prompt=5000), OWNER, 0)
    door.submit(ask("small"), OWNER, 0)
    door.report_replica(MODEL, "m-1", 4, 100, 1 * S)
    refused, granted = door.dispatch(1 * S)
    assert (refusal(refused).request_id, refusal(refused).code) == ("huge", RefusalCode.KV_CAPACITY_EXCEEDED)
    assert permit(granted).request_id == "small"
    door.check_integrity()


def test_waiting_ends_at_the_deadline_and_gives_everything_back() -> None:
    door = controller(
        tenant(tokens_per_minute=1000, requests_per_minute=10), slots=0, policy=QueuePolicy(max_wait_s=30)
    )
    before = door.snapshot(0)
    queued(door.submit(ask("r"), OWNER, 0))
    assert door.dispatch(30 * S - 1) == []
    (refused,) = door.dispatch(30 * S)
    assert (refusal(refused).code, refusal(refused).retry_after_s) == (RefusalCode.NO_CAPACITY, 5)
    assert refusal(refused).message == (
        "the request waited 30 s for model 'm', which is the limit: it has no live replica; retry in 5 s"
    )
    assert door.snapshot(30 * S) == before


def test_deadline_of_one_unblocks_those_behind_it() -> None:
    door = controller(slots=4, kv_tokens=100, policy=QueuePolicy(max_wait_s=30))
    door.submit(ask("r", prompt=50), OWNER, 0)
    door.submit(ask("large", prompt=50), OWNER, 0)
    door.submit(ask("small", prompt=5), OWNER, 10 * S)
    refused, granted = door.dispatch(30 * S)
    assert refusal(refused).message.endswith("its 1 replicas were busy; retry in 5 s")
    assert permit(granted).request_id == "small"


def test_full_queue_of_the_model_refuses_at_once_with_the_time_when_a_place_is_free_for_certain() -> None:
    door = controller(slots=1, policy=QueuePolicy(max_waiting_per_model=2, max_wait_s=30))
    door.submit(ask("r"), OWNER, 0)
    door.submit(ask("s", "a"), OWNER, 10 * S)
    door.submit(ask("t", "b"), OWNER, 11 * S)
    before = door.snapshot(12 * S)
    refused = refusal(door.submit(ask("u"), OWNER, 12 * S + 1))
    assert (refused.code, refused.retry_after_s) == (RefusalCode.QUEUE_FULL, 28)
    assert refused.message == "the queue of model 'm' is full: 2 requests may wait, and do; retry in 28 s"
    assert door.snapshot(12 * S + 1) == before
    assert ids(door.dispatch(40 * S + 1)) == ["s"]
    queued(door.submit(ask("u"), OWNER, 40 * S + 1))


def test_full_queue_of_one_tenant_leaves_room_for_others() -> None:
    door = controller(slots=1, policy=QueuePolicy(max_waiting_per_tenant=1))
    door.submit(ask("r", "a"), OWNER, 0)
    door.submit(ask("s", "a"), OWNER, 0)
    refused = refusal(door.submit(ask("t", "a"), OWNER, 0))
    assert refused.code is RefusalCode.QUEUE_FULL
    assert "1 requests of tenant 'a' may wait, and do; retry in 60 s" in refused.message
    queued(door.submit(ask("u", "b"), OWNER, 0))


def test_full_queue_refuses_even_what_would_fit_beside_those_who_run() -> None:
    door = controller(slots=4, kv_tokens=100, policy=QueuePolicy(max_waiting_per_model=1))
    door.submit(ask("r", prompt=50), OWNER, 0)
    door.submit(ask("large", prompt=50), OWNER, 0)
    assert refusal(door.submit(ask("small", prompt=1), OWNER, 0)).code is RefusalCode.QUEUE_FULL


def test_queue_of_length_zero_still_grants_what_fits() -> None:
    door = controller(slots=1, policy=QueuePolicy(max_waiting_per_model=0))
    permit(door.submit(ask("r"), OWNER, 0))
    refused = refusal(door.submit(ask("s"), OWNER, 0))
    assert (refused.code, refused.retry_after_s) == (RefusalCode.QUEUE_FULL, 1)


def test_tenant_is_told_of_its_own_limit_before_it_is_told_of_a_full_queue() -> None:
    door = controller(tenant(requests_per_minute=1), slots=0, policy=QueuePolicy(max_waiting_per_model=1))
    door.submit(ask("r"), OWNER, 0)
    assert refusal(door.submit(ask("s"), OWNER, 0)).code is RefusalCode.REQUESTS_PER_MINUTE


def test_models_do_not_wait_for_each_other() -> None:
    door = controller(slots=1, models=("m", "n"))
    door.submit(ask("r", model="m"), OWNER, 0)
    queued(door.submit(ask("s", model="m"), OWNER, 0))
    permit(door.submit(ask("t", model="n"), OWNER, 0))


def test_what_lower_lanes_were_promised_does_not_keep_a_higher_one_waiting() -> None:
    door = controller(tenant("a"), tenant("b"), slots=2)
    for name in ("low-0", "low-1"):
        permit(door.submit(ask(name, "a", lane=Lane.BATCH), OWNER, 0))
    assert isinstance(door.submit(ask("low-2", "a", lane=Lane.BATCH), OWNER, 0), Queued)
    for name in ("high-0", "high-1"):
        permit(door.submit(ask(name, "b", lane=Lane.INTERACTIVE), OWNER, 0))
    assert isinstance(door.submit(ask("high-2", "b", lane=Lane.INTERACTIVE), OWNER, 0), Queued)
    door.close("low-0", used(10, 10), 0)
    assert door.dispatch(0) == []  # a place of the lower lane is none for the higher
    door.close("high-0", used(10, 10), 0)
    assert ids(door.dispatch(0)) == ["high-2"]


def test_age_lifts_in_the_queue_but_displaces_nobody() -> None:
    door = controller(tenant("a"), tenant("b"), slots=1, policy=QueuePolicy(aging_s=10, max_wait_s=60))
    permit(door.submit(ask("running", "a", lane=Lane.BATCH), OWNER, 0))
    door.submit(ask("patient", "a", lane=Lane.BATCH), OWNER, 0)
    for second in (10, 20, 30):
        assert door.dispatch(second * S) == []
    door.close("running", used(10, 10), 30 * S)
    (granted,) = door.dispatch(30 * S)
    assert permit(granted).lane is Lane.INTERACTIVE  # and nobody of that lane displaces it
    assert door.submit(ask("patient", "a", lane=Lane.BATCH), OWNER, 30 * S) == granted
    assert isinstance(door.submit(ask("high", "b", lane=Lane.INTERACTIVE), OWNER, 30 * S), Queued)


def test_aged_request_passes_a_flood_of_a_higher_lane() -> None:
    door = controller(tenant("a"), tenant("b"), slots=1, policy=QueuePolicy(aging_s=10, max_wait_s=60))
    permit(door.submit(ask("running", "b", lane=Lane.INTERACTIVE), OWNER, 0))
    door.submit(ask("patient", "a", lane=Lane.BATCH), OWNER, 0)
    running, granted_at = "running", {}
    for second in range(40):
        for n in range(2):
            door.submit(ask(f"{second}-{n}", "b", lane=Lane.INTERACTIVE), OWNER, second * S)
        door.close(running, used(10, 10), second * S)
        (granted,) = door.dispatch(second * S)
        running = permit(granted).request_id
        granted_at[running] = second
    assert 20 <= granted_at["patient"] <= 21


# Leaving.


def test_client_that_leaves_the_queue_frees_its_place_and_its_quota() -> None:
    door = controller(tenant(tokens_per_minute=1000, requests_per_minute=10, concurrent_requests=5), slots=0)
    before = door.snapshot(0)
    door.submit(ask("r"), OWNER, 0)
    assert door.withdraw("r", 0)
    assert not door.withdraw("r", 0)
    assert door.snapshot(0) == before
    assert door.dispatch(0) == []


def test_withdrawal_that_crosses_its_permit_closes_it() -> None:
    door = controller(tenant(tokens_per_minute=1000))
    before = door.snapshot(0)
    permit(door.submit(ask("r"), OWNER, 0))
    assert door.withdraw("r", 0)
    assert door.snapshot(0) == before


def test_close_of_a_waiting_request_charges_nothing() -> None:
    door = controller(slots=0)
    door.submit(ask("r"), OWNER, 0)
    assert door.close("r", used(10, 10), 0)
    assert door.snapshot(0).tenants[0].used_tokens == 0


# Messages that come twice, controllers that start anew, owners and replicas that fall silent.


def test_ask_that_comes_twice_gets_the_same_answer() -> None:
    door = controller(slots=1)
    first = door.submit(ask("r"), OWNER, 0)
    assert door.submit(ask("r"), OWNER, 1 * S) is first
    waits = door.submit(ask("s"), OWNER, 1 * S)
    assert door.submit(ask("s"), OWNER, 2 * S) == waits
    assert door.snapshot(2 * S).tenants[0].open_reservations == 2
    door.check_integrity()


@pytest.mark.parametrize("slots", [0, 1])
def test_request_id_in_use_for_another_request_is_an_error(slots: int) -> None:
    door = controller(slots=slots)
    door.submit(ask("r", "a"), OWNER, 0)
    with pytest.raises(ValueError, match="'r' is open for another request"):
        door.submit(ask("r", "b"), OWNER, 0)
    door.check_integrity()


def test_unknown_tenant_or_model_is_an_error() -> None:
    door = controller()
    for output in (10, None):
        with pytest.raises(LookupError, match="no tenant 'x'"):
            door.submit(ask("r", "x", output=output), OWNER, 0)
    with pytest.raises(LookupError, match="no model 'y'"):
        door.submit(ask("r", model="y"), OWNER, 0)
    with pytest.raises(LookupError, match="no model 'y'"):
        door.report_replica("y", "y-1", 1, 1, 0)


def test_controller_that_starts_anew_takes_over_what_ingresses_hold() -> None:
    limited = tenant(requests_per_minute=10, tokens_per_minute=100, concurrent_requests=1)
    held = permit(controller(limited).submit(ask("r", prompt=50, output=30), OWNER, 0))
    door = controller(limited, slots=1)
    for _ in range(2):
        door.reopen(held, OWNER, 0)
        door.check_integrity()
        snapshot = door.snapshot(0)
        assert (snapshot.models[0].permits_open, snapshot.models[0].committed_kv_tokens) == (1, 80)
        assert (snapshot.tenants[0].open_reservations, snapshot.tenants[0].reserved_tokens) == (1, 80)
    assert refusal(door.submit(ask("s", prompt=1, output=1), OWNER, 0)).code is RefusalCode.CONCURRENT_REQUESTS
    door.close("r", used(50, 5), 0)
    limits = door.limits("a", 0)
    assert limits.tokens is not None and limits.tokens.remaining == 45


def test_reopened_permits_may_exceed_what_there_is() -> None:
    limited = tenant(tokens_per_minute=100)
    held = [permit(controller(limited).submit(ask(f"r{n}", prompt=80), OWNER, 0)) for n in range(3)]
    door = controller(limited, slots=1)
    for each in held:
        door.reopen(each, OWNER, 0)
    assert door.snapshot(0).models[0].committed_slots == 3
    assert door.limits("a", 0).tokens == door.snapshot(0).tenants[0].limits.tokens
    assert refusal(door.submit(ask("s"), OWNER, 0)).retry_after_s == 114  # 270 - 100 in debt, and 20 of its own


def test_permit_of_a_waiting_request_cannot_be_reopened() -> None:
    held = permit(controller().submit(ask("r"), OWNER, 0))
    door = controller(slots=0)
    door.submit(ask("r"), OWNER, 0)
    with pytest.raises(ValueError, match="'r' waits"):
        door.reopen(held, OWNER, 0)


def test_what_a_silent_owner_holds_is_ended_and_charged_its_prompt() -> None:
    door = controller(slots=1)
    door.submit(ask("ran"), "dead", 0)
    door.submit(ask("waited"), "dead", 0)
    door.submit(ask("other"), "alive", 0)
    door.renew("alive", 20 * S)
    assert door.expire(OWNER_LEASE_NS - 1) == []
    door.report_replica(MODEL, "m-1", 1, 10_000, 20 * S)
    assert sorted(door.expire(OWNER_LEASE_NS)) == ["ran", "waited"]
    door.check_integrity()
    assert ids(door.dispatch(OWNER_LEASE_NS)) == ["other"]
    (account, _) = door.snapshot(OWNER_LEASE_NS).tenants
    assert (account.used_requests, account.used_tokens, account.open_reservations) == (1, 10, 1)


@pytest.mark.parametrize("reopens", [True, False])
def test_owner_that_was_only_slow_settles_its_exact_usage(reopens: bool) -> None:
    door = controller(tenant(tokens_per_minute=1000))
    held = permit(door.submit(ask("r", prompt=10, output=90), OWNER, 0))
    assert door.expire(OWNER_LEASE_NS) == ["r"]
    if reopens:
        door.reopen(held, OWNER, OWNER_LEASE_NS)
        door.check_integrity()
    assert door.close("r", used(10, 42), OWNER_LEASE_NS)
    assert not door.close("r", used(10, 42), OWNER_LEASE_NS)
    (account,) = door.snapshot(OWNER_LEASE_NS).tenants
    assert (account.used_requests, account.used_tokens) == (1, 52)
    door.check_integrity()


def test_silent_replica_counts_no_more() -> None:
    door = controller(slots=1)
    door.expire(REPLICA_LEASE_NS)
    assert door.snapshot(REPLICA_LEASE_NS).models[0].replicas == 0
    queued(door.submit(ask("r"), OWNER, REPLICA_LEASE_NS))
    door.report_replica(MODEL, "m-2", 1, 1000, REPLICA_LEASE_NS)
    assert ids(door.dispatch(REPLICA_LEASE_NS)) == ["r"]


def test_replica_that_is_forgotten_grants_no_more_and_its_permits_stay_until_closed() -> None:
    door = controller(slots=2)
    door.submit(ask("r"), OWNER, 0)
    door.forget_replica(MODEL, "m-1")
    queued(door.submit(ask("s"), OWNER, 0))
    assert door.snapshot(0).models[0].permits_open == 1
    door.close("r", used(10, 3), 0)
    assert door.dispatch(0) == []


def test_clock_that_goes_back_stands_still() -> None:
    door = controller(tenant(requests_per_minute=1), slots=0, policy=QueuePolicy(max_wait_s=30))
    assert queued(door.submit(ask("r"), OWNER, 100 * S)).deadline_ns == 130 * S
    assert door.dispatch(50 * S) == []
    assert refusal(door.submit(ask("s"), OWNER, 50 * S)).retry_after_s == 60
    assert ids(door.dispatch(130 * S)) == ["r"]


# What operators see, and what cannot be said.


def test_snapshot_counts_by_lane_and_tenant() -> None:
    door = controller(slots=1, kv_tokens=500)
    door.submit(ask("r", "a", lane=Lane.INTERACTIVE), OWNER, 0)
    door.submit(ask("s", "a", lane=Lane.BATCH), OWNER, 0)
    door.submit(ask("t", "b", lane=Lane.BATCH), OWNER, 0)
    door.submit(ask("u", "b", lane=Lane.BATCH), OWNER, 0)
    door.submit(ask("v", "b", lane=Lane.INTERACTIVE), OWNER, 0)
    (model,) = door.snapshot(0).models
    assert model.waiting == (
        WaitingCount(lane=Lane.INTERACTIVE, tenant="b", count=1),
        WaitingCount(lane=Lane.BATCH, tenant="a", count=1),
        WaitingCount(lane=Lane.BATCH, tenant="b", count=2),
    )
    assert (model.model, model.permits_open, model.replicas, model.slots, model.kv_tokens) == ("m", 1, 1, 1, 500)
    assert (model.committed_slots, model.committed_kv_tokens) == (1, 20)


def test_numbers_that_would_mint_quota_cannot_be_written_down() -> None:
    with pytest.raises(ValueError, match="-1 output tokens"):
        ask("r", output=-1)
    with pytest.raises(ValueError, match="-5 prompt tokens"):
        AdmissionAsk(request_id="r", tenant="a", model="m", lane=Lane.BATCH, prompt_tokens=-5, max_output_tokens=None)
    with pytest.raises(ValueError, match="usage cannot be negative"):
        Usage(prompt_tokens=1, completion_tokens=-1)
    with pytest.raises(ValueError, match="tokens_per_minute is -1"):
        Limits(tokens_per_minute=-1)
    with pytest.raises(ValueError, match="burst_s is 0"):
        Limits(burst_s=0)
    with pytest.raises(ValueError, match="weight of tenant 'a' is 0"):
        tenant("a", weight=0)
