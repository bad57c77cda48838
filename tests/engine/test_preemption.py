"""Who has to step back: the lowest lane, what costs least, the youngest; never the protected, never in vain."""

from __future__ import annotations

from engine.api import Choice
from engine.block_pool import BlockPool
from engine.config import PrefixCache
from engine.kv_memory import KvMemory
from engine.preemption import first_victim, victims_for
from engine.sequence import PREEMPTIONS_UNTIL_PROTECTED, Sequence
from tests.engine.makers import request

BLOCK_SIZE = 4


def make_memory() -> KvMemory:
    return KvMemory(BlockPool(64, BLOCK_SIZE), prefix_cache=PrefixCache.OFF, watermark=0.0)


def running(memory: KvMemory, name: str, arrival: int, num_computed: int, lane: int = 1) -> Sequence:
    """One that has computed so many tokens, in blocks of its own."""
    sequence = Sequence(
        request(name, num_prompt=num_computed, lane=lane), Choice(), arrival=arrival, eos_token_ids=frozenset()
    )
    memory.join(sequence, memory.find(sequence))
    sequence.num_computed = num_computed
    return sequence


def test_the_lowest_lane_pays_whatever_it_costs() -> None:
    memory = make_memory()
    cheap = running(memory, "cheap", 2, num_computed=1, lane=1)
    dear = running(memory, "dear", 1, num_computed=40, lane=2)
    assert first_victim([cheap, dear], memory) is dear


def test_in_a_lane_the_smallest_loss_is_taken_and_of_equals_the_youngest() -> None:
    memory = make_memory()
    large = running(memory, "large", 3, num_computed=12)
    old, young = running(memory, "old", 1, num_computed=8), running(memory, "young", 2, num_computed=8)
    assert first_victim([large, old, young], memory) is young
    assert first_victim([large, old], memory) is old


def test_what_others_hold_as_well_is_no_loss() -> None:
    memory = make_memory()
    sharing = running(memory, "sharing", 1, num_computed=12)
    alone = running(memory, "alone", 2, num_computed=8)
    memory.pool.share(sharing.block_ids[:2])
    assert (memory.loss(sharing), memory.loss(alone)) == (4, 8)
    assert first_victim([sharing, alone], memory) is sharing


def test_the_protected_are_not_taken() -> None:
    memory = make_memory()
    sequence = running(memory, "sequence", 1, num_computed=4)
    sequence.preemptions_in_a_row = PREEMPTIONS_UNTIL_PROTECTED - 1
    assert first_victim([sequence], memory) is sequence
    sequence.preemptions_in_a_row = PREEMPTIONS_UNTIL_PROTECTED
    assert first_victim([sequence], memory) is None
    assert first_victim([], memory) is None


def test_as_many_as_are_needed_and_none_more() -> None:
    memory = make_memory()
    sequences = [running(memory, str(number), number, num_computed=8) for number in range(3)]
    nothing: frozenset[int] = frozenset()
    for num_blocks, num_slots, num_victims in (
        (0, 0, 0),
        (0, 1, 1),
        (2, 0, 1),
        (2, 1, 1),
        (3, 1, 2),
        (1, 2, 2),
        (6, 0, 3),
    ):
        victims = victims_for(sequences, memory, num_blocks=num_blocks, num_slots=num_slots, kept=nothing)
        assert victims == sequences[::-1][:num_victims], (num_blocks, num_slots)


def test_nobody_steps_back_in_vain() -> None:
    memory = make_memory()
    sequences = [running(memory, str(number), number, num_computed=8) for number in range(3)]
    kept = frozenset(sequences[0].block_ids[:1])
    for num_blocks, num_slots, expected in ((7, 0, 0), (0, 4, 0), (6, 0, 0), (5, 0, 3)):
        victims = victims_for(sequences, memory, num_blocks=num_blocks, num_slots=num_slots, kept=kept)
        assert len(victims) == expected, (num_blocks, num_slots)
