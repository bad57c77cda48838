"""One `Sequence` lives from intake to finish. Every change of its status goes through one gate.

A sequence is never "in prefill" or "in decode". It has tokens that are *known* (prompt, then output) and a count of
those whose keys and values are *computed*; a step lets computed catch up with known. When it does, the step's last
logits are those of the next token.
"""

from __future__ import annotations

from enum import StrEnum

from engine.api import FinishReason, GenerateRequest


class Status(StrEnum):
    WAITING = "waiting"
    """Known to the scheduler, holds no slot and no block."""
    RUNNING = "running"
    """Holds a slot, and blocks for what is computed."""
    FINISHED = "finished"


MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """The state of one request inside the engine; owned by the scheduler, on the engine thread."""

    __slots__ = (
        "arrival",
        "block_ids",
        "eos_token_ids",
        "finish_reason",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "request",
        "status",
        "token_ids",
    )

    def __init__(self, request: GenerateRequest, *, arrival: int, eos_token_ids: frozenset[int]) -> None:
        self.request = request
        self.arrival = arrival
        self.eos_token_ids = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.token_ids = [*request.prompt_token_ids, *request.resumed_token_ids]
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_preemptions = 0
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def move_to(self, status: Status) -> None:
        """The one gate: a move that is not in `MOVES` is a bug of the caller."""
        assert status in MOVES[self.status], f"{self.request_id}: {self.status} -> {status}"
        self.status = status

    def append(self, token_id: int) -> None:
        """Take the next output token, and note the reason if it is the last one.

        Before `min_tokens` the tokens that end a sequence are not among those that the sampler may choose.
        """
        sampling = self.request.sampling
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids or token_id in sampling.stop_token_ids:
            self.finish_reason = FinishReason.STOP
        elif self.num_output >= sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
