"""What the step recorder writes: all that the scheduler was told, and all that it decided. Plain data, no torch.

The scheduler is a pure function of the configuration, of what came in and when, and of the tokens that were sampled. A
record holds all three, so whoever feeds them to a scheduler of the same code gets the same decisions, step for step;
`engine.replay` does. Seeds, temperatures and the like are in the requests, but decide nothing here.

A file has one `Header`, then what happened, in order. It contains every prompt as token ids, and names tenants and
requests: keep it as you would keep the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.api import FinishReason, GenerateRequest, PlaceAccount, StepSummary, TokenAccount
from engine.config import EngineConfig
from engine.hold import Obstacle
from engine.intake import ModelFacts
from engine.plan import BlockCopy, Preemption, StepPlan, StepResult

FORMAT_VERSION = 1
"""Changes whenever an older `engine.replay` would misread a record, or a newer one an old record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the engine was started with; `num_blocks` is the size of the pool, wherever it came from."""

    kind: Literal["header"] = "header"
    version: int = FORMAT_VERSION
    config: EngineConfig
    num_blocks: int
    facts: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A request came in. All times are seconds on the engine's clock."""

    kind: Literal["added"] = "added"
    at_s: float
    request: GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A request, or one choice of it, was cancelled; whom that ended is among those that `left` with the next step."""

    kind: Literal["cancelled"] = "cancelled"
    at_s: float
    request_id: str
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedBack:
    """All that was open was handed back; no step need follow."""

    kind: Literal["handed_back"] = "handed_back"
    at_s: float
    sequence_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the parts of a step ended, on the engine's clock."""

    started: float
    scheduled: float
    executed: float
    committed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A sequence ended, and gave back `num_blocks` blocks, shared ones included."""

    sequence_id: str
    reason: FinishReason
    num_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """A sequence computed `num_tokens` tokens from position `start` on, and sampled `token_id`, or nothing.

    `new_block_ids` are the blocks it was given since its last chunk.
    """

    sequence_id: str
    start: int
    num_tokens: int = 1
    token_id: int | None = None
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step: who joined, left and stepped back, what was computed, what stood in the way, and both accounts.

    `left` are those that ended since the last step, be it by themselves or not. `checksum` is the CRC-32 of all token
    ids that were computed, so that a wrong one shows in the step that uses it.
    """

    kind: Literal["step"] = "step"
    step: int
    times: StepTimes
    joined: tuple[str, ...] = ()
    left: tuple[Departure, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    chunks: tuple[ChunkRecord, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    obstacle: Obstacle | None = None
    num_running: int
    num_waiting: int
    num_idle_slots: int = 0
    tokens: TokenAccount
    places: PlaceAccount
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """The file has reached its bound; the engine went on, its record does not."""

    kind: Literal["full"] = "full"
    max_bytes: int


Event = Added | Cancelled | HandedBack
"""What comes in between steps."""

Record = Header | Added | Cancelled | HandedBack | Stepped | Full


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A sequence has ended, and why."""

    sequence_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the engine knows of a step when it is over; what `Stepped` is made of.

    `cut_off` are those that were ended before it was planned, `ended` those that it brought to their end.
    """

    plan: StepPlan
    result: StepResult
    summary: StepSummary
    cut_off: tuple[Ended, ...]
    ended: tuple[Ended, ...]
    times: StepTimes
