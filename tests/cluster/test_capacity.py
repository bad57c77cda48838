from __future__ import annotations

import pytest

from cluster.capacity import REPLICA_LEASE_NS, Fit, ModelCapacity


def capacity(*replicas: tuple[int, int]) -> ModelCapacity:
    made = ModelCapacity()
    for number, (slots, kv_tokens) in enumerate(replicas):
        made.report(f"replica-{number}", slots, kv_tokens, 0)
    return made


def test_replicas_add_up() -> None:
    model = capacity((4, 1000), (2, 500))
    assert (model.replicas, model.slots, model.kv_tokens, model.largest_kv_tokens) == (2, 6, 1500, 1000)


def test_slots_bind() -> None:
    model = capacity((2, 1000))
    model.commit("r", 10)
    assert model.fit(10) is Fit.NOW
    model.commit("s", 10)
    assert model.fit(10) is Fit.LATER
    model.release("r")
    assert model.fit(10) is Fit.NOW


def test_kv_tokens_bind_to_the_last_one() -> None:
    model = capacity((10, 1000))
    model.commit("r", 600)
    assert model.fit(400) is Fit.NOW
    assert model.fit(401) is Fit.LATER


def test_larger_than_the_largest_replica_never_fits_even_if_the_sum_would() -> None:
    model = capacity((4, 1000), (4, 800))
    assert model.fit(1000) is Fit.NOW
    assert model.fit(1001) is Fit.NEVER


def test_without_a_replica_it_is_too_early_to_say_never() -> None:
    assert capacity().fit(10**9) is Fit.LATER


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
    model.commit("r", 10)
    model.forget("replica-0")
    model.forget("replica-0")
    assert (model.slots, model.committed_slots, model.committed_kv_tokens) == (0, 1, 10)
    model.check_integrity({"r"})


def test_negative_report_is_refused_and_changes_nothing() -> None:
    model = capacity((4, 1000))
    with pytest.raises(ValueError, match="-1 slots"):
        model.report("replica-0", -1, 1000, 0)
    assert model.slots == 4
