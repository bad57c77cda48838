"""Where our processes write what they have to say: stderr, which Ray keeps in a file for each worker."""

from __future__ import annotations

import logging

PACKAGES = ("engine", "router", "cluster", "deployments")


def log_to_stderr() -> None:
    """Log our packages from INFO up, in this process. Other libraries keep their own settings. Idempotent."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in PACKAGES:
        package = logging.getLogger(name)
        if not package.handlers:
            package.addHandler(handler)
            package.setLevel(logging.INFO)
            package.propagate = False
