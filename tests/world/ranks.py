"""What the tests run in ranks: functions, states and writers, at module level as users must write them too.

Where only one rank is to fail, it is rank 1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from pytest_ckpt.world import commands
from pytest_ckpt.world.context import Rank

CULPRIT = 1
MiB = 2**20


# Functions


def save_round(rank: Rank, *, mode: str, writer: list[Any], location: str, **options: Any) -> dict[str, Any]:
    """`commands.save_round` with an engine for this one save: planned saves differ in mode and writer here."""
    commands.close_engine(rank)
    with rank.status.phase("make the engine"):
        rank.memory["engine"] = commands.make_engine_of(rank, mode, writer, {}, "dcp", None)
    return commands.save_round(rank, location=location, **options)


def pid(rank: Rank) -> int:
    return os.getpid()


def environment(rank: Rank, names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def echo(rank: Rank, value: Any) -> Any:
    return value


def wait(rank: Rank, seconds: float) -> None:
    time.sleep(seconds)


def raise_while_the_others_wait(rank: Rank) -> None:
    if rank.rank == CULPRIT:
        raise ValueError(f"planted at {time.monotonic()}")
    dist.barrier(group=rank.control_group)


def raise_late_on_the_other(rank: Rank) -> None:
    time.sleep(0 if rank.rank == CULPRIT else 0.5)
    raise ValueError(f"planted on rank {rank.rank}")


def fail_handled_then_raise(rank: Rank, location: str) -> None:
    with contextlib.suppress(CheckpointException):
        save(small_tensors(), storage_writer=full_writer(location), process_group=rank.save_group)
    with rank.status.phase("afterwards"):
        raise ValueError("another reason")


def exit_hard(rank: Rank) -> None:
    if rank.rank == CULPRIT:
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    dist.barrier(group=rank.control_group)


def exit_politely(rank: Rank) -> None:
    if rank.rank == CULPRIT:
        sys.exit("enough")
    dist.barrier(group=rank.control_group)


def die_with_a_child_that_holds_the_channel(rank: Rank) -> None:
    if rank.rank == CULPRIT:
        if os.fork() == 0:
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group=rank.control_group)


def return_a_tensor(rank: Rank) -> torch.Tensor:
    return torch.ones(2)


def start_a_child(rank: Rank) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid


def sit_in_different_collectives(rank: Rank) -> None:
    group = rank.control_group if rank.rank else rank.save_group
    dist.barrier(group=group)


def stop_while_replying(rank: Rank) -> str:
    if rank.rank == CULPRIT:
        threading.Thread(target=stop_in_phase, args=(rank, "send the reply"), daemon=True).start()
    return "x" * (20 * MiB)


def stop_in_phase(rank: Rank, phase: str) -> None:
    while phase not in rank.status.text():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_ctrl_c(rank: Rank, started: str) -> None:
    Path(started, str(rank.rank)).touch()
    time.sleep(3600)


def save_with_cached_plans(rank: Rank, location: str, writer: str) -> None:
    made = {"filesystem": FileSystemWriter, "huggingface": HuggingFaceStorageWriter, "tagging": _Tagging}[writer](
        location
    )
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(small_tensors(), storage_writer=made, planner=planner, process_group=rank.save_group)


def train_while_saving(rank: Rank, location: str, shared: bool, steps: int) -> int:
    upload = async_save(
        {f"weight{rank.rank}": torch.ones(8 * MiB)},
        storage_writer=slow_writer(location),
        process_group=None if shared else rank.save_group,
    )
    gradient = torch.ones(1024)
    for _ in range(steps):
        dist.all_reduce(gradient)
    upload.result()  # type: ignore[union-attr]
    return steps


def start_a_save_and_never_look(rank: Rank, location: str, writer: str) -> None:
    made = {"full": full_writer, "slow": slow_writer}[writer](location)
    upload = async_save(small_tensors(), storage_writer=made, process_group=rank.save_group)
    while writer == "full" and not upload.done():  # type: ignore[union-attr]
        time.sleep(0.01)


# States


def small_tensors() -> dict[str, torch.Tensor]:
    return {f"weight{dist.get_rank()}": torch.rand(MiB)}


def small_state(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    return small_tensors()


def state_of_64_mib(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    return {f"weight{mesh.get_rank()}": torch.rand(64 * MiB // 4 // mesh.size())}


# Writers


class _Spoiled(FileSystemWriter):
    """Writes a first MiB for real, then does what `spoil` says, on the culprit alone."""

    def spoil(self) -> None:
        raise NotImplementedError

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if dist.get_rank() == CULPRIT:
            Path(self.path, "part").write_bytes(bytes(MiB))
            self.spoil()
        return super().write_data(plan, planner)


class _Tagging(FileSystemWriter):
    """Hands data from the local to the global plan, as HuggingFaceStorageWriter does."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(super().prepare_local_plan(plan), storage_data={"rank": dist.get_rank()})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert [dict(plan.storage_data)["rank"] for plan in plans] == list(range(dist.get_world_size()))
        return super().prepare_global_plan([dataclasses.replace(plan, storage_data=None) for plan in plans])


class _Full(_Spoiled):
    def spoil(self) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


class _Killed(_Spoiled):
    def spoil(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class _Stopped(_Spoiled):
    def spoil(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class _Stuck(_Spoiled):
    def spoil(self) -> None:
        sleep_without_end()


class _Slow(_Spoiled):
    def spoil(self) -> None:
        time.sleep(2)


class _Limited(_Spoiled):
    def spoil(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, MiB))


def sleep_without_end() -> None:
    time.sleep(3600)


def plain_writer(path: str) -> FileSystemWriter:
    return FileSystemWriter(path)


def full_writer(path: str) -> FileSystemWriter:
    return _Full(path)


def killed_writer(path: str) -> FileSystemWriter:
    return _Killed(path)


def stopped_writer(path: str) -> FileSystemWriter:
    return _Stopped(path)


def stuck_writer(path: str) -> FileSystemWriter:
    return _Stuck(path)


def slow_writer(path: str) -> FileSystemWriter:
    return _Slow(path)


def limited_writer(path: str) -> FileSystemWriter:
    return _Limited(path)


def no_writer(path: str) -> str:
    return path


def leave_work_behind(rank: Rank, *, folder: str) -> str:
    """Give a pool work that takes a while, and make shared memory that nobody removes; return its name."""
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 0.5)
    pool.submit(Path(folder, str(rank.rank)).touch)
    return str(SharedMemory(create=True, size=1000).name)
