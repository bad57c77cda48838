"""What a sequence is given of the KV memory, and what newcomers leave to those that run."""

from __future__ import annotations

from engine.api import Choice
from engine.block_pool import BlockPool
from engine.config import PrefixCache
from engine.kv_memory import KvMemory
from engine.sequence import PREEMPTIONS_UNTIL_PROTECTED, Sequence
from tests.engine.makers import request

BLOCK_SIZE = 4


def make_memory(num_blocks: int = 16, **changes: float) -> KvMemory:
    rules = {"watermark": 0.0, **changes}
    return KvMemory(BlockPool(num_blocks, BLOCK_SIZE), prefix_cache=PrefixCache.TENANT, **rules)  # type: ignore[arg-type]


def make_sequence(name: str = "s", num_prompt: int = 6, max_tokens: int = 100, resumed: int = 0) -> Sequence:
    asked = request(name, num_prompt=num_prompt, max_tokens=max_tokens)
    choice = Choice(resumed_token_ids=tuple(range(resumed)))
    return Sequence(asked, choice, arrival=1, eos_token_ids=frozenset())


def join(memory: KvMemory, sequence: Sequence) -> Sequence:
    memory.join(sequence, memory.find(sequence))
    return sequence


def compute(memory: KvMemory, sequence: Sequence) -> Sequence:
    """All that it knows is computed."""
    start, sequence.num_computed = sequence.num_computed, sequence.num_known
    memory.note_computed(sequence, start)
    return sequence


def test_whoever_joins_gets_blocks_for_all_it_knows() -> None:
    memory = make_memory()
    sequence = make_sequence(num_prompt=6, resumed=3)
    assert memory.blocks_needed(sequence, memory.find(sequence)) == 3
    assert len(join(memory, sequence).block_ids) == 3


def test_the_protected_get_a_block_more_unless_there_is_none() -> None:
    for num_blocks, given in ((16, 3), (2, 2)):
        memory, sequence = make_memory(num_blocks), make_sequence(num_prompt=6)
        sequence.preemptions_in_a_row = PREEMPTIONS_UNTIL_PROTECTED
        assert memory.blocks_needed(sequence, memory.find(sequence)) == given
        assert len(join(memory, sequence).block_ids) == given


def test_newcomers_leave_room_for_the_next_tokens_of_those_that_run() -> None:
    memory = make_memory(growth_tokens=8)
    growing = join(memory, make_sequence("growing", num_prompt=6))
    assert memory.room_to_grow([growing]) == 2  # 6 + 8 tokens are 4 blocks, of which it has 2
    ending = join(memory, make_sequence("ending", num_prompt=6, max_tokens=2))
    assert memory.room_to_grow([ending]) == 0  # its last block has places for both
    assert memory.room_to_grow([growing, ending]) == 2
    assert memory.room_to_grow([]) == 0


def test_nobody_grows_beyond_the_memory() -> None:
    memory = make_memory(num_blocks=2, growth_tokens=100)
    assert memory.room_to_grow([join(memory, make_sequence(num_prompt=6))]) == 0


def test_the_watermark_is_left_besides() -> None:
    memory = make_memory(num_blocks=16, watermark=0.2, growth_tokens=8)
    assert memory.room_to_grow([]) == 3
    assert memory.room_to_grow([join(memory, make_sequence(num_prompt=6))]) == 5


def test_a_found_block_that_nobody_holds_is_one_that_is_needed() -> None:
    memory = make_memory()
    first = compute(memory, join(memory, make_sequence("s", num_prompt=9)))
    twin = make_sequence("s", num_prompt=9)
    found = memory.find(twin)
    assert (len(found.shared), found.copied, found.num_tokens) == (2, None, 8)
    assert memory.blocks_needed(twin, found) == 1
    memory.release(first)
    assert memory.blocks_needed(twin, memory.find(twin)) == 3
    assert memory.num_found_tokens == 0
    join(memory, twin)
    assert (twin.num_computed, memory.num_found_tokens) == (8, 8)


def test_who_goes_frees_what_it_alone_holds_and_a_newcomer_does_not_want() -> None:
    memory = make_memory()
    first = compute(memory, join(memory, make_sequence("s", num_prompt=9)))
    nothing: frozenset[int] = frozenset()
    assert (memory.num_released(first, nothing), memory.loss(first)) == (3, 9)
    assert memory.num_released(first, frozenset(first.block_ids[:2])) == 1
    twin = compute(memory, join(memory, make_sequence("s", num_prompt=9)))
    assert (memory.num_released(twin, nothing), memory.loss(twin)) == (1, 1)
    assert (memory.num_released(first, nothing), memory.loss(first)) == (1, 1)
