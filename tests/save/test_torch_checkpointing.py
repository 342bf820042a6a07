"""The engine `torch-checkpointing` on real ranks and real files; skipped where the package is not installed."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model import values
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.state import TrainingState, make_state
from pytest_ckpt.save.engine import Engine, Meanwhile, Pending, timed_save
from pytest_ckpt.save.engines import EngineSetup, make_engine
from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.target.space import tree_bytes
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.rounds import Measured, RoundsPlan, Saving, measure_rounds
from pytest_ckpt.world.spawned import SpawnedWorld
from tests.model.checks import SMALL, TIED, assert_same, bits
from tests.world.conftest import _lives
from tests.world.fakes import FakeProgress

pytest.importorskip("torch_checkpointing")

MODES = ("sync", "async", "async-process")


# In the ranks


def engine(rank: Rank, mode: str, **options: Any) -> Engine:
    setup = EngineSetup(mode, rank.save_group, rank.device, file_system_writer, options)
    return make_engine("torch-checkpointing", setup)


def tied(rank: Rank, seed: int = 0) -> TrainingState:
    return make_state(TIED, RECIPES["mixed-adamw"], rank.mesh, rank.device, seed)


def save_and_load(rank: Rank, mode: str, folder: str) -> list[Any]:
    """The state changes as soon as that is allowed, and what comes back is what was there at the call."""
    stored = []
    for geometry in SMALL:
        made, location = engine(rank, mode), os.path.join(folder, geometry.name)
        state = make_state(geometry, RECIPES["fp32-adamw"], rank.mesh, rank.device)
        before = bits(state)

        def change(pending: Pending, state: TrainingState = state) -> Meanwhile:
            called = time.monotonic()
            if pending.staged is not None:
                pending.staged.result()
            waited_s = time.monotonic() - called
            state.advance()
            assert pending.completed is not None
            pending.completed.result()
            return Meanwhile(waited_s, time.monotonic())

        made.prepare(location)
        timed = timed_save(made, state.state_dict, change)
        assert os.path.exists(os.path.join(location, "checkpoint", "metadata.pkl")), "complete, on every rank"
        assert (timed.returned_s < timed.completed_s) == (mode != "sync")
        stored.append([geometry.name, made.stored_bytes(), state.logical_bytes])
        fresh = make_state(geometry, RECIPES["fp32-adamw"], rank.mesh, rank.device, seed=1)
        for other in (state, fresh):
            made.load(other.state_dict, location)
            assert_same(before, bits(other))
        made.close()
    return stored


def save_again_and_again(rank: Rank, mode: str, folder: str, count: int) -> list[dict[str, int]]:
    made, state, seen = engine(rank, mode), tied(rank), []
    for number in range(count):
        state.advance()
        made.prepare(os.path.join(folder, str(number)))
        timed_save(made, state.state_dict)
        seen.append(held())
    before = bits(state)
    made.load(state.state_dict, os.path.join(folder, str(count - 1)))
    assert_same(before, bits(state))
    made.close()
    return seen


def digests(rank: Rank, location: str, load: bool) -> dict[str, str]:
    """Save, or load into other values; then tell what each whole tensor is."""
    made, state = engine(rank, "sync"), tied(rank, seed=load)
    if load:
        made.load(state.state_dict, location)
    else:
        made.prepare(location)
        timed_save(made, state.state_dict)
    made.close()
    found = {}
    for key, tensor in values.tensors(state.state_dict):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[key] = hashlib.sha256(raw).hexdigest()
    return found


def save_objects(rank: Rank, location: str) -> list[Any]:
    def state(scale: float) -> dict[str, Any]:
        weight = distribute_tensor(torch.arange(10.0) * scale, rank.mesh, [Shard(0)])
        return {"a.weight": weight, "deep": [{"step": torch.tensor(scale)}], "name": f"x{scale}", str(rank.rank): scale}

    made, target = engine(rank, "async"), state(3.0)
    made.prepare(location)
    timed_save(made, state(2.0))
    made.load(target, location)
    made.close()
    assert torch.equal(target["a.weight"].full_tensor(), torch.arange(10.0) * 2)
    return [target["name"], target[str(rank.rank)], target["deep"][0]["step"].item()]


def held() -> dict[str, int]:
    """What this process holds, but for Python's one resource tracker, which stays as long as it does."""
    process = psutil.Process()
    return {
        "threads": threading.active_count(),
        "processes": len(background()),
        "files": process.num_fds(),
        "shared": sum("/torch_" in mapped.path for mapped in process.memory_maps()),
        "named": len(list(Path("/dev/shm").glob(f"*{os.getpid()}*"))),
    }


