"""The KV memory as fixed blocks with reference counts.

The pool hands out block numbers; it knows nothing of tensors. The free list is a queue: a block that was freed first
is used again first, so that what was freed last stays untouched for longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each; one writer, the scheduler."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extend `block_ids` so that it holds `num_tokens` tokens; all or nothing, False when the pool is short."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_id = self._free.popleft()
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return True

    def release(self, block_ids: list[int]) -> None:
        """Give up one reference to each block and empty the list. The tail of a sequence is used again first."""
        while block_ids:
            block_id = block_ids.pop()
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is either free or held exactly as often as it is counted."""
        held = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                held[block_id] += 1
        wrong = [block_id for block_id in range(self.num_blocks) if held[block_id] != self._ref_counts[block_id]]
        assert not wrong, f"blocks whose reference count is not the number of their holders: {wrong[:10]}"
        free = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        assert free == set(self._free) and len(free) == len(self._free), "the free list is not the unreferenced blocks"
