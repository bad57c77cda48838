from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api import Lane
from cluster.capacity import REPLICA_LEASE_NS, Fit, ModelCapacity, Need


def capacity(*replicas: tuple[int, int]) -> ModelCapacity:
    made = ModelCapacity()
    for number, (slots, kv_tokens) in enumerate(replicas):
        made.report(f"replica-{number}", slots, kv_tokens, 0)
    return made


def need(kv_tokens: int, *, prompt: int = 0, sequences: int = 1, lane: Lane = Lane.STANDARD) -> Need:
    return Need(lane=lane, sequences=sequences, kv_tokens=kv_tokens, indivisible_tokens=prompt)


def test_replicas_add_up() -> None:
    model = capacity((4, 1000), (2, 500))
    assert (model.replicas, model.slots, model.kv_tokens, model.largest_kv_tokens) == (2, 6, 1500, 1000)


def test_slots_bind() -> None:
    model = capacity((2, 1000))
    model.commit("r", need(10))
    assert model.fit(need(10)) is Fit.NOW
    model.commit("s", need(10))
    assert model.fit(need(10)) is Fit.LATER
    model.release("r")
    assert model.fit(need(10)) is Fit.NOW


def test_promises_to_lower_lanes_are_not_in_the_way_of_who_may_displace_them() -> None:
    model = capacity((2, 1000))
    model.commit("batch", need(900, sequences=2, lane=Lane.BATCH))
    assert model.fit(need(100, lane=Lane.BATCH)) is Fit.LATER
    assert model.fit(need(1000, sequences=2, lane=Lane.STANDARD)) is Fit.NOW
    lifted = Need(lane=Lane.INTERACTIVE, sequences=1, kv_tokens=10, displaces=False)
    assert model.fit(lifted) is Fit.LATER
    model.commit("standard", need(1000, sequences=2, lane=Lane.STANDARD))
    assert model.fit(need(1, lane=Lane.STANDARD)) is Fit.LATER
    assert model.fit(need(1, lane=Lane.INTERACTIVE)) is Fit.NOW
    assert (model.committed_slots, model.committed_kv_tokens) == (4, 1900)
    model.release("batch")
    assert model.fit(need(100, lane=Lane.BATCH)) is Fit.LATER


def test_every_sequence_takes_a_slot() -> None:
    model = capacity((5, 1000))
    model.commit("r", need(10, sequences=3))
    assert (model.permits, model.committed_slots) == (1, 3)
    assert model.fit(need(10, sequences=2)) is Fit.NOW
    assert model.fit(need(10, sequences=3)) is Fit.LATER
    model.release("r")
    assert (model.permits, model.committed_slots) == (0, 0)


def test_more_sequences_than_slots_run_once_they_can_have_all_slots() -> None:
    model = capacity((2, 1000), (3, 1000))
    model.commit("r", need(10))
    assert model.fit(need(10, sequences=99)) is Fit.LATER
    model.release("r")
    assert model.fit(need(10, sequences=99)) is Fit.NOW
    model.commit("s", need(10, sequences=99))
    assert model.committed_slots == 5
    model.forget("replica-0")
    model.release("s")
    assert model.committed_slots == 0


def test_a_replica_without_slots_runs_nothing() -> None:
    assert capacity((0, 1000)).fit(need(10, sequences=3)) is Fit.LATER


def test_kv_tokens_bind_to_the_last_one() -> None:
    model = capacity((10, 1000))
    model.commit("r", need(600))
    assert model.fit(need(400)) is Fit.NOW
    assert model.fit(need(401)) is Fit.LATER


def test_a_prompt_larger_than_the_largest_replica_never_fits_even_if_the_sum_would() -> None:
    model = capacity((4, 1000), (4, 800))
    assert model.fit(need(1000, prompt=1000)) is Fit.NOW
    assert model.fit(need(1001, prompt=1001)) is Fit.NEVER


def test_one_sequence_is_promised_no_more_than_one_replica_has_and_several_no_more_than_all() -> None:
    for sequences, promised in ((1, 1000), (2, 1800)):
        model = capacity((4, 1000), (4, 800))
        model.commit("r", need(5000, prompt=1000, sequences=sequences))
        assert model.committed_kv_tokens == promised


def test_without_a_replica_it_is_too_early_to_say_never() -> None:
    assert capacity().fit(need(10**9, prompt=10**9)) is Fit.LATER


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 500)), max_size=3),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 900)), max_size=12),
)
def test_what_is_promised_fits_and_what_is_given_back_is_what_was_promised(
    replicas: list[tuple[int, int]], wishes: list[tuple[int, int]]
) -> None:
    model = capacity(*replicas)
    granted: set[str] = set()
    for number, (sequences, kv_tokens) in enumerate(wishes):
        wish = need(kv_tokens, sequences=sequences)
        alone = not granted
        if model.fit(wish) is Fit.NOW:
            model.commit(str(number), wish)
            granted.add(str(number))
            assert model.committed_slots <= model.slots
            assert model.committed_kv_tokens <= model.kv_tokens
        else:
            assert not alone or model.slots == 0  # alone, everything fits that ever can
        model.check_integrity(granted)
    for request_id in granted:
        model.release(request_id)
    assert (model.permits, model.committed_slots, model.committed_kv_tokens) == (0, 0, 0)


def test_report_that_is_not_renewed_expires() -> None:
    model = capacity((4, 1000), (2, 500))
    model.report("replica-1", 2, 500, 10)
    model.expire(REPLICA_LEASE_NS - 1)
    assert model.replicas == 2
    model.expire(REPLICA_LEASE_NS)
    assert (model.replicas, model.slots, model.kv_tokens, model.largest_kv_tokens) == (1, 2, 500, 500)


def test_new_report_replaces_the_old_one() -> None:
    model = capacity((4, 1000))
    model.report("replica-0", 1, 100, 0)
    assert (model.slots, model.kv_tokens) == (1, 100)


def test_commitments_outlive_their_replica() -> None:
    model = capacity((4, 1000))
    model.commit("r", need(10))
    model.forget("replica-0")
    model.forget("replica-0")
    assert (model.slots, model.committed_slots, model.committed_kv_tokens) == (0, 1, 10)
    model.check_integrity({"r"})


def test_negative_report_is_refused_and_changes_nothing() -> None:
    model = capacity((4, 1000))
    with pytest.raises(ValueError, match="-1 slots"):
        model.report("replica-0", -1, 1000, 0)
    assert model.slots == 4