def background() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def open_and_close(rank: Rank, mode: str, folder: str, rounds: int) -> list[dict[str, int]]:
    state, seen = tied(rank), []
    for number in range(rounds):
        made = engine(rank, mode)
        made.prepare(os.path.join(folder, str(number)))
        timed_save(made, state.state_dict)
        assert bool(background()) == (mode != "sync")
        made.close()
        made.close()
        del made
        seen.append(held())
    return seen


def background_pids(rank: Rank, location: str) -> list[int]:
    made = rank.memory["made"] = engine(rank, "async")
    made.prepare(location)
    timed_save(made, tied(rank).state_dict)
    return [os.getpid(), *background()]


def synced_files(rank: Rank, location: str, **options: Any) -> list[str]:
    synced: list[str] = []
    real = os.fsync

    def noted(fd: Any) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        assert not os.path.exists(os.path.join(location, "checkpoint")), "synced before the rename"
        real(fd)

    os.fsync = noted
    try:
        made = engine(rank, "sync", **options)
        made.prepare(location)
        timed_save(made, tied(rank).state_dict)
        made.close()
    finally:
        os.fsync = real
    return [os.path.basename(name) for name in synced]


def fail_to_save(rank: Rank, mode: str, location: str) -> list[Any]:
    made, before = engine(rank, mode), None
    made.prepare(location)
    try:
        timed_save(made, tied(rank).state_dict)
    except OSError as error:
        before = type(error).__name__
    made.close()
    return [before, len(background())]


def refuse_a_url(rank: Rank) -> str:
    made = engine(rank, "sync")
    try:
        made.prepare("s3://bucket/key")
    except SettingError as error:
        return str(error)
    finally:
        made.close()
    return "taken"


# The tests


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, SpawnedWorld]]:
    worlds = {size: SpawnedWorld(size, timeout_s=180) for size in (2, 3)}
    yield worlds
    for world in worlds.values():
        world.close()


@pytest.fixture
def world(worlds: dict[int, SpawnedWorld]) -> SpawnedWorld:
    return worlds[2]


@pytest.mark.parametrize(("mode", "size"), [*((mode, 2) for mode in MODES), ("sync", 3), ("async", 3)])
def test_state_comes_back_bit_for_bit_as_it_was_at_the_call(
    worlds: dict[int, SpawnedWorld], tmp_path: Path, mode: str, size: int
) -> None:
    replies = worlds[size].run(save_and_load, mode=mode, folder=str(tmp_path))
    for name, stored, logical in replies[0]:
        assert stored == tree_bytes(str(tmp_path / name))
        assert logical < stored, "names and padding come on top"


@pytest.mark.parametrize("mode", MODES)
def test_each_of_many_saves_is_whole_and_nothing_grows(world: SpawnedWorld, tmp_path: Path, mode: str) -> None:
    count = 6
    for seen in world.run(save_again_and_again, mode=mode, folder=str(tmp_path), count=count):
        assert seen[2] == seen[-1]
        assert seen[-1]["processes"] == (mode != "sync")
    kept = [sorted(path.name for path in (tmp_path / str(n) / "checkpoint").iterdir()) for n in range(count)]
    assert kept == [["metadata.pkl", "state_0.pt", "state_1.pt"]] * count


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 2)])
def test_state_is_loaded_by_another_number_of_ranks(
    worlds: dict[int, SpawnedWorld], tmp_path: Path, saved: int, loaded: int
) -> None:
    location = str(tmp_path / "save")
    (before, *_) = worlds[saved].run(digests, location=location, load=False)
    for after in worlds[loaded].run(digests, location=location, load=True):
        assert after == before


def test_keys_with_dots_objects_and_keys_of_one_rank_are_saved(world: SpawnedWorld, tmp_path: Path) -> None:
    assert world.run(save_objects, location=str(tmp_path / "save")) == [["x2.0", 2.0, 2.0]] * 2


