"""Thirty-two clients at once share one running batch of the real model, and nobody notices the others."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from deployments.models import DEFAULT_MODEL
from tests.e2e.conftest import Running

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NUM_CLIENTS = 32
WORDS = ("apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house", "igloo", "juice", "knife", "lemon")


def prompt(number: int) -> str:
    """Of 4 to 35 words, and nobody else's."""
    words = [WORDS[(number * 7 + at * (number + 3)) % len(WORDS)] for at in range(4 + number)]
    return f"Story {number}: {' '.join(words)}"


def max_tokens(number: int) -> int:
    return 16 + number % 10


async def completion(client: AsyncOpenAI, number: int) -> str:
    stream = await client.completions.create(
        model=DEFAULT_MODEL, prompt=prompt(number), max_tokens=max_tokens(number), temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def steps_since(running: Running, first: int) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {running.admin_key}"}
    async with httpx.AsyncClient(base_url=running.url, headers=headers, timeout=30.0) as http:
        answer = await http.get("/admin/v1/replicas", params={"steps": 4096})
    (replica,) = [each for each in answer.json()["replicas"] if each["model"] == DEFAULT_MODEL]
    return [step for step in replica["steps"] if step["step"] > first]


async def test_every_one_of_many_clients_gets_its_own_answer_out_of_one_batch(running: Running) -> None:
    async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key=running.api_key, timeout=120.0) as client:
        before = len(await steps_since(running, 0))
        together = await asyncio.gather(*(completion(client, number) for number in range(NUM_CLIENTS)))
        steps = await steps_since(running, before)
        alone = [await completion(client, number) for number in range(0, NUM_CLIENTS, 2)]

    assert together[::2] == alone
    joined = [name for step in steps for name in step["joined"]]
    left = [name for step in steps for name in step["left"]]
    assert len(joined) == NUM_CLIENTS
    assert sorted(joined) == sorted(left)
    changing = [step for step in steps if step["joined"] or step["left"]]
    assert len(changing) > len(steps) / 2
    assert max(step["tokens"]["decode"] for step in steps) > NUM_CLIENTS / 2
    assert {step["tokens"]["graph_padding"] for step in steps} == {0}
