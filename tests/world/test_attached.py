"""Attached worlds, as far as they can be told without a launcher: jobs, hosts, clocks and folders on several hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import CannotFit, SettingError
from pytest_ckpt.measure.io_probes import Reading, combine
from pytest_ckpt.plugin.follow import FollowingWorld
from pytest_ckpt.plugin.lead import LeadingWorld
from pytest_ckpt.target.path import PathTarget, open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world import spread
from pytest_ckpt.world.attached import AttachedWorld, LeftTheCall
from pytest_ckpt.world.body_watch import BodyWatch
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.control import Hello, host_numbers
from pytest_ckpt.world.functions import FunctionRef
from pytest_ckpt.world.interface import World, hosts_of
from pytest_ckpt.world.job import JOINED, Job, find_job, first_host, why_this_node_only
from pytest_ckpt.world.members import Outcome
from pytest_ckpt.world.probing import from_common_start
from pytest_ckpt.world.rounds import RoundsPlan, Saving, measure_rounds
from tests.world.fakes import FakeFolder, FakeProgress, FakeWorld

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "10",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "3",
}


def test_torchrun_is_known_by_what_it_sets() -> None:
    assert find_job(TORCHRUN) == Job(3, 4, 1, 2, 1, "torchrun", "node1", 29500)
    assert find_job({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is not None
    assert find_job({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}) is None
    assert find_job({}) is None


def test_srun_is_known_by_a_step_of_several_tasks() -> None:
    job = find_job(SRUN)
    assert job == Job(9, 10, 1, 2, 2, "srun", "gpu07", 20_000 + (4711 * 16 + 2) % 10_000)
    assert job.port < 32_768
    assert find_job({**SRUN, "SLURM_NTASKS": "1"}) is None
    assert find_job({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) is None


def test_torchrun_inside_of_srun_is_torchruns() -> None:
    job = find_job({**SRUN, **TORCHRUN})
    assert job is not None
    assert job.launcher == "torchrun"


def test_what_a_rank_starts_is_no_rank() -> None:
    assert find_job({**TORCHRUN, JOINED: str(os.getpid())}) is not None
    assert find_job({**TORCHRUN, JOINED: "1"}) is None


def test_number_that_is_none_is_refused() -> None:
    with pytest.raises(SettingError, match="RANK='three' in the environment is no number"):
        find_job({**TORCHRUN, "RANK": "three"})


def test_job_tells_torch_what_srun_does_not() -> None:
    job, environ = find_job(SRUN), dict(SRUN)
    assert job is not None
    job.export(environ)
    told = find_job(environ)
    assert told is not None
    assert (told.rank, told.size, told.local_rank, told.local_size) == (9, 10, 1, 2)
    assert (told.address, told.port) == (job.address, job.port)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node[003-006,009],gpu1", "node003"),
        ("a1,b2", "a1"),
        ("tux[1,3]-ib", "tux1-ib"),
        ("rack1-node[12]", "rack1-node12"),
    ],
)
def test_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_plain_run_on_one_node_of_several_is_told() -> None:
    alone = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "5", "SLURM_NTASKS": "3"}
    assert "this node only, of the 3 of Slurm job 5" in str(why_this_node_only(alone))
    assert why_this_node_only(SRUN) is None
    assert why_this_node_only({**alone, **TORCHRUN}) is None
    assert why_this_node_only({"SLURM_JOB_NUM_NODES": "1"}) is None
    assert why_this_node_only({}) is None


def test_hosts_are_numbered_in_the_order_of_ranks() -> None:
    places = ["1", "1", "0", "2"]
    hellos = [
        Hello(rank=n, host="h", place=place, kernel="", pid=1, status_file="", tests=[], errors=0)
        for n, place in enumerate(places)
    ]
    assert host_numbers(hellos) == (0, 0, 1, 2)


# Rank 0 in a test body that does nothing


class Sitting:
    """A main thread that is overdue once, and reacts to being interrupted where `reacts`."""

    def __init__(self, reacts: bool) -> None:
        self.reacts, self.acted_s = reacts, 0.0
        self.forsaken: list[str] = []
        self.gave_up: list[str] = []
        self.done = threading.Event()

    def overdue(self) -> str | None:
        return None if self.forsaken else "ckpt_save"

    def forsake(self, reason: str) -> None:
        self.forsaken.append(reason)

    def interrupt(self) -> bool:
        if self.reacts:
            self.acted_s += 1
            self.done.set()
        return self.reacts

    def give_up(self, reason: str) -> None:
        self.gave_up.append(reason)
        self.done.set()


@pytest.mark.parametrize("reacts", [True, False])
def test_main_thread_that_is_overdue_is_interrupted_and_else_given_up(reacts: bool) -> None:
    main = Sitting(reacts)
    watch = BodyWatch(main, main.interrupt, main.give_up)
    assert main.done.wait(30)
    watch.close()
    assert watch.reason is not None
    assert watch.reason.startswith("rank 0 did not come to ckpt_save: its test sits in ")
    assert "test_main_thread_that_is_overdue" in watch.reason
    assert main.forsaken == [watch.reason.splitlines()[0]]
    assert main.gave_up == ([] if reacts else [watch.reason])


def test_rank_that_left_a_call_without_a_word_is_named_without_a_colon() -> None:
    assert str(LeftTheCall(1, Outcome(at="t", kind="passed"))).endswith("since its test passed there")
    assert str(LeftTheCall(1, Outcome(at="t", kind="failed", text="a\nb\n"))).endswith("its test failed there: b")


# Clocks

SAVING = Saving(
    mode="async", writer=FunctionRef("some", "writer"), model="llama3-tiny", state="fp32-adamw", function=None
)


class FarWorld(FakeWorld):
    """Two ranks on two hosts, the clock of the second an hour ahead."""

    hosts = (0, 1)
    ahead_s = 3600.0

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> list[Any]:
        replies = super().run(function, **arguments)
        for rank, reply in enumerate(replies):
            if reply is not None and "called_s" in reply:
                ahead = rank * self.ahead_s
                for name in ("called_s", "returned_s", "unblocked_s", "completed_s"):
                    if name in reply:
                        reply[name] += ahead
                reply.update(host=rank, exits_s=[reply["called_s"] - rank * 0.01 - 0.001])
        return replies


def test_seconds_do_not_depend_on_how_the_clocks_of_hosts_are_set() -> None:
    plan = RoundsPlan(rounds=4, max_time_s=1000, trace=False)
    for ahead_s in (3600.0, -5.0):
        world = FarWorld()
        world.ahead_s = ahead_s
        for one in measure_rounds(world, FakeFolder([]), SAVING, plan, FakeProgress(), world.clock).rounds:
            assert one.save_s == pytest.approx(world.save_s, abs=1e-6)
            assert one.stall_s == pytest.approx(world.save_s / 10, abs=1e-6)
            assert one.straggler == 1


def test_probes_of_hosts_count_from_their_common_start() -> None:
    def reading(start_s: float, seconds: float) -> Reading:
        return Reading(bytes=100, start_s=start_s, end_s=start_s + seconds, block_bytes=1)

    readings = [reading(10.0, 2.0), reading(10.5, 1.0), reading(9000.0, 4.0), reading(9000.1, 1.0)]
    assert from_common_start(readings, [0, 0, 0, 0]) == readings
    probe = combine("write_direct", from_common_start(readings, [0, 0, 1, 1]))
    assert probe.seconds == pytest.approx(4.0)
    assert probe.Bps == pytest.approx(100.0)


def as_world(attached: AttachedWorld | LeadingWorld | FollowingWorld) -> World:
    return attached


def test_attached_worlds_fit_the_seam() -> None:
    anyone: Any = None
    world = as_world(FollowingWorld(anyone, 2, "cpu"))
    assert (world.size, world.device, world.start_method, world.renew()) == (2, "cpu", "attached", False)


def test_other_worlds_share_one_host() -> None:
    assert hosts_of(FakeWorld()) == ()
    assert hosts_of(FarWorld()) == (0, 1)


# Folders on several hosts


class TwoHosts:
    """Two ranks of this process on two hosts, each of which sees `roots` of its own at the path of the first."""

    hosts: tuple[int, ...] = (0, 1)

    def __init__(self, see: Callable[[int, str], str]) -> None:
        self._see = see

    def keep_house(self, function: Callable[..., Any], /, *, timeout_s: float = 60.0, **arguments: Any) -> list[Any]:
        replies = []
        for number in self.hosts:
            seen = {name: self._see(number, v) if isinstance(v, str) else v for name, v in arguments.items()}
            replies.append(function(rank_on(number), **seen))
        return replies


def rank_on(number: int) -> Rank:
    nothing: Any = None
    return Rank(number, 2, nothing, nothing, nothing, nothing, nothing, "", hosts=(0, 1))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_LOOK_S", 0.3)


@pytest.fixture
def disks(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    return tmp_path / "one", tmp_path / "two"


def test_shared_folder_is_found_by_writing(disks: tuple[Path, Path], quick: None) -> None:
    folder = open_target(TargetSpec("disk", str(disks[0]), source="test")).open()
    found = spread.find_spread(TwoHosts(lambda host, path: path), folder)
    assert (found.shared, found.text) == (True, "shared by 2 hosts")
    assert os.listdir(folder.location) == [".pytest-ckpt"]
    folder.close()


def test_folder_that_appears_late_is_shared(disks: tuple[Path, Path]) -> None:
    """Clients of a network file system keep what they know of a folder for seconds."""
    late = disks[1] / "late"
    threading.Timer(0.5, late.touch).start()
    assert spread.look_for(rank_on(1), path=str(late)) is True


def test_disks_of_hosts_are_told_apart_and_cleaned_on_both(disks: tuple[Path, Path], quick: None) -> None:
    def see(host: int, path: str) -> str:
        return path.replace(str(disks[0]), str(disks[host]))

    world = TwoHosts(see)
    own = open_target(TargetSpec("disk", str(disks[0]), source="test")).open()
    found = spread.find_spread(world, own)
    assert (found.shared, found.text) == (False, "a local disk on each of 2 hosts")

    folder = spread.SpreadFolder(world, own)
    twin = Path(see(1, folder.location))
    assert twin.is_dir()
    assert twin.stat().st_mode & 0o777 == 0o700
    location = Path(folder.new_round("save"))
    for place, size in ((location, 10), (Path(see(1, str(location))), 7)):
        place.mkdir()
        (place / "part").write_bytes(bytes(size))
    assert (folder.bytes_in(str(location)), folder.own_bytes_in(str(location))) == (17, 10)
    folder.remove(str(location))
    assert not location.exists()
    assert os.listdir(twin) == [".pytest-ckpt"]
    folder.close()
    assert [os.listdir(disk) for disk in disks] == [[], []]


def stale(target: PathTarget) -> int:
    raise OSError(116, "Stale file handle")


def test_disk_without_room_for_its_part_is_named_by_its_host(
    disks: tuple[Path, Path], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see(host: int, path: str) -> str:
        return path.replace(str(disks[0]), str(disks[host]))

    free = {str(disks[0]): 600, str(disks[1]): 400}
    monkeypatch.setattr(PathTarget, "free_bytes", lambda target: free[target.location])
    own = open_target(TargetSpec("disk", str(disks[0]), source="test")).open()
    folder = spread.SpreadFolder(TwoHosts(see), own)
    folder.require_space(lambda host: (600, 400)[host])
    with pytest.raises(
        CannotFit, match=f"the part of the save on host 1 needs 401 B and {disks[0]} on host 1 has 400 B"
    ):
        folder.require_space(lambda host: 401)
    monkeypatch.setattr(PathTarget, "free_bytes", stale)
    with pytest.raises(SettingError, match=f"{disks[0]} on host 0 does not say how much is free: .*Stale file handle"):
        folder.require_space(lambda host: 1)
    folder.close()


def test_folder_that_cannot_be_made_elsewhere_is_refused(disks: tuple[Path, Path], quick: None) -> None:
    world = TwoHosts(lambda host, path: path.replace(str(disks[0]), f"{disks[0]}/missing") if host else path)
    own = open_target(TargetSpec("disk", str(disks[0]), source="test")).open()
    with pytest.raises(SettingError, match=r"host 1: target .* refuses to mkdir"):
        spread.SpreadFolder(world, own)
    own.close()