@pytest.mark.parametrize("mode", MODES)
def test_nothing_survives_the_engine(world: SpawnedWorld, tmp_path: Path, mode: str) -> None:
    for first, *others in world.run(open_and_close, mode=mode, folder=str(tmp_path), rounds=2):
        assert first["processes"] == first["shared"] == first["named"] == 0
        assert others == [first]


def test_background_process_ends_with_a_rank_that_is_killed(tmp_path: Path) -> None:
    world = SpawnedWorld(2, timeout_s=120)
    try:
        (victim, *children), _ = world.run(background_pids, location=str(tmp_path / "save"))
        for pid in children:
            os.kill(pid, signal.SIGSTOP)  # it cannot notice by itself, as where it waits for other ranks
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(psutil.pid_exists(pid) and _lives(psutil.Process(pid)) for pid in children):
            assert time.monotonic() < deadline, "it is left"
            time.sleep(0.05)
        assert children
    finally:
        world.close()


def test_files_are_synced_before_they_are_where_they_belong(world: SpawnedWorld, tmp_path: Path) -> None:
    synced = world.run(synced_files, location=str(tmp_path / "synced"))
    assert synced == [["state_0.pt", "metadata.pkl"], ["state_1.pt"]]
    assert world.run(synced_files, location=str(tmp_path / "not"), sync_files=False) == [[], []]


@pytest.mark.parametrize("mode", MODES)
def test_save_that_fails_says_why_and_leaves_no_process(world: SpawnedWorld, tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").touch()
    replies = world.run(fail_to_save, mode=mode, location=str(tmp_path / "file" / "save"))
    assert replies == [["NotADirectoryError", 0]] * 2


def test_url_is_refused(world: SpawnedWorld) -> None:
    assert set(world.run(refuse_a_url)) == {
        "engine torch-checkpointing saves to paths alone, and s3://bucket/key is a URL"
    }


def test_mode_that_it_has_not_is_refused_with_those_it_has() -> None:
    setup = EngineSetup("async-staged", None, torch.device("cpu"), file_system_writer)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"no mode 'async-staged'; it has sync, async, async-process, async-pinned$"):
        make_engine("torch-checkpointing", setup)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"thread_count": 4},
            r"unknown option of engine torch-checkpointing 'thread_count' \(from --ckpt-writer-opt\)",
        ),
        ({"sync_files": 1}, "sync_files=1 .* is neither on nor off"),
    ],
)
def test_option_that_it_has_not_is_refused(options: dict[str, Any], message: str) -> None:
    setup = EngineSetup("sync", None, torch.device("cpu"), file_system_writer, options)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=message):
        make_engine("torch-checkpointing", setup)


class Folder:
    """A work folder below pytest's own, for `measure_rounds`."""

    def __init__(self, path: Path) -> None:
        self.path, self.made = path, 0

    @property
    def location(self) -> str:
        return str(self.path)

    def new_round(self, name: str) -> str:
        self.made += 1
        return str(self.path / f"{self.made}-{name}")

    def bytes_in(self, location: str) -> int:
        return tree_bytes(location)

    def remove(self, location: str) -> None:
        """Everything stays, to be looked at."""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_is_measured_as_dcp_is(world: SpawnedWorld, tmp_path: Path, mode: str) -> None:
    found: dict[str, Measured] = {}
    for name in ("dcp", "torch-checkpointing"):
        folder: WorkFolder = Folder(tmp_path / name)  # type: ignore[assignment]
        saving = Saving(
            mode=mode,
            writer=reference(file_system_writer, "writer"),
            model="llama3-tiny",
            state="fp32-adamw",
            function=None,
            engine=name,
        )
        found[name] = measure_rounds(world, folder, saving, RoundsPlan(rounds=4, max_time_s=300), FakeProgress())
    theirs, ours = found["torch-checkpointing"], found["dcp"]
    assert len(theirs.rounds) == len(ours.rounds) == 4
    assert theirs.logical_bytes == ours.logical_bytes
    assert theirs.stored_bytes is not None
    assert theirs.stored_bytes == theirs.folder_bytes
    assert theirs.folder_bytes == pytest.approx(ours.folder_bytes, rel=0.25)
    for one in theirs.rounds:
        assert (one.stall_s == one.save_s) == (mode == "sync")
        assert one.stall_s <= one.save_s
