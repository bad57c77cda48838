"""Priority classes."""

from __future__ import annotations

from enum import IntEnum


class Lane(IntEnum):
    """A priority class. Lower goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2
