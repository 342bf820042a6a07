"""Whether the files of a checkpoint were written over after it was complete: what their times tell, and what not.

DCP writes `.metadata` last. A data file that was changed after it was so either by a later save into the same folder,
which opens the old files and replaces their contents, or by a copy that did not keep times (`cp -r`). A file that is
written over keeps its birth time; one that a copy makes is born then. So this speaks for a later save: all data files
were born before `.metadata` was, as a save makes them, and one of them was changed after it. Whatever else does not fit
is a warning. It proves none: `touch`, a file that its owner put back with `cp`, or a copy made in parallel without
times, into which `.metadata` came last to begin with and not last to end, look the same. Each file of a mix is sound in
itself, so nothing else tells, and only the owner knows: `ignore_times` is to say so. A changed file whose bytes are
damaged speaks for no later save: what damaged it may have changed it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pytest_ckpt.accept.checkpoint_folder import CheckpointFolder, LeadsOut, NotThere
from pytest_ckpt.accept.listing import problem
from pytest_ckpt.records import Problem
from pytest_ckpt.target.mounts import mount_of
from pytest_ckpt.target.storage_class import NETWORK
from pytest_ckpt.units import format_seconds

_CLOCKS_APART_NS = 2 * 10**9
"""How far the clocks of hosts that share a file system may be apart; on a local one a single clock gives all times."""


def written_over(
    folder: CheckpointFolder,
    metadata_file: str,
    data_files: Iterable[str],
    damaged: Collection[str],
    ignore_times: bool = False,
) -> Problem | None:
    """Return what the times say against the checkpoint: a `mix` where files were changed in place, else `times`.

    None: they are in order. `damaged`: the data files in which something else is wrong. `ignore_times`: never `mix`.
    """
    listed = folder.files.get(metadata_file)
    known = [name for name in data_files if name in folder.files]
    if listed is None:
        return None
    filesystem = mount_of(folder.path).filesystem
    apart = _CLOCKS_APART_NS if filesystem in NETWORK or filesystem.startswith("fuse") else 0
    changed = sorted(name for name in known if folder.files[name].modified_ns > listed.modified_ns + apart)
    if not changed:
        return None
    shown = changed[0] + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
    later_s = (max(folder.files[name].modified_ns for name in changed) - listed.modified_ns) / 1e9
    what = f"changed {format_seconds(later_s)} after {metadata_file}"
    if not _born_in_order(folder, metadata_file, known):
        text = f"{what}: by a copy that keeps no times (cp -a and rsync -a do), or a later save that did not end"
        return problem("times", shown, "", f"{text}; the folder does not tell which")
    if set(changed) <= set(damaged):
        return problem("times", shown, "", f"{what}, in place: by a later save that did not end, or by what damaged it")
    many = f"{what}, in place, {len(changed)} of {len(known)} data files"
    if ignore_times:
        return problem("times", shown, "", f"{many}: by touch, a repair, or a later save that did not end; ignored")
    text = (
        f"{many}: by a later save that did not end, or by touch or a repair; that cannot be told from the folder: "
        "if you repaired or touched it yourself, --ignore-times takes it as it is"
    )
    return problem("mix", shown, "", text)


def _born_in_order(folder: CheckpointFolder, metadata_file: str, data_files: list[str]) -> bool:
    try:
        last = folder.born_ns(metadata_file)
        born = [folder.born_ns(name) for name in data_files]
    except (NotThere, LeadsOut):
        return False
    return last is not None and all(one is not None and one < last for one in born)
