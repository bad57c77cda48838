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
    "Engine",
    "EngineDeadError",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "RequestRefusedError",
    "SamplingParams",
    "StepSummary",
    "TextCodec",
    "TextStream",
    "TokenDelta",
    "describe_memory",
    "start_engine",
]

GIB = 1 << 30


class FinishReason(StrEnum):
    """Why a sequence ended. `STOP` and `LENGTH` are what clients see; the others never reach a well-behaved stream."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class EngineError(Exception):
    """Root of what the engine raises; the message is fit for the client."""


class RequestRefusedError(EngineError):
    """The request can never run here (too long, unknown token id, duplicate id). Do not retry it unchanged."""


class EngineDeadError(EngineError):
    """The engine has stopped; every open request ends with this. The caller may retry on another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    ``temperature`` 0 (below 1e-5) is greedy. ``top_k`` None keeps all. Filters apply in the order temperature, top-k,
    top-p, min-p, each over the renormalised mass that the one before it left. The token at position p of a sequence
    depends on ``(seed, p)`` and the logits alone, so that neither batch composition nor a restart changes a stream.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate.

    ``resumed_token_ids`` are output tokens that an earlier attempt has already delivered: generation goes on after
    them as if it had never stopped, and they count towards ``max_tokens`` but are not delivered again.
    ``lane`` orders waiting sequences: lower goes first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    lane: int = 1
    resumed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """Output tokens since the last delta of this request. The delta with a ``finish_reason`` is the last one.

    An end-of-sequence or stop token is counted (it was generated) and is the last of ``token_ids``;
    `TextStream` leaves it out of the text.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one engine step did. ``num_tokens`` = ``num_prefill_tokens`` + ``num_decode_tokens`` + padding."""

    step: int
    joined: tuple[str, ...]
    left: tuple[str, ...]
    preempted: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padding_tokens: int
    num_free_blocks: int
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
    num_running: int
    num_waiting: int
    num_steps: int
    num_requests: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_padding_tokens: int
    num_preemptions: int


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
        """Run `request`; closing the iterator early cancels it.

        Raises RequestRefusedError before the first delta, EngineDeadError at any point.
        """

    async def cancel(self, request_id: str) -> int | None:
        """End a request within one step; returns how many output tokens it had generated.

        Also answers for requests that ended a short while ago; None if it is unknown.
        """

    def stats(self) -> EngineStats:
        """The present counts."""

    def recent_steps(self) -> list[StepSummary]:
        """The last steps, oldest first; bounded."""

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""

    async def drain(self, timeout_s: float) -> None:
        """Take no new request, let the open ones finish for `timeout_s`, then cancel what is left and stop."""


def start_engine(config: EngineConfig) -> Engine:
    """Load the model and start the engine thread; returns when it can serve. Imports torch.

    Raises EngineError with the numbers and the option to change when the model does not fit.
    """
    from engine.build import build_async_engine

    return build_async_engine(config)
