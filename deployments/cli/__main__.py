"""`python -m deployments.cli` is `roulant`."""

from __future__ import annotations

from deployments.cli.app import main

main()
