"""What the driver of a local service tells the process that started it, one event in JSON on a line."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class EventKind(StrEnum):
    """What kind of news. After READY and FAILED there is none."""

    STEP = "step"
    READY = "ready"
    FAILED = "failed"


class DriverEvent(BaseModel):
    """One piece of news. The text is for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: EventKind
    text: str = ""
