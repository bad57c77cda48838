"""The table of reported faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
AREAS = {"VAL": 11, "STR": 7, "COR": 6, "SCH": 5}


def test_every_case_has_tests_and_every_test_exists() -> None:
    rows = re.findall(r"^\| (P-[A-Z]+-\d+) \|.*\| (.+) \|$", (ROOT / "tests" / "CASES.md").read_text(), re.MULTILINE)
    assert [case for case, _ in rows] == [
        f"P-{area}-{number:02}" for area, count in AREAS.items() for number in range(1, count + 1)
    ]
    for case, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, f"{case} has no test"
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
