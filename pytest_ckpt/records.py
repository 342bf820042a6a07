"""Records of what was measured: immutable, plain, and the schema of `extra_info["ckpt"]` in the result file.

Units stand in the names: `_s` seconds, `_bytes` bytes, `_Bps` bytes per second. The keys are a contract
(docs/reference/result-file.md): they are extended, not renamed, and `format` is raised when one changes its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

import msgspec

FORMAT = 1
METHOD = 1
"""Raised only when what is measured changes, so that figures of different methods are never compared."""


PLAN = "plan"
"""The mode of what is planned and not saved."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One way of saving one model on one world: what identifies a figure, wherever it was measured."""

    engine: str
    mode: str
    writer: str
    options: dict[str, Any]
    model: str
    state: str
    params: int | None
    """Unique parameters of the model; None for a user's own state, whose parameters are not known."""
    world_size: int
    mesh: str
    device: str
    share: str | None = None

    @property
    def is_load(self) -> bool:
        """Whether it is the way back: modes `load-warm` and `load-cold`."""
        return self.mode.startswith("load-")

    @property
    def is_plan(self) -> bool:
        """Whether it is the planning of a save alone, by ranks on paper: mode `plan`."""
        return self.mode == PLAN

    @property
    def is_save(self) -> bool:
        """Whether bytes are written: neither a load nor planning alone."""
        return self.kind == "save"

    @property
    def kind(self) -> str:
        """What is measured: `save`, `load` or `plan`."""
        return "load" if self.is_load else "plan" if self.is_plan else "save"

    @property
    def saved_ranks(self) -> int:
        """Of a load: by how many ranks the checkpoint was written."""
        return int(self.options.get("saved_ranks", self.world_size))

    @property
    def layout(self) -> str:
        """How the ranks are laid out, where that is not a full shard over all of them: a mesh, or a share of a job."""
        if self.share is not None:
            return f"share {self.share}"
        return "" if self.mesh == f"shard={self.world_size}" else self.mesh

    @property
    def options_text(self) -> str:
        """The options that differ from their defaults, as in `thread_count=4,sync_files=off`."""
        return options_text(self.options)


def options_text(options: Mapping[str, Any]) -> str:
    """Return options in words: part of a test's id, and of a table."""
    words = {True: "on", False: "off"}
    return ",".join(f"{name}={words[v] if isinstance(v, bool) else v}" for name, v in options.items())


Evidence = str | int | float | bool | None


