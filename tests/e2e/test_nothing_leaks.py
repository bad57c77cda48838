"""Clients that leave: whatever they held is given back."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import psutil
import pytest

from deployments.local import session_processes
from deployments.models import DEFAULT_MODEL
from tests.e2e.conftest import SIMULATED_MODEL, Running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

POLLS = 100
POLL_S = 0.1


def held(queue: dict[str, Any]) -> dict[str, int]:
    """Everything that a request can hold, summed over models, engines and tenants."""
    engines = [engine for model in queue["models"] for engine in model["engines"]]
    admissions = [model["admission"] for model in queue["models"]]
    return {
        "waiting": sum(count["count"] for admission in admissions for count in admission["waiting"]),
        "permits": sum(admission["permits_open"] for admission in admissions),
        "slots": sum(admission["committed_slots"] for admission in admissions),
        "kv_tokens": sum(admission["committed_kv_tokens"] for admission in admissions),
        "sequences": sum(engine["num_running"] + engine["num_waiting"] for engine in engines),
        "blocks": sum(engine["num_used_blocks"] for engine in engines),
        "reservations": sum(tenant["open_reservations"] for tenant in queue["tenants"]),
        "reserved_tokens": sum(tenant["reserved_tokens"] for tenant in queue["tenants"]),
    }


async def queue_of(running: Running) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=running.url, timeout=30.0) as http:
        answer = await http.get("/admin/v1/queue", headers={"Authorization": f"Bearer {running.admin_key}"})
    assert answer.status_code == 200
    queue: dict[str, Any] = answer.json()
    assert all(model["engines"] for model in queue["models"]), "every engine answers"
    return queue


async def held_in_the_end(running: Running) -> dict[str, int]:
    """What is held once nothing is held any more, or after the last poll."""
    for _ in range(POLLS):
        now = held(await queue_of(running))
        if not any(now.values()):
            break
        await asyncio.sleep(POLL_S)
    return now


def used_by(queue: dict[str, Any], tenant: str) -> int:
    return next(int(each["used_tokens"]) for each in queue["tenants"] if each["tenant"] == tenant)


def body(model: str, max_tokens: int, *, stream: bool) -> dict[str, object]:
    # `ignore_eos`: as many tokens as were asked for, whatever they are.
    return {"model": model, "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}


async def test_a_client_that_leaves_in_mid_stream_gives_everything_back(running: Running) -> None:
    used_before = used_by(await queue_of(running), "local")
    headers = {"Authorization": f"Bearer {running.api_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60.0) as http:
        request = body(DEFAULT_MODEL, 2000, stream=True)
        async with http.stream("POST", "/v1/completions", json=request) as answer:
            lines = answer.aiter_lines()
            while "data:" not in await anext(lines):
                pass
            during = held(await queue_of(running))

    assert during["permits"] == 1
    assert during["reserved_tokens"] == 2001
    assert during["blocks"] > 0
    assert not any((await held_in_the_end(running)).values())
    assert 1 < used_by(await queue_of(running), "local") - used_before < 2001


async def test_a_storm_of_requests_and_cancels_leaves_all_counts_at_zero(running: Running) -> None:
    rng = random.Random(7)
    headers = {"Authorization": f"Bearer {running.api_key}"}
    plans = [(rng.randint(1, 40), rng.random() < 0.5, rng.uniform(0.0, 3.0)) for _ in range(300)]
    patience = [wait_s if rng.random() < 0.5 else 60.0 for _, _, wait_s in plans]

    async def one(http: httpx.AsyncClient, index: int) -> str:
        max_tokens, stream, _ = plans[index]
        try:
            async with asyncio.timeout(patience[index]):
                answer = await http.post("/v1/completions", json=body(SIMULATED_MODEL, max_tokens, stream=stream))
        except TimeoutError:
            return "cancelled"
        return str(answer.status_code)

    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60.0, limits=limits) as http:
        outcomes = await asyncio.gather(*(one(http, index) for index in range(len(plans))))

    assert set(outcomes) <= {"200", "cancelled"}
    assert outcomes.count("200") >= patience.count(60.0)
    assert outcomes.count("cancelled") > 0
    assert not any((await held_in_the_end(running)).values())


def process_of(running: Running, actor: str) -> psutil.Process:
    (found,) = [each for each in session_processes(running.session_id) if actor in " ".join(each.cmdline())]
    return found


async def test_requests_outlive_the_admission_actor_and_its_successor_has_their_books(running: Running) -> None:
    headers = {"Authorization": f"Bearer {running.api_key}"}
    used_before = {tenant["tenant"]: tenant["used_tokens"] for tenant in (await queue_of(running))["tenants"]}
    assert used_before["local"] > 0
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=60.0) as http:
        # More than the batch holds, so that some wait in the actor's queue when it dies.
        posts = [http.post("/v1/completions", json=body(SIMULATED_MODEL, 60, stream=False)) for _ in range(50)]
        requests = [asyncio.create_task(post) for post in posts]
        for _ in range(POLLS):
            if held(await queue_of(running))["waiting"] > 0:
                break
        process_of(running, "ray::AdmissionActor").kill()
        answers = await asyncio.gather(*requests)

    assert [answer.status_code for answer in answers] == [200] * 50
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {60}
    assert not any((await held_in_the_end(running)).values())
    # A new actor counts from zero; what ran across its birth is all there.
    assert 0 < used_by(await queue_of(running), "local") <= 50 * 61
