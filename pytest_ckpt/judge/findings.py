"""Findings: a closed set of named conclusions with their evidence; each a pure function from a record to one or none.

Every id has a heading in docs/reference/findings.md. Advice knows the options in force, and never repeats what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from pytest_ckpt.records import Evidence, Finding, SaveRecord
from pytest_ckpt.units import format_bytes, format_rate, format_seconds

Rule = Callable[[SaveRecord], Finding | None]

_BOUND_SHARE = 0.4
"""A resource that takes this share of the save, and more than any other, bounds it."""
_STRAGGLER_SHARE = 0.2
_OTHER_SHARE = 0.10
_FASTER = 1.5
_STALL_SHARE = 0.5
_COLD_FACTOR = 1.5
_UNEVEN_FACTOR = 1.25
_TREND = 1.25
_STORAGE = ("write", "sync")
_SERIALIZE = ("serialize",)
_COPY = ("copy", "stage")
_PLAN = ("state_dict", "plan", "collective", "metadata")


def find(record: SaveRecord) -> list[Finding]:
    """Return the findings of a record, the one that explains most of the save first."""
    found = [finding for rule in RULES.values() if (finding := rule(record)) is not None]
    return sorted(found, key=lambda f: (-(f.explains_s or 0.0), list(RULES).index(f.id)))


def bottleneck(findings: list[Finding]) -> str | None:
    """Return the id of the finding that explains most of the save; None where none explains any."""
    return next((f.id for f in findings if f.explains_s), None)


def is_synced(record: SaveRecord) -> bool:
    """Return whether the writer was seen to sync files, or could not be watched."""
    return any(r.synced_files for r in record.rounds) or not any(r.traced for r in record.rounds)


def phase_medians(record: SaveRecord) -> dict[str, float]:
    """Return the median seconds of each phase on the slowest rank, over the rounds."""
    names = dict.fromkeys(name for r in record.rounds for name in r.phases)
    return {name: median(r.phases.get(name, 0.0) for r in record.rounds) for name in names}


def storage_bound(record: SaveRecord) -> Finding | None:
    """Writing and syncing take the largest part of the save."""
    seconds = _seconds(record, *_STORAGE)
    if not _bounds(record, seconds, _SERIALIZE, _COPY, _PLAN):
        return None
    synced = is_synced(record)
    rate = _storage_Bps(record, synced)
    evidence: dict[str, Evidence] = {
        "write_s": _seconds(record, "write"),
        "sync_s": _seconds(record, "sync"),
        "share": seconds / record.save_s,
    }
    text = f"storage-bound: {_share(seconds, record)} of the save is writing and syncing"
    if rate:
        evidence["storage_Bps"] = rate
        at_rate = record.logical_bytes / rate
        text += (
            f"; the target takes {format_rate(rate)} (measured), and "
            f"{format_bytes(record.logical_bytes)} at that rate are {format_seconds(at_rate)}"
        )
    better = faster_volume_present(record)
    advice = (
        f"save to {better.evidence['mount']}" if better else "save to a faster volume, or save less often or less state"
    )
    if record.scenario.mode == "sync":
        advice += "; --ckpt-mode=async hides this time from training as long as it is shorter than the interval"
    return _finding("storage-bound", "warning", text, evidence, advice, seconds)


def serialize_bound(record: SaveRecord) -> Finding | None:
    """The CPU's serialising (its crc32) takes the largest part of the save."""
    seconds = _seconds(record, *_SERIALIZE)
    if not _bounds(record, seconds, _STORAGE, _COPY, _PLAN):
        return None
    evidence: dict[str, Evidence] = {"serialize_s": seconds, "share": seconds / record.save_s}
    text = f"serialize-bound: {_share(seconds, record)} of the save is torch.save on the CPU, most of it crc32"
    if record.probes and record.probes.serialize_Bps:
        evidence["serialize_Bps"] = record.probes.serialize_Bps
        text += f"; to nowhere it goes at {format_rate(record.probes.serialize_Bps)} on all ranks together"
    advice = "use more writer threads (FileSystemWriter(thread_count=...)) or more ranks a host"
    return _finding("serialize-bound", "warning", text, evidence, advice, seconds)


