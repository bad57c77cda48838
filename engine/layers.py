"""The building blocks of a decoder. Numerics follow `transformers`: norms in float32, rotation in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotary position embedding (Su et al., 2021), half-split layout; one table for all positions up to the bound."""

    def __init__(self, inv_freq: Tensor, scaling: float, max_positions: int, dtype: torch.dtype) -> None:
        angles = torch.arange(max_positions, device=inv_freq.device).float()[:, None] * inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [max_positions, 1, head_dim]
        self._cos = (angles.cos() * scaling).to(dtype)
        self._sin = (angles.sin() * scaling).to(dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] -> cosines and sines: [tokens, 1, head_dim]."""
        return self._cos[positions], self._sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its position's angle. x: [tokens, heads, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
