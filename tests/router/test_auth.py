from __future__ import annotations

import pytest

from cluster.api import Lane
from router.auth import Caller, KeyRing, hash_key
from router.errors import ApiError

CALLER = Caller(tenant="acme", key_id="k1", max_lane=Lane.STANDARD, default_lane=Lane.BATCH)


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing({hash_key("sk-good"): CALLER})


@pytest.mark.parametrize("header", ["Bearer sk-good", "bearer sk-good", "Bearer  sk-good "])
def test_a_known_key_gives_its_caller(ring: KeyRing, header: str) -> None:
    assert ring.authenticate(header) is CALLER


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer sk-bad", "sk-good", "Basic sk-good", "Bearer sk-good x", "Bearer \udce9"],
)
def test_every_other_header_gets_the_same_401_without_the_key(ring: KeyRing, header: str | None) -> None:
    with pytest.raises(ApiError) as missing:
        ring.authenticate(None)
    with pytest.raises(ApiError) as caught:
        ring.authenticate(header)
    assert caught.value.row.status == 401
    assert caught.value.headers() == {"www-authenticate": "Bearer"}
    assert caught.value.body() == missing.value.body()


def test_replacing_the_keys_revokes_the_old_ones(ring: KeyRing) -> None:
    ring.replace({hash_key("sk-new"): CALLER})
    assert ring.authenticate("Bearer sk-new") is CALLER
    with pytest.raises(ApiError):
        ring.authenticate("Bearer sk-good")


def test_the_set_of_keys_is_a_copy() -> None:
    callers = {hash_key("sk-good"): CALLER}
    ring = KeyRing(callers)
    callers.clear()
    assert ring.authenticate("Bearer sk-good") is CALLER


def test_a_request_may_lower_its_priority() -> None:
    assert CALLER.lane(None) is Lane.BATCH
    assert CALLER.lane("batch") is Lane.BATCH
    assert CALLER.lane("standard") is Lane.STANDARD


def test_a_request_may_not_raise_its_priority_above_the_key_s() -> None:
    with pytest.raises(ApiError) as caught:
        CALLER.lane("interactive")
    assert (caught.value.row.status, caught.value.param) == (403, "priority")
    assert "'standard'" in caught.value.message


def test_a_key_whose_default_is_above_its_highest_is_refused() -> None:
    with pytest.raises(ValueError, match="above the highest"):
        Caller(tenant="acme", key_id="k1", max_lane=Lane.BATCH, default_lane=Lane.STANDARD)
