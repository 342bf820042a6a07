"""What stands for a host's name in a baseline: equal for equal hosts, and not to be guessed from outside."""

from __future__ import annotations

import hashlib
import re
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.new_file import write_new

SALT = ".salt"
_ROUNDS = 200_000
"""Names of hosts are short: each guess shall cost something."""
_HEX = re.compile(r"[0-9a-f]{32,}")


def hash_host(folder: Path, host: str) -> str:
    """Return twelve hexadecimal characters for `host`, by the salt of the baselines in `folder`; made if missing."""
    return _hash(_salt(folder / SALT), host)


def _salt(path: Path) -> str:
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another run was first
                write_new(path, (secrets.token_hex(16) + "\n").encode())
        text = path.read_bytes()[:1000].decode("ascii", errors="replace").strip()
    except OSError as error:
        raise SettingError(
            f"the salt of the baselines, {path}, cannot be read or made: {error.strerror}; "
            "give a folder that can be written, or commit the file that another run made"
        ) from None
    if not _HEX.fullmatch(text):
        raise SettingError(
            f"the salt of the baselines, {path}, is damaged; restore it from git, or keep one side's where two were "
            "merged"
        )
    return text


@cache
def _hash(salt: str, host: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", host.encode(errors="replace"), salt.encode(), _ROUNDS).hex()[:12]