def copy_bound(record: SaveRecord) -> Finding | None:
    """Copying the state, off the device or for staging, takes the largest part of the save."""
    seconds = _seconds(record, *_COPY)
    if not _bounds(record, seconds, _STORAGE, _SERIALIZE, _PLAN):
        return None
    evidence: dict[str, Evidence] = {
        "copy_s": _seconds(record, "copy"),
        "stage_s": _seconds(record, "stage"),
        "share": seconds / record.save_s,
    }
    text = f"copy-bound: {_share(seconds, record)} of the save is copying the state"
    advice = "reuse the staged memory from save to save (cache_staged_state_dict), which spares fresh pages"
    if record.scenario.device == "cuda":
        advice += "; pinned memory copies several times faster"
    return _finding("copy-bound", "warning", text, evidence, advice, seconds)


def plan_bound(record: SaveRecord) -> Finding | None:
    """Planning and its collectives take the largest part of the save."""
    seconds = _seconds(record, *_PLAN)
    if not _bounds(record, seconds, _STORAGE, _SERIALIZE, _COPY):
        return None
    evidence: dict[str, Evidence] = {name + "_s": _seconds(record, name) for name in _PLAN}
    text = f"plan-bound: {_share(seconds, record)} of the save is planning, metadata and what the ranks exchange for it"
    advice = "let DCP cache its plans (DefaultSavePlanner(enable_plan_caching=True)); save fewer, larger tensors"
    return _finding("plan-bound", "warning", text, evidence, advice, seconds)


def straggler(record: SaveRecord) -> Finding | None:
    """One rank keeps the others waiting, and it is the same one in most rounds."""
    waits: dict[int, list[float]] = {}
    for r in record.rounds:
        for waiting in r.ranks:
            for waited_for, waited_s in waiting.waits.items():
                waits.setdefault(int(waited_for), []).append(waited_s)
    if not waits:
        return None
    per_round = len(record.rounds)
    rank = max(waits, key=lambda other: sum(waits[other]))
    others = max(1, record.scenario.world_size - 1)
    seconds = sum(waits[rank]) / per_round / others
    last = sum(r.straggler == rank for r in record.rounds)
    if seconds < _STRAGGLER_SHARE * record.save_s or last * 2 <= per_round:
        return None
    evidence: dict[str, Evidence] = {"rank": rank, "waited_s": seconds, "share": seconds / record.save_s}
    text = (
        f"straggler: the other ranks wait {format_seconds(seconds)} ({_share(seconds, record)} of the save) for rank "
        f"{rank}, which was last in {last} of {per_round} rounds"
    )
    advice = f"look at what rank {rank} shares its core, its device or its disk with"
    return _finding("straggler", "warning", text, evidence, advice, seconds)


def page_cache_only(record: SaveRecord) -> Finding | None:
    """The save ended in the page cache: nothing was synced, and the storage behind is slower."""
    if is_synced(record) or record.target.medium == "memory":
        return None
    durable = _storage_Bps(record, True)
    evidence: dict[str, Evidence] = {"throughput_Bps": record.throughput_Bps}
    text = (
        f"page-cache-only: {format_rate(record.throughput_Bps)} is the rate into the page cache; nothing was synced, "
        "and a crash of the host loses the checkpoint"
    )
    if durable:
        if durable * _FASTER > record.throughput_Bps and record.save_s > record.logical_bytes / durable:
            return None
        evidence["storage_Bps"] = durable
        text += f"; the storage takes {format_rate(durable)}"
    return _finding("page-cache-only", "warning", text, evidence, "let the writer sync its files (sync_files=True)")


def faster_volume_present(record: SaveRecord) -> Finding | None:
    """Another volume that was measured in this run writes faster."""
    if record.probes is None:
        return None
    own = record.probes.storage_Bps(True)
    measured = [other for other in record.other_volumes if other.write_Bps]
    if own is None or not measured or record.target.medium == "memory":
        return None
    best = max(measured, key=lambda other: other.write_Bps or 0.0)
    assert best.write_Bps is not None
    if best.write_Bps < _FASTER * own or best.medium == "memory":
        return None
    evidence: dict[str, Evidence] = {"mount": best.mount, "write_Bps": best.write_Bps, "own_write_Bps": own}
    text = (
        f"faster-volume-present: {best.mount} writes {format_rate(best.write_Bps)}, this target "
        f"{format_rate(own)} (both measured in this run)"
    )
    return _finding("faster-volume-present", "warning", text, evidence, f"save to {best.mount}")


