"""pytest under torchrun: every rank walks the same tests, rank 0 reports, and each test ends alike on all ranks."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytest_ckpt.plugin.joint import collection_difference, joint_outcome
from pytest_ckpt.world.control import Hello
from pytest_ckpt.world.members import Outcome
from tests.hosts import Host, two_hosts

from . import job_functions
from .project import SUITE, TINY, Project, Result

pytestmark = pytest.mark.timeout(240)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
DEFAULTS = (TINY, "--ckpt-rounds=1", "--ckpt-probe=off", "--ckpt-target=disk")

WALK = """
import os
from pathlib import Path

import job_functions as functions
import pytest

RANK = int(os.environ["RANK"])


@pytest.fixture
def broken_on_one():
    if RANK == 1:
        raise OSError("planted in a fixture")


def test_save(ckpt_save, ckpt_target, ckpt_model, ckpt_world):
    record = ckpt_save(mode="sync")
    Path(f"save_s-{RANK}").write_text(repr(record.save_s))


def test_fails_on_one(ckpt_world):
    assert RANK == 0, "one alone"
    ckpt_world.run(functions.echo, value=1)


def test_skips_on_one(ckpt_save):
    if RANK == 1:
        pytest.skip("no such thing here")
    ckpt_save()


def test_is_broken_on_one(ckpt_world, broken_on_one):
    pass


def test_command_raises_on_one(ckpt_world):
    ckpt_world.run(functions.raise_on_one)


def test_ranks_can_be_used_again(ckpt_world):
    assert ckpt_world.run(functions.echo, value={"a": [1, None]}) == [[0, {"a": [1, None]}], [1, {"a": [1, None]}]]
    assert ckpt_world.run(functions.pid)[RANK] == os.getpid()


def test_failure_is_caught_on_all(ckpt_world):
    with pytest.raises(Exception, match="planted on all"):
        ckpt_world.run(functions.raise_on_all)
    assert ckpt_world.run(functions.echo, value=2)[1] == [1, 2]


def test_own_failure_after_a_caught_one(ckpt_world):
    with pytest.raises(Exception, match="planted on all"):
        ckpt_world.run(functions.raise_on_all)
    assert RANK == 0, "a reason of its own"


def test_call_on_one_alone(ckpt_world):
    if RANK == 1:
        ckpt_world.run(functions.echo, value=1)


def test_fails_on_zero_alone(ckpt_world):
    assert RANK == 1, "zero alone"
    ckpt_world.run(functions.echo, value=1)


def test_other_ranks_are_refused(ckpt_load, ckpt_world):
    ckpt_load(saved_ranks=2 * ckpt_world.size)


def test_plain():
    Path(f"plain-{RANK}").touch()
