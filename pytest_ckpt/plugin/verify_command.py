"""`pytest-ckpt verify`: is the checkpoint in a folder complete, and are its bytes those that were written?"""

from __future__ import annotations

import argparse
from typing import Any

from pytest_ckpt.errors import SettingError

DAMAGED = 1
UNUSABLE = 4
"""Exit statuses beside 0, complete: the checkpoint is not; there is none that could be verified."""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command's parser."""
    verifying = verbs.add_parser(
        "verify",
        help="say whether a saved checkpoint is complete and undamaged, from its folder alone",
        epilog="exit status: 0 complete, 1 damaged or incomplete, 4 no checkpoint that can be verified",
    )
    verifying.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="folder that holds .metadata")
    verifying.add_argument("--json", action="store_true", help="all that was found, as JSON")
    verifying.add_argument("-v", "--verbose", action="store_true", help="every problem, not only the first 20")
    verifying.add_argument("--cold", action="store_true", help="read from the storage, not from the page cache")
    verifying.add_argument(
        "--ignore-times",
        action="store_true",
        help="files changed in place after .metadata are a warning: you know that a repair or touch changed them",
    )
    verifying.add_argument(
        "--threads", type=int, metavar="N", help="how many read at once; default: the processors, at most 8"
    )
    verifying.add_argument(
        "--allowed", action="store_true", help="print the names that a .metadata may have; others are refused"
    )
    verifying.set_defaults(do=_verify)


def _verify(options: argparse.Namespace) -> int:
    from pytest_ckpt.accept.metadata_file import allowed_names
    from pytest_ckpt.accept.verify import UNUSABLE as UNUSABLE_OUTCOMES
    from pytest_ckpt.accept.verify import verify
    from pytest_ckpt.report.verification import verification_json, verification_lines

    if options.allowed:
        print("\n".join(allowed_names()))
        return 0
    if options.checkpoint is None:
        raise SettingError("give the folder of a checkpoint, as in `pytest-ckpt verify /mnt/nvme/step-1000`")
    if options.threads is not None and options.threads < 1:
        raise SettingError(f"{options.threads} threads (from --threads) cannot read; write 1 or more")
    found = verify(options.checkpoint, threads=options.threads, cold=options.cold, ignore_times=options.ignore_times)
    if options.json:
        print(verification_json(found))
    else:
        print("\n".join(verification_lines(found, verbose=options.verbose)))
    if found.is_complete:
        return 0
    return UNUSABLE if found.outcome in UNUSABLE_OUTCOMES else DAMAGED
