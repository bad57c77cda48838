"""What one step computes: the message from the scheduler to an executor, and the answer. No torch, plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.api import PositionLogprobs, SamplingParams
from engine.hold import Obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One sequence's share of a step: `token_ids` stand at positions `start`, `start + 1`, ...

    `block_ids` hold the keys and values of positions 0 to `start + len(token_ids) - 1`, in order. If `samples`, the
    chunk ends at the last known token, and the executor returns the token at position `start + len(token_ids)`;
    `banned_token_ids` may not be that token, and `seed` is that of the sequence's own choice.

    `prompt_token_ids` and `output_token_ids` are what the sequence holds so far, for the penalties; both are empty if
    `sampling` has none. `scored_token_ids`: if the request wants the log-probabilities of its prompt, the prompt's
    tokens at `start + 1`, `start + 2`, ...: one for each row of the chunk that another prompt token follows.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    seed: int
    banned_token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    scored_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last token; also the number of tokens the last one attends to."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy a whole block, keys and values of all layers, because a sequence is about to write into a shared one."""

    source: int
    target: int


class PreemptionCause(StrEnum):
    """What a sequence had to step back for."""

    LANE = "lane"
    """A sequence of a higher lane joined in its place."""
    MEMORY = "memory"
    """A running sequence needed a block, and none was to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A sequence had to step back for `in_favour_of`, which may be itself, if no other could be taken.

    The numbers are those by which it was chosen (see `engine.preemption`): its lane, and how many tokens may have to be
    computed again. `num_blocks` it held, shared ones included.
    """

    sequence_id: str
    cause: PreemptionCause
    in_favour_of: str
    lane: int
    num_lost_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A ragged batch: chunks of any length side by side. All `copies` are made before anything is computed.

    `joined` and `preemptions` are the changes of membership; `obstacle` is why nobody more joined, None if nobody
    waits. `num_decode_tokens` and `num_recomputed_tokens` of all tokens are the newest output of a sequence, and what
    has been computed before; the rest are prompts.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()
    joined: tuple[str, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    obstacle: Obstacle | None = None
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def preempted(self) -> tuple[str, ...]:
        return tuple(each.sequence_id for each in self.preemptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`token_ids`: one for each chunk that samples, in the order of the chunks.

    `logprobs`: empty if no chunk wants any, else one entry for each of `token_ids`, None where none are wanted.
    `scored`: the scores of `scored_token_ids`, for each chunk that has some, in order.
    """

    token_ids: list[int]
    logprobs: tuple[PositionLogprobs | None, ...] = ()
    scored: tuple[tuple[PositionLogprobs, ...], ...] = ()
    num_padding_tokens: int = 0
