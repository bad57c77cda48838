"""Why a sequence is not scheduled, in words that an operator can act on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Hold(StrEnum):
    """What keeps a sequence from being scheduled in a step."""

    BATCH = "batch"
    """Static or dynamic batching: the next batch is not formed yet."""
    SLOT = "slot"
    """The batch is full."""
    BLOCKS = "blocks"
    """Too little KV memory is free."""
    BUDGET = "budget"
    """The tokens of the step went to others."""
    PREEMPTION = "preemption"
    """A sequence was preempted, for memory or for a higher lane; nobody else joins in such a step."""
    SIBLING = "sibling"
    """Another choice of the same request computes the prompt for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What stopped the head of the queue in a step, and with it everybody behind. The numbers are blocks."""

    hold: Hold
    sequence_id: str
    num_needed: int = 0
    num_available: int = 0
    num_kept_free: int = 0

    def __str__(self) -> str:
        match self.hold:
            case Hold.BATCH:
                return "the running batch has to end first"
            case Hold.SLOT:
                return "every slot is taken"
            case Hold.BLOCKS:
                return (
                    f"needs {self.num_needed} blocks, {self.num_available} are free or cached, "
                    f"{self.num_kept_free} are kept for the growth of running sequences"
                )
            case Hold.BUDGET:
                return "the token budget of the step went to more urgent ones"
            case Hold.PREEMPTION:
                return "somebody had to step back in this step, so nobody else joined"
            case Hold.SIBLING:
                return f"{self.sequence_id} computes the prompt for it"