"""


def make_project(path: Path, **files: str) -> Project:
    project = Project(path)
    project.write("job_functions.py", Path(job_functions.__file__).read_text())
    for name, text in files.items():
        project.write(f"{name}.py", text)
    return project


# One walk through many tests


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Result]:
    project = make_project(tmp_path_factory.mktemp("walk"), test_walk=WALK)
    ranks = ("--nproc-per-node=2", "-m", "pytest")
    files = ("--junitxml=junit.xml", "--benchmark-json=result.json")
    return project, project.run(*TORCHRUN, *ranks, *DEFAULTS, *files, "-rA", "--tb=short")


def outcomes(project: Project) -> dict[str, tuple[str, str]]:
    """Return the outcome and the message of each test, as JUnit has them."""
    found = {}
    for case in ElementTree.parse(project.path / "junit.xml").iter("testcase"):
        children = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = str(case.get("name")).partition("[")[0]
        found[name] = (children[0].tag, str(children[0].get("message"))) if children else ("passed", "")
    return found


def test_one_report_one_file_and_nothing_left(walked: tuple[Project, Result]) -> None:
    project, result = walked
    result.require(1)
    assert result.out.count("test session starts") == 1
    assert "ckpt: attached to torchrun: 2 ranks\n" in result.out
    (row,) = json.loads((project.path / "result.json").read_text())["benchmarks"]
    record = row["extra_info"]["ckpt"]
    assert (record["scenario"]["world_size"], record["start_method"]) == (2, "attached")
    assert "hosts" not in record["scenario"]["options"]
    assert project.last()["benchmarks"][0]["extra_info"]["ckpt"] == record
    assert not [name for name in os.listdir(project.temporary) if name.startswith("ckpt-")]


def test_all_ranks_run_the_body_and_get_the_record(walked: tuple[Project, Result]) -> None:
    project, _ = walked
    assert (project.path / "plain-0").exists()
    assert (project.path / "plain-1").exists()
    assert (project.path / "save_s-0").read_text() == (project.path / "save_s-1").read_text()


@pytest.mark.parametrize(
    ("test", "outcome", "message"),
    [
        ("test_save", "passed", ""),
        ("test_fails_on_one", "failure", "rank 1 failed: AssertionError: one alone"),
        ("test_skips_on_one", "skipped", "rank 1 skipped: no such thing here"),
        ("test_is_broken_on_one", "error", "rank 1 failed: OSError: planted in a fixture"),
        ("test_command_raises_on_one", "failure", "rank 1 raised in phase 'raise_on_one': ValueError: planted"),
        ("test_ranks_can_be_used_again", "passed", ""),
        ("test_failure_is_caught_on_all", "passed", ""),
        ("test_own_failure_after_a_caught_one", "failure", "rank 1 failed: AssertionError: a reason of its own"),
        ("test_call_on_one_alone", "failure", "^Failed: rank 1 called ckpt_world.run in .* and rank 0 did not"),
        ("test_fails_on_zero_alone", "failure", "AssertionError: zero alone"),
        ("test_other_ranks_are_refused", "skipped", "an attached world has its 2 ranks; loads with another number"),
        ("test_plain", "passed", ""),
    ],
)
def test_each_test_ends_alike_on_all_ranks(
    walked: tuple[Project, Result], test: str, outcome: str, message: str
) -> None:
    project, result = walked
    found = outcomes(project)[test]
    assert found[0] == outcome, result.out
    assert re.search(message, found[1]), found[1]


# Ranks that die or hang

SIGNALLED = """
import job_functions as functions


def test_before(ckpt_save):
    ckpt_save(mode="sync")


def test_signalled(ckpt_save):
    ckpt_save(mode="sync", writer=functions.signalled)


def test_after(ckpt_save):
    ckpt_save(mode="sync")
