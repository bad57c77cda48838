"""Weights straight from safetensors into the decoder, one tensor at a time, fused where the decoder is fused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from engine.config import ConfigError
from engine.layers import Rotary
from engine.models.decoder import Decoder
from engine.models.shape import ModelShape

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the file goes: a module inside a layer, and its part of that module's rows."""

    module: str
    part: int = 0


LAYER_PLACES = {
    "self_attn.q_proj": Place("attention.qkv", 0),
    "self_attn.k_proj": Place("attention.qkv", 1),
    "self_attn.v_proj": Place("attention.qkv", 2),
    "self_attn.o_proj": Place("attention.out"),
    "self_attn.q_norm": Place("attention.query_norm"),
    "self_attn.k_norm": Place("attention.key_norm"),
    "mlp.gate_proj": Place("mlp.gate_up", 0),
    "mlp.up_proj": Place("mlp.gate_up", 1),
    "mlp.down_proj": Place("mlp.down"),
    "input_layernorm": Place("attention_norm"),
    "post_attention_layernorm": Place("mlp_norm"),
}
OUTER_PLACES = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}


def load_decoder(
    model_dir: Path, config: Any, shape: ModelShape, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Build the decoder and fill it. Raises ConfigError if the files do not hold exactly what it needs."""
    rotary = _rotary(config, shape, max_model_len, dtype, device)
    with torch.device("meta"):  # no time is spent on random weights
        decoder = Decoder(shape, rotary)
    decoder = decoder.to(dtype).to_empty(device=device)
    if shape.tied_head:
        decoder.head.weight = decoder.embed.weight
    parameters = dict(decoder.named_parameters())
    missing = {name: parameter.shape[0] for name, parameter in parameters.items()}
    for source, tensor in _tensors(model_dir):
        if shape.tied_head and source == "lm_head.weight":
            continue
        name, begin = _destination(source, tensor.shape[0], shape)
        if name not in parameters or parameters[name][begin : begin + tensor.shape[0]].shape != tensor.shape:
            raise ConfigError(f"{model_dir} holds {source} {tuple(tensor.shape)}, which has no place in this model")
        parameters[name].data[begin : begin + tensor.shape[0]] = tensor
        missing[name] -= tensor.shape[0]
    absent = sorted(name for name, rows in missing.items() if rows)
    if absent:
        raise ConfigError(f"{model_dir} lacks weights for {', '.join(absent[:5])} ({len(absent)} in all)")
    return decoder.eval().requires_grad_(False)


def _tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files, read when its turn comes."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for file in files:
        if not (model_dir / file).exists():
            raise ConfigError(f"{model_dir} has no {file}")
        with safe_open(model_dir / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _destination(source: str, rows: int, shape: ModelShape) -> tuple[str, int]:
    """The parameter a tensor belongs to, and its first row there."""
    if source in OUTER_PLACES:
        return OUTER_PLACES[source], 0
    match = LAYER.fullmatch(source)
    if match is None or match[2] not in LAYER_PLACES:
        raise ConfigError(f"the weights hold {source}, which this decoder does not know")
    place = LAYER_PLACES[match[2]]
    query_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    begins = (0, query_rows, query_rows + kv_rows) if place.module == "attention.qkv" else (0, rows)
    return f"layers.{match[1]}.{place.module}.{match[3]}", begins[place.part]


def _rotary(config: Any, shape: ModelShape, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Rotary:
    """The position table; scaled variants by the formulas that `transformers` keeps."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float, device=device) / shape.head_dim
        return Rotary(1.0 / parameters["rope_theta"] ** exponents, 1.0, max_model_len, dtype)
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope type {kind!r} is not supported; known are default, linear, llama3 and yarn")
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
    return Rotary(inv_freq, scaling, max_model_len, dtype)
