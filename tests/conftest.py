"""What all tests share: the default model's weights, and how hypothesis runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from deployments.home import roulant_home
from deployments.models import DEFAULT_MODEL, pull

# No deadline: how long an example takes says more about the machine than about the code.
settings.register_profile("roulant", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("roulant")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model, fetched if it is missing. Tests that ask for it carry the mark `model`."""
    return pull(DEFAULT_MODEL, home=roulant_home())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
