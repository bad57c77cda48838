"""What an engine is started with. Plain data, checked on construction; no torch."""

from __future__ import annotations

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
    block_size
        Tokens per KV block.
    num_kv_blocks, memory_fraction
        The size of the KV cache, as a number of blocks or as a share of the memory that is free once the weights are
        loaded. Both None: `DEFAULT_MEMORY_FRACTION`. Both set: refused.
    num_threads
        Threads that torch computes with; None: all cores this process may use.
    """

    model: str
    dtype: Dtype = Dtype.AUTO
    device: str = "cpu"
    executor: ExecutorKind = ExecutorKind.MODEL
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    block_size: int = 16
    num_kv_blocks: int | None = None
    memory_fraction: float | None = None
    num_threads: int | None = None
    simulated_cost: StepCost = StepCost()

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.num_kv_blocks is not None and self.memory_fraction is not None:
            raise ConfigError("num_kv_blocks and memory_fraction both size the KV cache; set one of them")
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction is {self.memory_fraction}; it must lie in (0, 1]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a full batch could not decode one token each; raise the first or lower the second"
            )


DEFAULT_MEMORY_FRACTION = 0.5
"""Leaves room for activations and for neighbours on the host; GPU deployments set it higher."""
