"""The command `pytest-ckpt`, for those who have no checkout."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest

import pytest_ckpt
from pytest_ckpt.errors import SettingError
from pytest_ckpt.plugin import baseline_command, verify_command
from pytest_ckpt.report.explain import explain_lines, read_records
from pytest_ckpt.target.clean import clean
from pytest_ckpt.target.interface import Leftover
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import parse_target
from pytest_ckpt.units import format_bytes, parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 4 for input that cannot be used, as pytest has it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["run"] and not {"-h", "--help"} & set(given[1:2]):
            return _run(given[1:])  # what follows is pytest's to parse
        options = _parser().parse_args(given)
        status = int(options.do(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `pytest-ckpt ... | head`: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SettingError as error:
        print(f"pytest-ckpt: {error}", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pytest-ckpt", description=pytest_ckpt.__doc__)
    parser.add_argument("--version", action="version", version=f"pytest-ckpt {pytest_ckpt.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    run = verbs.add_parser(
        "run",
        help="benchmark saves into TARGET; further arguments go to pytest",
        usage="pytest-ckpt run [LABEL=]PATH ... [PYTEST OPTION ...]",
        epilog="for example: pytest-ckpt run nvme=/mnt/nvme --ckpt-model=llama3-8b --benchmark-autosave; "
        "all options: pytest --help, group ckpt",
    )
    run.add_argument("path", nargs="+", metavar="[LABEL=]PATH", help="folder to save into")

    explaining = verbs.add_parser("explain", help="say where the time went in a result file, and what to do")
    explaining.add_argument("file", nargs="?", metavar="RUN.json", help="default: the last run in this folder")
    explaining.add_argument("-v", "--verbose", action="store_true", help="all findings, probes and ranks")
    explaining.set_defaults(do=_explain)

    probing = verbs.add_parser("probe", help="measure TARGET without saving, beside what misleads people")
    probing.add_argument("target", metavar="[LABEL=]PATH", help="folder to measure")
    probing.add_argument("--ranks", type=int, default=2, metavar="N", help="processes that write at once; default: 2")
    probing.add_argument("--size", default="2GiB", metavar="SIZE", help="most bytes of each probe; default: 2GiB")
    probing.add_argument("--checkpoint", metavar="DIR", help="a saved checkpoint, to be copied as cp -r does")
    probing.set_defaults(do=_probe)

    identifying = verbs.add_parser("hardware", help="print the hardware id of TARGET, and the facts it is made of")
    identifying.add_argument("target", nargs="?", metavar="[LABEL=]PATH", help="default: pytest's temporary root")
    identifying.add_argument("--json", action="store_true", help="id and facts as JSON")
    identifying.set_defaults(do=_hardware)

    baseline_command.add_parser(verbs)
    verify_command.add_parser(verbs)

    cleaning = verbs.add_parser("clean", help="remove what killed runs left in TARGET, and nothing else")
    cleaning.add_argument("target", metavar="PATH", help="folder that was a target")
    cleaning.add_argument("--kept", action="store_true", help="remove also what --ckpt-keep kept")
    cleaning.set_defaults(do=_clean)
    return parser


def _run(arguments: list[str]) -> int:
    # Options follow the targets: `--ckpt-model NAME PATH` cannot be told from an option without a value.
    paths = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not paths:
        raise SettingError(
            "write the folder to save into first, then options of pytest, as in "
            "`pytest-ckpt run /mnt/nvme --ckpt-rounds=4`"
        )
    targets = [f"--ckpt-target={path}" for path in paths]
    # A process of its own: pytest wants to load its plugins, this package among them, itself.
    command = [sys.executable, "-m", "pytest", "--pyargs", "pytest_ckpt.suites", *targets]
    sys.stdout.flush()
    os.execv(command[0], command + arguments[len(paths) :])


def _explain(options: argparse.Namespace) -> int:
    path = Path(options.file) if options.file else Path(".pytest_cache/d/ckpt/last.json")
    if not options.file and not path.exists():
        raise SettingError(f"there is no last run in this folder ({path} is missing); give a result file")
    for name, record in read_records(path):
        print("\n".join(explain_lines(record, name=name, verbose=options.verbose)))
    return 0


def _probe(options: argparse.Namespace) -> int:
    from pytest_ckpt.plugin.probe import probe_target

    try:
        size = parse_bytes(options.size)
    except ValueError as error:
        raise SettingError(f"{error} (from --size)") from error
    if options.ranks < 1:
        raise SettingError(f"{options.ranks} ranks (from --ranks) cannot write; write 1 or more")
    if options.checkpoint is not None and not os.path.isdir(options.checkpoint):
        raise SettingError(f"checkpoint {options.checkpoint!r} (from --checkpoint) is no folder; give a saved one")
    target = open_target(parse_target(options.target, "pytest-ckpt probe"))
    for line in probe_target(target, options.ranks, size, options.checkpoint):
        print(line, flush=True)
    return 0


def _hardware(options: argparse.Namespace) -> int:
    from pytest_ckpt.plugin.hardware import hardware_lines

    print("\n".join(hardware_lines(options.target, options.json)))
    return 0


def _clean(options: argparse.Namespace) -> int:
    target = open_target(parse_target(options.target, "pytest-ckpt clean"))
    target.check()
    result = clean(target.location, include_kept=options.kept)
    for removed in result.removed:
        print(f"removed {_described(removed)}")
    for left in result.left:
        print(f"left    {_described(left)}: {left.detail}")
    freed = sum(removed.bytes for removed in result.removed)
    print(f"{len(result.removed)} removed, {format_bytes(freed)} freed, {len(result.left)} left in {target.location}")
    return 0


def _described(found: Leftover) -> str:
    made = f", made {found.created:%Y-%m-%d %H:%M} UTC" if found.created else ""
    return f"{found.path} ({format_bytes(found.bytes)}{made}, {found.state})"


if __name__ == "__main__":
    sys.exit(main())
