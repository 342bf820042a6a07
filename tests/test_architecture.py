"""The folders are the pipeline: imports go one way, and nothing heavy is imported where it would cost others."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_ckpt

PACKAGE = Path(pytest_ckpt.__file__).parent
BASE = {"records", "units", "errors"}
MAY_IMPORT = {
    "records": {"units", "errors"},
    "units": set(),
    "errors": set(),
    "measure": BASE,
    "target": BASE | {"measure"},
    "model": BASE | {"measure"},
    "save": BASE | {"measure", "target", "model"},
    "world": BASE | {"measure", "target", "model", "save"},
    "accept": BASE | {"measure", "target", "model", "save", "world"},
    "judge": BASE,
    "report": BASE | {"judge"},
    "plugin": BASE | {"measure", "target", "model", "save", "world", "accept", "judge", "report"},
}
TORCH_ROOMS = {"model", "save", "world", "accept"}
TORCH_PROBES = {"measure/devices.py"}  # asks torch for its devices, where a driver is present


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] != "suites" and parts != ("__init__.py",):
            yield parts[0].removesuffix(".py"), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            yield node.module or ""


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: str(getattr(value, "name", value)))
def test_imports_go_one_way(room: str, path: Path) -> None:
    for name in imports(path):
        if name.startswith("pytest_ckpt."):
            other = name.split(".")[1]
            assert other == room or other in MAY_IMPORT[room], f"{room} must not import {name}"


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda value: str(getattr(value, "name", value)))
def test_only_the_plugin_knows_pytest_and_only_some_rooms_torch(room: str, path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    if room != "plugin":
        assert not roots & {"pytest", "_pytest", "pytest_benchmark"}
    if room not in TORCH_ROOMS and str(path.relative_to(PACKAGE)) not in TORCH_PROBES:
        assert "torch" not in roots


def test_every_room_of_the_design_is_there_and_known_here() -> None:
    rooms = {room for room, _ in modules()}
    assert rooms == set(MAY_IMPORT)


@pytest.mark.parametrize(
    "module",
    ["pytest_ckpt.plugin", "pytest_ckpt.records", "pytest_ckpt.report.table", "pytest_ckpt.plugin.settings"],
)
def test_module_loads_without_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_plugin_loads_nothing_heavy() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules); import pytest_ckpt.plugin; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'torch', 'numpy', 'rich', 'msgspec', 'psutil', 'hypothesis', 'pytest_benchmark'}))"
    )
    printed = subprocess.run([sys.executable, "-c", program], timeout=60, check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == "[]"
