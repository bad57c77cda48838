"""The command line. `main` is what `roulant` runs."""

from __future__ import annotations

from deployments.cli.app import main

__all__ = ["main"]
