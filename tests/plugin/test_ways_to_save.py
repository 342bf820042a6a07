"""Modes, options of the writer, engines and training beside the save, as a user asks for them."""

from __future__ import annotations

import importlib.util

import pytest

from .project import SUITE, Project, Result

NO_PROBE = "--ckpt-probe=off"
WRITERS = """
import os
import signal

from torch.distributed.checkpoint.filesystem import FileSystemWriter


def threads(path, thread_count=1):
    return FileSystemWriter(path, thread_count=thread_count)


class Dying(FileSystemWriter):
    def write_data(self, plan, planner):
        os.kill(os.getpid(), signal.SIGKILL)


def dying(path):
    return Dying(path)


class Staging(FileSystemWriter):
    def stage(self, state_dict):
        raise RuntimeError("no memory to stage into")


def staging(path):
    return Staging(path)


class OneFile:
    # An engine as a user would write one: torch.save of what a rank holds.

    def __init__(self, setup):
        self.setup = setup

    def prepare(self, location):
        os.makedirs(location, exist_ok=True)
        self.file = os.path.join(location, f"rank{os.environ['RANK']}.pt")

    def start(self, state_dict):
        import torch

        from pytest_ckpt.save.engine import Pending

        torch.save({key: value.state_dict() for key, value in state_dict.items()}, self.file)
        return Pending(None, None)

    def stored_bytes(self):
        return None

    def load(self, state_dict, location):
        raise NotImplementedError

    def close(self):
        pass


def one_file(setup):
    return OneFile(setup)
"""


@pytest.fixture(scope="module")
def matrix(module_project: Project) -> Result:
    return module_project.pytest(
        *SUITE,
        "-v",
        NO_PROBE,
        "--ckpt-rounds=4",
        "--ckpt-mode=sync",
        "--ckpt-mode=async-process",
        "--ckpt-writer-opt=thread_count=1,4",
        "--ckpt-writer-opt=sync_files=on,off",
    )


def test_options_make_a_matrix_whose_ids_show_what_is_not_as_always(matrix: Result, module_project: Project) -> None:
    matrix.require(0)
    names = {row["name"] for row in module_project.last()["benchmarks"] if not row["name"].endswith(":stall")}
    assert names == {
        f"test_save[disk-llama3-tiny-r2-{mode}-{options}]"
        for mode in ("sync", "async-process")
        for options in ("default", "sync_files=off", "thread_count=4", "thread_count=4,sync_files=off")
    }


def test_options_are_in_the_record_and_do_what_they_say(matrix: Result, module_project: Project) -> None:
    records = [row["extra_info"]["ckpt"] for row in module_project.last()["benchmarks"]]
    for record in records:
        synced = all(taken["synced_files"] > 0 for taken in record["rounds"])
        assert synced == ("sync_files" not in record["scenario"]["options"])
    assert [
        options for options in ({}, {"thread_count": 4}) if any(r["scenario"]["options"] == options for r in records)
    ] == [{}, {"thread_count": 4}]


def test_background_process_is_traced_and_its_start_is_the_first_save(matrix: Result, module_project: Project) -> None:
    rows = [row["extra_info"]["ckpt"] for row in module_project.last()["benchmarks"]]
    background = [record for record in rows if record["scenario"]["mode"] == "async-process"]
    for record in background:
        assert all(taken["traced"] for taken in record["rounds"])
        assert all(taken["phases"]["write"] > 0 for taken in record["rounds"])
        assert record["first_save_s"] > 3 * max(taken["save_s"] for taken in record["rounds"])


