"""`verify(location)`: is this folder a complete checkpoint, and are its bytes those that were written?

From the folder alone: without torch, a process group, or anything that the save left elsewhere. Nothing is written, no
code of the checkpoint runs, and no link leads out of the folder.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence

from pytest_ckpt.accept.archive import CRC32
from pytest_ckpt.accept.checkpoint_folder import CheckpointFolder
from pytest_ckpt.accept.coverage import find_flaw
from pytest_ckpt.accept.entries import Read, read_entries
from pytest_ckpt.accept.listing import (
    DATA_SUFFIXES,
    INDEX,
    Entry,
    Listed,
    list_pickled,
    list_safetensors,
    pickled_lists,
    problem,
)
from pytest_ckpt.accept.metadata_file import OtherFormat, RefusedMetadata, UnreadableMetadata
from pytest_ckpt.accept.times import written_over
from pytest_ckpt.errors import CkptError
from pytest_ckpt.model.share import PARTIAL, PARTIAL_SIGN
from pytest_ckpt.records import Orphan, Problem, Verification
from pytest_ckpt.units import format_bytes, format_rate, format_seconds

KINDS = {
    "refused-metadata": "its list names a class that no checkpoint needs, and was not loaded",
    "other-format": "its list is not one that DCP's own writers leave",
    "no-checkpoint": "the folder holds no checkpoint of DCP",
    "partial": "it is what some ranks of a bigger job would write, by --ckpt-share",
    "unreadable-metadata": "its list cannot be read",
    "incomplete": "data files are there, and no list of them: the save did not end",
    "mix": "data files were changed in place after its list: by a later save that did not end, touch or a repair",
    "outside": "a file leads out of its folder",
    "missing-file": "a file that it lists is not there",
    "empty-file": "a file that it lists has no bytes",
    "truncated": "a file ends before what it should hold",
    "unreadable": "the storage does not give back a file",
    "hole": "a part of it lies nowhere",
    "overlap": "two of its parts claim the same elements",
    "size-differs": "an entry or file is longer or shorter than its shape and dtype say",
    "corrupt-header": "the structure of an entry is damaged",
    "corrupt": "an entry differs from its checksum",
    "times": "files are newer than the list, which a copy or other damage can explain",
    "unknown-end": "nothing tells whether a last file is missing",
}
"""What can be wrong, the gravest first; the last two only warn."""

OUTCOMES = ("ok", "no-checksum", *tuple(KINDS)[:-2])
"""What `Verification.outcome` can be. `no-checksum`: complete, and some entries carry no checksum."""

UNUSABLE = frozenset({"refused-metadata", "other-format", "no-checkpoint", "partial"})
"""Outcomes that say nothing of a checkpoint: the input is not one that can be verified."""

_RANK = {kind: place for place, kind in enumerate(KINDS)}
_LEFTOVER = re.compile(r"(__\d+)?\.metadata(\.tmp)?")


def verify(
    location: str, *, threads: int | None = None, cold: bool = False, ignore_times: bool = False
) -> Verification:
    """Return what the checkpoint in the folder `location` is worth; all of its data files are read.

    `threads`: how many read at once; None: as many as there are processors, at most 8. `cold`: the page cache forgets
    each data file first, so that the bytes come from the storage. `ignore_times`: data files that were changed in place
    after `.metadata` are a warning and no `mix`, for the one who knows what changed them. Raises `SettingError` where
    `location` is no folder that can be read.
    """
    began = time.monotonic()
    folder = CheckpointFolder(location)
    fetched = _fetched_bytes()
    if _is_partial(folder):
        text = f"a part of a checkpoint, as --ckpt-share writes it (see {PARTIAL}): most of each tensor is missing"
        return _not_listed(folder, "partial", text, began)
    try:
        names = pickled_lists(folder)
        listed = list_pickled(folder, names) if names else list_safetensors(folder)
    except (UnreadableMetadata, RefusedMetadata, OtherFormat) as error:
        return _not_listed(folder, _KIND_OF[type(error)], str(error), began)
    if listed is None:
        return _not_listed(folder, *_without_list(folder), began)
    read = read_entries(folder, listed.entries, threads, cold)
    problems = [*listed.problems, *_uncovered(listed), *read.problems]
    warnings = list(listed.warnings)
    damaged = {one.file for one in problems}
    for metadata_file, data_files in listed.referring.items():
        if metadata_file == INDEX:  # written first or last, as its writer likes
            continue
        found = written_over(folder, metadata_file, data_files, damaged, ignore_times)
        if found is not None:
            (problems if found.kind == "mix" else warnings).append(found)
    now = _fetched_bytes()
    fetched_bytes = None if fetched is None or now is None else now - fetched
    return _verification(folder, listed, read, problems, warnings, began, fetched_bytes)


_KIND_OF = {
    UnreadableMetadata: "unreadable-metadata",
    RefusedMetadata: "refused-metadata",
    OtherFormat: "other-format",
}


def _is_partial(folder: CheckpointFolder) -> bool:
    if PARTIAL not in folder.files:
        return False
    try:
        with folder.open(PARTIAL) as descriptor:
            return os.read(descriptor, len(PARTIAL_SIGN)) == PARTIAL_SIGN.encode()
    except (OSError, CkptError):  # of a file that cannot be read nothing is known
        return False


def _without_list(folder: CheckpointFolder) -> tuple[str, str]:
    data = [name for name in folder.files if name.endswith(DATA_SUFFIXES)]
    left = sorted(name for name in folder.files if _LEFTOVER.fullmatch(name) and name.endswith(".tmp"))
    below = sorted(name.rpartition("/")[0] for name in folder.files if name.endswith("/.metadata"))
    if below and not left:
        return "no-checkpoint", f"has no .metadata; folders in it do: {', '.join(below[:5])}"
    if not data and not left:
        return "no-checkpoint", "holds neither .metadata nor a data file of DCP"
    held = f"{len(data)} data files, {format_bytes(sum(folder.files[name].bytes for name in data))}"
    if left:
        size = folder.files[left[0]].bytes
        return (
            "incomplete",
            f"has {left[0]} ({size} bytes) and no .metadata: the save ended before it was in place; {held}",
        )
    why = "the save did not end, or a copy left it out (`cp DIR/*` does)"
    return "incomplete", f"has no .metadata, which DCP writes last: {why}; {held}"


def _not_listed(folder: CheckpointFolder, kind: str, text: str, began: float) -> Verification:
    found = problem(kind, "", "", text)
    word = {"incomplete": "incomplete", "unreadable-metadata": "damaged"}.get(kind, "not verified")
    return Verification(
        location=folder.location,
        outcome=kind,
        text=f"{word}: {text}",
        layout="",
        problems=[found],
        folder_bytes=sum(file.bytes for file in folder.files.values()),
        seconds=time.monotonic() - began,
        crc32=CRC32,
    )


def _uncovered(listed: Listed) -> list[Problem]:
    flaws = ((fqn, find_flaw(tensor.size, tensor.chunks)) for fqn, tensor in listed.tensors.items())
    return [problem(flaw.kind, "", fqn, flaw.text) for fqn, flaw in flaws if flaw is not None]


def _unreferred(folder: CheckpointFolder, referred: set[str]) -> tuple[list[Orphan], int]:
    """Return the files that a save left and nothing refers to, and how many files are none of a save's."""
    suffixes = (*DATA_SUFFIXES, *{"." + name.rpartition(".")[2] for name in referred if "." in name})
    left = sorted(folder.files.keys() - referred)
    orphans = [name for name in left if name.endswith(suffixes) or _LEFTOVER.fullmatch(name)]
    return [Orphan(file=name, bytes=folder.files[name].bytes) for name in orphans], len(left) - len(orphans)


