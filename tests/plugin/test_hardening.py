"""What users' own code and machines do to a run, each seen once to go wrong."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from .project import SAVING_TEST, SUITE, Project

WRITERS = """
import os, time
from torch.distributed.checkpoint import FileSystemWriter

class BadText(Exception):
    def __str__(self):
        raise ValueError("no text")

def fails_without_text(path):
    raise BadText

def fails_with_surrogate(path):
    raise OSError("no such file: \\udcff")

def not_a_writer(path):
    return path

def elsewhere(path):
    return FileSystemWriter(os.path.join(os.environ["ELSEWHERE"], os.path.basename(path)))

def slower_and_slower(path):
    time.sleep(0 if "0001" in path else 1.5)
    return FileSystemWriter(path)

def list_state(mesh, device):
    return [1]
"""


@pytest.fixture
def own(project: Project) -> Project:
    project.write("own.py", WRITERS)
    return project


@pytest.mark.parametrize(
    ("writer", "cause"),
    [
        ("fails_without_text", "BadText: its message cannot be shown"),
        pytest.param("fails_with_surrogate", r"no such file: \\udcff", marks=pytest.mark.long),
    ],
)
def test_error_that_cannot_be_shown_or_encoded_still_names_rank_and_phase(
    own: Project, writer: str, cause: str
) -> None:
    own.write("test_it.py", f"import own\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync', writer=own.{writer})\n")
    result = own.pytest("--ckpt-probe=off").require(1)
    result.lines.re_match_lines([rf".*rank 0 raised in phase 'save_round > make the writer': .*{cause}"])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("mode='sync', writer=own.not_a_writer", "writer own:not_a_writer returned 'str'; it must return a *"),
        pytest.param(
            "mode='sync', model=own.list_state",
            "model own:list_state returned 'list'; it must return the state dict*",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "mode='sync', writer='own:missing'", "*module 'own' has no function 'missing'", marks=pytest.mark.long
        ),
    ],
)
def test_users_function_that_cannot_be_used_is_one_sentence_and_exit_status_four(
    own: Project, call: str, sentence: str
) -> None:
    own.write("test_it.py", f"import own\ndef test_it(ckpt_save):\n    ckpt_save({call})\n")
    result = own.pytest("--ckpt-probe=off").require(4)
    result.lines.fnmatch_lines([sentence])
    assert "Traceback" not in result.out


@pytest.mark.long
def test_writer_that_saves_elsewhere_is_named_and_its_files_are_left(own: Project, tmp_path: Path) -> None:
    own.environment["ELSEWHERE"] = str(tmp_path)
    own.write("test_it.py", "import own\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync', writer=own.elsewhere)\n")
    result = own.pytest("--ckpt-probe=off").require(1)
    result.lines.re_match_lines([r".*writer own:elsewhere reported success and left nothing at .*0001.*"])
    assert list(tmp_path.glob("0001-*/.metadata"))


@pytest.mark.long
def test_module_of_the_working_folder_named_as_pythons_own_does_not_reach_the_ranks(own: Project) -> None:
    own.write("platform.py", "raise RuntimeError('not Python\\'s platform')\n")
    (own.path / "tests").mkdir()
    own.write("tests/test_it.py", SAVING_TEST)
    own.run("pytest", "tests", f"--ckpt-target={own.target}", "--ckpt-model=llama3-tiny", "--ckpt-probe=off").require(0)


@pytest.mark.long
def test_rounds_stop_when_the_time_is_over_although_the_warm_up_was_fast(own: Project) -> None:
    own.write(
        "test_it.py", "import own\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync', writer=own.slower_and_slower)\n"
    )
    result = own.pytest("--ckpt-rounds=20", "--ckpt-max-time=5s", "--ckpt-probe=off").require(0)
    result.lines.re_match_lines([r".*[45] of 20 rounds: more do not fit the 5\.00 s of --ckpt-max-time"])


@pytest.mark.long
def test_failed_checkpoint_is_kept_although_a_later_scenario_passes(own: Project) -> None:
    own.write(
        "test_it.py",
        """
import own
def test_fails(ckpt_save):
    ckpt_save(mode='sync', writer=own.fails_late)
def test_passes(ckpt_save):
    ckpt_save(mode='sync')
""",
    )
    own.write(
        "own.py",
        WRITERS
        + """
class Late(FileSystemWriter):
    def finish(self, metadata, results):
        raise OSError("planted")

def fails_late(path):
    return Late(path)
""",
    )
    result = own.pytest("--ckpt-keep=failed", "--ckpt-probe=off")
    assert result.status == 1
    assert list(own.target.glob("pytest-ckpt-*/0001-*/*.distcp"))
    result.lines.fnmatch_lines(["kept: *"])


@pytest.mark.long
def test_target_that_is_moved_away_meanwhile_fails_and_gives_no_figures(own: Project) -> None:
    own.write(
        "own.py",
        WRITERS
        + """
def moves_the_target(path):
    if os.environ["RANK"] == "0":
        target = os.path.dirname(os.path.dirname(path))
        os.rename(target, target + ".away")
    time.sleep(1)
    return FileSystemWriter(path)
""",
    )
    own.write(
        "test_it.py", "import own\ndef test_it(ckpt_save):\n    ckpt_save(mode='sync', writer=own.moves_the_target)\n"
    )
    result = own.pytest("--ckpt-probe=off", "--ckpt-ranks=1")
    assert result.status == 1, result.out
    result.lines.re_match_lines([r".*is not the folder any more that this run made: .*unmounted, moved or replaced.*"])
    assert "checkpoint saves" not in result.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_at_start(project: Project, number: signal.Signals) -> None:
    """A signal while ranks are being started ends the session.

    Elastic's own handlers would make an ordinary exception of it: a failed test, and the session would go on. (The
    name is short so that the ranks' sockets fit into the test's folder, where they are looked for.)
    """
    result = project.pytest(
        *SUITE, when=lambda: any(project.temporary.rglob("ckpt-world-*/status0")), send=number
    ).require(2)
    assert result.seconds < 10
    assert "SignalException" not in result.out


@pytest.mark.long
def test_several_signals_in_a_row_do_not_cut_the_cleaning_short(project: Project) -> None:
    command = ["pytest", *SUITE, f"--ckpt-target={project.target}", "--ckpt-model=llama3-tiny", "--ckpt-rounds=200"]
    process = subprocess.Popen(command, cwd=project.path, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not any(project.target.rglob("0003-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(4):
            process.terminate()
            time.sleep(0.1)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "ended by SIGTERM" in out
    assert project.in_target() == []
