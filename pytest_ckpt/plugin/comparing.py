"""A bare `--benchmark-compare`: pytest-benchmark's table of this run beside this hardware's newest baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import CkptError
from pytest_ckpt.judge.baseline_file import HEAD
from pytest_ckpt.judge.store import Store
from pytest_ckpt.measure.hardware import find_hardware
from pytest_ckpt.measure.hardware_id import hardware_id
from pytest_ckpt.plugin.settings import Settings, default_root, of_label
from pytest_ckpt.target.identity import identify

FILES: pytest.StashKey[list[list[str]]] = pytest.StashKey()
"""Those of each target, newest first."""


def stored_files(settings: Settings) -> list[list[str]]:
    """Return the stored files of each target's hardware as paths, newest first; nothing where none is stored.

    What is wrong with a target or a baseline is said later, when it is used.
    """
    store = Store(settings.baseline_folder)
    places = {target.label: target.location for target in settings.targets} or {"local": default_root()}
    found = []
    for label, location in places.items():
        try:
            volume = identify(location)
            name = of_label(settings.hardware, label) or hardware_id(
                find_hardware(), volume.storage_class, volume.filesystem, volume.medium
            )
            entries = store.read(name).entries
        except (CkptError, OSError):
            continue
        if entries:
            own = [entry for entry in entries if entry.label == label] or entries
            found.append([str(store.folder / name / entry.file) for entry in reversed(own)])
    return found


def compare_with_newest(config: pytest.Config, settings: Settings) -> None:
    """Let pytest-benchmark, not configured yet, compare with this hardware's newest baseline, if there is one.

    Where it finds a file by itself it keeps to that one: benchmarks that save nothing are compared as ever.
    """
    config.stash[FILES] = stored_files(settings)
    if config.stash[FILES] and not _has_files(config):
        config.option.benchmark_compare = config.stash[FILES][0][0]


def compare_saves(config: pytest.Config, saving: Sequence[str]) -> None:
    """Let pytest-benchmark, which is configured, compare the tests `saving` with the newest baseline of every target.

    That is the newest that holds one of them: a session of another number of ranks is no comparison.
    """
    session: Any = config._benchmarksession  # type: ignore[attr-defined]
    for paths in config.stash[FILES]:
        for path in paths:
            loaded = [(name, _by_name(document)) for name, document in session.storage.load(path)]
            if any(test.startswith(tuple(saving)) for _, rows in loaded for test in rows):
                session.compared_mapping.update(loaded)
                break


def _by_name(document: Any) -> dict[str, Any]:
    return {row["fullname"]: row for row in document["benchmarks"]}


def _has_files(config: pytest.Config) -> bool:
    """Return whether pytest-benchmark has a file of its own to compare with."""
    from pytest_benchmark.utils import get_machine_id

    place = str(config.getoption("benchmark_storage"))
    if "://" in place and not place.startswith("file://"):
        return True
    folder = Path(place.removeprefix("file://"))  # asking its storage would make the folder
    machine = str(get_machine_id())  # type: ignore[no-untyped-call]
    return any(any(one.glob("[0-9][0-9][0-9][0-9]_*.json")) for one in (folder, folder / machine))


def is_baseline(document: Any) -> bool:
    """Return whether pytest-benchmark read one of our baselines."""
    return isinstance(document, dict) and HEAD in document
