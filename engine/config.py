"""What an engine is started with. Plain data, checked on construction; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from engine.api import EngineError


class ConfigError(EngineError):
    """A setting, or a combination of settings, that cannot work. The message says which value and what to change."""


class ExecutorKind(StrEnum):
    """Who computes a step."""

    MODEL = "model"
    SIMULATED = "simulated"


class Dtype(StrEnum):
    """Precision of weights, activations and KV cache."""

    AUTO = "auto"
    """bfloat16 where the hardware computes in it, float32 on other CPUs, where bfloat16 is emulated and slower."""
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class KvDtype(StrEnum):
    """Precision of the KV cache."""

    AUTO = "auto"
    """That of the model."""
    INT8 = "int8"
    """Eight bits, with one scale for each token and KV head."""


class PrefixCache(StrEnum):
    """Who may reuse the computed prompt blocks of whom."""

    OFF = "off"
    TENANT = "tenant"
    """Each tenant its own only. A shared cache tells by its speed what others have sent."""
    SHARED = "shared"
    """Everybody everyone's. For deployments whose tenants trust one another."""


class BatchingMode(StrEnum):
    """When waiting sequences may join the batch."""

    CONTINUOUS = "continuous"
    """At every step."""
    DYNAMIC = "dynamic"
    """When the last batch has ended: once `max_batch_size` wait, or the oldest has waited `max_delay_ms`."""
    STATIC = "static"
    """When the last batch has ended: whoever waits at that moment, into a batch of `max_batch_size` fixed slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost model of the simulated executor, in seconds: ``base_s + per_token_s * tokens + per_seq_s * sequences``."""

    base_s: float = 0.010
    per_token_s: float = 0.0001
    per_seq_s: float = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Raises ConfigError.

    model
        A folder with `config.json`, `tokenizer.json` and safetensors. The simulated executor reads all but the weights.
    max_model_len
        Tokens of prompt plus output that one request may have; None: what the model was trained for.
    max_num_seqs
        Slots: sequences that may be in the running batch.
    max_num_batched_tokens
        Tokens that one step may compute, decodes and prefill chunks together.
    max_prefill_tokens_with_decodes
        Of these, how many may be prefill while a stream is decoding: bounds what a long prompt does to the gaps between
        the tokens of others. None: no bound of its own.
    batching, max_batch_size, max_delay_ms
        When waiting sequences may join; see `BatchingMode`. `max_batch_size` None: `max_num_seqs`. The other two are
        for `dynamic` and `static` only.
    aging_steps
        A sequence that waits is lifted by one lane for every so many steps.
    watermark
        Share of the blocks that stays free when a sequence joins others, so that it does not soon have to step back.
    prefix_cache
        Who may reuse whose computed prompt blocks.
    block_size
        Tokens per KV block.
    kv_dtype
        Precision of the KV cache.
    num_kv_blocks, memory_fraction
        The size of the KV cache, as a number of blocks or as a share of the memory that is free once the weights are
        loaded. Both None: `DEFAULT_MEMORY_FRACTION`. Both set: refused.
    num_threads
        Threads that torch computes with; None: all cores this process may use.
    record_steps, record_max_bytes
        A file to write every step's decision to, prompts as token ids included, until it is `record_max_bytes` long;
        `python -m engine.replay` reads it.
    """

    model: str
    dtype: Dtype = Dtype.AUTO
    device: str = "cpu"
    executor: ExecutorKind = ExecutorKind.MODEL
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_prefill_tokens_with_decodes: int | None = None
    batching: BatchingMode = BatchingMode.CONTINUOUS
    max_batch_size: int | None = None
    max_delay_ms: float = 0.0
    aging_steps: int = 200
    watermark: float = 0.01
    prefix_cache: PrefixCache = PrefixCache.TENANT
    block_size: int = 16
    kv_dtype: KvDtype = KvDtype.AUTO
    num_kv_blocks: int | None = None
    memory_fraction: float | None = None
    num_threads: int | None = None
    simulated_cost: StepCost = StepCost()
    record_steps: str | None = None
    record_max_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if not 0 <= self.max_delay_ms < math.inf:
            raise ConfigError(f"max_delay_ms is {self.max_delay_ms}; it must be a number that is not negative")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}; it must lie in [0, 1)")
        if self.num_kv_blocks is not None and self.memory_fraction is not None:
            raise ConfigError("num_kv_blocks and memory_fraction both size the KV cache; set one of them")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it must lie in (0, 1]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a full batch could not decode one token each; raise the first or lower the second"
            )
        self._check_batching()

    def _check_batching(self) -> None:
        if self.batching is BatchingMode.CONTINUOUS and (self.max_batch_size is not None or self.max_delay_ms):
            raise ConfigError("max_batch_size and max_delay_ms mean nothing with batching: continuous; leave them out")
        if (self.max_batch_size or 0) > self.max_num_seqs:
            raise ConfigError(f"max_batch_size ({self.max_batch_size}) is above max_num_seqs ({self.max_num_seqs})")
        if self.batching is BatchingMode.STATIC and self.max_delay_ms:
            raise ConfigError(
                "max_delay_ms is for batching: dynamic; a static batch takes whoever waits when it starts"
            )


DEFAULT_MEMORY_FRACTION = 0.5
"""Leaves room for activations and for neighbours on the host; GPU deployments set it higher."""

_AT_LEAST_ONE = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_tokens_with_decodes",
    "max_batch_size",
    "aging_steps",
    "block_size",
    "num_kv_blocks",
    "num_threads",
    "record_max_bytes",
)
