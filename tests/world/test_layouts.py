"""Meshes and shares on real ranks: who writes what, told from the files themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.model.share import PARTIAL, Share, rank_bytes, share_bytes
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.loads import measure_loads
from pytest_ckpt.world.mesh import MeshShape, full_shard, parse_mesh
from pytest_ckpt.world.rounds import Measured, RoundsPlan, Saving, measure_rounds
from pytest_ckpt.world.spawned import SpawnedWorld

from . import layouts
from .fakes import FakeProgress

MODEL, RECIPE = GEOMETRIES["llama3-tiny"], RECIPES["fp32-adamw"]
BYTES = state_bytes(MODEL, RECIPE)
HSDP = "replicate=2,shard=2"


@pytest.fixture(scope="module")
def four(world: SpawnedWorld) -> Iterator[SpawnedWorld]:
    """Four more ranks, which are gone when it is looked whether the two have left anything."""
    world = SpawnedWorld(4, timeout_s=120)
    yield world
    world.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[WorkFolder]:
    folder = open_target(TargetSpec("disk", str(tmp_path), str(tmp_path), "a test")).open()
    yield folder
    folder.close()


def saving(**given: Any) -> Saving:
    writer = reference(layouts.writer, "writer")
    known: dict[str, Any] = {"mode": "sync", "writer": writer, "model": MODEL.name, "state": RECIPE.name}
    return Saving(function=None, **{**known, **given})


def measure(world: SpawnedWorld, folder: WorkFolder, **given: Any) -> Measured:
    return measure_rounds(
        world, folder, saving(**given), RoundsPlan(rounds=1, max_time_s=120, keep_all=True), FakeProgress()
    )


def last_folder(folder: WorkFolder) -> Path:
    return max(path for path in Path(folder.location).iterdir() if path.is_dir())


def planned(measured: Measured) -> list[int | None]:
    return [rank.planned_bytes for rank in measured.rounds[-1].ranks]


def bytes_by_rank(location: Path) -> Counter[int]:
    """Bytes of tensors in the files of each rank; each part of a tensor must be there once."""
    parts = layouts.stored_parts(location)
    places = Counter((key, offset) for _, key, offset, tensor in parts if tensor.numel())
    assert set(places.values()) == {1}
    return sum((Counter({rank: tensor.nbytes}) for rank, _, _, tensor in parts), Counter())


@pytest.mark.parametrize(
    "mode", ["sync", "async", "async-staged", pytest.param("async-process", marks=pytest.mark.long)]
)
def test_share_writes_what_these_ranks_of_the_whole_job_would(
    world: SpawnedWorld, folder: WorkFolder, mode: str
) -> None:
    share = Share(2, 7)
    measured = measure(world, folder, mode=mode, share=str(share))
    location = last_folder(folder)
    exact = [rank_bytes(MODEL, RECIPE, 7, rank) for rank in range(2)]
    written = bytes_by_rank(location)
    assert [written[rank] for rank in range(2)] == planned(measured) == exact
    assert sum(exact) == measured.logical_bytes == share_bytes(MODEL, RECIPE, share)
    assert "2 of 7 ranks" in (location / PARTIAL).read_text()
    # The last save is of the state as it is now.
    assert world.run(layouts.differing_parts, location=str(location)) == [[], []]


def test_each_byte_is_written_once_by_one_of_the_ranks_that_hold_it(four: SpawnedWorld, folder: WorkFolder) -> None:
    measured = measure(four, folder, mesh=HSDP)
    assert four.run(layouts.mesh_of_state) == [[["replicate", "shard"], [2, 2]]] * 4
    written = bytes_by_rank(last_folder(folder))
    assert planned(measured) == [written[rank] for rank in range(4)]
    assert sum(written.values()) == measured.logical_bytes == BYTES
    assert min(written.values()) > 0.2 * BYTES, "replicas share the writing"


def test_ranks_are_kept_over_meshes_and_a_mesh_is_made_once(four: SpawnedWorld, folder: WorkFolder) -> None:
    pids = four.pids
    for mesh in (HSDP, None, HSDP):
        measured = measure(four, folder, mesh=mesh)
        assert sum(size or 0 for size in planned(measured)) == BYTES
    assert four.run(layouts.mesh_is_kept) == [1] * 4
    assert four.pids == pids


def test_state_of_replicas_is_loaded_bit_for_bit(four: SpawnedWorld, world: SpawnedWorld, folder: WorkFolder) -> None:
    plan, progress = RoundsPlan(rounds=1, max_time_s=120), FakeProgress()
    assert measure_loads(four, four, folder, saving(mesh=HSDP), plan, progress, cold=False).rounds
    # Another number of ranks saves as a full shard; the mesh is that of the ranks that load.
    assert measure_loads(world, four, folder, saving(mesh=HSDP), plan, progress, cold=False).rounds
    assert four.run(layouts.mesh_of_state) == [[["replicate", "shard"], [2, 2]]] * 4


@pytest.mark.parametrize(
    ("text", "shape", "written"),
    [
        ("shard=8", MeshShape(1, 8), "shard=8"),
        ("replicate=2,shard=4", MeshShape(2, 4), "replicate=2,shard=4"),
        (" shard = 4 , replicate = 2 ", MeshShape(2, 4), "replicate=2,shard=4"),
        ("replicate=1,shard=3", full_shard(3), "shard=3"),
        ("replicate=3,shard=1", MeshShape(3, 1), "replicate=3,shard=1"),
    ],
)
def test_mesh_is_read_in_any_order_and_written_in_one(text: str, shape: MeshShape, written: str) -> None:
    assert (parse_mesh(text, "--x"), str(shape)) == (shape, written)
    assert shape.size == math.prod(shape)


@pytest.mark.parametrize("text", ["8", "shard", "shard=0", "replicate=2", "shard=2,shard=4", "tp=2,shard=4", ","])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match=rf"'{text}' \(from --x\) is no mesh; write shard=8, or replicate=2,shard=4"):
        parse_mesh(text, "--x")


def test_mesh_of_other_ranks_is_refused() -> None:
    with pytest.raises(SettingError, match=r"mesh replicate=2,shard=4 \(from --x\) has 8 ranks and this world has 2;"):
        MeshShape(2, 4).require_size(2, "--x")
