"""The door of the engine: the types that cross it, the errors it raises, and how to start one.

Importing this module does not import torch. ``start_engine`` does, when it is called.

The engine speaks tokens: text in and out is `TextCodec`, which callers run where they like (see `engine.text`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from engine.text import ChatTemplateError, TextCodec, TextStream

if TYPE_CHECKING:
    from engine.config import EngineConfig

__all__ = [
    "ChatTemplateError",
    "Choice",
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "Explanation",
    "FinishReason",
    "GenerateRequest",
    "Logprob",
    "PlaceAccount",
    "PositionLogprobs",
    "RequestRefusedError",
    "SamplingParams",
    "StepSummary",
    "TextCodec",
    "TextStream",
    "TokenAccount",
    "TokenBias",
    "TokenDelta",
    "describe_memory",
    "start_engine",
]

GIB = 1 << 30


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP` and `LENGTH` are what clients see."""

    STOP = "stop"
    LENGTH = "length"
    """`max_tokens` are reached, or the KV memory of the engine is full of this one sequence."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """`timeout_s` is over."""
    HANDED_BACK = "handed_back"
    """The engine shuts down. The tokens so far are right; another engine goes on if they are given to it."""
    ERROR = "error"


class EngineError(Exception):
    """Root of what the engine raises; the message is fit for the client."""


class RequestRefusedError(EngineError):
    """The request can never run here (too long, unknown token id, duplicate id). Do not retry it unchanged."""


class EngineDeadError(EngineError):
    """The engine has stopped; every open request ends with this. The caller may retry on another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBias:
    """A number that is added to one token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    The logits are changed in this order: ``logit_bias`` is added; ``repetition_penalty`` r divides positive and
    multiplies negative logits of every token that the prompt or the output holds (Keskar et al., 2019, as in
    transformers and vLLM); of tokens that the *output* holds, ``presence_penalty`` is taken off once and
    ``frequency_penalty`` once for each occurrence (as OpenAI defines them); before ``min_tokens`` the tokens that would
    end the sequence are ruled out. Log-probabilities are those of the logits at this point, whatever the temperature.

    ``temperature`` 0 (below 1e-5) is greedy. ``top_k`` None keeps all. Filters apply in the order temperature, top-k,
    top-p, min-p, each over the renormalised mass that the one before it left. The token at position p of a sequence
    depends on ``(seed, index, p)`` and the logits alone, so that neither batch composition nor a restart changes a
    stream.

    ``max_tokens`` 0 computes the prompt only. ``logprobs`` None: no log-probabilities; k: the chosen token's, and those
    of the k likeliest. ``prompt_logprobs`` likewise for every prompt token but the first.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[TokenBias, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on those before it in other ways than through the model."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the outputs of a request. Choices share the prompt and draw different random numbers, told by `index`.

    ``resumed_token_ids`` are output tokens that an earlier attempt has already delivered: generation goes on after
    them as if it had never stopped, and they count towards ``max_tokens`` but are not delivered again.
    """

    index: int = 0
    resumed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, and one output or several (OpenAI's ``n``); the prompt is computed once for all of them.

    ``lane`` orders waiting sequences, lower goes first, and takes room from higher ones if need be. Within a lane
    tenants share in proportion to their ``weight``. ``timeout_s`` counts from intake. Ids that differ after a dot only
    (``job.0``, ``job.1``) are explained together as ``job``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    weight: int = 1
    lane: int = 1
    timeout_s: float | None = None
    choices: tuple[Choice, ...] = (Choice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token's natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """The token that stands at a position, and the likeliest ones there, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Output tokens of one choice since its last delta. The delta with a ``finish_reason`` is the choice's last one.

    An end-of-sequence or stop token is counted (it was generated) and is the last of ``token_ids``;
    `TextStream` leaves it out of the text. ``logprobs``, if asked for, has one entry for each of ``token_ids``.

    The first delta of the request has what concerns the prompt: ``prompt_logprobs``, if asked for, one entry for each
    prompt token after the first, and ``num_cached_tokens``, how many prompt tokens the prefix cache had.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Where the token budget of one step went. The parts sum up to ``budget``, always."""

    budget: int
    decode: int
    new_prefill: int
    recomputed: int
    """Tokens computed again, after a preemption or in a block that a choice does not share."""
    speculative_rejected: int
    graph_padding: int
    unused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAccount:
    """What the token places of the KV cache hold, in tokens; shared blocks count once. Sums up to ``total``, always."""

    total: int
    live: int
    """Computed tokens of running sequences."""
    reserved: int
    """Places kept for tokens that are known, or promised, but not computed yet."""
    tail_waste: int
    """The rest of the last block of each sequence."""
    cached_idle: int
    """Blocks of the prefix cache that nobody uses now; free to whoever needs them."""
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one engine step did, and how its books balance. Sequences are named by `sequence_id`."""

    step: int
    joined: tuple[str, ...]
    left: tuple[str, ...]
    preempted: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_idle_slots: int
    """Slots that static or dynamic batching holds empty until the whole batch is done."""
    tokens: TokenAccount
    places: PlaceAccount
    schedule_s: float
    execute_s: float
    commit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine: gauges now, counters since start."""

    max_num_seqs: int
    max_model_len: int
    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Blocks that only the prefix cache holds; with the used ones and the free ones they make `num_blocks`."""
    num_running: int
    num_waiting: int
    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_recomputed_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    num_idle_slot_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one sequence is where it is.

    ``waited_steps``: for how many steps each reason kept it from being scheduled, by the reason's name.
    ``now``: what holds it up at present, with the numbers; None if nothing does.
    """

    sequence_id: str
    status: str
    lane: int
    waited_steps: dict[str, int]
    now: str | None
    num_preemptions: int
    num_cached_tokens: int


def describe_memory(stats: EngineStats) -> str:
    """What start-up decided about memory, in one line."""
    num_tokens = stats.num_blocks * stats.block_size
    num_full = stats.num_blocks // -(-stats.max_model_len // stats.block_size)
    return (
        f"weights {stats.weight_bytes / GIB:.2f} GiB; KV cache {stats.kv_bytes_per_token:,} bytes per token, "
        f"{stats.num_blocks:,} blocks of {stats.block_size} tokens = {num_tokens:,} tokens, "
        f"{num_tokens * stats.kv_bytes_per_token / GIB:.2f} GiB; "
        f"holds {num_full} requests of the full {stats.max_model_len:,} tokens at once"
    )


class Engine(Protocol):
    """What a started engine offers. All methods are called from one event loop."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Run `request`; closing the iterator early cancels it. Ends when every choice has ended.

        Raises RequestRefusedError before the first delta, EngineDeadError at any point.
        """

    async def cancel(self, request_id: str, index: int | None = None) -> int | None:
        """End a request, or one of its choices, within one step; returns how many output tokens all of its choices
        have generated here, resumed ones not among them.

        Also answers for requests that ended a short while ago; None if it is unknown.
        """

    def stats(self) -> EngineStats:
        """The present counts."""

    def recent_steps(self) -> list[StepSummary]:
        """The last steps, oldest first; bounded."""

    async def explain(self, request_id: str) -> list[Explanation]:
        """Why the open sequences of a request, or of all ``{request_id}.…``, wait or run; empty if none is open."""

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, let the open ones finish for `timeout_s`, then hand back what is left and stop."""


def start_engine(config: EngineConfig) -> Engine:
    """Load the model and start the engine thread; returns when it can serve. Imports torch.

    Raises EngineError with the numbers and the option to change when the model does not fit.
    """
    from engine.build import build_async_engine

    return build_async_engine(config)
