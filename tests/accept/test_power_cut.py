"""The power cut, with real ranks, DCP and ext4: what the audit says is what is found afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from pytest_ckpt.accept import power_cut
from pytest_ckpt.accept.durability import Audit, combine
from pytest_ckpt.accept.durable import make_durable
from pytest_ckpt.accept.power_cut import PREFIX, PowerCut, why_no_power_cut
from pytest_ckpt.errors import CannotFit, CkptError
from pytest_ckpt.target.mounts import read_mounts
from pytest_ckpt.world.spawned import SpawnedWorld

from . import durable_saves
from .durable_saves import DURABLE, WRITERS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _root_and_loop_devices() -> None:
    if reason := why_no_power_cut():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(2, timeout_s=60)
    yield world
    world.close()


@pytest.fixture(scope="module")
def power() -> Iterator[PowerCut]:
    if reason := why_no_power_cut():
        pytest.skip(reason)
    # In memory: each unmounting waits for the image below.
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="ckpt-tests-", dir=in_memory) as folder:
        with PowerCut(folder, 20_000_000) as power:
            yield power
            assert os.listdir(folder) == []  # nothing that a kill could leave
        assert mounts_of(power) == []
        assert not os.path.exists(os.path.dirname(power.location))


def mounts_of(power: PowerCut) -> list[str]:
    return [mount.point for mount in read_mounts() if mount.point.startswith(os.path.dirname(power.location))]


def saved(world: SpawnedWorld, location: str, writer: str, mode: str = "sync") -> Audit:
    replies = world.run(durable_saves.save_audited, location=location, writer=writer, mode=mode)
    return combine(msgspec.convert(reply, Audit) for reply in replies)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_the_audit_calls_durable_survives_and_nothing_else_does(
    world: SpawnedWorld, power: PowerCut, writer: str
) -> None:
    name = "/" + writer.replace(" ", "-")
    audit = saved(world, power.location + name, writer)
    after = power.cut()
    survived = world.run(durable_saves.load_equal, location=after + name)
    assert world.run(durable_saves.load_equal, location=power.location + name) == [True, True]
    assert survived == [audit.is_durable] * 2
    assert audit.is_durable == (writer in DURABLE)
    assert audit.verdict in ("durable", "not durable")


def test_async_save_is_audited_in_the_thread_that_writes(world: SpawnedWorld, power: PowerCut) -> None:
    lost = saved(world, power.location + "/async", "dcp", mode="async")
    kept = saved(world, power.location + "/async-durable", "dcp, made durable", mode="async")
    after = power.cut()
    assert world.run(durable_saves.load_equal, location=after + "/async") == [lost.is_durable] * 2 == [False] * 2
    assert world.run(durable_saves.load_equal, location=after + "/async-durable") == [kept.is_durable] * 2
    assert kept.is_durable


def test_synced_save_of_dcp_has_lost_its_metadata_in_a_power_cut(world: SpawnedWorld, power: PowerCut) -> None:
    """CASES 31; the data files, each of another rank, were synced and are whole."""
    audit = saved(world, power.location + "/case31", "dcp")
    (said,) = audit.sentences
    size = os.path.getsize(power.location + "/case31/.metadata")
    assert said == f"not durable: 0 of {size:,} bytes of .metadata were synced, its rename was not, nor the folder"
    after = Path(power.cut()) / "case31"
    assert not (after / ".metadata").exists()
    assert (after / ".metadata.tmp").stat().st_size == 0
    for name in ("__0_0.distcp", "__1_0.distcp"):
        assert (after / name).read_bytes() == Path(power.location, "case31", name).read_bytes()


def test_checkpoint_before_survives_the_cut_of_the_one_after(world: SpawnedWorld, power: PowerCut) -> None:
    assert saved(world, power.location + "/step-1", "dcp, made durable").is_durable
    before = world.run(durable_saves.load_equal, location=power.location + "/step-1")
    assert not saved(world, power.location + "/step-2", "dcp").is_durable
    after = power.cut()
    assert before == world.run(durable_saves.load_equal, location=after + "/step-1") == [True, True]
    assert world.run(durable_saves.load_equal, location=after + "/step-2") == [False, False]


def test_save_over_a_checkpoint_has_lost_both_in_a_power_cut(world: SpawnedWorld, power: PowerCut) -> None:
    """CASES 31 and 38: with `.metadata` deleted first, there is a moment in which neither is there."""
    place = power.location + "/over"
    assert saved(world, place, "dcp, made durable").is_durable
    audit = saved(world, place, "dcp")
    assert audit.sentences[1] == (
        "a moment without any checkpoint: 2 files (__0_0.distcp, __1_0.distcp) were written over in place, "
        "and .metadata was deleted before the new one got its name"
    )


def test_cut_is_of_one_moment(power: PowerCut) -> None:
    """What is written after the cut is not in it, and what was cut before stays as it was."""
    make_durable(power.location)
    first = power.cut()
    Path(power.location, "later").write_bytes(b"x" * 100)
    make_durable(power.location)
    assert Path(power.cut(), "later").read_bytes() == b"x" * 100
    assert not Path(first, "later").exists()


def test_fresh_volume_is_empty_before_and_after_a_cut(tmp_path: Path) -> None:
    with PowerCut(tmp_path, 0) as power:
        (options,) = [mount.options for mount in read_mounts() if mount.point == power.location]
        assert "commit=600" in options  # or the journal's own commit, each 5 s, would spare what was not synced
        assert os.listdir(power.location) == os.listdir(power.cut()) == []


def test_copy_during_which_the_device_was_written_to_is_no_cut(
    power: PowerCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, written = power_cut._copy_data, Path(power.location, "busy")
    writes: list[bytes] = [os.urandom(4096) for _ in range(5)]

    def copy_while_it_is_written(source: int, target: int) -> None:
        copy(source, target)
        if writes:
            written.write_bytes(writes.pop())
            make_durable(power.location)

    monkeypatch.setattr(power_cut, "_copy_data", copy_while_it_is_written)
    with pytest.raises(CkptError, match="written to during each of 5 copies"):
        power.cut()
    writes += [os.urandom(4096) for _ in range(2)]
    assert Path(power.cut(), "busy").read_bytes() == written.read_bytes()
    assert writes == []


def test_volume_in_use_is_unmounted_lazily_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_cut, "_BUSY_S", 0.2)
    with PowerCut(tmp_path, 0) as power:
        sleeper = subprocess.Popen(["sleep", "60"], cwd=power.location)
        try:
            with pytest.warns(RuntimeWarning, match="has been unmounted lazily"):
                power.close()
            assert mounts_of(power) == []
        finally:
            sleeper.kill()
            sleeper.wait(10)
    assert not os.path.exists(os.path.dirname(power.location))


def test_killed_process_leaves_a_mount_that_names_itself_and_no_file(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pytest_ckpt.accept.power_cut import PowerCut\n"
        "power = PowerCut(sys.argv[1], 0).__enter__(); print(power.location, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    point = Path(killed.stdout.strip())
    try:
        assert killed.returncode == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []
        assert point.parent.name.startswith(PREFIX)
        assert point.parent.stat().st_mode & 0o777 == 0o700
        source = next(mount.source for mount in read_mounts() if mount.point == str(point))
    finally:
        subprocess.run(["umount", str(point)], timeout=30, check=True)
        point.rmdir()
        point.parent.rmdir()
    devices = subprocess.run(
        ["losetup", "--list", "--noheadings"], capture_output=True, text=True, check=True, timeout=30
    )
    assert f"{source} " not in devices.stdout


def test_volume_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_cut, "_MOUNT_OPTIONS", "loop,nonsense")
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    with pytest.raises(CkptError, match="no power cut here: mount: "), PowerCut(tmp_path, 0):
        pass
    assert list(tmp_path.iterdir()) == [places]
    assert list(places.iterdir()) == []


def test_folder_without_room_is_refused_with_the_figures(tmp_path: Path) -> None:
    with pytest.raises(CannotFit, match=r"needs twice 1\.10 PB in .* has .* free"), PowerCut(tmp_path, 10**15):
        pass
    assert list(tmp_path.iterdir()) == []


def test_reason_is_told_where_no_power_cut_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    why = why_no_power_cut.__wrapped__
    with monkeypatch.context() as changed:
        changed.setattr(power_cut, "os", SimpleNamespace(geteuid=lambda: 1000))
        assert why() == "only root can mount a volume"
    with monkeypatch.context() as changed:
        changed.setenv("PATH", "")
        assert why() == "mkfs.ext4 is not installed"
    with monkeypatch.context() as changed:
        changed.setattr(power_cut, "_MOUNT_OPTIONS", "loop,nonsense")
        assert str(why()).startswith("mount: ")
