"""Puts an engine together: the one place that knows all parts. Imports torch."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path

import torch

from engine.api import describe_memory
from engine.async_engine import AsyncEngine
from engine.attention.reference import reference_attention
from engine.config import ConfigError, EngineConfig, ExecutorKind
from engine.engine import Engine, Executor
from engine.executor import InProcessExecutor
from engine.hardware import free_memory, resolve_dtype
from engine.intake import ModelFacts
from engine.memory import MemoryPlan, kv_bytes_per_token, plan_memory
from engine.models.shape import ModelShape, read_config, shape_of
from engine.models.weights import load_decoder
from engine.recorder import open_recorder
from engine.runner import Runner, allocate_cache
from engine.scheduler import build_scheduler
from engine.simulated import SimulatedExecutor
from engine.text import eos_token_ids

logger = logging.getLogger(__name__)


def build_async_engine(config: EngineConfig) -> AsyncEngine:
    """See `engine.api.start_engine`."""
    return AsyncEngine(partial(build_engine, config))


def build_engine(config: EngineConfig) -> Engine:
    """A loaded engine without a thread: whoever holds it calls `step`. Raises ConfigError."""
    model_config = read_config(config.model)
    shape = shape_of(model_config)
    max_model_len = _max_model_len(config, shape)
    if config.executor is ExecutorKind.SIMULATED:
        plan = plan_memory(
            config, weight_bytes=0, kv_bytes_per_token=1, max_model_len=max_model_len, free_bytes=_SIMULATED_TOKENS
        )
        executor: Executor = SimulatedExecutor(
            vocab_size=shape.vocab_size, cost=config.simulated_cost, sleep=time.sleep
        )
    else:
        plan, executor = _load(config, model_config, shape, max_model_len)
    facts = ModelFacts(
        vocab_size=shape.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids(Path(config.model))),
        weight_bytes=plan.weight_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
    )
    recorder = open_recorder(config, plan.num_blocks, facts)
    engine = Engine(build_scheduler(config, plan.num_blocks), executor, facts, time.monotonic, recorder)
    logger.info("%s: %s", Path(config.model).name, describe_memory(engine.stats()))
    return engine


_SIMULATED_TOKENS = 1 << 20
"""The simulated executor's cache, where the configuration does not say: memory that nobody allocates."""


def _load(
    config: EngineConfig, model_config: object, shape: ModelShape, max_model_len: int
) -> tuple[MemoryPlan, Executor]:
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    device = torch.device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    decoder = load_decoder(
        Path(config.model), model_config, shape, max_model_len=max_model_len, dtype=dtype, device=device
    )
    plan = plan_memory(
        config,
        weight_bytes=sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters()),
        kv_bytes_per_token=kv_bytes_per_token(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            element_bytes=dtype.itemsize,
            kv_dtype=config.kv_dtype,
        ),
        max_model_len=max_model_len,
        free_bytes=free_memory(device),
    )
    cache = allocate_cache(
        shape,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        dtype=dtype,
        kv_dtype=config.kv_dtype,
        device=device,
    )
    return plan, InProcessExecutor(Runner(decoder, shape, reference_attention, cache, plan.block_size))


def _max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """The bound on prompt plus output; never more than the model was trained for."""
    length = config.max_model_len or shape.max_positions
    if length > shape.max_positions:
        raise ConfigError(
            f"max_model_len is {length}, but the model was trained for {shape.max_positions} positions; lower it"
        )
    if shape.sliding_window is not None and length > shape.sliding_window:
        raise ConfigError(
            f"the model attends through a window of {shape.sliding_window} tokens, which the engine does not do; "
            f"set max_model_len to {shape.sliding_window} or less (it is {length})"
        )
    return length
