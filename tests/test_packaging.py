"""What ships: the wheel and the editable install carry the same suites, and work outside the checkout."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path, timeout_s: float = 300) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A new environment outside the checkout, with the package installed one way and torch lent by this one."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    lent = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages" / "lent.pth"
    # A plain path: .pth files below it (this environment's own editable install) are not followed.
    lent.write_text("\n".join(site.getsitepackages()) + "\n")
    what = [str(request.getfixturevalue("wheel"))] if request.param == "wheel" else ["--editable", str(ROOT)]
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--force-reinstall", *what]
    run(str(python), "-m", "pip", *install, cwd=tmp_path)
    return python


def test_installed_package_runs_the_suites_without_a_checkout(python: Path, tmp_path: Path) -> None:
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "target"
    elsewhere.mkdir()
    target.mkdir()
    few = ["--ckpt-model=llama3-tiny", "--ckpt-rounds=4", "-p", "no:randomly"]
    by_command = run(str(python.parent / "pytest-ckpt"), "run", str(target), *few, cwd=elsewhere)
    by_pyargs = run(
        *(str(python), "-m", "pytest", "--pyargs", "pytest_ckpt.suites", f"--ckpt-target={target}", *few), cwd=elsewhere
    )
    for printed in (by_command, by_pyargs):
        assert "2 passed" in printed
        assert "llama3-tiny" in printed
    assert list(target.iterdir()) == []


def test_wheel_holds_the_types_the_suites_and_the_licence(wheel: Path) -> None:
    names = run(sys.executable, "-m", "zipfile", "-l", str(wheel), cwd=wheel.parent)
    for name in ("pytest_ckpt/py.typed", "pytest_ckpt/suites/test_save.py", "licenses/LICENSE"):
        assert name in names
    assert "tests/" not in names
