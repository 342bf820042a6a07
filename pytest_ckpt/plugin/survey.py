"""What is known of the storage before the first save: identities, probes and the prediction that they give."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pytest_ckpt.errors import CkptError
from pytest_ckpt.judge.bounds import CopyKind, SaveFacts, find_bounds
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.records import Bounds, Probes, Scenario, Volume
from pytest_ckpt.save.options import HUGGING_FACE
from pytest_ckpt.target.identity import identify
from pytest_ckpt.target.interface import Target, WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.target.volume import VolumeIdentity
from pytest_ckpt.target.volumes import volumes
from pytest_ckpt.units import format_bytes, format_rate, format_seconds
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.probing import run_probes
from pytest_ckpt.world.rounds import Progress

LEAST_PROBE_BYTES = 64 * 2**20
MOST_PROBE_BYTES = 2 * 2**30
SURVEY_BYTES = 256 * 2**20
_REFERENCE = "llama3-8b"


@dataclass
class Survey:
    """Of one session: each target is identified once, and probed once for each world and size of probe."""

    most_bytes: int
    """Zero: nothing is probed."""
    others_too: bool
    """Whether other writable volumes are probed as well, with `SURVEY_BYTES` each."""
    _identities: dict[str, VolumeIdentity] = field(default_factory=dict)
    _probes: dict[tuple[str, int], tuple[int, Probes]] = field(default_factory=dict)
    _host: dict[int, Probes] = field(default_factory=dict)
    _others: dict[str, float | None] = field(default_factory=dict)

    def identity(self, target: Target) -> VolumeIdentity:
        """Return what the volume of `target` is."""
        if target.location not in self._identities:
            self._identities[target.location] = identify(target.location)
        return self._identities[target.location]

    def devices(self, target: Target) -> list[str]:
        """Return the number of the block device that is mounted there; none where it has no counters."""
        number = self.identity(target).device_number
        return [number] if os.path.exists(f"/sys/dev/block/{number}/stat") else []

    def probe(self, target: Target, world: World, folder: WorkFolder, state: int, progress: Progress) -> bool:
        """Probe `target` with about as many bytes as a `state` has; False where that was done or is not wanted."""
        want = min(self.most_bytes, max(LEAST_PROBE_BYTES, state))
        key = (target.location, world.size)
        if want == 0 or (key in self._probes and self._probes[key][0] >= want):
            return False
        host = self._host.get(world.size) if key not in self._probes else None
        probes = run_probes(world, folder, progress, max_bytes=want, host=host)
        self._probes[key] = (want, probes)
        self._host[world.size] = probes
        return True

    def probe_others(self, beside: list[Target], world: World, progress: Progress) -> None:
        """Probe the other volumes of the machine where that was asked for; one that refuses stays unmeasured."""
        if not self.others_too or self._others:
            return
        own = {self.identity(target).device_number for target in beside}
        for volume in volumes(least_bytes=4 * SURVEY_BYTES):
            if volume.device_number in own or not os.access(volume.mount, os.W_OK):
                continue
            self._others[volume.mount] = None
            try:
                folder = open_target(TargetSpec("survey", volume.mount, volume.mount, "--ckpt-survey")).open()
            except (CkptError, OSError):
                continue
            try:
                probes = run_probes(world, folder, progress, max_bytes=SURVEY_BYTES, host=self._host.get(world.size))
                self._others[volume.mount] = probes.storage_Bps(synced=True)
            finally:
                folder.close()

    def probes_of(self, target: Target, world: World) -> Probes | None:
        """Return what was measured of `target` with this world."""
        found = self._probes.get((target.location, world.size))
        return found[1] if found else None

    def other_volumes(self, target: Target, targets: list[Target], world: World, state: int) -> list[Volume]:
        """Return the other targets and volumes with room for a `state`, with their rates where they were measured."""
        own = self.identity(target).device_number
        found: dict[str, Volume] = {}
        for other in targets:
            identity, probes = self.identity(other), self.probes_of(other, world)
            if identity.device_number != own and probes is not None:
                rate = probes.storage_Bps(synced=True)
                found[identity.device_number] = _volume(identity, other.location, other.free_bytes(), rate)
        for identity in volumes(beside=target.location, least_bytes=state):
            if identity.device_number not in found:
                free = os.statvfs(identity.mount)
                rate = self._others.get(identity.mount)
                found[identity.device_number] = _volume(identity, identity.mount, free.f_bavail * free.f_frsize, rate)
        return list(found.values())


def facts_of(scenario: Scenario, synced: bool = True) -> SaveFacts:
    """Return what a way of saving does with each byte; `synced` as was seen, or as is expected of a writer."""
    options = scenario.options
    tensors_as_they_are = scenario.writer == HUGGING_FACE or options.get("serialization_format") == "safetensors"
    copy: CopyKind = "none" if scenario.mode == "sync" else "host"
    if scenario.device == "cuda":
        copy = "d2h_pinned" if scenario.mode in ("async-pinned", "async-staged") else "d2h_pageable"
    return SaveFacts(
        synced=synced and options.get("sync_files", True) is not False,
        copy=copy,
        serialized=options.get("crc32", True) is not False and not tensors_as_they_are,
    )


def bounds_of(scenario: Scenario, logical_bytes: int, probes: Probes | None, synced: bool = True) -> Bounds | None:
    """Return the bounds of a scenario; None where nothing was probed."""
    return None if probes is None else find_bounds(logical_bytes, probes, facts_of(scenario, synced))


def prediction_lines(target: Target, scenario: Scenario, logical_bytes: int, probes: Probes) -> list[str]:
    """Return what the probes say before anyone has waited: rates, and seconds for this model and for llama3-8b."""
    direct = f"direct {format_rate(probes.write_direct_Bps)}" if probes.write_direct_Bps else "direct writes refused"
    rates = [direct]
    for name, rate in (
        ("synced", probes.write_synced_Bps),
        ("page cache", probes.write_buffered_Bps),
        ("serialise", probes.serialize_Bps),
        ("memory copy", probes.copy_Bps),
    ):
        if rate:
            rates.append(f"{name} {format_rate(rate)}" + (" (not durable)" if name == "page cache" else ""))
    lines = [f"ckpt: probes of {target.label}, {probes.world_size} ranks at once: {', '.join(rates)}"]
    predictions: list[str] = []
    reference = state_bytes(GEOMETRIES[_REFERENCE], RECIPES["fp32-adamw"])
    for name, count in ((scenario.model, logical_bytes), (_REFERENCE, reference)):
        bounds = bounds_of(scenario, count, probes)
        if bounds is not None and bounds.predicted_s is not None and not any(name in p for p in predictions):
            predictions.append(f"{format_seconds(bounds.predicted_s)} for {name} ({format_bytes(count)})")
    if predictions:
        lines.append(f"ckpt: predicted {scenario.mode} save into {target.label}: {', '.join(predictions)}")
    return lines


def _volume(identity: VolumeIdentity, mount: str, free_bytes: int, write_Bps: float | None) -> Volume:
    return Volume(
        mount=mount,
        medium=identity.medium,
        storage_class=identity.storage_class,
        free_bytes=free_bytes,
        write_Bps=write_Bps,
    )
