"""A test file with saves that have one thing wrong each, as source; every test is named as what must be found."""

SAVES = """
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter

RANK = os.environ.get("RANK")
SAVED = 0
MIB = 2**20


def sharded(mesh, tensors, elements):
    rank = mesh.get_local_rank()
    return {f"{rank}.{number}": torch.rand(elements) for number in range(tensors)}


def small(mesh, device):
    return sharded(mesh, 4, MIB // 4)


def many(mesh, device):
    return sharded(mesh, 600, 4)


def files(mesh, device):
    return sharded(mesh, 40, 1024)


def large(mesh, device):
    return sharded(mesh, 4, 16 * MIB // 4)


def on_rank_0(mesh, device):
    state = {"step": 1}
    return {**state, "all": torch.rand(24 * MIB)} if mesh.get_local_rank() == 0 else state


class Gathers(Stateful):
    def state_dict(self):
        time.sleep(0.4)
        return {"w": torch.ones(1000)}

    def load_state_dict(self, state):
        pass


def gathering(mesh, device):
    return {"slow": Gathers(), **small(mesh, device)}


def unsynced(path):
    return FileSystemWriter(path, sync_files=False)


class NoDescriptor:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        if name == "fileno":
            raise AttributeError(name)
        return getattr(self.stream, name)


class Remote(FileSystem):
    @contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            yield NoDescriptor(stream)


def remote(path):
    writer = FileSystemWriter(path)
    writer.fs = Remote()
    return writer


class Far(FileSystem):
    @contextmanager
    def create_stream(self, path, mode):
        time.sleep(0.02)
        with super().create_stream(path, mode) as stream:
            yield stream


def far(path):
    writer = FileSystemWriter(path, single_file_per_rank=False)
    writer.fs = Far()
    return writer


def far_with_threads(path):
    writer = FileSystemWriter(path, single_file_per_rank=False, thread_count=4)
    writer.fs = Far()
    return writer


class Slow(FileSystemWriter):
    def __init__(self, path, seconds):
        super().__init__(path)
        self.seconds = seconds

    def write_data(self, plan, planner):
        time.sleep(self.seconds)
        return super().write_data(plan, planner)


def slow_on_rank_1(path):
    return Slow(path, 0.5 if RANK == "1" else 0)


def slower_each_time(path):
    global SAVED
    SAVED += 1
    return Slow(path, 0.35 * SAVED)


def slow_at_first(path):
    global SAVED
    SAVED += 1
    return Slow(path, 1.5 if SAVED == 1 else 0)


class Stages(FileSystemWriter):
    def stage(self, state_dict):
        time.sleep(0.6)
        return super().stage(state_dict)


def stages(path):
    return Stages(path)


class Padded(FileSystemWriter):
    def finish(self, metadata, results):
        Path(self.path, "orphan").write_bytes(bytes(20 * MIB))
        return super().finish(metadata, results)


def padded(path):
    return Padded(path)


class Opaque(StorageWriter):
    def __init__(self, path):
        self.own = FileSystemWriter(path)

    def reset(self, checkpoint_id=None):
        self.own.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator):
        self.own.set_up_storage_writer(is_coordinator)

    def prepare_local_plan(self, plan):
        return self.own.prepare_local_plan(plan)

    def prepare_global_plan(self, plans):
        return self.own.prepare_global_plan(plans)

    def write_data(self, plan, planner):
        time.sleep(0.4)
        return self.own.write_data(plan, planner)

    def finish(self, metadata, results):
        self.own.finish(metadata, results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


def opaque(path):
    return Opaque(path)


CASES = {
    "unsynced": dict(writer=unsynced, model=large),
    "global-sync": dict(writer=remote),
    "latency-bound": dict(writer=far, model=files),
    "latency-bound-threads": dict(writer=far_with_threads, model=files),
    "straggler": dict(writer=slow_on_rank_1),
    "state-dict": dict(model=gathering),
    "plan-bound": dict(model=many),
    "uneven-bytes": dict(model=on_rank_0),
    "not-overlapped": dict(mode="async", writer=stages),
    "size-mismatch": dict(writer=padded),
    "unaccounted-time": dict(writer=opaque),
    "throttled-over-time": dict(writer=slower_each_time),
    "cold-start": dict(writer=slow_at_first),
}


@pytest.mark.parametrize("case", CASES)
def test_save(ckpt_save, ckpt_world, case):
    ckpt_world.run(begin)
    ckpt_save(**{"mode": "sync", "model": small, **CASES[case]})


def begin(rank):
    global SAVED
    SAVED = 0
"""
