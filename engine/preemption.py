"""Whose slot and blocks are taken when others have the better claim.

The lane decides first: the lowest lane pays. Within it, the sequence whose loss costs least: the fewest tokens in
blocks that nobody else holds, which are those that may have to be computed again; between equals the youngest.
Protected sequences are never taken (see `engine.sequence.Sequence.is_protected`).
"""

from __future__ import annotations

from collections.abc import Sequence as List

from engine.kv_memory import KvMemory
from engine.sequence import Sequence


def first_victim(candidates: List[Sequence], memory: KvMemory) -> Sequence | None:
    """Which of `candidates` is to step back; None if none may be taken."""
    takeable = [sequence for sequence in candidates if not sequence.is_protected]
    if not takeable:
        return None
    return min(takeable, key=lambda sequence: (-sequence.lane, memory.loss(sequence), -sequence.arrival))


def victims_for(
    candidates: List[Sequence], memory: KvMemory, *, num_blocks: int, num_slots: int, kept: frozenset[int]
) -> list[Sequence]:
    """The victims that together free `num_slots` slots and `num_blocks` blocks, those in `kept` not counted.

    All or nothing: empty if all candidates together do not hold as much, so that nobody steps back in vain.
    """
    takeable = list(candidates)
    victims: list[Sequence] = []
    num_freed = 0
    while len(victims) < num_slots or num_freed < num_blocks:
        victim = first_victim(takeable, memory)
        if victim is None:
            return []
        takeable.remove(victim)
        victims.append(victim)
        num_freed += memory.num_released(victim, kept)
    return victims
