"""The default model in float32: what the prefix cache gives back is what would have been computed (case P-COR-01)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.api import GenerateRequest, SamplingParams
from engine.build import build_engine
from engine.config import Dtype, EngineConfig, PrefixCache
from engine.engine import Engine
from engine.text import TextCodec
from tests.engine.makers import collect

BLOCK = 16
TIMES = 4
STORY = (
    "The lighthouse keeper wrote down every ship that passed: its flag, its sails, its course, and what the wind was "
    "doing at the time. Some nights nothing came, and then he wrote about the stars instead, or about his sister. "
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[tuple[int, ...]]:
    """Around whole numbers of blocks; three that share half of their tokens with them; one that is two whole blocks of
    another."""
    codec = TextCodec.load(smollm2)
    story, other = codec.encode(STORY * 3), codec.encode("Once there was a fox who could not swim. " * 8)
    around = [tuple(story[:length]) for length in (5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 2 * BLOCK)]
    return around + [(*story[: 3 * BLOCK], *other[: 2 * BLOCK + extra]) for extra in (-1, 0, 1)]


def start(model_dir: Path, prefix_cache: PrefixCache) -> Engine:
    return build_engine(
        EngineConfig(
            model=str(model_dir),
            dtype=Dtype.FLOAT32,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            num_kv_blocks=128,
            max_model_len=1024,
            block_size=BLOCK,
            prefix_cache=prefix_cache,
        )
    )


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> dict[int, set[tuple[int, ...]]]:
    """Every prompt `TIMES` times, mixed; one arrival for each step. The different outputs of each prompt."""
    order = [number for number in range(len(prompts)) for _ in range(TIMES)]
    random.Random(5).shuffle(order)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    outputs: dict[str, list[int]] = {}
    for turn, number in enumerate(order):
        name = f"{number}-{turn}"
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=prompts[number], sampling=params))
        collect(engine.step(), outputs)
    while engine.has_work:
        collect(engine.step(), outputs)
    found: dict[int, set[tuple[int, ...]]] = {}
    for name, tokens in outputs.items():
        found.setdefault(int(name.split("-")[0]), set()).add(tuple(tokens))
    return found


def test_greedy_answers_are_the_same_from_the_cache_and_without_it(
    smollm2: Path, prompts: list[tuple[int, ...]]
) -> None:
    cold, warm = start(smollm2, PrefixCache.OFF), start(smollm2, PrefixCache.TENANT)
    expected, found = answers(cold, prompts), answers(warm, prompts)
    assert all(len(different) == 1 for different in expected.values())
    assert found == expected
    num_prompt = sum(len(prompt) for prompt in prompts) * TIMES
    assert cold.stats().num_cached_tokens == 0
    assert warm.stats().num_cached_tokens > 0.6 * num_prompt
