"""The plan of the house, held by a machine: who imports whom, who reads the environment, how long things may grow."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "router", "cluster", "deployments")
ENVIRONMENT_READER = Path("deployments/home.py")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES = 400, 250, 50
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def lint_imports(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_every_contract_holds() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """An import that a contract forbids, as the last line of a file."""

    contract: str
    file: str
    line: str


PLANTS = (
    Plant(contract="layers", file="router/planted.py", line="import deployments.home"),
    Plant(contract="layers", file="cluster/planted.py", line="import engine.api"),
    Plant(contract="layers", file="engine/planted.py", line="import cluster.api"),
    Plant(contract="nobody-imports-tests", file="engine/planted.py", line="import tests"),
    Plant(contract="nobody-imports-tests", file="deployments/planted.py", line="import benchmarks"),
    Plant(contract="only-deployments-knows-ray", file="engine/planted.py", line="import ray"),
    Plant(
        contract="only-deployments-knows-ray", file="router/planted.py", line="def late():\n    from ray import serve"
    ),
    Plant(contract="only-deployments-knows-ray", file="cluster/planted.py", line="import yaml"),
    Plant(contract="cluster-is-pure", file="cluster/planted.py", line="import torch"),
    Plant(contract="cluster-is-pure", file="cluster/planted.py", line="from fastapi import FastAPI"),
    Plant(contract="engine-has-no-http", file="engine/planted.py", line="import httpx"),
    Plant(contract="router-without-torch", file="router/planted.py", line="import torch"),
    Plant(contract="router-without-torch", file="engine/text.py", line="def late():\n    import torch"),
    Plant(contract="engine-door-without-torch", file="engine/config.py", line="import torch"),
    Plant(contract="engine-is-entered-by-its-door", file="router/planted.py", line="import engine.text"),
    Plant(contract="engine-is-entered-by-its-door", file="deployments/planted.py", line="import engine.text"),
    Plant(contract="cluster-is-entered-by-its-door", file="router/planted.py", line="import cluster.planted"),
    Plant(contract="router-is-entered-by-its-door", file="deployments/planted.py", line="import router.service"),
)


@pytest.fixture(scope="module")
def a_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their contracts, to plant violations in."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    # A module of each lower package that is not its door.
    (folder / "cluster" / "planted.py").touch()
    return folder


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.contract}: {plant.file}: {plant.line}")
def test_a_contract_fails_on_a_planted_violation(a_copy: Path, plant: Plant) -> None:
    file = a_copy / plant.file
    before = file.read_text() if file.exists() else None
    file.write_text(f"{before or ''}\n{plant.line}\n")
    try:
        result = lint_imports(a_copy, "--contract", plant.contract)
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_text(before)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "0 kept, 1 broken" in result.stdout


def test_every_contract_has_a_planted_violation() -> None:
    assert {plant.contract for plant in PLANTS} == {contract["id"] for contract in CONTRACTS}


@pytest.mark.parametrize("door", ["engine.api", "engine.config", "cluster.api", "router.api", "deployments.cli"])
def test_a_door_opens_without_torch_and_ray(door: str) -> None:
    program = f"import sys, {door}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def modules() -> Iterator[Path]:
    """Every file of the product, relative to the root."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT)


def touches_environment(source: str) -> bool:
    """Whether a module reads or writes environment variables, by any of the names that `os` has for them."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            return True
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
    return False


def test_one_file_touches_the_environment() -> None:
    assert [path for path in modules() if touches_environment((ROOT / path).read_text())] == [ENVIRONMENT_READER]


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "def f():\n    from os import environ as e"],
)
def test_touching_the_environment_is_seen(source: str) -> None:
    assert touches_environment(source)


def test_no_module_has_a_name_that_says_nothing_or_that_python_has() -> None:
    vague = {"common", "utils", "util", "helpers", "base", "manager", "misc"}
    assert [path for path in modules() if path.stem in vague | sys.stdlib_module_names] == []


def too_long(path: Path, source: str) -> Iterator[str]:
    """What in a file passes the sizes that the architecture aims for."""
    if (length := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{path}: {length} lines"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > (MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES):
                yield f"{path}: {node.name} has {length} lines"


def test_files_classes_and_functions_stay_small() -> None:
    assert [fault for path in modules() for fault in too_long(path, (ROOT / path).read_text())] == []


def test_what_is_too_long_is_seen() -> None:
    body = "    a = 1\n"
    assert list(too_long(Path("f.py"), "def f():\n" + body * 49)) == []
    assert list(too_long(Path("f.py"), "def f():\n" + body * 50)) == ["f.py: f has 51 lines"]
    assert list(too_long(Path("f.py"), "class F:\n" + body * 250)) == ["f.py: F has 251 lines"]
    assert list(too_long(Path("f.py"), "a = 1\n" * 401)) == ["f.py: 401 lines"]


def test_the_wheel_holds_the_packages_and_their_data_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for package in (*PACKAGES, "tests", "benchmarks"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    with zipfile.ZipFile(next(tmp_path.glob("roulant-*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "deployments" / "configs").glob("*.yaml")}
    assert "deployments/configs/local.yaml" in configs
    assert names == {str(path) for path in modules()} | configs
