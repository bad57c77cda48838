from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool


def test_grow_gives_just_the_blocks_that_the_tokens_need() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    blocks: list[int] = []
    assert pool.grow(blocks, 16)
    assert blocks == [0]
    assert pool.grow(blocks, 17)
    assert blocks == [0, 1]
    assert pool.grow(blocks, 32)
    assert (blocks, pool.num_available, pool.num_used) == ([0, 1], 2, 2)


def test_grow_is_all_or_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    blocks: list[int] = []
    assert not pool.grow(blocks, 9)
    assert (blocks, pool.num_available) == ([], 2)


def test_released_blocks_are_used_again_oldest_first() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    first: list[int] = []
    second: list[int] = []
    pool.grow(first, 2)
    pool.grow(second, 1)
    pool.release(second)
    pool.release(first)
    again: list[int] = []
    pool.grow(again, 3)
    assert again == [2, 1, 0]


def test_releasing_a_block_twice_fails_where_it_is_done() -> None:
    pool = BlockPool(num_blocks=2, block_size=1)
    blocks: list[int] = []
    pool.grow(blocks, 1)
    stale = list(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(stale)


def test_integrity_names_blocks_that_nobody_holds() -> None:
    pool = BlockPool(num_blocks=2, block_size=1)
    blocks: list[int] = []
    pool.grow(blocks, 1)
    pool.check_integrity([blocks])
    with pytest.raises(AssertionError, match=r"\[0\]"):
        pool.check_integrity([])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60))
def test_blocks_are_conserved_whatever_the_order(operations: list[tuple[int, int]]) -> None:
    pool = BlockPool(num_blocks=12, block_size=4)
    holders: list[list[int]] = [[] for _ in range(5)]
    for who, num_tokens in operations:
        if num_tokens == 0:
            pool.release(holders[who])
        else:
            before = len(holders[who])
            grown = pool.grow(holders[who], num_tokens)
            assert len(holders[who]) == (max(before, pool.blocks_for(num_tokens)) if grown else before)
        pool.check_integrity(holders)
        assert pool.num_used == sum(map(len, holders))
