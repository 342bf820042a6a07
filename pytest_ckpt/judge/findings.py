"""Findings: a closed set of named conclusions with their evidence; each a pure function from a record to one or none.

Every id has a heading in docs/reference/findings.md. Advice knows the options in force, and never repeats what is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import median

from pytest_ckpt.judge.statistics import chance_of_rise
from pytest_ckpt.records import Evidence, Finding, RankRound, SaveRecord, Volume
from pytest_ckpt.units import format_bytes, format_rate, format_seconds

Rule = Callable[[SaveRecord], Finding | None]

BOUND_SHARE = 0.4
"""What takes this share of the save, and more than any other, bounds it."""
_WORTH_S = 0.1
"""Less than this is noise of the machine, and nothing to be gained."""
_STRAGGLER_SHARE = 0.2
_OTHER_SHARE = 0.10
_FASTER = 1.5
_FAR_FROM_PROBE = 3.0
"""A resource that was measured to be this much faster is not what bounds the save."""
_STALL_SHARE = 0.6
_SLOWED = 1.1
_COLD_FACTOR = 1.5
_UNEVEN_FACTOR = 1.25
_LEAST_BYTES = 1_000_000
_TREND = 1.25
_CHANCE = 0.01
_LOW_MEMORY_SHARE = 0.05
_MANY_FILES = 32
_QUEUE_FACTOR = 2.0
_GROUPS = {
    "storage": ("write", "sync"),
    "serialize": ("serialize",),
    "copy": ("copy", "stage"),
    "plan": ("state_dict", "plan", "collective", "metadata"),
}
"""The phases that one remedy would shorten together."""
_COORDINATOR = 0
_KEEP_STAGED = ("async-staged", "async-process", "async-pinned")
"""Modes whose stager keeps its memory from save to save."""
_DEFAULT_WRITER = "FileSystemWriter"


def find(record: SaveRecord) -> list[Finding]:
    """Return the findings of a save, the one that explains most of it first; of other records there are none."""
    if not record.scenario.is_save or not record.rounds or min(r.save_s for r in record.rounds) <= 0:
        return []
    found = [finding for rule in RULES.values() if (finding := rule(record)) is not None]
    return sorted(found, key=lambda f: (-(f.explains_s or 0.0), list(RULES).index(f.id)))


def bottleneck(findings: list[Finding]) -> str | None:
    """Return the id of the finding that explains most of the save; None where none explains 40 % of it."""
    return next((f.id for f in findings if f.explains_s), None)


def is_synced(record: SaveRecord) -> bool:
    """Return whether the writer was seen to sync files or the host, or could not be watched."""
    return any(r.synced_files or r.global_syncs for r in record.rounds) or not any(r.traced for r in record.rounds)


def phase_medians(record: SaveRecord) -> dict[str, float]:
    """Return the seconds of each phase on the slowest rank: medians over the rounds, scaled to sum to the save."""
    names = dict.fromkeys(name for r in record.rounds for name in r.phases)
    medians = {name: median(r.phases.get(name, 0.0) for r in record.rounds) for name in names}
    scale = record.save_s / (sum(medians.values()) or 1.0)
    return {name: seconds * scale for name, seconds in medians.items()}


def storage_bound(record: SaveRecord) -> Finding | None:
    """Writing and syncing take the largest part of the save."""
    seconds = _bounding(record, "storage")
    if seconds is None or record.target.medium == "memory" or _is_in_page_cache(record) or latency_bound(record):
        return None
    evidence: dict[str, Evidence] = {
        "write_s": _seconds(record, "write"),
        "sync_s": _seconds(record, "sync"),
        "share": seconds / record.save_s,
    }
    text = f"storage-bound: {_share(seconds, record)} of the save is writing and syncing"
    rate = _storage_Bps(record)
    at_rate_s = record.logical_bytes / rate if rate else None
    if rate and at_rate_s:
        evidence["storage_Bps"] = rate
        text += (
            f"; the target takes {format_rate(rate)} ({_storage_probe(record)}, measured), and "
            f"{format_bytes(record.logical_bytes)} at that rate are {format_seconds(at_rate_s)}"
        )
    if at_rate_s and seconds > _FAR_FROM_PROBE * at_rate_s:
        advice = "measure it again (pytest-ckpt probe): it has slowed since, is used by others, or syncs are dear"
    else:
        advice = _other_volume_advice(record) + "; more writer threads do not help"
    if record.scenario.mode == "sync":
        advice += "; --ckpt-mode=async hides this time from training where it is shorter than the interval"
    return _bound("storage-bound", text, evidence, advice, seconds)


def latency_bound(record: SaveRecord) -> Finding | None:
    """Opening, writing and syncing many files takes far longer than their bytes do at the measured rate."""
    files = median(r.synced_files for r in record.rounds) / max(1, len(record.rounds[0].ranks))
    rate = _storage_Bps(record)
    if files < _MANY_FILES or not rate or record.target.medium == "memory":
        return None
    seconds = _seconds(record, "write", "sync", "other")
    at_rate_s = record.logical_bytes / rate
    rivals = [_seconds(record, *phases) for group, phases in _GROUPS.items() if group != "storage"]
    if seconds < max(BOUND_SHARE * record.save_s, _FAR_FROM_PROBE * at_rate_s, *rivals):
        return None
    evidence: dict[str, Evidence] = {
        "files_a_rank": files,
        "s_a_file": seconds / files,
        "at_rate_s": at_rate_s,
        "share": seconds / record.save_s,
    }
    text = (
        f"latency-bound: {_share(seconds, record)} of the save is opening, writing and syncing {files:.0f} files a "
        f"rank, {format_seconds(seconds / files)} for each; their bytes alone are {format_seconds(at_rate_s)} at the "
        f"measured {format_rate(rate)}"
    )
    threads = "still more" if _writes_in_parallel(record) else "more"
    advice = (
        "write one file a rank (FileSystemWriter(single_file_per_rank=True)), or overlap the waits with "
        f"{threads} writer threads (thread_count)"
    )
    return _bound("latency-bound", text, evidence, advice, seconds)


def serialize_bound(record: SaveRecord) -> Finding | None:
    """The CPU's serialising (its crc32) takes the largest part of the save."""
    seconds = _bounding(record, "serialize")
    if seconds is None:
        return None
    evidence: dict[str, Evidence] = {"serialize_s": seconds, "share": seconds / record.save_s}
    text = f"serialize-bound: {_share(seconds, record)} of the save is torch.save on the CPU"
    rate = record.probes.serialize_Bps if record.probes else None
    at_rate_s = record.logical_bytes / rate if rate else None
    if rate and at_rate_s:
        evidence["serialize_Bps"] = rate
        text += (
            f"; {format_bytes(record.logical_bytes)} of large tensors take {format_seconds(at_rate_s)} on all ranks "
            "together (measured), most of it crc32"
        )
    if at_rate_s and seconds > _FAR_FROM_PROBE * at_rate_s:
        advice = "many small tensors cost more than their bytes: save fewer, larger ones"
    elif _writes_in_parallel(record):
        advice = "several threads write already: use more ranks a host or, where the storage checks its data, no crc32"
    else:
        advice = "where cores are idle, use more writer threads (FileSystemWriter(thread_count=...)) or ranks"
    return _bound("serialize-bound", text, evidence, advice, seconds)


