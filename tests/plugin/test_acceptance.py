"""An acceptance run, as its user sees it: the table, what fails it, and what it leaves to be read by others."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from pytest_ckpt.accept.power_cut import why_no_power_cut

from .project import SUITE, Project, Result

ACCEPTANCE = (*SUITE, "-m", "ckpt_acceptance")
FEW = "-k=its_own_step or while_training_goes_on or never_stepped"
OWN_STEP = "each checkpoint is of its own step"
ONE_STEP = "a checkpoint is of one step while training goes on"
NEVER_STEPPED = "an optimizer that never stepped gets all of its state"

ZEROES = """
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

class Zeroes(FileSystemWriter):
    def write_data(self, plan, planner):
        return super().write_data(plan, Zero(planner))

class Zero:
    def __init__(self, planner):
        self.planner = planner

    def resolve_data(self, item):
        data = self.planner.resolve_data(item)
        return torch.zeros_like(data) if isinstance(data, torch.Tensor) else data

def zeroes(path):
    return Zeroes(path)
"""

# As someone writes it who has read the documentation of StorageWriter and no code of this project.
STRANGER = """
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

class Plain(StorageWriter):
    def __init__(self, path):
        self.path = Path(path)

    def reset(self, checkpoint_id=None):
        self.path = Path(checkpoint_id or self.path)

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        pass

    def prepare_local_plan(self, plan):
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def write_data(self, plan, planner):
        name, written, done = f"rank{torch.distributed.get_rank()}.bin", [], Future()
        with open(self.path / name, "wb") as file:
            for item in plan.items:
                begin, data = file.tell(), planner.resolve_data(item)
                if item.type is WriteItemType.BYTE_IO:
                    file.write(data.getbuffer())
                else:
                    torch.save(data.detach().cpu().clone(), file)
                size = file.tell() - begin
                written.append(WriteResult(item.index, size, _StorageInfo(name, begin, size)))
        done.set_result(written)
        return done

    def finish(self, metadata, results):
        metadata.storage_data = {one.index: one.storage_data for rank in results for one in rank}
        with open(self.path / ".metadata", "wb") as file:
            pickle.dump(metadata, file)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

def plain(path):
    return Plain(path)
"""


def outcomes(project: Project) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the file of the last run says, by promise and scenario."""
    file = json.loads((project.path / ".pytest_cache/d/ckpt/acceptance.json").read_text())
    assert file["format"] == 1
    return {(one["promise"], one["scenario"]): one for one in file["promises"]}


@pytest.fixture(scope="module")
def run(module_project: Project) -> Result:
    return module_project.pytest(*ACCEPTANCE, FEW, "--junitxml=junit.xml")


def test_run_is_green_on_a_healthy_machine_and_ends_with_the_table(run: Result, module_project: Project) -> None:
    run.require(0)
    run.lines.fnmatch_lines(
        [
            "*- acceptance -*",
            "promise *disk-r2-sync *disk-r2-async",
            f"{ONE_STEP} *n/a *held",
            f"{OWN_STEP} *held *held",
            f"{NEVER_STEPPED} *known",
        ]
    )
    run.lines.fnmatch_lines(
        [
            "known of DCP: optimizer-not-initialised: *",
            "  it means:  *",
            "  live with: *get_state_dict*",
            "  seen:      0 of 2 entries were loaded, without an error  [[]disk-r2-sync]",
            f"not applicable: {ONE_STEP}: training stands still while a sync save runs  [[]disk-r2-sync]",
            "3 promises, put to the test 5 times in 2 scenarios: 3 held, 1 known of DCP, 1 not applicable",
            f"promises of this run: {module_project.path}/.pytest_cache/d/ckpt/acceptance.json",
        ]
    )


def test_results_are_a_file_for_programs(run: Result, module_project: Project) -> None:
    found = outcomes(module_project)
    assert {place: one["outcome"] for place, one in found.items()} == {
        (ONE_STEP, "disk-r2-sync"): "not applicable",
        (ONE_STEP, "disk-r2-async"): "held",
        (OWN_STEP, "disk-r2-sync"): "held",
        (OWN_STEP, "disk-r2-async"): "held",
        (NEVER_STEPPED, "disk-r2-sync"): "known",
    }
    assert found[NEVER_STEPPED, "disk-r2-sync"]["known"] == ["optimizer-not-initialised"]
    assert found[ONE_STEP, "disk-r2-sync"]["why"] == "training stands still while a sync save runs"
    assert found[OWN_STEP, "disk-r2-sync"]["seconds"] > 0


def test_junit_has_a_case_and_its_outcome_for_each(run: Result, module_project: Project) -> None:
    suite = ElementTree.parse(module_project.path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "0", "1")
    told = {
        str(case.get("name")): [p.get("value") for p in case.iter("property") if p.get("name") == "ckpt promise"]
        for case in suite.iter("testcase")
    }
    assert len(told) == 5
    assert sorted(str(value) for value in told.values()) == [
        *["['held']"] * 3,
        "['known']",
        "['not applicable']",
    ]


def test_what_dcp_is_known_for_fails_where_that_was_asked_for(project: Project) -> None:
    done = project.pytest(
        *ACCEPTANCE, "-k=never_stepped", "--ckpt-mode=sync", "--ckpt-fail-on=known-dcp", "--junitxml=junit.xml"
    ).require(1)
    done.lines.fnmatch_lines(
        [
            "known of DCP, which --ckpt-fail-on=known-dcp makes a failure: optimizer-not-initialised: 0 of 2 entries *",
            f"{NEVER_STEPPED} *BROKEN",
            f"broken: {NEVER_STEPPED}: known of DCP*",
            "known of DCP: optimizer-not-initialised: *",
            "1 promise, put to the test 1 time in 1 scenario: 1 broken",
        ]
    )
    assert outcomes(project)[NEVER_STEPPED, "disk-r2-sync"]["outcome"] == "broken"
    assert ElementTree.parse(project.path / "junit.xml").getroot()[0].get("failures") == "1"


