from __future__ import annotations

import subprocess
import sys


def test_admission_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys, cluster.api, cluster.admission; print(sorted({'torch', 'ray', 'asyncio'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