def copy_bound(record: SaveRecord) -> Finding | None:
    """Copying the state, off the device or for staging, takes the largest part of the save."""
    seconds = _bounding(record, "copy")
    if seconds is None:
        return None
    stage_s = _seconds(record, "stage")
    evidence: dict[str, Evidence] = {
        "copy_s": _seconds(record, "copy"),
        "stage_s": stage_s,
        "share": seconds / record.save_s,
    }
    text = f"copy-bound: {_share(seconds, record)} of the save is copying the state"
    if record.scenario.mode != "sync":
        return _bound("copy-bound", text, evidence, _staging_advice(record), seconds)
    if record.scenario.device == "cuda":
        advice = "copy ahead of the writing (FileSystemWriter(per_thread_copy_ahead=...)), or use more writer threads"
    else:
        advice = "tensors that are views of larger ones are copied: save tensors that own their memory"
    return _bound("copy-bound", text, evidence, advice, seconds)


def plan_bound(record: SaveRecord) -> Finding | None:
    """Planning, metadata and the collectives for them take the largest part of the save."""
    seconds = _bounding(record, "plan")
    if seconds is None:
        return None
    caches_plans = record.scenario.options.get("enable_plan_caching") is True
    parts = {name: _seconds(record, name) for name in _GROUPS["plan"]}
    evidence: dict[str, Evidence] = {f"{name}_s": part for name, part in parts.items()}
    largest = max(parts, key=lambda name: parts[name])
    words, advice = {
        "state_dict": ("state_dict()", "make state_dict() cheaper: gather nothing in it, and copy nothing"),
        "plan": (
            "planning",
            "save fewer, larger tensors"
            if caches_plans
            else "let DCP cache its plans (--ckpt-writer-opt enable_plan_caching=on), or save fewer, larger tensors",
        ),
        "collective": (
            "what the ranks exchange",
            "look at the network and the load of the ranks"
            + ("" if caches_plans else "; cached plans (--ckpt-writer-opt enable_plan_caching=on) exchange less"),
        ),
        "metadata": ("writing the metadata", "save fewer, larger tensors; look at how the target renames and syncs"),
    }[largest]
    text = (
        f"plan-bound: {_share(seconds, record)} of the save is planning, metadata and what the ranks exchange for "
        f"them, most of it {words} ({format_seconds(parts[largest])})"
    )
    return _bound("plan-bound", text, evidence, advice, seconds)


