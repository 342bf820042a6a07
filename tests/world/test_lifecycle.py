"""How worlds begin, are used again, and end: by themselves, with their parent, or at Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.world.scratch import ScratchFolder
from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks
from tests.world.conftest import ready, save, world_folders

ROOT = Path(__file__).parents[2]

_PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks
world = SpawnedWorld(2)
print(*world.run(ranks.pid), flush=True)
if sys.argv[2] == "wait":
    world.run(ranks.wait_for_ctrl_c, started=sys.argv[3])
began = time.monotonic()
world.close()
assert time.monotonic() - began < 10
"""


def parent(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(ROOT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert pids, process.communicate(timeout=60)
    return pids


def wait_until(condition: object, seconds: float) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_save_and_are_used_again_for_the_next_command(size: int, tmp_path: Path) -> None:
    world = SpawnedWorld(size, timeout_s=120)
    first = world.run(ranks.pid)
    assert len(set(first)) == size
    assert world.pids == first
    assert [reply["logical_bytes"] for reply in ready(world, ranks.small_state)] == [size * 4 * ranks.MiB] * size
    for mode in ("sync", "async"):
        replies = save(world, file_system_writer, tmp_path / mode, mode)
        assert (tmp_path / mode / ".metadata").exists()
        for reply in replies:
            assert reply["called_s"] <= reply["returned_s"] <= reply["completed_s"]
        assert replies[0]["stored_bytes"] >= size * 4 * ranks.MiB
    assert world.run(ranks.pid) == first
    began = time.monotonic()
    world.close()
    assert time.monotonic() - began < 10
    assert not any(psutil.pid_exists(pid) for pid in first)
    assert world_folders() == []


def test_closed_world_starts_anew_and_closes_twice() -> None:
    world = SpawnedWorld(1, timeout_s=60)
    world.close()
    first = world.run(ranks.pid)
    world.close()
    world.close()
    assert world.run(ranks.pid) != first
    world.close()


def test_replies_come_in_the_order_of_ranks_with_the_environment_of_a_real_job(
    world: SpawnedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.close()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    assert world.run(ranks.environment, names=names) == [
        ["0", "0", "2", "2", "127.0.0.1", "1"],
        ["1", "1", "2", "2", "127.0.0.1", "1"],
    ]
    world.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert world.run(ranks.environment, names=["OMP_NUM_THREADS"]) == [["3"], ["3"]]
    world.close()


def test_caller_is_told_that_time_passes_while_the_ranks_work(world: SpawnedWorld) -> None:
    calls: list[float] = []
    world.run(ranks.wait, seconds=1.0, while_waiting=lambda: calls.append(time.monotonic()))
    assert len(calls) >= 4


def test_large_arguments_and_replies_cross(world: SpawnedWorld) -> None:
    value = {"text": "x" * (10 * ranks.MiB), "list": [1, 2.5, None, True, b"\x00"]}
    assert world.run(ranks.echo, value=value) == [value, value]


def test_handlers_of_the_caller_stay_as_they_were(world: SpawnedWorld) -> None:
    """They are what ends the session in good order, and a library that starts processes may install its own."""
    world.close()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    world.run(ranks.pid)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)]
    assert before == after


def test_ctrl_c_while_ranks_work_ends_them_within_ten_seconds(world: SpawnedWorld, tmp_path: Path) -> None:
    pids = world.run(ranks.pid)
    began: list[float] = []

    def press() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        began.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        world.run(ranks.wait_for_ctrl_c, started=str(tmp_path))
    assert time.monotonic() - began[0] < 10
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert world_folders() == []


def test_no_rank_survives_a_killed_parent_and_its_folder_goes_with_the_next_world(tmp_path: Path) -> None:
    process = parent("wait", str(tmp_path))
    pids = pids_of(process)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: not any(lives(pid) for pid in pids), 10)
    (left,) = world_folders()
    ScratchFolder().remove()
    assert world_folders() == [left], "another run may just be making it"
    os.utime(left, (0, 0))
    held = ScratchFolder()
    os.utime(held.path, (0, 0))
    ScratchFolder().remove()
    assert world_folders() == [held.path]
    held.remove()


def test_what_a_rank_has_still_to_do_is_done_before_it_ends(tmp_path: Path) -> None:
    """Work that its pools were given, and what Python's resource tracker does after its end."""
    world = SpawnedWorld(2)
    names = world.run(ranks.leave_work_behind, folder=str(tmp_path))
    world.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert not [name for name in names if Path("/dev/shm", name).exists()]


def test_world_says_nothing_on_the_screen() -> None:
    process = parent("close")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    assert len(output.splitlines()) == 1