def test_mode_that_needs_cuda_is_skipped_with_the_reason(project: Project) -> None:
    done = project.pytest(*SUITE, NO_PROBE, "--ckpt-device=cpu", "--ckpt-mode=async-pinned", "-rs").require(0)
    done.lines.fnmatch_lines(["SKIPPED * mode async-pinned needs CUDA, and the state lives on cpu"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ckpt-mode=asynch"], "unknown mode 'asynch' (from --ckpt-mode); known, nearest first: async, *"),
        (
            ["--ckpt-writer-opt=thread_cont=4"],
            "unknown option of FileSystemWriter 'thread_cont' *: thread_count, *",
        ),
        (["--ckpt-writer-opt=thread_count=0"], "thread_count=0 (from --ckpt-writer-opt) is no whole number above zero"),
        (["--ckpt-writer-opt=sync_files=maybe"], "sync_files=maybe (from --ckpt-writer-opt) is neither on nor off*"),
        (["--ckpt-writer-opt=thread_count"], "writer option 'thread_count' (from --ckpt-writer-opt) sets nothing*"),
        (["--ckpt-writer=FileWriter"], "unknown writer 'FileWriter' *nearest first: FileSystemWriter, *"),
        (["--ckpt-engine=dpc"], "unknown engine 'dpc' *nearest first: dcp, *"),
        (["--ckpt-engine=torch-checkpointing", "--ckpt-writer-opt=thread_count=4"], "*engine torch-checkpointing*"),
        (["--ckpt-preset=nemo"], "unknown preset 'nemo' (from --ckpt-preset); known, nearest first: torchtitan"),
        (["--ckpt-train=many"], "'many' (from --ckpt-train) is no size of a training step*; or on, or off"),
        (["--ckpt-writer=HuggingFaceStorageWriter"], "*takes tensors alone*--ckpt-state=weights-bf16"),
        (["--ckpt-train=on", "--ckpt-model=ways:state"], "--ckpt-train=1x64 needs a model whose loss is known*"),
        (["--ckpt-writer=ways:threads", "--ckpt-writer-opt=colour=red"], "*ways:threads takes no option 'colour'*"),
        pytest.param(
            ["--ckpt-writer=ways:nothing"], "*module 'ways' has no function 'nothing'*", marks=pytest.mark.long
        ),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_status_4(
    project: Project, options: list[str], sentence: str
) -> None:
    project.write("ways.py", WRITERS + "\n\ndef state(mesh, device):\n    return {}\n")
    done = project.pytest(*SUITE, NO_PROBE, *options).require(4)
    done.lines.fnmatch_lines([f"*{sentence}"])
    assert "Traceback" not in done.out


@pytest.mark.long
def test_own_writer_gets_the_options_as_arguments(project: Project) -> None:
    project.write("ways.py", WRITERS)
    done = project.pytest(
        *SUITE, NO_PROBE, "--ckpt-mode=sync", "--ckpt-writer=ways:threads", "--ckpt-writer-opt=thread_count=2,3", "-v"
    ).require(0)
    done.lines.fnmatch_lines(["*sync-thread_count=2]*", "*sync-thread_count=3]*"])


@pytest.mark.long
def test_background_process_that_dies_fails_its_test_with_the_cause_and_the_next_gets_a_new_world(
    project: Project,
) -> None:
    project.write("ways.py", WRITERS)
    project.write(
        "test_dying.py",
        "import ways\n\n"
        "def test_dies(ckpt_save):\n    ckpt_save(mode='async-process', writer=ways.dying)\n\n"
        "def test_stages(ckpt_save):\n    ckpt_save(mode='async', writer=ways.staging)\n\n"
        "def test_next(ckpt_save):\n    ckpt_save(mode='async-process')\n",
    )
    done = project.pytest("test_dying.py", NO_PROBE).require(1)
    assert "1 passed" in done.out
    assert "2 failed" in done.out
    assert "ackground process is dead" in done.out
    assert "no memory to stage into" in done.out


def test_own_engine_stands_in_one_table_with_dcp(project: Project) -> None:
    project.write("ways.py", WRITERS)
    known = "torch-checkpointing" if importlib.util.find_spec("torch_checkpointing") else "dcp"
    project.write(
        "test_engines.py",
        "import ways\n\n"
        "def test_engines(ckpt_save):\n"
        "    own = ckpt_save(mode='sync', engine=ways.one_file, name='own')\n"
        f"    known = ckpt_save(mode='sync', engine={known!r}, name='known')\n"
        "    dcp = ckpt_save(mode='sync', name='dcp')\n"
        "    assert own.logical_bytes == known.logical_bytes == dcp.logical_bytes\n",
    )
    done = project.pytest("test_engines.py", NO_PROBE).require(0)
    done.lines.fnmatch_lines(["*ways:one_file*", f"*{known}*", "*dcp*"])


def test_preset_of_torchtitan_is_its_three_modes(project: Project) -> None:
    done = project.pytest(*SUITE, NO_PROBE, "--ckpt-preset=torchtitan", "--collect-only", "-q").require(0)
    done.lines.fnmatch_lines(["*r2-sync]", "*r2-async]", "*r2-async-pinned]"])


@pytest.mark.long
def test_training_beside_the_save_shows_what_a_save_costs(project: Project) -> None:
    done = project.pytest(
        *SUITE, NO_PROBE, "--ckpt-rounds=4", "--ckpt-train=1x16", "--ckpt-mode=sync", "--ckpt-mode=async-staged"
    ).require(0)
    done.lines.fnmatch_lines(["*training*cost*"])
    records = {
        row["extra_info"]["ckpt"]["scenario"]["mode"]: row["extra_info"]["ckpt"] for row in project.last()["benchmarks"]
    }
    assert {record["scenario"]["options"]["train"] for record in records.values()} == {"1x16"}
    for taken in records["sync"]["rounds"]:
        assert taken["train"] is None
        assert taken["effective_cost_s"] == taken["stall_s"] == taken["save_s"]
    for taken in records["async-staged"]["rounds"]:
        assert len(taken["train"]["step_s_during"]) >= 1
        assert taken["train_slowdown"] == taken["train"]["slowdown"]
        assert taken["effective_cost_s"] == pytest.approx(taken["stall_s"] + taken["train"]["lost_s"])
        assert taken["stall_s"] <= taken["save_s"]


@pytest.mark.long
def test_save_that_begins_while_another_is_under_way_waits_and_that_is_stall(project: Project) -> None:
    done = project.pytest(
        *SUITE, NO_PROBE, "--ckpt-rounds=4", "--ckpt-overlap", "--ckpt-mode=async", "--ckpt-mode=async-process"
    ).require(0)
    done.lines.fnmatch_lines(["*overlap=on*"])
    for row in project.last()["benchmarks"]:
        record = row["extra_info"]["ckpt"]
        assert record["scenario"]["options"] == {"overlap": True}
        for taken in record["rounds"]:
            assert 0 < taken["earlier_wait_s"] < taken["stall_s"] <= taken["save_s"]
            assert taken["phases"]["earlier"] > 0
            assert sum(taken["phases"].values()) == pytest.approx(taken["save_s"])


@pytest.mark.long
def test_safetensors_of_weights_alone_are_written_by_every_rank(project: Project) -> None:
    pytest.importorskip("safetensors")
    done = project.pytest(
        *SUITE,
        NO_PROBE,
        "--ckpt-mode=sync",
        "--ckpt-state=weights-bf16",
        "--ckpt-writer=HuggingFaceStorageWriter",
        "--ckpt-writer-opt=enable_consolidation=off,on",
    )
    done.require(0)
    assert "2 passed" in done.out
