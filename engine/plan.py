"""What one step computes: the message from the scheduler to an executor, and the answer. No torch, plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One sequence's share of a step: `token_ids` stand at positions `start`, `start + 1`, ...

    `block_ids` hold the keys and values of positions 0 to `start + len(token_ids) - 1`, in order. If `samples`, the
    chunk ends at the last known token, and the executor returns the token at position `start + len(token_ids)`;
    `banned_token_ids` may not be that token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    banned_token_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last token; also the number of tokens the last one attends to."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A ragged batch: chunks of any length side by side. `joined` and `preempted` are the changes of membership."""

    chunks: tuple[Chunk, ...]
    joined: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`token_ids`: one for each chunk that samples, in the order of the chunks."""

    token_ids: list[int]
    num_padding_tokens: int = 0
