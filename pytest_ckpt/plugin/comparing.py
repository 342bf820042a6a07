"""A bare `--benchmark-compare`: pytest-benchmark's table of this run beside this hardware's newest baseline."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest

from pytest_ckpt.errors import CkptError
from pytest_ckpt.judge.baseline_file import HEAD
from pytest_ckpt.judge.store import Store
from pytest_ckpt.measure.hardware import find_hardware
from pytest_ckpt.measure.hardware_id import hardware_id
from pytest_ckpt.plugin.settings import Settings
from pytest_ckpt.target.identity import identify

OTHERS: pytest.StashKey[list[str]] = pytest.StashKey()


def newest_baselines(settings: Settings) -> list[str]:
    """Return the newest stored file of each target's hardware, as paths; nothing where none is stored.

    What is wrong with a target or a baseline is said later, when it is used.
    """
    store = Store(settings.baseline_folder)
    default = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
    places = {target.label: target.location for target in settings.targets} or {"local": default}
    found = []
    for label, location in places.items():
        try:
            volume = identify(location)
            name = settings.hardware.get(label, settings.hardware.get(None)) or hardware_id(
                find_hardware(), volume.storage_class, volume.filesystem, volume.medium
            )
            entries = store.read(name).entries
        except (CkptError, OSError):
            continue
        if entries:
            found.append(str(store.folder / name / entries[-1].file))
    return list(dict.fromkeys(found))


def compare_with_newest(config: pytest.Config, settings: Settings) -> None:
    """Let pytest-benchmark, not configured yet, compare with this hardware's newest baseline, if there is one."""
    paths = newest_baselines(settings)
    if paths:
        config.option.benchmark_compare = paths[0]
        config.stash[OTHERS] = paths[1:]


def compare_with_others(config: pytest.Config) -> None:
    """Let pytest-benchmark, which is configured, compare with those of other targets too: it takes one by itself."""
    session: Any = config._benchmarksession  # type: ignore[attr-defined]
    for path in config.stash[OTHERS]:
        for name, document in session.storage.load(path):
            session.compared_mapping[name] = {row["fullname"]: row for row in document["benchmarks"]}


def is_baseline(document: Any) -> bool:
    """Return whether pytest-benchmark read one of our baselines."""
    return isinstance(document, dict) and HEAD in document