def straggler(record: SaveRecord) -> Finding | None:
    """One rank keeps the others waiting in nearly every round, and not because it has more to write."""
    found = _slow_rank(record)
    if found is None or found[0] == _rank_with_most(record):
        return None
    rank, seconds = found
    evidence: dict[str, Evidence] = {"rank": rank, "waited_s": seconds, "share": seconds / record.save_s}
    text = f"straggler: the other ranks wait {format_seconds(seconds)} ({_share(seconds, record)} of the save) for rank"
    host = f" on host {record.hosts[rank]}" if record.hosts else ""
    text += f" {rank}{host}, round after round"
    advice = f"look at what rank {rank}{host} shares its core, its device or its disk with"
    return _finding("straggler", "warning", text, evidence, advice, _explained(record, seconds))


def page_cache_only(record: SaveRecord) -> Finding | None:
    """Nothing was synced, and the bytes had not reached the storage when the save ended."""
    if not _is_in_page_cache(record):
        return None
    evidence: dict[str, Evidence] = {"throughput_Bps": record.throughput_Bps}
    text = (
        "page-cache-only: nothing was synced, and the save ended with its bytes in the page cache: "
        f"{format_rate(record.throughput_Bps)} is no rate of the storage, and a crash of the host loses the checkpoint"
    )
    if durable := _storage_Bps(record):
        evidence["storage_Bps"] = durable
        text += f"; the storage takes {format_rate(durable)} ({_storage_probe(record)}, measured)"
    return _finding("page-cache-only", "warning", text, evidence, _SYNC_ADVICE)


def faster_volume_present(record: SaveRecord) -> Finding | None:
    """Another volume that was measured in this run writes faster."""
    own, best = _storage_Bps(record), _fastest_other(record)
    if not own or best is None or best.write_Bps is None:
        return None
    evidence: dict[str, Evidence] = {"mount": best.mount, "write_Bps": best.write_Bps, "own_write_Bps": own}
    text = (
        f"faster-volume-present: {best.mount} ({best.storage_class}) takes {format_rate(best.write_Bps)}, this target "
        f"{format_rate(own)} (both measured in this run)"
    )
    bound = storage_bound(record) is not None
    advice = f"save to {best.mount}" + (
        "" if bound else "; little is gained as long as storage does not bound the save"
    )
    return _finding("faster-volume-present", "warning" if bound else "info", text, evidence, advice)


def not_overlapped(record: SaveRecord) -> Finding | None:
    """An async save blocks training for most of its time."""
    if record.scenario.mode == "sync" or record.stall_s < max(_STALL_SHARE * record.save_s, _WORTH_S):
        return None
    evidence: dict[str, Evidence] = {"stall_s": record.stall_s, "save_s": record.save_s}
    text = (
        f"not-overlapped: the async save blocks training for {format_seconds(record.stall_s)} of its "
        f"{format_seconds(record.save_s)}"
    )
    if _seconds(record, "stage") >= record.stall_s / 2:
        advice = _staging_advice(record)
    else:
        advice = "staging is not what blocks: look at what the writer or the planner does before async_save returns"
    return _finding("not-overlapped", "warning", text, evidence, advice)


