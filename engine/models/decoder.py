"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

The model knows nothing of batches or caches: tokens come as one flat list, and `attend` is how they look at one
another. The query, key and value products are one matrix, as are gate and up: fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import silu

from engine.layers import RMSNorm, Rotary, rotate
from engine.models.shape import ModelShape

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [tokens, heads, head_dim], key, value [tokens, kv_heads, head_dim]) -> [tokens, heads * head_dim]."""


class SelfAttention(nn.Module):
    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = shape.head_dim
        self.sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.qkv = nn.Linear(shape.hidden_size, sum(self.sizes) * shape.head_dim, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=shape.out_bias)
        self.query_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.key_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], sum(self.sizes), self.head_dim)
        query, key, value = heads.split(self.sizes, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        attended = attend(self.layer, rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.out(attended)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = SelfAttention(shape, layer)
        self.mlp_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """`forward` gives hidden states of all tokens, `logits` scores for the few rows that need them."""

    def __init__(self, shape: ModelShape, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied_head:
            self.head.weight = self.embed.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: [tokens] -> hidden states before the last norm: [tokens, hidden]."""
        cos, sin = self.rotary(positions)
        x: Tensor = self.embed(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> float32 logits: [rows, vocab]."""
        scores: Tensor = self.head(self.norm(hidden))
        return scores.float()
