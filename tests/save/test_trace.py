"""Spans of real saves: what they hold against what the ranks did, whatever the writer."""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from pytest_ckpt.measure.spans import Event, Item, RankTrace, Span, Sync, timelines
from pytest_ckpt.measure.traced import with_phases
from pytest_ckpt.records import Round, summarize_round
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.spawned import SpawnedWorld

TENSORS = 12
FSYNC_S = (1.0, 1.5)
"""Of each rank."""
STATE_DICT_S = 1.5


# States: each rank's keys are its own, so that each rank writes all it has.


def tensors(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    rank = dist.get_rank()
    sized = {f"{rank}.{number}": torch.rand(500_000 + number) for number in range(TENSORS)}
    return {**sized, f"{rank}.object": list(range(1000)), f"{rank}.view": torch.rand(400_000)[::2]}


class SlowToAsk:
    """A `Stateful` whose `state_dict()` takes long, as one that gathers does (CASES 15)."""

    def __init__(self) -> None:
        self.tensor = torch.rand(100_000)

    def state_dict(self) -> dict[str, Any]:
        time.sleep(STATE_DICT_S)
        return {f"{dist.get_rank()}.tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def slow_to_ask(mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Its key is the name of something that DCP logs as well."""
    return {"finish_checkpoint": SlowToAsk()}


# Writers


def plain(path: str) -> StorageWriter:
    return FileSystemWriter(path)


def four_threads(path: str) -> StorageWriter:
    return FileSystemWriter(path, thread_count=4)


def file_per_tensor(path: str) -> StorageWriter:
    return FileSystemWriter(path, single_file_per_rank=False, thread_count=2)


def unsynced(path: str) -> StorageWriter:
    return FileSystemWriter(path, sync_files=False)


def whole_file(path: str) -> StorageWriter:
    """A format that DCP serialises in one piece at the end of a file."""
    try:
        importlib.import_module("safetensors.torch")
    except ImportError:
        stub = types.ModuleType("safetensors.torch")
        stub.save = _serialized  # type: ignore[attr-defined]
        sys.modules["safetensors"], sys.modules["safetensors.torch"] = types.ModuleType("safetensors"), stub
    return FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)


def _serialized(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    return b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())


class SlowSync(FileSystem):
    """Takes long to sync what was written at once, by FSYNC_S."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            yield _SlowSyncStream(stream) if str(path).endswith(".distcp") else stream


class _SlowSyncStream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def fileno(self) -> int:
        time.sleep(FSYNC_S[dist.get_rank()])
        descriptor: int = self._stream.fileno()
        return descriptor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def slow_sync(path: str) -> StorageWriter:
    writer = FileSystemWriter(path)
    writer.fs = SlowSync()
    return writer


class Bare(StorageWriter):
    """A writer that has nothing in common with DCP's: no file system whose streams could be watched."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with (self.path / f"{dist.get_rank()}.bin").open("wb") as file:
            results = [self._write(file, item, planner) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, file: IO[bytes], item: Any, planner: SavePlanner) -> WriteResult:
        data = planner.resolve_data(item)
        torch.save(data, file)
        return WriteResult(index=item.index, size_in_bytes=file.tell(), storage_data=None)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        (self.path / "done").touch()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def bare(path: str) -> StorageWriter:
    return Bare(path)


class Saved:
    """One save: the round, and each rank's notes and spans."""

    def __init__(self, replies: list[dict[str, Any]], location: Path, mode: str) -> None:
        self.location = location
        self.traces = [msgspec.convert(reply["trace"], RankTrace) for reply in replies]
        self.streams_seen = [reply["streams_seen"] for reply in replies]
        one = summarize_round(
            [trace.called_s for trace in self.traces],
            [trace.returned_s for trace in self.traces],
            [trace.completed_s for trace in self.traces],
            [None for _ in self.traces],
            logical_bytes=1,
            blocks_until_complete=mode == "sync",
        )
        self.round: Round
        self.spans: list[list[Span]]
        self.round, self.spans = with_phases(one, self.traces)
        self.require_sound()

    def require_sound(self) -> None:
        start_s = min(trace.called_s for trace in self.traces)
        end_s = max(trace.completed_s for trace in self.traces)
        for trace, path, rank in zip(self.traces, self.spans, self.round.ranks, strict=True):
            assert (path[0].start_s, path[-1].end_s) == (start_s, end_s)
            assert all(first.end_s == second.start_s for first, second in pairwise(path))
            assert sum(rank.phases.values()) == pytest.approx(self.round.save_s, rel=0.02)
            noted: list[tuple[int, float, float]] = []
            for item in trace.items:
                assert item.copy_s <= item.serialize_s <= item.end_s
                assert 0 <= item.write_s <= item.end_s - item.serialize_s + 1e-6
                noted.append((item.thread, item.copy_s, item.end_s))
            noted += [(sync.thread, sync.start_s, sync.end_s) for sync in trace.syncs]
            for first, second in pairwise(sorted(noted)):
                assert first[0] != second[0] or first[2] <= second[1], "overlap on one thread"
            assert all(start_s <= begin <= end <= end_s for _, begin, end in noted)

    def files(self, rank: int) -> list[Path]:
        return sorted(self.location.glob(f"__{rank}_*.distcp"))


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(2, timeout_s=60)
    yield world
    world.close()


def save(world: SpawnedWorld, location: Path, writer: Any, model: Any = tensors, mode: str = "sync") -> Saved:
    def plain(function: Any) -> list[Any]:
        ref = reference(function, "function")
        return listed(ref)

    given: dict[str, Any] = {
        "model": "own",
        "state": "user",
        "function": plain(model),
        "mode": mode,
        "writer": plain(writer),
    }
    world.run(commands.prepare, **given)
    replies = world.run(commands.save_round, location=str(location))
    return Saved(replies, location, mode)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("writer", "files"), [(plain, 1), (four_threads, 4), (file_per_tensor, TENSORS + 2), (unsynced, 1)]
)
def test_spans_of_each_writer_hold_all_that_it_wrote_and_synced(
    world: SpawnedWorld, tmp_path: Path, writer: Any, files: int, mode: str
) -> None:
    saved = save(world, tmp_path / "save", writer, mode=mode)
    assert saved.streams_seen == [True, True]
    is_synced = writer is not unsynced
    for rank, (trace, own) in enumerate(zip(saved.traces, saved.round.ranks, strict=True)):
        assert len(saved.files(rank)) == files
        assert own.item_bytes == sum(file.stat().st_size for file in saved.files(rank))
        assert len(trace.items) == TENSORS + 2
        assert len(trace.syncs) == (files + (rank == 0) if is_synced else 0)  # the coordinator's metadata too
        assert {"plan", "collective", "serialize", "write", "other"} <= own.phases.keys()
        assert ("sync" in own.phases) == is_synced
        assert ("stage" in own.phases) == (mode == "async")
        assert ("metadata" in own.phases) == (rank == 0)
        assert own.thread_s["copy"] > 0  # of the view, which is made whole
        assert own.phases["other"] < max(0.2 * saved.round.save_s, 0.1)
        assert 0 < trace.tracer_s < 0.05 * saved.round.save_s
    assert saved.round.synced_files == (2 * files + 1 if is_synced else 0)
    assert saved.round.global_syncs == 0


