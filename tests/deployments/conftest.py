from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments.command_line import Run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Roulant home of the test's own, where the environment says nothing else."""
    for name in ("ROULANT_URL", "ROULANT_API_KEY", "ROULANT_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROULANT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


@pytest.fixture
def roulant(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs command lines."""
    return Run(monkeypatch, capsys)
