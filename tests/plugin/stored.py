"""Baselines made up for a project, so much faster or slower than its real saves that every outcome is certain.

A real save of `own:small` by one rank takes milliseconds. What is stored lies a thousandfold below or above.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from pytest_ckpt.judge.store import Store
from pytest_ckpt.records import SaveRecord

from ..judge.results import another, result, saved
from .project import Project, Result

ID = "the-id"
BYTES = 8000
"""Of the state of `own:small`."""
ALIKE = [1, 1.01, 1.02, 1.03, 1.04] * 4
"""Rounds of a calm session; twenty, so that four decide whatever the number of comparisons."""
FAST = [1e-6 * share for share in ALIKE]
SLOW = [1e3 * share for share in ALIKE]
SPREAD = FAST[::2] + SLOW[::2]
"""Against this nothing can be told, however many rounds there are."""
USUAL = [0.01 * share for share in ALIKE]
"""What a margin of 99.99 % covers."""

STATE = """
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter


def small(mesh, device):
    return {f"w{number}": torch.rand(1000) for number in range(2)}


def note(name):
    with Path(f"pids-{name}").open("a") as file:
        file.write(f"{os.getpid()}\\n")
"""
WRITER = """

def {name}(path):
    note("{name}")
    return FileSystemWriter(path)
"""
OWN = ("--ckpt-model=own:small", "--ckpt-rounds=4", "--ckpt-probe=off")


def write_own(project: Project, *writers: str) -> None:
    """Make the module `own`: a small state, and writers that are told apart by name alone."""
    project.write("own.py", STATE + "".join(WRITER.format(name=name) for name in writers))


def night(
    project: Project,
    *arguments: object,
    hardware: str | None = ID,
    target: bool = True,
    ranks: Sequence[int] = (1,),
    before: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Run the project's tests with the small state, and with one rank, target and id unless told otherwise."""
    given = [f"--ckpt-target=disk={project.target}"] if target else []
    given += [f"--ckpt-hardware={hardware}"] if hardware else []
    given += [f"--ckpt-ranks={count}" for count in ranks]
    return project.run(*before, sys.executable, "-m", "pytest", *OWN, *given, *arguments, **options)


def as_saved(
    seconds: Sequence[float], writer: str | None = None, *, mode: str = "sync", ranks: int = 1, **fields: Any
) -> SaveRecord:
    """Return the record of a save of `own:small`, with a round for each of `seconds`."""
    made = saved(mode, seconds=seconds, logical_bytes=BYTES, **fields)
    return another(
        made,
        writer=f"own:{writer}" if writer else "FileSystemWriter",
        model="own.small",
        state="user",
        world_size=ranks,
        mesh=f"shard={ranks}",
    )


def store(folder: Path, session: str, *records: SaveRecord, hardware: str = ID, **options: Any) -> Path:
    """Add a baseline file of the run `session`."""
    of_run = [msgspec.structs.replace(record, session=session, hardware_id=hardware) for record in records]
    return Store(folder).add(result(*of_run), hardware, label=of_run[0].target.label, **options)


def files(folder: Path) -> list[str]:
    """Return everything that lies below `folder`, hidden files too, as relative paths."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def rows(path: Path) -> list[str]:
    """Return the names of a file's rows."""
    return [row["name"] for row in json.loads(path.read_text())["benchmarks"]]


def record_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what a result file holds of the row `name`."""
    (record,) = [row["extra_info"]["ckpt"] for row in document["benchmarks"] if row["name"] == name]
    return dict(record)


def comparisons(result: Result) -> int:
    """Return the number of comparisons that the header names."""
    (count,) = re.findall(r"(\d+) comparisons? a run", result.out)
    return int(count)


def junit(path: Path) -> dict[str, ElementTree.Element]:
    """Return the test cases of a JUnit file by name; its counts are those of its cases."""
    suite = ElementTree.parse(path).getroot()[0]
    cases = list(suite.iter("testcase"))
    for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert int(suite.get(count, "")) == sum(case.find(kind) is not None for case in cases)
    return {case.get("name", ""): case for case in cases}


def properties(case: ElementTree.Element) -> dict[str, str]:
    return {one.get("name", ""): one.get("value", "") for one in case.iter("property")}


def another_host_name(name: str) -> list[str]:
    """Return what goes before a command, so that it runs where the host has this name; nothing where that cannot be."""
    before = ["unshare", "--uts", "sh", "-c", f'hostname {name} && exec "$@"', "sh"]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*before, "true"], capture_output=True, timeout=10)
    return [] if tried.returncode else before
