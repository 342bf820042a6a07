"""Says which torch broke which private name that we cannot do without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_ckpt.save import torch_private

BROKEN = f"torch {torch.__version__} has changed what pytest_ckpt/save/torch_private.py relies on: "


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.events: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg
        assert isinstance(event, dict), BROKEN + f"an event of its logger is {type(event).__name__}"
        self.events.append((str(event["func_name"]).rsplit(".", 1)[-1], str(event["event"])))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_logger_of_dcp_tells_the_phases_of_a_save_and_a_load(tmp_path: Path) -> None:
    listener = _Listener()
    logger = torch_private.dcp_logger()
    logger.addHandler(listener)
    try:
        state_dict_saver.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path))
    finally:
        logger.removeHandler(listener)
    logger.addHandler(listener)
    try:
        state_dict_loader.load({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    finally:
        logger.removeHandler(listener)
    for phase in ("save", "local_step", "global_step", "write_data", "finish_checkpoint", "read_data"):
        for event in ("start", "end"):
            assert (phase, event) in listener.events, BROKEN + f"no event {event!r} of {phase!r}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_logger_of_dcp_tells_of_an_exception_where_it_is_handled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    listener = _Listener()
    logger = torch_private.dcp_logger()
    logger.addHandler(listener)
    try:
        with pytest.raises(BaseException, match="file"):
            state_dict_saver.save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "file"))
    finally:
        logger.removeHandler(listener)
    assert ("save", "exception") in listener.events, BROKEN + "no exception event of 'save'"


@pytest.mark.parametrize("name", torch_private.PLAN_CACHES)
def test_plan_cache_is_a_dictionary_of_the_planner_class_and_is_cleared(name: str) -> None:
    cache = getattr(SavePlanner, name, None)
    assert isinstance(cache, dict), BROKEN + f"SavePlanner.{name} is {type(cache).__name__}"
    cache["planted"] = None
    torch_private.clear_plan_caches()
    assert cache == {}


def test_planner_class_has_no_other_cache() -> None:
    caches = {name for name in vars(SavePlanner) if name.startswith("_cached")}
    assert caches == set(torch_private.PLAN_CACHES), BROKEN + "it caches something else too"


def test_checkpoint_exception_names_the_ranks_it_began_in() -> None:
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    error = CheckpointException("write", {3: _wrap_exception(OSError("planted"))})
    failures = torch_private.wrapped_failures(error)
    assert list(failures) == [3], BROKEN + "CheckpointException.failures"
    assert str(failures[3][0]) == "planted"
    assert torch_private.wrapped_failures(OSError()) == {}


def test_async_save_is_where_watch_replaces_it() -> None:
    from torch.distributed import checkpoint

    assert checkpoint.async_save is state_dict_saver.async_save, BROKEN + "async_save has moved"  # type: ignore[attr-defined]


def test_offsets_of_a_shard_are_those_at_which_dcp_stores_it(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
        assert torch_private.offsets_of_shard(tensor) == (0, 0), BROKEN + "compute_local_shape_and_global_offset"
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        assert tuple(chunk.offsets) == (0, 0)
    finally:
        dist.destroy_process_group()


def test_mesh_on_paper_shards_as_a_rank_of_a_mesh_that_has_processes_would() -> None:
    mesh = torch_private.mesh_on_paper(4, 2)
    assert (mesh.size(), tuple(mesh.get_coordinate() or ())) == (4, (2,)), (
        BROKEN + "DeviceMesh(_init_backend=False, _rank=...)"
    )
    local = torch.empty(2, 3, device="meta")
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 3)), stride=(3, 1))
    assert torch_private.offsets_of_shard(tensor) == (4, 0), BROKEN + "a DTensor on a mesh without processes"
    assert not dist.is_initialized()


def test_check_of_a_global_plan_is_timed_and_put_back() -> None:
    planner, taken = DefaultSavePlanner(), list[float]()
    planner.set_up_planner({"a": torch.ones(3)}, is_coordinator=True)
    before = default_planner._validate_global_plan
    with torch_private.validation_timed(taken.append):
        planner.create_global_plan([planner.create_local_plan()])
    assert len(taken) == 1, BROKEN + "the planner's check of a global plan"
    assert taken[0] > 0
    assert default_planner._validate_global_plan is before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_write_results_are_those_of_the_writer_but_for_the_bytes_of_torch_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": 7, "c": torch.ones(2, 2, dtype=torch.bfloat16)}
    state_dict_saver.save(state, storage_writer=FileSystemWriter(tmp_path))
    metadata = FileSystemReader(tmp_path).read_metadata()  # torch 2.9 does not return the writer's part
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    results = {result.index: result for result in torch_private.write_results(planner.create_local_plan(), 0)}
    assert results.keys() == metadata.storage_data.keys(), BROKEN + "WriteResult"
    for index, info in metadata.storage_data.items():
        assert type(info) is type(results[index].storage_data), BROKEN + "_StorageInfo"
        assert info.relative_path == results[index].storage_data.relative_path
    assert [result.size_in_bytes for result in results.values()] == [12, 0, 8]
