"""`pytest-ckpt probe`: what a target gives, beside what people try first and why that misleads."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_ckpt.errors import SettingError
from pytest_ckpt.judge.bounds import SaveFacts, find_bounds
from pytest_ckpt.measure.io_probes import ProbeError
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.records import Probe
from pytest_ckpt.target.identity import identify
from pytest_ckpt.target.interface import Target
from pytest_ckpt.units import format_bytes, format_rate, format_seconds
from pytest_ckpt.world.probing import run_misleading_probes, run_probes
from pytest_ckpt.world.spawned import SpawnedWorld

_MODELS = ("llama3-debug", "llama3-8b")
_MEANINGS = {
    "write_direct": "past the page cache",
    "write_synced": "each piece followed by fsync: what a durable save gets",
    "write_buffered": "into the page cache: fast until it is full, and lost in a crash",
    "copy": "host memory, into fresh pages: what staging an async save costs on a CPU",
    "copy_warm": "host memory, into used pages",
    "serialize": "torch.save to nowhere: the CPU's share of a save",
    "d2h_pinned": "device to pinned host memory",
    "d2h_pageable": "device to pageable host memory",
    "write_zeros": "as `dd if=/dev/zero bs=1M`: misleads, it ends in the page cache and zeros compress",
    "copy_folder": "as `cp -r`: misleads, it ends in the page cache and reads from it",
}


class Silent:
    """A `Progress` that shows nothing: the lines come as the probes end."""

    def step(self, what: str, location: str | None, expected_bytes: int) -> None:
        """Show nothing."""

    def poll(self) -> None:
        """Show nothing."""

    def done(self) -> None:
        """Show nothing."""


def probe_target(target: Target, ranks: int, size: int, checkpoint: str | None) -> Iterator[str]:
    """Probe `target` with `ranks` processes and at most `size` bytes each time; yield lines as they become known."""
    for warning in target.check():
        yield f"warning: {warning}"
    identity = identify(target.location)
    yield (
        f"{target.location}: {identity.filesystem} on {identity.mount}, {identity.storage_class} "
        f"({identity.rule}), {format_bytes(target.free_bytes())} free"
    )
    yield f"probing with {ranks} processes, at most {format_bytes(size)} or 3 s each"
    world = SpawnedWorld(ranks, "cpu")
    folder = target.open()
    try:
        probes = run_probes(world, folder, Silent(), max_bytes=size)
        yield from (_line(probe) for probe in probes.details)
        yield "what people try first, and what misleads:"
        yield from (_line(probe) for probe in run_misleading_probes(folder, checkpoint, max_bytes=size))
    except ProbeError as error:
        raise SettingError(str(error)) from None
    finally:
        world.close()
        folder.close()
    for name in _MODELS:
        count = state_bytes(GEOMETRIES[name], RECIPES["fp32-adamw"])
        bounds = find_bounds(count, probes, SaveFacts(synced=True, copy="none"))
        if bounds is not None and bounds.predicted_s is not None:
            staging = f", staging of an async save {format_seconds(count / probes.copy_Bps)}" if probes.copy_Bps else ""
            yield (
                f"{name}, {format_bytes(count)}: a save in about {format_seconds(bounds.predicted_s)}, at best "
                f"{format_seconds(bounds.overlapped_s)} ({bounds.largest}){staging}"
            )


def _line(probe: Probe) -> str:
    if not probe.Bps:
        return f"  {probe.name:<16} {'refused':>10}  {probe.note}"
    return f"  {probe.name:<16} {format_rate(probe.Bps):>10}  {_MEANINGS.get(probe.name, probe.note)}"
