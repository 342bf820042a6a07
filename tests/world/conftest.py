"""Worlds of real ranks for these tests, and what must be gone after each."""

from __future__ import annotations

import faulthandler
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.interface import RankFailure
from pytest_ckpt.world.spawned import SpawnedWorld

from . import ranks


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """No test waits for ever, not even where the code under test does."""
    faulthandler.dump_traceback_later(180, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="package")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Other worlds on this machine make their folders elsewhere, so that what is left here is ours."""
    tmp_path_factory.getbasetemp()  # stays where it is
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="ckpt-tests-") as folder:
        tempfile.tempdir = folder
        yield
        tempfile.tempdir = before


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    """Two ranks; after a failure the next test gets new ones."""
    before = set(psutil.Process().children(recursive=True))  # other tests' helpers, such as a resource tracker
    world = SpawnedWorld(2, timeout_s=120)
    yield world
    world.close()
    assert world_folders() == []
    assert set(psutil.Process().children(recursive=True)) <= before


def world_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("ckpt-world-*"))


class Failed:
    """A command that failed: what was raised, and when."""

    def __init__(self, world: SpawnedWorld, run: Callable[[], Any]) -> None:
        pids = world.pids
        children = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
        with pytest.raises(RankFailure) as caught:
            run()
        self.at_s = time.monotonic()
        self.failure = caught.value
        self.text = str(caught.value)
        self.by_rank = {f.rank: f for f in self.failure.failed}
        self.culprits = [f.rank for f in self.failure.culprits]
        assert world.pids == []
        assert not [pid for pid in pids if psutil.pid_exists(pid)], "a rank is left"
        assert not [child for child in children if _lives(child)], "a child of a rank is left"
        assert world_folders() == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # not ours to reap
    except psutil.NoSuchProcess:
        return False


def named(function: Callable[..., Any]) -> list[Any]:
    ref = reference(function, "function")
    return listed(ref)


def ready(world: SpawnedWorld, model: Callable[..., Any]) -> list[Any]:
    return world.run(commands.prepare, model="own", state="user", function=named(model))


def save(world: SpawnedWorld, writer: Callable[..., Any], location: Path, mode: str = "sync", **options: Any) -> Any:
    return world.run(ranks.save_round, mode=mode, writer=named(writer), location=str(location), **options)