def not_overlapped(record: SaveRecord) -> Finding | None:
    """An async save blocks training for most of its time."""
    if record.scenario.mode == "sync" or record.stall_s < _STALL_SHARE * record.save_s:
        return None
    evidence: dict[str, Evidence] = {"stall_s": record.stall_s, "save_s": record.save_s}
    text = (
        f"not-overlapped: the async save blocks training for {format_seconds(record.stall_s)} of "
        f"{format_seconds(record.save_s)}"
    )
    advice = "staging is the stall: reuse staged memory (cache_staged_state_dict) or stage in a thread of its own"
    return _finding("not-overlapped", "warning", text, evidence, advice)


def cold_start(record: SaveRecord) -> Finding | None:
    """The first save took much longer than the rounds."""
    if record.first_save_s is None or record.first_save_s < _COLD_FACTOR * record.save_s:
        return None
    evidence: dict[str, Evidence] = {"first_save_s": record.first_save_s, "save_s": record.save_s}
    text = (
        f"cold-start: the first save took {format_seconds(record.first_save_s)}, the later ones "
        f"{format_seconds(record.save_s)}; it is no round"
    )
    return _finding("cold-start", "info", text, evidence, "expect it once per start of a job")


def throttled_over_time(record: SaveRecord) -> Finding | None:
    """Each round is slower than the one before it: burst credits, heat or a filling write cache."""
    saves = [r.save_s for r in record.rounds]
    rising = all(later > earlier for earlier, later in pairwise(saves))
    if len(saves) < 4 or not rising or saves[-1] < _TREND * saves[0]:
        return None
    evidence: dict[str, Evidence] = {"first_round_s": saves[0], "last_round_s": saves[-1]}
    text = (
        f"throttled-over-time: every round was slower than the one before, from {format_seconds(saves[0])} to "
        f"{format_seconds(saves[-1])}"
    )
    advice = "burst credits, heat or a filling write cache: run with more rounds to see where it settles"
    return _finding("throttled-over-time", "warning", text, evidence, advice)


def size_mismatch(record: SaveRecord) -> Finding | None:
    """The folder holds much more, or less, than the state."""
    stored = record.stored_bytes
    if stored is None or stored == 0:
        return None
    extra = record.folder_bytes - stored
    metadata = 0.02 * stored + 1_000_000
    if stored >= record.logical_bytes * 0.999 and extra <= metadata:
        return None
    evidence: dict[str, Evidence] = {
        "logical_bytes": record.logical_bytes,
        "stored_bytes": stored,
        "folder_bytes": record.folder_bytes,
    }
    text = (
        f"size-mismatch: the state has {format_bytes(record.logical_bytes)}, the checkpoint refers to "
        f"{format_bytes(stored)} and its folder holds {format_bytes(record.folder_bytes)}"
    )
    return _finding("size-mismatch", "warning", text, evidence, "look for orphaned files, padding or missing tensors")


def target_not_a_mount(record: SaveRecord) -> Finding | None:
    """The target lies on the root file system: perhaps a volume was not mounted."""
    if not record.target.root_filesystem or record.target.medium == "memory":
        return None
    text = "target-not-a-mount: the target lies on the root file system"
    advice = "if a volume of its own was meant, it is not mounted there"
    return _finding("target-not-a-mount", "info", text, {"mount": record.target.mount}, advice)


def memory_pressure(record: SaveRecord) -> Finding | None:
    """Little memory was left while the save ran, so that the page cache could not take what was written."""
    least = [r.least_available_bytes for r in record.rounds if r.least_available_bytes is not None]
    if not least or min(least) > 0.05 * (record.memory_bytes or 0):
        return None
    evidence: dict[str, Evidence] = {"least_available_bytes": min(least)}
    text = f"memory-pressure: only {format_bytes(min(least))} of memory were available while a save ran"
    return _finding("memory-pressure", "warning", text, evidence, "leave memory for the page cache and for staging")


