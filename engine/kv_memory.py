"""What a sequence has in the KV memory: which blocks it is given when it joins, as it grows, and when it goes.

A sequence that joins is given blocks for all tokens it knows, so that half-computed prompts never compete for memory.
What the prefix index has of them it need not compute: whole blocks are shared, for as long as the names match. The
last known token must be computed in any case, for its logits. If that would be the only one computed in a block that
the index has, the sequence gets a copy of that block instead of computing all of it. The other choices of a request
join in the same way, only that their first choice shows them its blocks: they share the full ones of the prompt, and
copy the one that prompt and output have in common, since each is about to write to its own.

So a block that several sequences hold, or that has a name, is never written to: whoever writes has copied before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.config import PrefixCache
from engine.plan import BlockCopy
from engine.prefix import block_name, root_name
from engine.sequence import Sequence, Status

GROWTH_TOKENS = 32
"""More costs slots that stand empty, less costs preemptions; see `benchmarks.scarce_memory`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What need not be computed. `shared`: blocks to share; `copied`: the block after them, to copy; `num_tokens`: all
    that is known of the sequence in them."""

    shared: tuple[int, ...] = ()
    copied: int | None = None
    num_tokens: int = 0


class KvMemory:
    """The pool, and the rules for its use.

    `watermark`: the share of blocks that newcomers leave free; `growth_tokens`: how far ahead they leave running
    sequences room to grow.
    """

    def __init__(
        self, pool: BlockPool, *, prefix_cache: PrefixCache, watermark: float, growth_tokens: int = GROWTH_TOKENS
    ) -> None:
        self.pool = pool
        self._prefix_cache = prefix_cache
        self._growth_tokens = growth_tokens
        self._num_watermark_blocks = int(watermark * pool.num_blocks)
        self.num_found_tokens = 0
        """Tokens that the prefix index has saved from being computed, since start."""

    @property
    def num_tokens(self) -> int:
        """The longest sequence that fits."""
        return self.pool.num_blocks * self.pool.block_size

    def find(self, sequence: Sequence) -> Found:
        """What of the sequence's known tokens is in memory already."""
        fork = sequence.forked_from
        if fork is not None and fork.status is Status.RUNNING and fork.num_computed >= sequence.num_prompt:
            return self._among(fork.block_ids, sequence.num_prompt, sequence)
        if self._prefix_cache is PrefixCache.OFF or must_score_prompt(sequence):
            return Found()
        self._name_blocks(sequence, sequence.num_known)
        block_ids = []
        for name in sequence.block_names:
            block_id = self.pool.find(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        return self._among(block_ids, len(block_ids) * self.pool.block_size, sequence)

    def blocks_needed(self, sequence: Sequence, found: Found) -> int:
        """How many of the pool's available blocks the sequence takes when it joins."""
        idle = sum(self.pool.is_idle(block_id) for block_id in found.shared)
        return self.pool.blocks_for(self._tokens_at_join(sequence)) - len(found.shared) + idle

    def join(self, sequence: Sequence, found: Found) -> BlockCopy | None:
        """Give it its blocks, which must be available; returns the copy that has to be made before it computes."""
        self.pool.share(found.shared)
        sequence.block_ids.extend(found.shared)
        has_room = self.pool.grow(sequence.block_ids, self._tokens_at_join(sequence))
        assert has_room, f"{sequence.sequence_id} joins without memory"
        sequence.num_computed = found.num_tokens
        if sequence.forked_from is None:
            self.num_found_tokens += found.num_tokens
        if found.copied is None:
            return None
        return BlockCopy(source=found.copied, target=sequence.block_ids[len(found.shared)])

    def grow(self, sequence: Sequence) -> bool:
        """Make room for all known tokens; False if there is no block to be had."""
        return self.pool.grow(sequence.block_ids, sequence.num_known)

    def note_computed(self, sequence: Sequence, start: int) -> None:
        """Let others find the blocks that have become full since `start` tokens were computed."""
        if self._prefix_cache is PrefixCache.OFF:
            return
        self._name_blocks(sequence, sequence.num_computed)
        owner, weight = self._owner(sequence), sequence.request.weight
        for index in range(start // self.pool.block_size, sequence.num_computed // self.pool.block_size):
            self.pool.name(sequence.block_ids[index], sequence.block_names[index], owner, weight)

    def release(self, sequence: Sequence) -> None:
        """Take everything back; what has a name can be found again for a while."""
        self.pool.release(sequence.block_ids)
        sequence.num_computed = 0

    def num_released(self, sequence: Sequence, kept: frozenset[int]) -> int:
        """How many blocks would become available if this sequence went, those in `kept` not counted."""
        own = sequence.block_ids[self._num_shared(sequence) :]
        return sum(block_id not in kept for block_id in own)

    def loss(self, sequence: Sequence) -> int:
        """Tokens that would have to be computed again if this sequence went: those in blocks that nobody shares.

        The index may give some of the others back, but not for certain: memory is short when this is asked.
        """
        return max(0, sequence.num_computed - self._num_shared(sequence) * self.pool.block_size)

    def room_to_grow(self, running: Iterable[Sequence]) -> int:
        """Blocks that a newcomer leaves to running sequences: the watermark, and what they will want for their next
        `growth_tokens` tokens."""
        return self._num_watermark_blocks + sum(self._growth_of(sequence) for sequence in running)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError if the pool's books are wrong, or a block could be written that others read."""
        held = [sequence.block_ids for sequence in sequences]
        self.pool.check_integrity(held)
        for sequence in sequences:
            for block_id in sequence.block_ids[sequence.num_computed // self.pool.block_size :]:
                assert self.pool.is_writable(block_id), f"{sequence.sequence_id} would write to block {block_id}"
        if not held:
            assert self.pool.num_used == 0, f"{self.pool.num_used} blocks are held by nobody"

    # ----

    def _among(self, block_ids: list[int], num_tokens: int, sequence: Sequence) -> Found:
        """What can be used of `block_ids`, which hold the first `num_tokens` tokens of the sequence."""
        size = self.pool.block_size
        usable = min(num_tokens, sequence.num_known - 1)
        num_shared = usable // size
        is_copied = usable % size > 0
        return Found(
            shared=tuple(block_ids[:num_shared]),
            copied=block_ids[num_shared] if is_copied else None,
            num_tokens=usable,
        )

    def _tokens_at_join(self, sequence: Sequence) -> int:
        extra = self.pool.block_size if sequence.is_protected else 0
        return min(sequence.num_known + extra, self.num_tokens)

    def _num_shared(self, sequence: Sequence) -> int:
        """Its leading blocks that others hold as well; shared blocks are always the first ones."""
        num_shared = 0
        for block_id in sequence.block_ids:
            if not self.pool.is_shared(block_id):
                break
            num_shared += 1
        return num_shared

    def _growth_of(self, sequence: Sequence) -> int:
        left = sequence.request.sampling.max_tokens - sequence.num_output
        tokens = min(sequence.num_known + min(left, self._growth_tokens), self.num_tokens)
        return max(0, self.pool.blocks_for(tokens) - len(sequence.block_ids))

    def _owner(self, sequence: Sequence) -> str:
        return sequence.tenant if self._prefix_cache is PrefixCache.TENANT else ""

    def _name_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Work out the names of the blocks that the first `num_tokens` tokens fill."""
        size, names = self.pool.block_size, sequence.block_names
        for index in range(len(names), num_tokens // size):
            parent = names[-1] if names else root_name(self._owner(sequence))
            names.append(block_name(parent, sequence.token_ids[index * size : (index + 1) * size]))


def must_score_prompt(sequence: Sequence) -> bool:
    """Whether the log-probabilities of its prompt are still wanted, for which all of it must be computed."""
    wanted = sequence.request.sampling.prompt_logprobs is not None and not sequence.told
    return wanted and sequence.forked_from is None and len(sequence.prompt_logprobs) < sequence.num_prompt - 1
