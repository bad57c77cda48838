"""The KV memory as fixed blocks with reference counts, and the prefix index. Knows numbers, not tensors.

A block is in one of three states:

    used    some sequences hold references to it
    idle    nobody holds it, but it has a name in the prefix index: a later prompt may find it and use it again
    blank   nobody holds it and nobody could find it

Whoever needs a block gets a blank one; when there is none, an idle one loses its name. Which: the owner that has most
idle blocks for its weight pays, with the block that has been idle longest. So one owner's flood of prompts cannot push
out what others keep within their share, and with a single owner this is plain LRU. A sequence releases its tail first,
so that the beginnings of prompts, which more prompts have in common, live longest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each; one writer, the scheduler."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._owners: list[str] = [""] * num_blocks
        self._index: dict[bytes, int] = {}
        self._blank: deque[int] = deque(range(num_blocks))
        self._idle: dict[str, OrderedDict[int, int]] = {}  # owner -> its idle blocks, oldest first, and since when
        self._num_idle = 0
        self._num_released = 0
        self._weights: dict[str, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that whoever needs them can have now."""
        return len(self._blank) + self._num_idle

    @property
    def num_idle(self) -> int:
        return self._num_idle

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extend `block_ids` so that it holds `num_tokens` tokens; all or nothing, False when the pool is short."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > self.num_available:
            return False
        block_ids.extend(self._take() for _ in range(missing))
        return True

    def release(self, block_ids: list[int]) -> None:
        """Give up one reference to each block and empty the list, the tail first."""
        while block_ids:
            block_id = block_ids.pop()
            assert self._ref_counts[block_id] > 0, f"block {block_id} released twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._lay_down(block_id)

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block, used or idle."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._wake(block_id)
            self._ref_counts[block_id] += 1

    def is_shared(self, block_id: int) -> bool:
        """Whether more than one sequence holds it."""
        return self._ref_counts[block_id] > 1

    def is_idle(self, block_id: int) -> bool:
        """Whether only the prefix index holds it."""
        return self._ref_counts[block_id] == 0 and self._names[block_id] is not None

    def is_writable(self, block_id: int) -> bool:
        """Whether one sequence holds it, and no other could find it."""
        return self._ref_counts[block_id] == 1 and self._names[block_id] is None

    # ---- the prefix index

    def name(self, block_id: int, name: bytes, owner: str, weight: int) -> None:
        """Let later prompts find this block, which is full and will not be written to again.

        Where another block has the name already, that one goes on being found.
        """
        if name in self._index or self._names[block_id] is not None:
            return
        self._index[name] = block_id
        self._names[block_id] = name
        self._owners[block_id] = owner
        self._weights[owner] = weight

    def find(self, name: bytes) -> int | None:
        """The block of this name, used or idle."""
        return self._index.get(name)

    def idle_blocks(self) -> dict[str, int]:
        """How many idle blocks each owner has."""
        return {owner: len(blocks) for owner, blocks in self._idle.items()}

    # ----

    def check_integrity(self, holders: Iterable[list[int]]) -> None:
        """Raise AssertionError unless every block is in one state, and held exactly as often as it is counted."""
        held = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                held[block_id] += 1
        wrong = [block_id for block_id in range(self.num_blocks) if held[block_id] != self._ref_counts[block_id]]
        assert not wrong, f"blocks whose reference count is not the number of their holders: {wrong[:10]}"
        named = {block_id for block_id, name in enumerate(self._names) if name is not None}
        assert self._index == {self._names[block_id]: block_id for block_id in named}, "names and index differ"
        unused = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        idle = [block_id for blocks in self._idle.values() for block_id in blocks]
        assert sorted(idle) == sorted(unused & named) and len(idle) == self._num_idle, "idle blocks are miscounted"
        assert sorted(self._blank) == sorted(unused - named), "the blank blocks are not the unused ones without a name"
        assert all(self._idle.values()), "an owner without idle blocks is listed"

    def _take(self) -> int:
        if not self._blank:
            self._evict()
        block_id = self._blank.popleft()
        self._ref_counts[block_id] = 1
        return block_id

    def _evict(self) -> None:
        """Make an idle block blank: the one idle longest, of the owner that has most for its weight."""

        def excess(owner: str) -> tuple[float, int]:
            blocks = self._idle[owner]
            return len(blocks) / self._weights[owner], -next(iter(blocks.values()))

        block_id = next(iter(self._idle[max(self._idle, key=excess)]))
        self._wake(block_id)
        name = self._names[block_id]
        assert name is not None
        del self._index[name]
        self._names[block_id] = None
        self._blank.append(block_id)

    def _lay_down(self, block_id: int) -> None:
        if self._names[block_id] is None:
            self._blank.append(block_id)
            return
        self._num_released += 1
        self._num_idle += 1
        self._idle.setdefault(self._owners[block_id], OrderedDict())[block_id] = self._num_released

    def _wake(self, block_id: int) -> None:
        """Take an idle block off its owner's list."""
        owner = self._owners[block_id]
        del self._idle[owner][block_id]
        self._num_idle -= 1
        if not self._idle[owner]:
            del self._idle[owner]
