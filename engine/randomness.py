"""The random numbers of sampling: pure functions of a seed and a position, so that no stream depends on another.

The hash is SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014),
applied twice so that both numbers are well mixed.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position); 53 bits."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice of a request. The first choice is what the request would have been with ``n`` = 1."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) + index)
