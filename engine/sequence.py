"""One `Sequence` lives from intake to finish. Every change of its status goes through one gate.

A sequence is one choice of a request. It is never "in prefill" or "in decode": it has tokens that are *known* (prompt,
then output) and a count of those whose keys and values are *computed*; a step lets computed catch up with known. When
it does, the step's last logits are those of the next token.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from engine.api import Choice, FinishReason, GenerateRequest, PositionLogprobs
from engine.randomness import choice_seed

PREEMPTIONS_UNTIL_PROTECTED = 2


class Status(StrEnum):
    WAITING = "waiting"
    """Known to the scheduler, holds no slot and no block."""
    RUNNING = "running"
    """Holds a slot, and blocks for all of its known tokens."""
    FINISHED = "finished"


MOVES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


def sequence_id(request_id: str, index: int) -> str:
    """The name of one choice in plans, summaries and records."""
    return request_id if index == 0 else f"{request_id}#{index}"


class Sequence:
    """The state of one choice inside the engine; owned by the scheduler, on the engine thread.

    `lane` is the lane it runs in; a sequence that has waited long joins in a higher one than its request named.
    `block_names` are the names of its full blocks in the prefix index, as far as they have been worked out.
    `siblings` are the other choices of the request while they wait for this one to compute the prompt; `forked_from`
    is the choice that has done so.
    """

    __slots__ = (
        "arrival",
        "arrival_step",
        "arrived_s",
        "block_ids",
        "block_names",
        "choice",
        "eos_token_ids",
        "finish_reason",
        "forked_from",
        "held_when_queued",
        "high_water",
        "lane",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "output_at_join",
        "preemptions_in_a_row",
        "prompt_logprobs",
        "queued_step",
        "request",
        "seed",
        "sequence_id",
        "siblings",
        "status",
        "token_ids",
        "told",
        "waited_steps",
        "waits",
    )

    def __init__(
        self,
        request: GenerateRequest,
        choice: Choice,
        *,
        arrival: int,
        eos_token_ids: frozenset[int],
        arrived_s: float = 0.0,
    ) -> None:
        """`arrival` numbers all sequences of the engine; `arrived_s` is the time, on the engine's clock."""
        self.request = request
        self.choice = choice
        self.sequence_id = sequence_id(request.request_id, self.choice.index)
        self.seed = choice_seed(request.sampling.seed, self.choice.index)
        self.arrival = arrival
        self.lane = request.lane
        self.eos_token_ids = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.num_prompt = len(request.prompt_token_ids)
        self.token_ids = [*request.prompt_token_ids, *self.choice.resumed_token_ids]
        self.num_computed = 0
        self.high_water = 0
        """The most tokens it ever had computed; what is computed below it is computed again."""
        self.block_ids: list[int] = []
        self.block_names: list[bytes] = []
        self.siblings: list[Sequence] = []
        self.forked_from: Sequence | None = None
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.num_cached_tokens = 0
        self.told = False
        """Whether the client has been told what concerns the prompt."""
        # ---- how it has fared
        self.arrived_s = arrived_s
        self.arrival_step = 0
        self.queued_step = 0
        self.waited_steps = 0
        self.waits: Counter[str] = Counter()
        self.held_when_queued: Counter[str] = Counter()
        self.num_preemptions = 0
        self.preemptions_in_a_row = 0
        """Preemptions since a run in which it produced a block's worth of tokens."""
        self.output_at_join = 0
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def index(self) -> int:
        return self.choice.index

    @property
    def tenant(self) -> str:
        return self.request.tenant

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

    @property
    def is_decoding(self) -> bool:
        """Whether a single token is all that keeps it from the next one."""
        return self.num_uncomputed == 1

    @property
    def is_protected(self) -> bool:
        """Whether it has been preempted so often in a row that it may not be again before it has got somewhere.

        When it joins, it is given memory for a block's worth of output beyond what it knows; so until then it needs
        nothing that others would have to give.
        """
        return self.preemptions_in_a_row >= PREEMPTIONS_UNTIL_PROTECTED

    def move_to(self, status: Status) -> None:
        """The one gate: a move that is not in `MOVES` is a bug of the caller."""
        assert status in MOVES[self.status], f"{self.sequence_id}: {self.status} -> {status}"
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
