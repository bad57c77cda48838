"""What a reader must know before the figures."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version


def conditions(**settings: object) -> dict[str, object]:
    """The state of the code and the machine, then what a benchmark was told."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "device": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        **settings,
    }