def global_sync(record: SaveRecord) -> Finding | None:
    """The writer calls os.sync(), which waits for every file system of the host."""
    calls = max((r.global_syncs for r in record.rounds), default=0)
    if not calls:
        return None
    text = (
        f"global-sync: the writer calls os.sync() {calls} times a save, which waits for every file system of the host"
    )
    advice = (
        "its streams have no fileno(), so DCP syncs the host instead of the file; give them one, or sync_files=False"
    )
    return _finding("global-sync", "warning", text, {"calls": calls}, advice)


def uneven_bytes(record: SaveRecord) -> Finding | None:
    """Some ranks write much more than others."""
    written = [
        median(values) for values in zip(*([k.item_bytes for k in r.ranks] for r in record.rounds), strict=False)
    ]
    if len(written) < 2 or not all(written) or max(written) < _UNEVEN_FACTOR * (sum(written) / len(written)):
        return None
    most = written.index(max(written))
    evidence: dict[str, Evidence] = {
        "rank": most,
        "most_bytes": max(written),
        "mean_bytes": sum(written) / len(written),
    }
    text = (
        f"uneven-bytes: rank {most} writes {format_bytes(max(written))}, the mean is "
        f"{format_bytes(sum(written) / len(written))}"
    )
    return _finding("uneven-bytes", "warning", text, evidence, "shard the large tensors over more ranks")


def not_durable(record: SaveRecord) -> Finding | None:
    """Files were written and none was synced."""
    if is_synced(record) or not record.rounds or record.target.medium == "memory":
        return None
    text = "not-durable: no file was synced before the save returned, so a power cut can lose it"
    return _finding(
        "not-durable", "warning", text, {"synced_files": 0}, "let the writer sync its files (sync_files=True)"
    )


def unaccounted_time(record: SaveRecord) -> Finding | None:
    """More than a tenth of the save belongs to no phase."""
    seconds = _seconds(record, "other")
    if not record.rounds or seconds <= _OTHER_SHARE * record.save_s:
        return None
    text = f"unaccounted-time: {_share(seconds, record)} of the save belongs to no known phase"
    advice = "a writer whose streams cannot be wrapped shows as one block; py-spy on a rank tells more"
    return _finding("unaccounted-time", "info", text, {"other_s": seconds, "share": seconds / record.save_s}, advice)


RULES: Mapping[str, Rule] = {
    "storage-bound": storage_bound,
    "serialize-bound": serialize_bound,
    "copy-bound": copy_bound,
    "plan-bound": plan_bound,
    "straggler": straggler,
    "page-cache-only": page_cache_only,
    "faster-volume-present": faster_volume_present,
    "not-overlapped": not_overlapped,
    "cold-start": cold_start,
    "throttled-over-time": throttled_over_time,
    "size-mismatch": size_mismatch,
    "target-not-a-mount": target_not_a_mount,
    "memory-pressure": memory_pressure,
    "global-sync": global_sync,
    "uneven-bytes": uneven_bytes,
    "not-durable": not_durable,
    "unaccounted-time": unaccounted_time,
}
"""All findings there are, but for `training-slowed` and `latency-bound`, whose measurements are still to come."""


def _finding(
    id: str, severity: str, text: str, evidence: dict[str, Evidence], advice: str, explains_s: float | None = None
) -> Finding:
    return Finding(id=id, severity=severity, text=text, evidence=evidence, advice=advice, explains_s=explains_s)


def _seconds(record: SaveRecord, *phases: str) -> float:
    medians = phase_medians(record)
    return sum(medians.get(phase, 0.0) for phase in phases)


def _bounds(record: SaveRecord, seconds: float, *rivals: Sequence[str]) -> bool:
    """Whether phases of `seconds` bound the save: a large share, and no smaller than any rival group of phases."""
    if not record.rounds or seconds < _BOUND_SHARE * record.save_s:
        return False
    return all(seconds >= _seconds(record, *group) for group in rivals)


def _storage_Bps(record: SaveRecord, synced: bool) -> float | None:
    return record.probes.storage_Bps(synced) if record.probes else None


def _share(seconds: float, record: SaveRecord) -> str:
    return f"{100 * seconds / record.save_s:.0f} %"