def test_broken_promise_fails_its_test_with_what_is_wrong_and_no_other(project: Project) -> None:
    project.write("own.py", ZEROES)
    done = project.pytest(
        *ACCEPTANCE, "-k=its_own_step or before_the_save", "--ckpt-mode=sync", "--ckpt-writer=own:zeroes"
    ).require(1)
    done.lines.fnmatch_lines(
        [
            f"{OWN_STEP} *BROKEN",
            "a load before the save is done fails *held",
            f"broken: {OWN_STEP}: what was loaded is not what was saved: *weights*  [[]disk-r2-sync]",
            "*1 failed, 1 passed*",
        ]
    )
    assert outcomes(project)[OWN_STEP, "disk-r2-sync"]["outcome"] == "broken"


def test_writer_that_is_none_is_one_sentence_and_exit_status_4(project: Project) -> None:
    project.write("own.py", "def none(path):\n    return 3\n")
    done = project.pytest(
        *ACCEPTANCE, "-k=its_own_step", "--ckpt-mode=sync", "--ckpt-writer=own:none", "-p", "no:cacheprovider"
    ).require(4)
    done.lines.fnmatch_lines(
        [
            "*writer own:none returned 'int'; it must return a torch*StorageWriter*",
            f"{OWN_STEP} *n/a",
            f"not applicable: {OWN_STEP}: refused: writer own:none returned *",
        ]
    )
    assert "Traceback" not in done.out
    assert "promises of this run" not in done.out


def test_test_of_ones_own_is_a_promise_too(project: Project) -> None:
    project.write(
        "test_own.py",
        "from pytest_ckpt.accept.states import DictSpec, TensorSpec\n\n"
        "def test_my_state_comes_back(ckpt_acceptance):\n"
        "    spec = DictSpec({'weight': TensorSpec(shape=(100, 3), shard=0)})\n"
        "    ckpt_acceptance.require_equal(ckpt_acceptance.save(spec))\n\n"
        "def test_not_here(ckpt_acceptance):\n"
        "    ckpt_acceptance.not_applicable('not on a Monday')\n",
    )
    done = project.pytest("test_own.py", "--ckpt-mode=sync").require(0)
    done.lines.fnmatch_lines(
        [
            "my state comes back *held",
            "not here *n/a",
            "not applicable: not here: not on a Monday *",
            "*2 promises, *",
        ]
    )


def through_the_suite(project: Project, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Run all of acceptance with a writer that breaks some of it, which must leave nothing."""
    monkeypatch.setattr(f"{__package__}.project.DEADLINE_S", 600)
    done = project.pytest(*ACCEPTANCE, *options)
    assert (done.status, done.in_target, done.processes) == (1, [], []), done.out
    return done


@pytest.mark.long
@pytest.mark.timeout(700)
def test_strangers_writer_goes_through_the_whole_suite_with_one_option(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never syncs, and writes over what is there: that, and only that, is found, and is its own and not DCP's."""
    project.write("stranger.py", STRANGER)
    done = through_the_suite(project, monkeypatch, "--ckpt-writer=stranger:plain")
    found = outcomes(project)
    broken = {promise for (promise, _), one in found.items() if one["outcome"] == "broken"}
    expected = {
        "what a save reported as done is synced",
        "a failed overwrite is the old checkpoint or none",
        *([] if why_no_power_cut() else ["a power cut after a save takes nothing"]),
    }
    assert broken == expected, done.out
    assert {one["outcome"] for (promise, _), one in found.items() if promise in expected} <= {"broken"}
    held = {promise for (promise, _), one in found.items() if one["outcome"] == "held"}
    assert len(held) > 15, done.out


OWN_FORMAT = """
import os
import pickle

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter


class Writer(FileSystemWriter):
    def finish(self, metadata, results):
        super().finish(metadata, results)
        os.rename(self.path / ".metadata", self.path / "index")


class Reader(FileSystemReader):
    def read_metadata(self):
        with open(self.path / "index", "rb") as file:
            metadata = pickle.load(file)
        metadata.storage_meta.load_id = self.load_id
        return metadata


def writer(path):
    return Writer(path)


def reader(path):
    return Reader(path)
"""


@pytest.mark.long
@pytest.mark.timeout(700)
def test_format_with_a_reader_of_its_own_goes_through_the_suite_too(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the folder could tell is not applicable; loads tell damage; its unsynced index is found."""
    project.write("own.py", OWN_FORMAT)
    through_the_suite(project, monkeypatch, "--ckpt-mode=sync", "--ckpt-writer=own:writer", "--ckpt-reader=own:reader")
    found = {promise: one["outcome"] for (promise, _), one in outcomes(project).items()}
    broken = {promise for promise, outcome in found.items() if outcome == "broken"}
    assert broken == {
        "what a save reported as done is synced",
        *([] if why_no_power_cut() else ["a power cut after a save takes nothing"]),
    }
    assert found["any state comes back bit for bit"] == "held"
    assert found["damage to a file is told: truncated"] == "held"
    assert found["damage to a file is told: flipped"] == "not applicable"
    assert found["a save that reported success is complete on its storage"] == "not applicable"
