"""Runs `roulant` inside the test's own process."""

from __future__ import annotations

import pytest

from deployments.cli import main


class Run:
    """Runs a command line in this process; keeps what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.out = ""
        self.err = ""
        monkeypatch.setattr("signal.signal", lambda number, handler: None)

    def __call__(self, *arguments: str) -> int:
        """The exit code."""
        self._monkeypatch.setattr("sys.argv", ["roulant", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        self.out, self.err = self._capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int | None)
        return code or 0