def training_slowed(record: SaveRecord) -> Finding | None:
    """Training goes on beside the save, and is slower for it: the stall alone hides that cost."""
    slowdowns = [r.train_slowdown for r in record.rounds if r.train_slowdown is not None]
    lost = [r.train.lost_s for r in record.rounds if r.train is not None]
    costs = [r.effective_cost_s for r in record.rounds if r.effective_cost_s is not None]
    if not (slowdowns and lost and costs) or median(slowdowns) < _SLOWED or median(lost) < _WORTH_S:
        return None
    evidence: dict[str, Evidence] = {
        "slowdown": median(slowdowns),
        "lost_s": median(lost),
        "stall_s": record.stall_s,
        "effective_cost_s": median(costs),
    }
    text = (
        f"training-slowed: while the save runs, training's steps take {median(slowdowns):.2f} times as long: "
        f"{format_seconds(median(lost))} are lost beside the stall of {format_seconds(record.stall_s)}"
    )
    advice = (
        "save less often; fewer writer threads, and ranks pinned to cores of their own, leave training more of the CPU"
    )
    return _finding("training-slowed", "warning", text, evidence, advice)


def cold_start(record: SaveRecord) -> Finding | None:
    """The first save took much longer than the rounds."""
    first_s = record.first_save_s
    if first_s is None or first_s < max(_COLD_FACTOR * record.save_s, record.save_s + _WORTH_S):
        return None
    evidence: dict[str, Evidence] = {"first_save_s": first_s, "save_s": record.save_s}
    text = (
        f"cold-start: the first save took {format_seconds(first_s)}, the later ones "
        f"{format_seconds(record.save_s)}; it is no round"
    )
    return _finding("cold-start", "info", text, evidence, "expect it once per start of a job")