"""


def test_killed_rank_is_named_and_ends_the_run_in_good_order(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_signalled=SIGNALLED)
    project.environment["CULPRIT_GETS"] = "SIGKILL"
    result = project.run(*TORCHRUN, "--nproc-per-node=2", "-m", "pytest", *DEFAULTS, "--benchmark-json=result.json")
    result.require(1)
    assert "rank 1 died in phase 'save_round > save > write_data'" in result.out
    assert "1 failed, 1 passed" in result.out
    assert len(json.loads((project.path / "result.json").read_text())["benchmarks"]) == 1
    assert not [name for name in os.listdir(project.temporary) if name.startswith("ckpt-")]


def test_stopped_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_signalled=SIGNALLED)
    result = project.ranks(2, "--ckpt-timeout=4s", environment={"CULPRIT_GETS": "SIGSTOP"})
    assert result.statuses[0] == 1, result.out
    assert "rank 1 is stuck in phase 'save_round > save > write_data': no reply within 4.00 s" in result.out
    assert "process stopped" in result.out
    assert "1 failed, 1 passed" in result.out
    assert result.in_target == []


def outputs(
    agents: Sequence[Sequence[str]], project: Project, environment: dict[str, str], *, status: int
) -> list[str]:
    """Return what torchrun's agents print, each a command, once all have ended with `status`."""
    running = [
        subprocess.Popen(
            agent,
            cwd=project.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for agent in agents
    ]
    try:
        outs = [agent.communicate(timeout=200)[0] for agent in running]
    finally:
        for agent in running:
            agent.kill()
    assert [agent.returncode for agent in running] == [status for _ in running], "\n".join(outs)
    return outs


def two_agents(*options: str) -> list[list[str]]:
    """Return the commands of two of torchrun's agents with two ranks each, that meet on this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    agents = []
    for number in (0, 1):
        meeting = (f"--rdzv-endpoint={endpoint}", "--rdzv-backend=c10d", f"--rdzv-conf=is_host={1 - number}")
        ranks = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", *meeting, "-m", "pytest", *DEFAULTS)
        agents.append([*ranks, *options])
    return agents


@pytest.mark.long
@pytest.mark.parametrize(("signal_name", "word"), [("SIGKILL", "died"), ("SIGSTOP", "is stuck")])
def test_rank_of_another_agent_is_named_and_both_agents_end(tmp_path: Path, signal_name: str, word: str) -> None:
    """torchrun gives a rank that it ends 30 s: a stopped one makes its agent end that much later."""
    project = make_project(tmp_path, test_signalled=SIGNALLED)
    project.environment |= {"CULPRIT_GETS": signal_name, "CULPRIT": "2", "OMP_NUM_THREADS": "1"}
    outs = outputs(two_agents("--ckpt-timeout=6s"), project, project._environment(signal_name), status=1)
    assert f"rank 2 {word} in phase 'save_round > save > write_data'" in outs[0]
    assert "1 failed, 1 passed" in outs[0]
    assert "test session starts" not in outs[1]
    assert project.in_target() == []


ON_ONE_OF_FOUR = """
import os

import pytest

RANK = int(os.environ["RANK"])


def test_fails_on_three(ckpt_save):
    assert RANK != 3, "three alone"
    ckpt_save(mode="sync")


def test_skips_on_one(ckpt_save):
    if RANK == 1:
        pytest.skip("one alone")
    ckpt_save(mode="sync")


def test_after(ckpt_save):
    ckpt_save(mode="sync")
"""


@pytest.mark.long
def test_failure_and_skip_on_one_of_four_ranks_are_those_of_all(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_one_of_four=ON_ONE_OF_FOUR)
    project.environment |= {"OMP_NUM_THREADS": "1"}
    outs = outputs(two_agents("-rA", "--ckpt-timeout=30s"), project, project._environment("four"), status=1)
    assert "1 failed, 1 passed, 1 skipped" in outs[0], outs[0]
    assert "rank 3" in outs[0]
    assert "three alone" in outs[0]
    assert "one alone" in outs[0]
    assert "test session starts" not in outs[1]
    assert project.in_target() == []


EXITS = """
import os


def test_before(ckpt_save):
    ckpt_save(mode="sync")


def test_exits(ckpt_save):
    if os.environ["RANK"] == "1":
        os._exit(3)
    ckpt_save(mode="sync")
"""


def test_rank_that_dies_in_the_body_is_reported_though_torchrun_ends_rank_zero_at_once(tmp_path: Path) -> None:
    project = make_project(
        tmp_path,
        test_exits=EXITS,
        conftest="""
import time


def pytest_sessionfinish():
    time.sleep(1)  # torchrun's SIGTERM comes while the report is written
""",
    )
    project.environment["OMP_NUM_THREADS"] = "1"
    result = project.run(*TORCHRUN, "--nproc-per-node=2", "-m", "pytest", *DEFAULTS, "--junitxml=junit.xml")
    result.require(1)
    assert "= FAILURES =" in result.out
    assert "rank 1 died in phase 'test_exits.py::test_exits (call)'" in result.out
    assert "1 failed, 1 passed" in result.out
    assert "FAILED test_exits.py::test_exits - " in result.out
    assert "rank 1 died" in outcomes(project)["test_exits"][1]
    assert result.in_target == []


LEAST_WAIT = """
import pytest_ckpt.world.attached

pytest_ckpt.world.attached._LEAST_WAIT_S = 3.0
"""
SLEEPS = """
import os
import signal
import time


def test_before(ckpt_save):
    ckpt_save(mode="sync")


def test_sleeps(ckpt_save):
    if os.environ["RANK"] == "0":
        if "BLOCKED" in os.environ:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(3600)
    ckpt_save(mode="sync")


def test_after(ckpt_save):
    ckpt_save(mode="sync")
"""
SAT = "rank 0 did not come to ckpt_save, where rank 1 waits, within 3.00 s (--ckpt-timeout): its test sits in "


def test_rank_zero_that_hangs_in_the_body_is_named_at_the_deadline(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_sleeps=SLEEPS, conftest=LEAST_WAIT)
    result = project.ranks(2, "--ckpt-timeout=3s", "--junitxml=junit.xml")
    result.require(1, 1)
    assert f"{SAT}test_sleeps.py:15 (test_sleeps)\n" in result.out
    assert "    time.sleep(3600)" in result.out
    assert "1 failed, 1 passed" in result.out
    assert SAT in outcomes(project)["test_sleeps"][1]
    assert result.in_target == []


@pytest.mark.long
def test_rank_zero_that_cannot_be_interrupted_ends_with_a_word(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_sleeps=SLEEPS, conftest=LEAST_WAIT)
    result = project.ranks(2, "--ckpt-timeout=3s", environment={"BLOCKED": "1"})
    assert (result.statuses, result.outs[1]) == ([1, 1], ""), "\n".join(result.outs)
    assert f"ckpt: {SAT}test_sleeps.py:15 (test_sleeps)\n" in result.out
    assert "ckpt: rank 0 cannot be interrupted there, and ends" in result.out
    assert result.processes == []


@pytest.mark.long
def test_call_that_takes_much_longer_than_the_deadline_is_no_hanging_body(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_save="def test_save(ckpt_save):\n    ckpt_save(mode='sync')\n")
    project.write("conftest.py", LEAST_WAIT)
    result = project.ranks(2, "--ckpt-timeout=3s", "--ckpt-rounds=1500", "--ckpt-max-time=20s")
    result.require(0, 0)
    assert result.seconds > 9


@pytest.mark.long
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    project = make_project(
        tmp_path,
        test_long="""
        from pathlib import Path
        import time

        def wait(rank):
            Path(f"waits-{rank.rank}").touch()
            time.sleep(3600)

        def test_long(ckpt_world):
            ckpt_world.run(wait)
        """.replace("\n        ", "\n"),
    )
    result = project.run(
        *(*TORCHRUN, "--nproc-per-node=2", "-m", "pytest", *DEFAULTS),
        when=lambda: all((project.path / f"waits-{rank}").exists() for rank in (0, 1)),
    )
    result.require(result.status)
    assert result.status != 0
    assert "KeyboardInterrupt" in result.out
    assert result.seconds < 25


@pytest.mark.long
def test_rank_zero_that_dies_ends_the_others_with_a_word(tmp_path: Path) -> None:
    project = make_project(
        tmp_path,
        test_zero_dies="""
import os, signal

def die(rank):
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def test_zero_dies(ckpt_world):
    ckpt_world.run(die)
""",
    )
    result = project.ranks(2)
    assert result.statuses == [-9, 1]
    assert "ckpt: rank 1 ends: rank 0 is gone; " in result.outs[1]
    assert "before, it was in test_zero_dies.py::test_zero_dies[r2] (call), ckpt_world.run" in result.outs[1]
    assert result.processes == []


# What is selected

ONE_FAILS = """
import os
from pathlib import Path


def test_first(ckpt_world):
    Path(f"first-{os.environ['RANK']}").touch()


def test_second():
    assert False, "planted"


def test_third():
    Path(f"third-{os.environ['RANK']}").touch()
"""


def test_exitfirst_stops_all_ranks_at_one_test(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_one_fails=ONE_FAILS)
    project.ranks(2, "-x").require(1, 1)
    assert (project.path / "first-1").exists()
    assert not list(project.path.glob("third-*"))


def test_different_tests_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    project = make_project(
        tmp_path,
        test_some=ONE_FAILS,
        conftest="""
import os

def pytest_collection_modifyitems(items):
    if os.environ["RANK"] == "1":
        del items[1]
""",
    )
    result = project.ranks(2).require(4, 4)
    assert "number 2 is test_some.py::test_second on rank 0, and test_some.py::test_third on rank 1" in result.out
    assert not list(project.path.glob("first-*"))


@pytest.mark.long
def test_collecting_and_last_failed_behave(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_one_fails=ONE_FAILS)
    collected = project.ranks(2, "--co", "-q").require(0, 0)
    assert collected.out.count("test_one_fails.py::test_second") == 1
    project.ranks(2).require(1, 1)
    again = project.ranks(2, "--lf", "-v").require(1, 1)
    assert "rerun previous 1 failure" in again.out
    assert "1 failed" in again.out


@pytest.mark.long
def test_a_group_of_the_users_is_used_and_kept(tmp_path: Path) -> None:
    project = make_project(
        tmp_path,
        conftest="""
import torch.distributed as dist

dist.init_process_group("gloo")

def pytest_unconfigure():
    assert dist.is_initialized()
    print("still there", flush=True)
    dist.destroy_process_group()
""",
        test_save="""
def test_save(ckpt_save):
    ckpt_save(mode="sync")
""",
    )
    result = project.ranks(2, "-s")
    assert result.statuses == [0, 0], "\n".join(result.outs)
    assert [out.count("still there") for out in result.outs] == [1, 1]


@pytest.mark.long
def test_srun_is_known_by_its_environment(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_save="def test_save(ckpt_save):\n    ckpt_save(mode='sync')\n")
    slurm = {
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "RANK": "",
        "MASTER_ADDR": "",
        "MASTER_PORT": "",
    }
    result = project.ranks(2, environment=slurm).require(0, 0)
    assert "ckpt: attached to srun: 2 ranks" in result.out


@pytest.mark.long
def test_other_tests_under_torchrun_are_left_alone(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_own="import os\n\ndef test_own():\n    assert os.environ['RANK'] == '0'\n")
    result = project.run(*TORCHRUN, "--nproc-per-node=2", "-m", "pytest")
    assert result.out.count("test session starts") == 2


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (("--ckpt-ranks=3",), 4, "3 ranks (from --ckpt-ranks) are not the 2 that torchrun started"),
    ],
)
def test_bad_input_is_refused_on_all_ranks(tmp_path: Path, given: tuple[str, ...], status: int, words: str) -> None:
    project = make_project(tmp_path, test_one_fails=ONE_FAILS)
    result = project.ranks(2, *given)
    assert result.statuses == [status, status]
    assert words in result.out


def test_one_node_of_a_slurm_job_says_so(tmp_path: Path) -> None:
    project = make_project(tmp_path, test_one_fails=ONE_FAILS, test_save="def test_save(ckpt_save):\n    pass\n")
    project.environment |= {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "77"}
    result = project.pytest("--co").require(0)
    assert "warning: this node only, of the 4 of Slurm job 77: `srun --ntasks-per-node=N python -m pytest" in result.out


# Several hosts


def run_on(hosts: tuple[Host, Host], project: Project, disks: tuple[str, str], *arguments: str) -> list[str]:
    """Run the suite under an agent on each host, whose `disk` is one of `disks`, and return what they printed."""
    agents = []
    for number, (host, disk) in enumerate(zip(hosts, disks, strict=True)):
        (project.path / disk).mkdir(exist_ok=True)
        agent = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--local-addr={host.address}", "--rdzv-id=ckpt")
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400")
        command = (*agent, *meeting, f"--rdzv-conf=is_host={int(number == 0)}", "-m", "pytest", *DEFAULTS, *arguments)
        agents.append(
            [
                *("env", f"GLOO_SOCKET_IFNAME={host.interface}", "OMP_NUM_THREADS=1"),
                *host.command(*command, mounts={project.target: project.path / disk}),
            ]
        )
    return outputs(agents, project, project._environment("hosts"), status=0)


@pytest.mark.long
def test_suites_pass_on_two_hosts_with_a_shared_and_with_separate_folders(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    with two_hosts() as hosts:
        began = time.time()
        shared, other = run_on(hosts, project, ("one", "one"), *SUITE, "--benchmark-json=result.json")
        assert "4 ranks on 2 hosts: 0 = " in shared
        assert "is shared by 2 hosts" in shared
        assert "test session starts" not in other
        rows = json.loads((project.path / "result.json").read_text())["benchmarks"]
        records = [row["extra_info"]["ckpt"] for row in rows]
        assert {tuple(record["hosts"]) for record in records} == {(0, 0, 1, 1)}
        assert all(record["scenario"]["options"]["hosts"] == 2 for record in records)
        assert all(0 < one["save_s"] < time.time() - began for record in records for one in record["rounds"])
        assert all(one["clock_error_s"] < 1 for record in records for one in record["rounds"])

        separate, _ = run_on(hosts, project, ("first", "second"), *SUITE)
        assert "is a local disk on each of 2 hosts" in separate
        assert "cannot be loaded from one node" in separate
    for disk in ("one", "first", "second"):
        assert os.listdir(project.path / disk) == []


# What is decided, without any rank


def hello(rank: int, *tests: str, errors: int = 0) -> Hello:
    return Hello(rank=rank, host="h", place="0", kernel="", pid=1, status_file="", tests=list(tests), errors=errors)


def test_first_difference_between_collections_is_named() -> None:
    assert collection_difference([hello(0, "a", "b"), hello(1, "a", "b"), hello(2, "a", "b")]) is None
    missing = collection_difference([hello(0, "a", "b"), hello(1, "a", "b"), hello(2, "a")])
    assert missing is not None
    assert "number 2 is b on rank 0, and none on rank 2" in missing
    errors = collection_difference([hello(0, "a"), hello(1, "a", errors=1)])
    assert errors is not None
    assert "rank 1 (on h) had 1 error while it collected tests, and rank 0 0" in errors


def outcome(kind: str, text: str = "", taken: bool = False) -> Outcome:
    return Outcome(at="t", kind=kind, text=text, taken=taken)


def test_a_ranks_own_reason_goes_before_what_it_was_taken_along_by() -> None:
    passed, taken = outcome("passed"), outcome("failed", "rank 0 waited", taken=True)
    assert joint_outcome({0: passed, 1: passed}) == ("passed", "", [])
    assert joint_outcome({0: taken, 1: outcome("skipped", "why")}) == ("skipped", "rank 1 skipped: why", [1])
    assert joint_outcome({0: taken, 1: outcome("failed", "why")}) == ("failed", "rank 1 failed: why", [1])
    assert joint_outcome({0: outcome("skipped", "a"), 1: outcome("failed", "b")}) == ("failed", "rank 1 failed: b", [1])
    assert joint_outcome({0: outcome("failed", "a"), 1: outcome("lost", "gone")}) == ("failed", "rank 0 failed: a", [0])
    assert joint_outcome({0: passed, 1: outcome("lost", "gone")}) == ("failed", "rank 1 failed: gone", [1])
    dead = outcome("lost", "rank 1 died in phase 'save'")
    assert joint_outcome({0: passed, 1: dead}) == ("failed", "rank 1 died in phase 'save'", [1])
    same = outcome("failed", "a")
    assert joint_outcome({0: same, 1: same, 2: passed}) == ("failed", "ranks 0, 1 failed: a", [0, 1])
    assert joint_outcome({0: passed, 1: outcome("xfailed", "known")}) == ("xfailed", "rank 1 xfailed: known", [1])
