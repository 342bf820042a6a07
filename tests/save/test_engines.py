"""Engines by name, what is missing for them, and a user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_ckpt.errors import SettingError
from pytest_ckpt.save import engines
from pytest_ckpt.save.engines import EngineSetup, make_engine, require_engine
from pytest_ckpt.save.writers import file_system_writer
from tests.test_docs import examples

SETUP = EngineSetup("sync", None, torch.device("cpu"), file_system_writer)  # type: ignore[arg-type]
OWN = "test_own_engine"


class Half:
    """Has but half of what an engine needs."""

    prepare = None

    def start(self) -> None: ...


def half(setup: EngineSetup) -> Any:
    return Half()


@pytest.mark.parametrize("name", ["torch-checkpointing"])
def test_engine_whose_package_is_missing_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(engines.PACKAGES, name, "no_such_package")
    for ask in (require_engine, lambda name: make_engine(name, SETUP)):
        with pytest.raises(SettingError, match=rf"^engine {name} is not installed; pip install pytest-ckpt\[{name}\]$"):
            ask(name)


def test_dcp_needs_nothing_more() -> None:
    require_engine("dcp")


def test_asking_imports_neither_torch_nor_the_package() -> None:
    program = (
        "import sys; from pytest_ckpt.save.engines import require_engine, PACKAGES\n"
        "for name in PACKAGES:\n"
        "    try: require_engine(name)\n"
        "    except Exception as error: print(error)\n"
        "sys.exit(bool({'torch', *PACKAGES.values()} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_each_engine_that_needs_a_package_has_an_extra_of_its_name() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("[project.")[0]
    for name in engines.PACKAGES:
        assert name in engines.ENGINES
        assert f"\n{name} = [" in extras


def test_factory_that_returns_no_engine_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(SettingError, match=r"engine mine:half returned 'Half', which has no prepare\(\)"):
        make_engine("mine:half", SETUP, half)


def test_documented_engine_saves_and_loads_and_is_benchmarked_by_its_name(pytester: pytest.Pytester) -> None:
    (pytester.path / f"{OWN}.py").write_text(examples()[f"{OWN}.py"])
    result = pytester.runpytest_subprocess(
        *("--ckpt-model=llama3-tiny", "--ckpt-rounds=4", f"--ckpt-engine={OWN}:one_file_per_rank"), timeout=300
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*engine {OWN}:one_file_per_rank*"])


def test_documented_engine_refuses_a_mode_that_it_has_not(pytester: pytest.Pytester) -> None:
    (pytester.path / f"{OWN}.py").write_text(examples()[f"{OWN}.py"])
    (pytester.path / "test_mode.py").write_text("def test_mode(ckpt_save): ckpt_save(mode='async-process')")
    result = pytester.runpytest_subprocess(
        *("--ckpt-model=llama3-tiny", f"--ckpt-engine={OWN}:one_file_per_rank", "test_mode.py"), timeout=300
    )
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*this engine has sync and async, not async-process*"])
