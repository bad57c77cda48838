"""`roulant models size`: what a model takes in memory and what fits beside it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from deployments.cli.terminal import CliError, say_json, stderr, stdout
from deployments.home import roulant_home
from deployments.models import ModelError, model_path
from engine.api import GIB
from engine.config import ConfigError, Dtype, EngineConfig, KvDtype
from engine.sizing import CacheFit, ModelSize, fit_cache, size_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about a model. `memory_gib` None: only what it takes; `context` None: the model's most."""

    tp: int
    dtype: Dtype
    kv_dtype: KvDtype
    memory_gib: float | None
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    size: ModelSize
    context: int
    block_size: int
    fit: CacheFit | None


def show_size(model: str, question: Question, *, as_json: bool) -> None:
    """Print the sizes; exits with 1 if the memory does not hold the weights and one request. Raises CliError."""
    try:
        answer = _answer(_config_file(model), question)
    except (ConfigError, ModelError) as error:
        raise CliError(str(error)) from error
    if as_json:
        say_json(asdict(question) | asdict(answer))
    else:
        _show_to_people(question, answer)
    if answer.fit is not None and answer.fit.num_requests == 0:
        sys.exit(1)


def _config_file(model: str) -> Path:
    path = Path(model).expanduser()
    return path if path.is_file() else model_path(model, roulant_home()) / "config.json"


def _answer(config_file: Path, question: Question) -> _Answer:
    size = size_model(config_file, num_ranks=question.tp, dtype=question.dtype, kv_dtype=question.kv_dtype)
    context = question.context or size.max_model_len
    block_size = EngineConfig(model="").block_size
    fit = None
    if question.memory_gib is not None:
        memory_bytes = int(question.memory_gib * GIB)
        fit = fit_cache(size, memory_bytes=memory_bytes, block_size=block_size, context=context)
    return _Answer(size=size, context=context, block_size=block_size, fit=fit)


def _show_to_people(question: Question, answer: _Answer) -> None:
    size, each = answer.size, " on each device" if question.tp > 1 else ""
    table = Table.grid(padding=(0, 2))
    table.add_row("precision", f"{question.dtype}, KV cache {_kv_precision(question)}")
    kv_cache = f"{size.kv_bytes_per_token:,} bytes per token{each}"
    if size.num_parameters is None or size.weight_bytes is None:
        table.add_row("weights", f"not known for model type {size.model_type!r}, which the engine does not run")
        kv_cache += ", if all layers have plain attention"
    else:
        table.add_row("parameters", f"{size.num_parameters:,}")
        table.add_row("weights", f"{size.weight_bytes / GIB:.2f} GiB{each}")
    table.add_row("KV cache", kv_cache)
    request_gib = answer.context * size.kv_bytes_per_token / GIB
    table.add_row("a request", f"{request_gib:.2f} GiB{each} at {answer.context:,} tokens")
    if answer.fit is not None:
        fit = answer.fit
        table.add_row("memory", f"{question.memory_gib:g} GiB{each}, {fit.kv_bytes / GIB:.2f} of it for the KV cache")
        table.add_row("holds", f"{fit.num_blocks:,} blocks of {answer.block_size} tokens = {fit.num_tokens:,} tokens")
        table.add_row("at once", f"{fit.num_requests:,} requests of {answer.context:,} tokens")
    stdout().print(table)
    stderr().print("Not counted: activations and the device's own software. Leave room for them.", style="dim")


def _kv_precision(question: Question) -> str:
    return "in the same" if question.kv_dtype is KvDtype.AUTO else f"in {question.kv_dtype} with a scale per head"