class RankRound(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a round, in seconds from the first rank's call."""

    save_s: float
    stall_s: float
    peak_rss_bytes: int | None
    """Peak resident memory above the level before the round; None where the kernel does not let it be reset."""
    phases: dict[str, float] = {}
    """Seconds of each phase on the rank's critical path: disjoint, summing to the round. Empty: not traced."""
    thread_s: dict[str, float] = {}
    """Seconds of copy, serialize, write and sync summed over the rank's writer threads."""
    waits: dict[str, float] = {}
    """Seconds spent waiting, by the rank waited for."""
    item_bytes: int = 0
    """Bytes that the rank's writer put into files."""
    planned_bytes: int | None = None
    """Bytes of the tensors that DCP's plan has the rank write, each replica on one rank; None: there is no such plan.

    Counted as `logical_bytes` are: where each byte is written once, they sum to those.
    """
    cpu_s: float | None = None
    """CPU seconds of the rank's process, user and system."""
    write_bytes: int | None = None
    """Bytes that the rank's process caused to be sent to storage (/proc/PID/io, write_bytes)."""
    read_bytes: int | None = None
    """Of a load: bytes that the rank's process had fetched from storage (read_bytes): not those of the page cache."""


class TrainingBeside(msgspec.Struct, frozen=True, kw_only=True):
    """Training steps before, during and after an async upload, each as long as on the slowest rank."""

    tokens_per_step: int
    """Of all ranks."""
    step_s_before: float
    """Median."""
    step_s_during: list[float]
    """Each step that began before the upload was complete on all ranks, without its wait for staging."""
    step_s_after: float
    """Median."""
    waited_for_staging_s: float
    """How long steps stood before their optimizer until the state was staged: stall, and no part of `step_s_during`."""
    lost_s: float
    """The sum of (1 - rate / rate before) dt over the steps during the upload; not below zero."""
    slowdown: float
    """Median step during the upload over the median step before."""
    tokens_per_s: float
    """Of all ranks, before the save."""
    mfu: float | None = None
    """Share of the devices' dense bfloat16 FLOP/s that training used before; None where their peak is not known."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One save, or one load in whose seconds the state was there on all ranks, over all ranks."""

    save_s: float
    stall_s: float
    throughput_Bps: float
    ranks: list[RankRound]
    straggler: int
    """The rank that was last."""
    peak_rss_bytes: int | None
    """Sum over ranks."""
    phases: dict[str, float] = {}
    """Seconds of each phase on the slowest rank, the one that waited least for others."""
    traced: bool = False
    """Whether the writer's streams could be wrapped, so that copy, serialize, write and sync are known."""
    synced_files: int = 0
    global_syncs: int = 0
    """Calls of os.sync() over all ranks."""
    tracer_s: float = 0.0
    """Estimated cost of the tracing on the slowest rank."""
    least_available_bytes: int | None = None
    """Least memory available on the host while the round ran."""
    dirty_peak_bytes: int | None = None
    """Most bytes of the page cache that waited for write-back (Dirty and Writeback)."""
    device_written_bytes: int | None = None
    """Bytes that the target's block devices wrote while the round ran, whoever sent them."""
    earlier_wait_s: float | None = None
    """Of the stall, the wait for an earlier save that was under way; None: none was."""
    train: TrainingBeside | None = None
    """The training that ran beside an async save; None where none did."""
    train_slowdown: float | None = None
    """Median step while the save ran over the median step before it."""
    effective_cost_s: float | None = None
    """What the save cost the training: the stall, and what its steps lost while it ran; None: no training ran."""
    clock_error_s: float | None = None
    """Of ranks on several hosts: how far their clocks may be apart in waits and pictures; None on one host."""
    device_busy_share: float | None = None
    """Share of the round in which the busiest of them had requests in flight."""


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the checkpoints went."""

    label: str
    kind: str
    medium: str
    mount: str
    filesystem: str
    device_model: str | None = None
    storage_class: str | None = None
    storage_rule: str = ""
    """The facts that gave `storage_class`."""
    root_filesystem: bool = False
    spread: str = ""
    """Of ranks on several hosts: `shared by 2 hosts`, or `a local disk on each of 2 hosts`."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One resource over all ranks: their bytes from the first one's start to the last one's end."""

    name: str
    bytes: int
    seconds: float
    Bps: float | None
    """None where the probe was refused; `note` has the reason."""
    per_rank_Bps: list[float] = []
    block_bytes: int
    note: str = ""


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """All probes of one target by one world, as they stand in a result file; None is "not measured"."""

    write_direct_Bps: float | None = None
    write_synced_Bps: float | None = None
    write_buffered_Bps: float | None = None
    """write() alone, into the page cache: the misleading figure."""
    copy_Bps: float | None = None
    """Host memory to fresh host memory."""
    copy_warm_Bps: float | None = None
    serialize_Bps: float | None = None
    d2h_pinned_Bps: float | None = None
    d2h_pageable_Bps: float | None = None
    world_size: int
    details: list[Probe] = []

    def storage_Bps(self, synced: bool) -> float | None:
        """Return the most that the target was seen to take.

        Synced: direct writes or, where they are refused or slower (one write in flight a rank), fsynced ones. Not
        synced: what the page cache takes.
        """
        if not synced:
            return self.write_buffered_Bps
        known = [rate for rate in (self.write_direct_Bps, self.write_synced_Bps) if rate is not None]
        return max(known, default=None)


BOUND_TERMS = ("storage", "cache", "copy", "serialize")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a save in seconds, their maximum and their sum; None where a rate is not known."""

    storage_s: float | None
    cache_s: float | None
    """Filling the page cache that an fsync then writes back; 0 without fsync, where that is the storage term."""
    copy_s: float | None
    serialize_s: float | None
    overlapped_s: float
    """The largest known term: the roofline."""
    serial_s: float
    """One step at a time; writing is filling the cache and writing it back, or longer where fsynced writes were."""

    @property
    def predicted_s(self) -> float | None:
        """What to expect of DCP, which does one step at a time in each thread; None without a rate of the storage."""
        return None if self.storage_s is None else self.serial_s

    @property
    def largest(self) -> str:
        """The term that bounds the save: `storage`, `cache`, `copy` or `serialize`."""
        return max(BOUND_TERMS, key=lambda name: getattr(self, f"{name}_s") or 0.0)


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """Another volume of the machine: measured in the same run, or named by its kind alone."""

    mount: str
    medium: str
    storage_class: str
    free_bytes: int
    write_Bps: float | None
    """As its probe showed, durable writes of all ranks; None: not measured."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A named conclusion with its evidence; the ids are a closed set (docs/reference/findings.md)."""

    id: str
    severity: str
    text: str
    evidence: dict[str, Evidence]
    advice: str
    explains_s: float | None = None
    """The seconds of the save that it explains, for findings that say what bounds it."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The software that made the figures: a difference is judged, and named."""

    torch: str
    driver: str | None
    kernel: str
    plugin: str
    python: str


class Accelerators(msgspec.Struct, frozen=True, kw_only=True):
    """Equal accelerators of a machine."""

    name: str
    count: int
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    """The most that the link can do, not what it has fallen to while idle."""
    pcie_width: int | None = None
    """Lanes, at most."""

    @property
    def link(self) -> str:
        """The link in words, as in `PCIe 5 x16`."""
        if not self.pcie_generation and not self.pcie_width:
            return "PCIe link not told"
        return f"PCIe {self.pcie_generation or '?'} x{self.pcie_width or '?'}"


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is: no host name, serial number, user name or path."""

    instance_type: str | None = None
    """As the cloud calls it; None elsewhere, and where it does not tell."""
    board: str | None = None
    """Vendor and product as the firmware tells them; None where it does not."""
    cpu: str
    cpus: int
    """Of the machine, that are online."""
    usable_cpus: int
    """Of them, those that this process may use: fewer in a container."""
    memory_bytes: int
    accelerators: list[Accelerators] = []


OUTCOMES = ("ok", "improved", "regressed", "undecided", "not comparable", "no baseline")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one metric of a scenario is against its baseline.

    `now` and `baseline` are medians in the unit of the metric; `change`, `interval` and `detectable` are changes of the
    metric relative to the baseline (-0.2: a fifth less).
    """

    metric: str
    """`throughput` (bytes/s), `stall` or `planning` (seconds), or `efficiency` (roofline over save)."""
    outcome: str
    """One of `OUTCOMES`."""
    now: float | None = None
    baseline: float | None = None
    change: float | None = None
    interval: list[float | None] | None = None
    """Exact bounds of `change`, each one-sided at `confidence`; None at an end that the samples do not bound."""
    detectable: float | None = None
    """The smallest change for the worse that these samples could have shown as regressed; None: none at all."""
    attribution: str | None = None
    """Of a regression: whether the machine or the software became slower, and what of it."""
    source: str | None = None
    """The files of the baseline."""
    text: str = ""
    """The verdict as a sentence."""
    tolerance: float | None = None
    confidence: float | None = None
    comparisons: int | None = None
    """How many comparisons a whole run makes at this confidence: the m of Bonferroni."""
    sessions: int = 0
    hosts: int = 0
    looks: int = 1


class Planning(msgspec.Struct, frozen=True, kw_only=True):
    """What the planning of a save sends and holds, with ranks on paper: one process is rank 0, the others' plans are
    derived. The seconds of its steps are the `phases` of each round.
    """

    items_per_rank: int
    """Write items in a rank's local plan."""
    write_items: int
    """Write items of all ranks, each replica once."""
    plan_bytes: int
    """A rank's local plan, pickled: the mean."""
    gathered_bytes: int
    """Local plans of all ranks that rank 0 gathers in a save."""
    scattered_bytes: int
    """Plans that rank 0 scatters in a save."""
    results_bytes: int
    """What the ranks tell rank 0 of their writes."""
    metadata_bytes: int
    """The file `.metadata`, which is sent to every rank too."""
    peak_bytes: int | None
    """Peak resident memory of rank 0 above its level before the first save; None where it cannot be told."""
    held_bytes: int
    """Of it, what stayed after the first save."""
    first_gathered_bytes: int
    """As `gathered_bytes`, of the first save."""
    first_phases: dict[str, float]
    """Seconds of the first save's steps, with Python's collector running; in the rounds it is frozen."""
    derive_s: float
    """Seconds that making and pickling the plans of all ranks took: part of no save."""
    checked_ranks: list[int]
    """Ranks whose plan on paper was compared with what the planner makes there."""


class SaveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one scenario on one target."""

    scenario: Scenario
    environment: Environment
    host: str
    time: str
    """Start of the scenario, ISO 8601 in UTC."""
    target: TargetRecord
    logical_bytes: int
    """Bytes of the state's tensors, from the model alone (0-dim step counters not counted)."""
    stored_bytes: int | None
    """Sum of the ranges that the checkpoint's metadata refers to; None where a writer does not say."""
    folder_bytes: int
    """Apparent size of the files that a round left."""
    rounds: list[Round]
    first_save_s: float | None
    """Seconds of the first save of the fresh world (or the first of this scenario in a reused one): no round."""
    predicted_s: float | None = None
    """From the probes, before the first save."""
    probes: Probes | None = None
    bounds: Bounds | None = None
    efficiency: float | None = None
    """The roofline `bounds.overlapped_s` over the median `save_s`."""
    bottleneck: str | None = None
    """The id of the finding that explains most of `save_s`."""
    findings: list[Finding] = []
    other_volumes: list[Volume] = []
    """Volumes measured in the same run, and others of the machine by their kind."""
    memory_bytes: int | None = None
    """Memory of the host."""
    notes: list[str] = []
    session: str = ""
    """Of the run that measured it: a random name."""
    hardware_id: str = ""
    """The name under which baselines of equal machines and storage are kept."""
    hardware: Hardware | None = None
    tracing: str = "spans"
    """`spans`, or `off`: with the start method, how the harness itself may change the figures."""
    start_method: str = "exec"
    """How the ranks were started: `exec`, each a new program."""
    hosts: list[int] = []
    """Of each rank, the number of its host; empty where all ranks share one."""
    verdicts: list[Verdict] = []
    planning: Planning | None = None
    """Of mode `plan`: None elsewhere."""
    format: int = FORMAT
    method: int = METHOD

    @property
    def save_s(self) -> float:
        """Median over the rounds of the seconds until the checkpoint was complete."""
        return median(r.save_s for r in self.rounds)

    @property
    def stall_s(self) -> float:
        """Median over the rounds of the seconds in which training could not go on."""
        return median(r.stall_s for r in self.rounds)

    @property
    def throughput_Bps(self) -> float:
        """Median over the rounds of `logical_bytes / save_s`."""
        return median(r.throughput_Bps for r in self.rounds)


def to_plain(record: SaveRecord) -> dict[str, Any]:
    """Return the record as the plain dictionary that goes into the result file."""
    plain: dict[str, Any] = msgspec.to_builtins(record)
    return plain


def from_plain(plain: Any) -> SaveRecord:
    """Return the record that a result file holds; `msgspec.ValidationError` where it is none."""
    return msgspec.convert(plain, SaveRecord)


def summarize_round(
    called_s: list[float],
    returned_s: list[float],
    completed_s: list[float],
    peak_rss_bytes: list[int | None],
    *,
    logical_bytes: int,
    blocks_until_complete: bool,
) -> Round:
    """Return one round from each rank's clock readings (CLOCK_MONOTONIC, one axis for a host's ranks).

    `called_s`, `returned_s`, `completed_s` hold one reading per rank: before the call, when it returned, and when
    the checkpoint was complete. The save lasts from the first call to the last completion; training is blocked
    from a rank's own call to its return, or until completion where the mode is synchronous.
    """
    start = min(called_s)
    save_s = max(completed_s) - start
    own_stall_s = [returned - called for called, returned in zip(called_s, returned_s, strict=True)]
    known_peaks = [peak for peak in peak_rss_bytes if peak is not None]
    return Round(
        save_s=save_s,
        stall_s=save_s if blocks_until_complete else max(own_stall_s),
        throughput_Bps=logical_bytes / save_s,
        ranks=[
            RankRound(save_s=done - start, stall_s=stall, peak_rss_bytes=peak)
            for done, stall, peak in zip(completed_s, own_stall_s, peak_rss_bytes, strict=True)
        ],
        straggler=completed_s.index(max(completed_s)),
        peak_rss_bytes=sum(known_peaks) if len(known_peaks) == len(peak_rss_bytes) else None,
    )


# What a checkpoint's folder tells about it (pytest_ckpt/accept/verify.py).


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or, among the warnings, that cannot be told."""

    kind: str
    """One of `accept.verify.KINDS`."""
    file: str
    """Relative to the checkpoint's folder; empty where no file is to blame."""
    entry: str
    """Name of the tensor or object, with the offsets of its chunk; empty where the file as a whole is meant."""
    text: str
    """One sentence."""


class Orphan(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the kind that a save writes, to which nothing in the checkpoint refers."""

    file: str
    bytes: int


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a checkpoint are worth, found from its folder alone."""

    location: str
    outcome: str
    """`ok`, `no-checksum`, or the kind of the gravest problem: one of `accept.verify.OUTCOMES`."""
    text: str
    """One sentence: what the outcome means, with its figures."""
    layout: str
    """`torch_save`, `safetensors`, `mixed`, or empty where nothing could be read."""
    problems: list[Problem] = []
    warnings: list[Problem] = []
    """What does not make the checkpoint bad: times in an order that cannot be explained, and the like."""
    orphans: list[Orphan] = []
    entries: int = 0
    """Chunks of tensors, and objects, that the checkpoint lists."""
    verdicts: dict[str, int] = {}
    """How many entries have each verdict; `ok`: read, and equal to their checksums."""
    tensors: int = 0
    files: int = 0
    """That the checkpoint refers to, and that are there."""
    stored_bytes: int = 0
    """Sum of the ranges that the entries lie in."""
    folder_bytes: int = 0
    """Sum of the sizes of all files in the folder, links not followed."""
    other_files: int = 0
    """Files that no save writes, such as a tokenizer's: not looked into."""
    read_bytes: int = 0
    """Bytes read from data files."""
    fetched_bytes: int | None = None
    """Of them, what the storage gave this process (/proc/self/io); the rest lay in the page cache. None: not told."""
    checked_bytes: int = 0
    """Bytes that a checksum covers, and that are equal to it."""
    seconds: float = 0.0
    crc32: str = ""
    """What computed the checksums: `isal` or `zlib`."""

    @property
    def is_complete(self) -> bool:
        """Whether everything that the checkpoint lists is there, and nothing of it is known to be bad."""
        return self.outcome in ("ok", "no-checksum")


class PromiseResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one promise in one scenario."""

    promise: str
    """The test's name as a sentence."""
    scenario: str
    """Target, mode, writer and ranks, as in the test's id."""
    outcome: Literal["held", "broken", "known", "not applicable"]
    why: str = ""
    """Why it broke, what DCP is known to do, or why it does not apply."""
    known: list[str] = []
    """Ids of known behaviour of DCP."""
    seconds: float = 0.0
