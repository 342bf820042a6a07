"""Why there is no baseline: nothing was ever stored, or what this scenario had is stored under another name.

A disk that was not mounted and a GPU that is gone change the hardware id; a run that then found "no baseline" and
passed would be green on exactly the night that it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pytest_ckpt.judge.hardware_differences import hardware_differences
from pytest_ckpt.judge.store import Holder, Store, Stored
from pytest_ckpt.records import SaveRecord


class Absence(NamedTuple):
    """What to say, and whether it looks as if something of the machine were missing."""

    text: str
    suspicious: bool
    has_nearest: bool = False
    """Whether there is something that the text compares with."""


def explain_absence(store: Store, stored: Stored, record: SaveRecord, is_here: Callable[[str, int], bool]) -> Absence:
    """Return why `record` has no baseline under the id of `stored`.

    `is_here` tells of a hardware id and world size whether the session has it too: what it has is not missing.
    """
    start = f"no baseline of this scenario on {stored.hardware_id}"
    holders = store.holders(record.scenario, stored.hardware_id)
    missing = [h for h in holders if not is_here(h.hardware_id, h.scenario.world_size)]
    if missing:
        closest = min(missing, key=lambda holder: len(_differing(holder, stored.hardware_id, record)))
        facts = _differing(closest, stored.hardware_id, record)
        where = "" if closest.hardware_id == stored.hardware_id else f" under {closest.hardware_id}"
        return Absence(
            f"{start}: it is held{where}, which differs: {'; '.join(facts) or 'by its name alone'}", True, True
        )
    if stored.has_only_examples(record.scenario):
        return Absence(f"{start}: only an example, which judges nobody", False)
    nearest = store.nearest(record.scenario, stored.hardware_id)
    if nearest is None or not nearest.differs:
        return Absence(start, False)
    where = "" if nearest.hardware_id == stored.hardware_id else f" under {nearest.hardware_id}"
    differing = ", ".join(str(difference) for difference in nearest.differs)
    return Absence(f"{start}: the nearest that is held{where} differs: {differing}", False, True)


def _differing(holder: Holder, hardware_id: str, record: SaveRecord) -> list[str]:
    """Return the facts in which a holder differs, the telling ones first."""
    facts = [str(difference) for difference in holder.differs]
    if holder.hardware_id == hardware_id:
        return facts
    for name in ("medium", "storage_class", "filesystem"):
        there, here = getattr(holder.target, name), getattr(record.target, name)
        if there != here:
            facts.append(f"{name.replace('_', ' ')}: {there} there, {here} here")
    if record.target.root_filesystem and facts:
        facts.append("this target lies on the root filesystem: is its volume mounted?")
    if record.hardware is not None and holder.hardware is not None:
        facts += hardware_differences(record.hardware, holder.hardware)
    return facts
