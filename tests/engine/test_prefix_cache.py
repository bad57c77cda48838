"""Shared blocks: what a prompt finds of earlier ones, whose they may be, and the choices of one request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.api import Choice, GenerateRequest, TokenDelta
from engine.block_pool import BlockPool
from engine.config import PrefixCache
from engine.engine import Engine
from engine.prefix import block_name, root_name
from tests.engine.makers import collect, expected_output, make_engine, run_to_end, sampling

PROMPT = tuple(range(1, 14))


def ask(name: str, prompt: tuple[int, ...] = PROMPT, tenant: str = "a", num_choices: int = 1) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling(3, ignore_eos=True),
        tenant=tenant,
        choices=tuple(Choice(index=index) for index in range(num_choices)),
    )


def cached(engine: Engine, request: GenerateRequest) -> int:
    """Run a request alone; the cached tokens that its client is told."""
    deltas: list[TokenDelta] = []
    engine.add(request)
    while engine.has_work:
        deltas += [output.delta for output in engine.step()]
    assert [delta.num_cached_tokens for delta in deltas[1:]] == [0, 0]
    expected = expected_output(request.prompt_token_ids, request.sampling)
    assert [token_id for delta in deltas for token_id in delta.token_ids] == expected
    return deltas[0].num_cached_tokens


@pytest.mark.parametrize(("length", "hit"), [(11, 8), (12, 11), (13, 12)])
def test_a_prompt_finds_its_whole_blocks_and_computes_at_least_one_token(length: int, hit: int) -> None:
    """Case P-COR-01: around whole numbers of blocks; nothing on the first run."""
    engine = make_engine()
    assert [cached(engine, ask(f"r{turn}", PROMPT[:length])) for turn in range(3)] == [0, hit, hit]


def test_of_a_resumed_request_only_the_prompt_counts_as_cached() -> None:
    engine = make_engine()
    assert cached(engine, ask("first", PROMPT[:6])) == 0
    output = expected_output(PROMPT[:6], sampling(3, ignore_eos=True))
    resumed = replace(ask("again", PROMPT[:6]), choices=(Choice(resumed_token_ids=tuple(output[:2])),))
    engine.add(resumed)
    (last,) = engine.step()
    assert (last.delta.token_ids, last.delta.num_cached_tokens) == ((output[2],), 5)


def test_half_a_prompt_is_found_too() -> None:
    engine = make_engine()
    assert cached(engine, ask("first")) == 0
    assert cached(engine, ask("second", (*PROMPT[:9], 77, 78, 79))) == 8


def test_tenants_do_not_share_unless_told_to() -> None:
    """Case P-COR-06."""
    engine = make_engine()
    assert cached(engine, ask("a")) == 0
    assert [cached(engine, ask(f"b{turn}", tenant="b")) for turn in range(2)] == [0, 12]
    shared = make_engine(prefix_cache=PrefixCache.SHARED)
    assert cached(shared, ask("a")) == 0
    assert cached(shared, ask("b", tenant="b")) == 12
    off = make_engine(prefix_cache=PrefixCache.OFF)
    assert [cached(off, ask(f"r{turn}")) for turn in range(2)] == [0, 0]


def test_names_differ_by_owner_adapter_place_and_tokens() -> None:
    roots = {root_name("a"), root_name("b"), root_name("", "a"), root_name("a", "x"), root_name("ax")}
    assert len(roots) == 5
    first = block_name(root_name("a"), (1, 2))
    assert len({first, block_name(first, (1, 2)), block_name(root_name("a"), (1, 3))}) == 3


def test_choices_share_the_blocks_of_their_prompt() -> None:
    """Four outputs of a prompt of 500 tokens: 31 full blocks once, and the block after them once for each."""
    engine = make_engine(num_blocks=100, block_size=16, max_num_batched_tokens=512)
    prompt = tuple(number % 900 for number in range(500))
    request = ask("r", prompt, num_choices=4)
    engine.add(request)
    outputs: dict[str, list[int]] = {}
    used = []
    for _ in range(2):
        collect(engine.step(), outputs)
        used.append(engine.stats().num_used_blocks)
    assert used == [32, 31 + 4]
    run_to_end(engine, outputs)
    assert outputs == dict.fromkeys(("r", "r#1", "r#2", "r#3"), expected_output(prompt, request.sampling))
    assert engine.stats().num_used_blocks == 0


def test_a_choice_takes_the_lead_when_the_first_one_is_cancelled() -> None:
    engine = make_engine()
    engine.add(ask("r", num_choices=3))
    engine.cancel("r", 0)
    outputs = run_to_end(engine)
    assert outputs == dict.fromkeys(("r#1", "r#2"), expected_output(PROMPT, sampling(3, ignore_eos=True)))


def test_whoever_has_most_for_its_weight_loses_its_oldest_block_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    held: list[int] = []
    pool.grow(held, 16)
    for block_id, (owner, weight) in enumerate((("a", 2), ("a", 2), ("b", 1), ("a", 2))):
        pool.name(block_id, bytes([block_id]), owner, weight)
    pool.release(held)  # the tail first: 3, 2, 1, 0
    assert pool.idle_blocks() == {"a": 3, "b": 1}
    taken: list[int] = []
    pool.grow(taken, 8)
    assert taken == [3, 2]  # of `a`, which has 1.5 for its weight; then both have 1, and b's block is the older one
    assert [pool.find(bytes([block_id])) for block_id in range(4)] == [0, 1, None, None]
    pool.check_integrity([taken])