def throttled_over_time(record: SaveRecord) -> Finding | None:
    """The rounds get slower, more than chance would have it: burst credits, heat or a filling write cache."""
    saves = [r.save_s for r in record.rounds]
    chance = chance_of_rise(saves)
    some = max(1, len(saves) // 3)
    first_s, last_s = median(saves[:some]), median(saves[-some:])
    if chance > _CHANCE or last_s < _TREND * first_s:
        return None
    evidence: dict[str, Evidence] = {"first_rounds_s": first_s, "last_rounds_s": last_s, "chance": chance}
    text = (
        f"throttled-over-time: the rounds get slower, from {format_seconds(first_s)} to {format_seconds(last_s)} over "
        f"{len(saves)} rounds"
    )
    advice = "burst credits, heat or a filling write cache: run more rounds (--ckpt-rounds) to see where it settles"
    return _finding("throttled-over-time", "warning", text, evidence, advice)


def size_mismatch(record: SaveRecord) -> Finding | None:
    """The checkpoint has less than the state, or its folder much more than the checkpoint."""
    stored, logical = record.stored_bytes, record.logical_bytes
    if not stored:
        return None
    # `.metadata` grows with the number of tensors, as does what torch.save adds to each.
    metadata = 0.02 * stored + _LEAST_BYTES + max(0, stored - logical)
    if stored < logical * 0.999:
        advice = "look for tensors that are missing, unless the writer compresses"
    elif record.folder_bytes - stored > metadata:
        advice = "look for files that the checkpoint does not refer to, and for padding"
    else:
        return None
    evidence: dict[str, Evidence] = {
        "logical_bytes": logical,
        "stored_bytes": stored,
        "folder_bytes": record.folder_bytes,
    }
    text = (
        f"size-mismatch: the state has {format_bytes(logical)}, the checkpoint refers to {format_bytes(stored)} and "
        f"its folder holds {format_bytes(record.folder_bytes)}"
    )
    return _finding("size-mismatch", "warning", text, evidence, advice)


def target_not_a_mount(record: SaveRecord) -> Finding | None:
    """The target lies on the root file system: perhaps a volume was not mounted."""
    target = record.target
    if not target.root_filesystem or target.medium == "memory":
        return None
    text = f"target-not-a-mount: the target lies on the root file system ({target.filesystem} on {target.mount})"
    advice = "if a volume of its own was meant, it is not mounted there"
    evidence: dict[str, Evidence] = {"mount": target.mount, "filesystem": target.filesystem}
    return _finding("target-not-a-mount", "info", text, evidence, advice)


def memory_pressure(record: SaveRecord) -> Finding | None:
    """Little memory was left while the save ran, so that the page cache could not take what was written."""
    least = min((b for r in record.rounds if (b := r.least_available_bytes) is not None), default=None)
    if least is None or not record.memory_bytes or least > _LOW_MEMORY_SHARE * record.memory_bytes:
        return None
    evidence: dict[str, Evidence] = {"least_available_bytes": least, "memory_bytes": record.memory_bytes}
    text = (
        f"memory-pressure: only {format_bytes(least)} of {format_bytes(record.memory_bytes)} of memory were available "
        "while a save ran"
    )
    return _finding("memory-pressure", "warning", text, evidence, "leave memory for the page cache and for staging")


def global_sync(record: SaveRecord) -> Finding | None:
    """The writer calls os.sync(), which waits for every file system of the host."""
    calls = max(r.global_syncs for r in record.rounds)
    if not calls:
        return None
    text = (
        f"global-sync: the writer calls os.sync() {calls} times a save, which waits for every file system of the host"
    )
    advice = "DCP does so where a stream has no fileno(): give it one (sync_files=False ends it, and durability too)"
    return _finding("global-sync", "warning", text, {"calls": calls}, advice)


def uneven_bytes(record: SaveRecord) -> Finding | None:
    """One rank writes much more than the others."""
    rank = _rank_with_most(record)
    if rank is None:
        return None
    written = _written_bytes(record)
    mean = sum(written) / len(written)
    evidence: dict[str, Evidence] = {"rank": rank, "most_bytes": written[rank], "mean_bytes": mean}
    text = f"uneven-bytes: rank {rank} writes {format_bytes(written[rank])}, the mean is {format_bytes(mean)}"
    slow = _slow_rank(record)
    seconds = slow[1] if slow is not None and slow[0] == rank else None
    if seconds:
        evidence["waited_s"] = seconds
        text += f"; the other ranks wait {format_seconds(seconds)} for it"
    advice = "shard the large tensors over more ranks"
    severity = "warning" if seconds else "info"
    return _finding("uneven-bytes", severity, text, evidence, advice, _explained(record, seconds or 0.0))


def not_durable(record: SaveRecord) -> Finding | None:
    """Files were written and none was synced, though most of the bytes may have reached the storage."""
    if is_synced(record) or record.target.medium == "memory" or _is_in_page_cache(record):
        return None
    text = "not-durable: no file was synced before the save returned, so a crash of the host can lose the checkpoint"
    return _finding("not-durable", "warning", text, {"synced_files": 0}, _SYNC_ADVICE)


def unaccounted_time(record: SaveRecord) -> Finding | None:
    """More than a tenth of the save belongs to no phase."""
    seconds = _seconds(record, "other")
    if seconds < max(_OTHER_SHARE * record.save_s, _WORTH_S) or latency_bound(record):
        return None
    text = f"unaccounted-time: {_share(seconds, record)} of the save belongs to no known phase"
    if any(r.traced for r in record.rounds):
        advice = "it passes between the writer's files and items; py-spy on a rank tells more"
    else:
        advice = "this writer opens no streams that can be watched, so all its work is one block; py-spy tells more"
    severity = "warning" if seconds >= BOUND_SHARE * record.save_s else "info"
    evidence: dict[str, Evidence] = {"other_s": seconds, "share": seconds / record.save_s}
    return _finding("unaccounted-time", severity, text, evidence, advice)


RULES: Mapping[str, Rule] = {
    "storage-bound": storage_bound,
    "latency-bound": latency_bound,
    "serialize-bound": serialize_bound,
    "copy-bound": copy_bound,
    "plan-bound": plan_bound,
    "straggler": straggler,
    "uneven-bytes": uneven_bytes,
    "page-cache-only": page_cache_only,
    "not-durable": not_durable,
    "faster-volume-present": faster_volume_present,
    "not-overlapped": not_overlapped,
    "training-slowed": training_slowed,
    "global-sync": global_sync,
    "throttled-over-time": throttled_over_time,
    "memory-pressure": memory_pressure,
    "size-mismatch": size_mismatch,
    "unaccounted-time": unaccounted_time,
    "cold-start": cold_start,
    "target-not-a-mount": target_not_a_mount,
}
"""All findings there are, but for `training-slowed`, whose measurement is still to come."""

_SYNC_ADVICE = "let the writer sync its files (FileSystemWriter(sync_files=True))"


def _finding(
    id: str, severity: str, text: str, evidence: dict[str, Evidence], advice: str, explains_s: float | None = None
) -> Finding:
    return Finding(id=id, severity=severity, text=text, evidence=evidence, advice=advice, explains_s=explains_s)


def _bound(id: str, text: str, evidence: dict[str, Evidence], advice: str, seconds: float) -> Finding:
    return _finding(id, "warning" if seconds >= _WORTH_S else "info", text, evidence, advice, seconds)


def _explained(record: SaveRecord, seconds: float) -> float | None:
    return seconds if seconds >= BOUND_SHARE * record.save_s else None


def _bounding(record: SaveRecord, group: str) -> float | None:
    """Return the seconds of a group of phases that bounds the save; None where it is small, or another is larger."""
    seconds = {name: _seconds(record, *phases) for name, phases in _GROUPS.items()}
    own = seconds[group]
    return own if own >= BOUND_SHARE * record.save_s and own == max(seconds.values()) else None


def _seconds(record: SaveRecord, *phases: str) -> float:
    """Return the seconds of these phases as `phase_medians` has them or, beside a straggler, those of the others.

    What only a straggler spends is charged to it: other ranks would not have needed that time.
    """
    slow = straggler(record)
    if slow is None:
        medians = phase_medians(record)
        return sum(medians.get(phase, 0.0) for phase in phases)
    return median(
        median(
            sum(own.phases.get(phase, 0.0) for phase in phases)
            for rank, own in enumerate(r.ranks)
            if rank != slow.evidence["rank"]
        )
        for r in record.rounds
    )


def _slow_rank(record: SaveRecord) -> tuple[int, float] | None:
    """Return the rank that the others wait for in nearly every round, and for how long."""
    nets = [net for r in record.rounds if (net := _net_waits(r.ranks, _queue_s(record)))]
    if len(nets) < 3 or len(nets) < len(record.rounds):
        return None  # of two ranks one is always last, and twice the same is no sign
    rank = max(range(min(map(len, nets))), key=lambda one: median(net[one] for net in nets))
    long = sum(net[rank] >= _STRAGGLER_SHARE * r.save_s for net, r in zip(nets, record.rounds, strict=True))
    seconds = median(net[rank] for net in nets)
    return (rank, seconds) if long >= math.ceil(0.8 * len(nets)) and seconds >= _WORTH_S else None


def _queue_s(record: SaveRecord) -> float:
    """Return up to which time in write and sync a rank may just have been the last that a busy target served."""
    rate = record.probes.storage_Bps(is_synced(record)) if record.probes else None
    return _QUEUE_FACTOR * record.logical_bytes / rate if rate else math.inf


def _net_waits(ranks: list[RankRound], queue_s: float) -> list[float]:
    """Return, by rank, how long the others waited for it on average, less what it waited itself.

    Two things are no one's slowness: the coordinator's own duties, which are the global plan and the metadata, and to
    be served last by a target that is busy with the bytes of all (up to `queue_s` in write and sync).
    """
    size = len(ranks)
    if size < 2:
        return []

    def planned(rank: RankRound) -> float:
        return rank.phases.get("plan", 0.0) + rank.phases.get("metadata", 0.0)

    net = [0.0] * size
    for waiting, own in enumerate(ranks):
        for name, seconds in own.waits.items():
            if not name.isdecimal() or int(name) >= size:
                continue
            if int(name) == _COORDINATOR:
                seconds = max(0.0, seconds - max(0.0, planned(ranks[_COORDINATOR]) - planned(own)))
            net[int(name)] += seconds / (size - 1)
            net[waiting] -= seconds
    stored = [sum(rank.phases.get(phase, 0.0) for phase in _GROUPS["storage"]) for rank in ranks]
    for rank, own_s in enumerate(stored):
        if own_s <= queue_s:
            net[rank] -= max(0.0, own_s - (sum(stored) - own_s) / (size - 1))
    return net


def _written_bytes(record: SaveRecord) -> list[float]:
    counts = zip(*([rank.item_bytes for rank in r.ranks] for r in record.rounds), strict=False)
    return [median(values) for values in counts]


def _rank_with_most(record: SaveRecord) -> int | None:
    written = _written_bytes(record)
    if len(written) < 2:
        return None
    mean = sum(written) / len(written)
    most = max(written)
    return written.index(most) if most >= max(_UNEVEN_FACTOR * mean, mean + _LEAST_BYTES) else None


def _is_in_page_cache(record: SaveRecord) -> bool:
    """Whether the save ended with its bytes in memory: the disk took few of them, or could not have been so fast."""
    if is_synced(record) or record.target.medium == "memory":
        return False
    if (durable := _storage_Bps(record)) and record.throughput_Bps > durable:
        return True
    on_disk = [r.device_written_bytes for r in record.rounds if r.device_written_bytes is not None]
    return bool(on_disk) and median(on_disk) < 0.5 * record.logical_bytes


def _storage_Bps(record: SaveRecord) -> float | None:
    return record.probes.storage_Bps(True) if record.probes else None


def _storage_probe(record: SaveRecord) -> str:
    assert record.probes is not None
    return "direct writes" if _storage_Bps(record) == record.probes.write_direct_Bps else "synced writes"


def _fastest_other(record: SaveRecord) -> Volume | None:
    """Return the fastest volume measured in this run, where moving pays; memory is no place to keep a checkpoint."""
    own = _storage_Bps(record)
    measured = [other for other in record.other_volumes if other.write_Bps and other.medium != "memory"]
    if not own or record.target.medium == "memory":
        return None
    best = max(measured, key=lambda other: other.write_Bps or 0.0, default=None)
    return best if best is not None and (best.write_Bps or 0.0) >= _FASTER * own else None


def _other_volume_advice(record: SaveRecord) -> str:
    best = _fastest_other(record)
    if best is not None and best.write_Bps:
        return f"save to {best.mount}, which takes {format_rate(best.write_Bps)} (measured)"
    candidates = [o for o in record.other_volumes if o.write_Bps is None and o.medium != "memory"]
    if candidates:
        named = ", ".join(f"{other.mount} ({other.storage_class})" for other in candidates[:3])
        return f"try another volume: {named}, not measured (--ckpt-survey measures them)"
    return "save to a faster volume, less often, or less state"


def _staging_advice(record: SaveRecord) -> str:
    """Advise reuse of staged memory, unless staging goes at the rate of used memory already."""
    probes, stage_s = record.probes, _seconds(record, "stage")
    staged_Bps = record.logical_bytes / stage_s if stage_s else None
    if record.scenario.device == "cuda":
        advice = "stage into pinned memory that is kept from save to save"
        if probes and probes.d2h_pinned_Bps and probes.d2h_pageable_Bps:
            advice += (
                f" ({format_rate(probes.d2h_pinned_Bps)} against {format_rate(probes.d2h_pageable_Bps)}, measured)"
            )
        return advice
    fresh_Bps, warm_Bps = (probes.copy_Bps, probes.copy_warm_Bps) if probes else (None, None)
    if fresh_Bps and staged_Bps and _FAR_FROM_PROBE * staged_Bps < fresh_Bps:
        return (
            f"copying {format_bytes(record.logical_bytes)} takes {format_seconds(record.logical_bytes / fresh_Bps)} "
            "(measured): look at what the stager does besides"
        )
    if record.scenario.options.get("cache_staged_state_dict") or record.scenario.mode in _KEEP_STAGED:
        return "staged memory is kept from save to save already: stage less state, or look at what else uses memory"
    if warm_Bps and staged_Bps and 2 * staged_Bps > warm_Bps:
        return "staging goes at the rate of memory already: stage less state"
    advice = "reuse the staged memory from save to save (--ckpt-mode=async-staged, or cache_staged_state_dict=True)"
    if record.scenario.writer != _DEFAULT_WRITER:
        advice += ", unless this writer does"
    if warm_Bps and staged_Bps:
        advice += f": used memory takes {format_rate(warm_Bps)} (measured), staging went at {format_rate(staged_Bps)}"
    return advice


def _writes_in_parallel(record: SaveRecord) -> bool:
    """Whether several threads of a rank write: together they are busy for longer than the last of them."""
    return any(
        sum(rank.thread_s.values()) > 1.5 * sum(rank.phases.get(name, 0.0) for name in rank.thread_s) > 0
        for r in record.rounds
        for rank in r.ranks
    )


def _share(seconds: float, record: SaveRecord) -> str:
    return f"{100 * seconds / record.save_s:.0f} %"
