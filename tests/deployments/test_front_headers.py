from __future__ import annotations

import pytest

from deployments.front_headers import clean


def test_a_fit_request_id_is_kept_and_other_headers_stay_in_order() -> None:
    headers = [(b"host", b"x"), (b"x-request-id", b"mine"), (b"authorization", b"Bearer \xff")]

    assert clean(headers) == [(b"host", b"x"), (b"authorization", b"Bearer \xff"), (b"x-request-id", b"mine")]


@pytest.mark.parametrize("given", [b"", b"\xe9\xe9", b"two words", b"a" * 129])
def test_an_unfit_request_id_is_replaced(given: bytes) -> None:
    [(name, made)] = clean([(b"x-request-id", given)])

    assert name == b"x-request-id"
    assert made != given
    assert len(made) == 32


def test_of_two_request_ids_the_first_counts() -> None:
    assert clean([(b"x-request-id", b"one"), (b"x-request-id", b"two")]) == [(b"x-request-id", b"one")]


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve_multiplexed_model_id",
        b"Serve-Multiplexed-Model-Id",
        b"x-session-id",
        b"x_session_id",
    ],
)
def test_what_serve_would_obey_does_not_reach_it(name: bytes) -> None:
    assert [kept for kept, _ in clean([(name, b"\xff")])] == [b"x-request-id"]