def test_format_that_is_serialised_at_the_end_of_a_file_is_one_item(world: SpawnedWorld, tmp_path: Path) -> None:
    saved = save(world, tmp_path / "save", whole_file)
    for rank, own in enumerate(saved.round.ranks):
        (file,) = saved.files(rank)
        assert own.item_bytes == pytest.approx(file.stat().st_size, rel=0.01)
        assert {"serialize", "write", "sync"} <= own.phases.keys()


def test_writer_without_streams_still_gets_the_coarse_phases(world: SpawnedWorld, tmp_path: Path) -> None:
    saved = save(world, tmp_path / "save", bare)
    assert saved.streams_seen == [False, False]
    for trace, own in zip(saved.traces, saved.round.ranks, strict=True):
        assert (trace.items, trace.syncs) == ([], [])
        assert {"plan", "collective", "other"} <= own.phases.keys()
        assert {"copy", "serialize", "write", "sync"}.isdisjoint(own.phases)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slow_state_dict_is_a_phase_of_its_own(world: SpawnedWorld, tmp_path: Path, mode: str) -> None:
    """CASES 15; and the key of an entry is not taken for one of DCP's own functions."""
    saved = save(world, tmp_path / "save", plain, slow_to_ask, mode)
    for rank, own in enumerate(saved.round.ranks):
        assert own.phases["state_dict"] == pytest.approx(STATE_DICT_S, rel=0.1)
        assert own.phases["plan"] < 0.3
        assert ("metadata" in own.phases) == (rank == 0)
    assert saved.round.stall_s >= STATE_DICT_S


def test_waiting_for_a_slow_fsync_is_charged_to_the_rank_whose_fsync_it_is(world: SpawnedWorld, tmp_path: Path) -> None:
    """CASES 2: a timer that stops when write returns would see nothing of it."""
    saved = save(world, tmp_path / "save", slow_sync)
    first, second = saved.round.ranks
    assert [own.phases["sync"] for own in (first, second)] == pytest.approx(FSYNC_S, rel=0.1)
    rest_s = sum(seconds for phase, seconds in second.phases.items() if phase != "sync")
    assert saved.round.save_s - rest_s == pytest.approx(max(FSYNC_S), rel=0.1)
    assert first.waits["1"] == pytest.approx(FSYNC_S[1] - FSYNC_S[0], abs=0.15)
    assert second.waits.get("0", 0.0) < 0.15
    assert saved.round.straggler == 1
    assert saved.round.phases == second.phases


def test_metadata_of_the_coordinator_does_not_make_its_thread_the_last_writer() -> None:
    items = [Item(1, 1.0, 1.0, 2.0, 0.5, 10), Item(2, 1.0, 1.0, 5.0, 3.0, 10)]
    events = [
        Event("local_step", 1, 0.0, 1.0),
        Event("write_data", 1, 1.0, 5.0),
        Event("finish_checkpoint", 1, 5.5, 6.5),
    ]
    trace = RankTrace(
        called_s=0.0, returned_s=7.0, completed_s=7.0, events=events, items=items, syncs=[Sync(1, 6.0, 6.4)]
    )
    (path,) = timelines([trace])
    assert [span.seconds for span in path if span.phase == "write"] == [3.0]
    assert [span.thread for span in path if span.phase == "write"] == [2]
    assert [(span.start_s, span.end_s) for span in path if span.phase == "metadata"] == [(5.5, 6.5)]
