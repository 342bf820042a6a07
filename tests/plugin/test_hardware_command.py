"""`pytest-ckpt hardware`, as a person or a script types it, and that a machine keeps its id."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.target.mounts import mount_of

COMMAND = [sys.executable, "-m", "pytest_ckpt.plugin.command", "hardware"]
HOST = "host-b4d9e1"


def run(*arguments: object, before: Sequence[str] = (), status: int = 0, **environment: str) -> str:
    command = [*before, *COMMAND, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def chosen(*arguments: object, **options: Any) -> str:
    return run(*arguments, **options).splitlines()[0]


def unshared(script: str, *arguments: object) -> str:
    """Run the command with `arguments` after `script`, in namespaces of its own for host name and mounts."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can leave the namespaces")
    before = ["unshare", "--uts", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]
    if subprocess.run([*before, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("the namespaces cannot be left here")
    return run(*arguments, before=before)


def test_first_line_is_the_id_alone_and_the_rest_says_why(tmp_path: Path) -> None:
    lines = run(f"disk={tmp_path}").splitlines()
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", lines[0])
    assert lines[1] == "made of:"
    assert any(re.match(r"  target +" + re.escape(f"{tmp_path}; mounted at"), line) for line in lines)


def test_head_that_stops_reading_gets_the_id_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -1', "bash", *COMMAND, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", chosen(tmp_path) + "\n")


def test_default_target_is_the_temporary_root_and_said(tmp_path: Path) -> None:
    printed = run(TMPDIR=str(tmp_path))
    assert f"{tmp_path}, the default: pytest's temporary root" in printed
    assert printed.splitlines()[0] == chosen(tmp_path)


def test_json_holds_the_id_its_rule_and_the_facts(tmp_path: Path) -> None:
    facts = json.loads(run(tmp_path, "--json"))
    assert facts["hardware_id"] == "-".join(row["part"] for row in facts["rule"]) == chosen(tmp_path)
    assert facts["hardware"]["cpus"] == os.sysconf("SC_NPROCESSORS_ONLN")
    assert facts["target"]["location"] == str(tmp_path)
    assert facts["target"]["default"] is False


@pytest.mark.parametrize("target", ["missing", "file"])
def test_target_that_is_no_folder_is_refused(tmp_path: Path, target: str) -> None:
    """A disk that did not mount must not be given the id of the disk below it."""
    (tmp_path / "file").write_text("")
    assert "(from pytest-ckpt hardware) cannot be used" in run(tmp_path / target, status=4)


def test_command_does_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pytest_ckpt.plugin.command import main; "
        f"main(['hardware', {str(tmp_path)!r}]); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True).returncode == 0


def test_another_host_name_gives_the_same_id(tmp_path: Path) -> None:
    printed = unshared(f"hostname {HOST}", tmp_path)
    assert printed.splitlines()[0] == chosen(tmp_path)
    assert HOST not in printed


def test_another_mount_point_gives_the_same_id(tmp_path: Path) -> None:
    for name in ("data", "bound"):
        (tmp_path / name).mkdir()
    printed = unshared(f"mount --bind {tmp_path}/data {tmp_path}/bound", tmp_path / "bound")
    assert f"mounted at {tmp_path}/bound" in printed
    assert printed.splitlines()[0] == chosen(tmp_path)


def test_memory_has_another_id_than_a_disk(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or mount_of(str(tmp_path)).filesystem == "tmpfs":
        pytest.skip("there are not both a disk and /dev/shm here")
    assert chosen(shm) != chosen(tmp_path)
    assert chosen(shm).endswith("-tmpfs")


def test_no_path_host_or_user_is_in_the_id(tmp_path: Path) -> None:
    folder = tmp_path / "pr1v4te-project"
    folder.mkdir()
    found = chosen(folder, USER="us3r-pr1v4te", HOME=str(folder), HOSTNAME=HOST)
    assert "pr1v4te" not in found
    assert f"-{getpass.getuser()}-" not in f"-{found}-"
    assert os.uname().nodename not in found.split("-")
