"""What does the installed plugin cost people who do not use it? `pytest --co` of an empty project, with and without."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

import pytest_ckpt

from .pairs import shift

LIMIT_S = 0.050
PAIRS = 20
_OURS = "pytest-ckpt"
_DEADLINE_S = 60
_ARGUMENTS = ["--co", "-q"]
_LOOK = """
import json, sys, pytest
class Look:
    def pytest_sessionfinish(self, session):
        self.plugin = session.config.pluginmanager.hasplugin("ckpt")
look = Look()
pytest.main({arguments}, plugins=[look])
print(json.dumps({{"plugin": look.plugin, "heavy": sorted({heavy} & set(sys.modules))}}))
"""
_HEAVY = {"torch", "numpy", "pytest_ckpt.plugin.run", "pytest_ckpt.plugin.settings"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of runs (default: %(default)s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="ckpt-speed-") as name:
        root = Path(name)
        installed = list(_installed())
        environments = {
            "with": _environment(root / "with", installed, ours=True),
            "without": _environment(root / "without", installed, ours=False),
            "fresh with": _environment(root / "fresh-with", _closure("pytest", _OURS), ours=True),
            "fresh": _environment(root / "fresh", _closure("pytest"), ours=False),
        }
        project = root / "project"
        project.mkdir()
        (project / "pytest.ini").write_text("[pytest]\n")
        seen = {name: _look(python, project) for name, python in environments.items()}
        if [name for name, look in seen.items() if look["plugin"]] != ["with", "fresh with"]:
            raise SystemExit(f"the environments are not what they should be: {seen}")
        seconds: dict[str, list[float]] = {name: [] for name in environments}
        for number in range(options.pairs):
            order = list(environments) if number % 2 == 0 else list(environments)[::-1]
            for name in order:
                seconds[name].append(_run(environments[name], project))
    return report(seconds, seen["with"]["heavy"])


def report(seconds: dict[str, list[float]], heavy: list[str]) -> int:
    """Print what was found and return the exit status."""
    for name, values in seconds.items():
        print(f"{name:<12} median {median(values) * 1e3:.0f} ms, least {min(values) * 1e3:.0f} ms")
    fell_short = bool(heavy)
    for name, other, judged in (("with", "without", True), ("fresh with", "fresh", False)):
        found = shift([a - b for a, b in zip(seconds[name], seconds[other], strict=True)])
        line = (
            f"{name} less {other}: {found.middle * 1e3:+.1f} ms, "
            f"95 % interval {found.low * 1e3:+.1f} to {found.high * 1e3:+.1f} ms"
        )
        if judged:
            beyond = found.middle >= LIMIT_S
            fell_short |= beyond
            line += f": {'falls short (limit' if beyond else 'within (limit'} {LIMIT_S * 1e3:.0f} ms)"
        else:
            line += " (for information: pytest-benchmark and hypothesis, which it brings, included)"
        print(line)
    print(f"imported by the plugin: {', '.join(heavy)}: falls short" if heavy else "torch is not imported")
    if len(seconds["with"]) < PAIRS:
        print(f"{len(seconds['with'])} pairs only show that this runs: {PAIRS} are the measurement")
    return int(fell_short)


def _installed() -> Iterable[Distribution]:
    return {d.metadata["Name"].lower(): d for d in Distribution.discover()}.values()


def _closure(*names: str) -> list[Distribution]:
    """Return the named distributions and all that they need here, by their own metadata."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # needed elsewhere: another system, another Python
            continue
        needed = [text for text in found[name].requires or () if "extra ==" not in text]
        left += [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in needed]
    return list(found.values())


def _environment(folder: Path, distributions: Iterable[Distribution], ours: bool) -> Path:
    """Make a virtual environment of links to what is installed here, and return its Python.

    The environments differ in what they hold and in nothing else; -p no:ckpt would still read the entry point. The
    plugin is put there as its wheel would put it, also where it is installed for editing.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    for found in distributions:
        is_ours = found.metadata["Name"] == _OURS
        if is_ours and not ours:
            continue
        for path in found.files or ():
            top = path.parts[0]
            if top == ".." or (is_ours and top.endswith(".pth")):
                continue
            link = site / top
            if not link.is_symlink() and not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    if ours:
        package = site / "pytest_ckpt"
        if not package.is_symlink():
            package.symlink_to(Path(pytest_ckpt.__file__).parent)
    return folder / "bin" / "python"


def _look(python: Path, project: Path) -> dict[str, Any]:
    """Return whether the plugin is there and which heavy modules were imported; warms the caches of files, too."""
    code = _LOOK.format(arguments=_ARGUMENTS, heavy=_HEAVY)
    output = _python(python, project, "-c", code)
    look: dict[str, Any] = json.loads(output.splitlines()[-1])
    return look


def _run(python: Path, project: Path) -> float:
    began = time.perf_counter()
    _python(python, project, "-m", "pytest", *_ARGUMENTS)
    return time.perf_counter() - began


def _python(python: Path, project: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(python), *arguments], cwd=project, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S
    )
    if done.returncode not in (0, 5):  # 5: no tests collected
        raise SystemExit(f"{python} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