def _verification(
    folder: CheckpointFolder,
    listed: Listed,
    read: Read,
    problems: list[Problem],
    warnings: list[Problem],
    began: float,
    fetched_bytes: int | None,
) -> Verification:
    paths = {entry.path for entry in listed.entries}
    orphans, others = _unreferred(folder, paths | listed.referring.keys())
    problems.sort(key=lambda found: (_RANK[found.kind], found.file))
    verdicts = Counter(verdict for _, verdict in read.verdicts)
    seconds = time.monotonic() - began
    outcome = problems[0].kind if problems else "no-checksum" if verdicts["no-checksum"] else "ok"
    stored = sum(length for _, _, length in {(entry.path, entry.start, entry.length) for entry in listed.entries})
    return Verification(
        location=folder.location,
        outcome=outcome,
        text=_sentence(problems, verdicts, read, seconds),
        layout=_layout(listed.entries),
        problems=problems,
        warnings=warnings,
        orphans=orphans,
        entries=len(listed.entries),
        verdicts=dict(verdicts),
        tensors=len(listed.tensors),
        files=len(paths & folder.files.keys()),
        stored_bytes=stored,
        folder_bytes=sum(file.bytes for file in folder.files.values()),
        other_files=others,
        read_bytes=read.read_bytes,
        fetched_bytes=fetched_bytes,
        checked_bytes=read.checked_bytes,
        seconds=seconds,
        crc32=CRC32,
    )


def _layout(entries: Sequence[Entry]) -> str:
    forms = {"safetensors" if entry.form == "raw" else "torch_save" for entry in entries if entry.offsets is not None}
    return "mixed" if len(forms) > 1 else next(iter(forms), "torch_save")


def _sentence(problems: Sequence[Problem], verdicts: Counter[str], read: Read, seconds: float) -> str:
    took = f"in {format_seconds(seconds)} ({format_rate(read.read_bytes / seconds)})" if read.read_bytes else ""
    total = sum(verdicts.values())
    if problems:
        worst = problems[0]
        word = {"mix": "perhaps a mix, not a checkpoint"}.get(worst.kind, f"damaged ({worst.kind})")
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        named = " ".join(filter(None, (worst.file, worst.entry)))
        return f"{word}: {named}{' ' * bool(named)}{worst.text}{more}"
    done = f"{format_bytes(read.read_bytes)} read"
    if not verdicts["no-checksum"]:
        return f"complete: {total:,} entries, {done} and equal to their checksums {took}"
    if not verdicts["ok"]:
        return f"complete: {total:,} entries, {done} {took}; they carry no checksum, so their values are not checked"
    bare = f"{verdicts['no-checksum']:,} of {total:,} entries carry no checksum"
    return f"complete: {total:,} entries, {done} and equal to what checksums there are {took}; {bare}"


def _fetched_bytes() -> int | None:
    """Return the bytes that the storage gave this process so far; None where the kernel does not tell."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            fields = dict(line.split(": ") for line in file.read().splitlines())
            return int(fields["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
