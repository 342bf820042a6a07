"""What rank 0 does for one save of N ranks besides writing: each step of DCP's planning, timed apart.

The calls and their order are those of `torch.distributed.checkpoint.state_dict_saver._save_state_dict` and of the
collectives that it goes through. The other ranks are simulated: what they send is pickled as they would pickle it.
Only the network is left out: how much goes through it is said, how long that takes is not.

Seconds are CPU seconds of this process, which does one thing at a time and waits for nothing: what rank 0 needs on a
core that it has for itself, however many others share it here.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from pytest_ckpt.measure.memory import PeakMemory
from pytest_ckpt.save.simulated_ranks import MakePlanner, SimulatedRanks
from pytest_ckpt.save.torch_private import validation_timed, write_results

STEPS = ("local_plan", "gather", "global_plan", "validate", "scatter", "results", "metadata", "broadcast")
"""In their order; `validate` is a part of DCP's global plan, and none where that came from a cache. What comes before
the first byte is written ends with `scatter`."""


@dataclass
class PlannedSave:
    """One save's planning: CPU seconds of each step, bytes that go over the network, and memory."""

    steps: dict[str, float] = field(default_factory=dict)
    gathered_bytes: int = 0
    """Of all ranks' local plans."""
    scattered_bytes: int = 0
    results_bytes: int = 0
    """Of what all ranks tell of their writes."""
    metadata_bytes: int = 0
    """Of the file `.metadata`."""
    write_items: int = 0
    """Of all ranks, each replica once; 0 where plans came from a cache."""
    peak_bytes: int | None = None
    """Resident memory above the level before; None where the kernel does not let the peak be reset."""
    held_bytes: int = 0
    """Resident memory above the level before, once the save is over."""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time what is done inside as step `name`."""
        began = time.process_time()
        yield
        self.steps[name] = time.process_time() - began


class PlanningOfSaves:
    """Saves of N simulated ranks, one after the other, as far as they are planned and concluded.

    `folder` is where `.metadata` is written, into the page cache, since storage is not what is measured here; that of
    the last save stays there.
    """

    def __init__(self, ranks: SimulatedRanks, make_planner: MakePlanner, folder: Path) -> None:
        self._ranks = ranks
        self._make_planner = make_planner
        self._folder = folder
        self._coordinator = ranks.state_dict(0)
        began = time.process_time()
        self._sent = [_pickled(ranks.plan(rank)) for rank in range(ranks.size)]
        self.derive_s = time.process_time() - began
        """CPU seconds that making and pickling the plans of all ranks took; real ranks do that side by side."""
        self._reported: list[bytes] = []

    @property
    def plan_bytes(self) -> int:
        """Mean bytes of a rank's local plan, pickled."""
        return sum(map(len, self._sent)) // len(self._sent)

    def save(self) -> PlannedSave:
        """Plan and conclude one save; with plan caching, a later one finds what the first left."""
        done = PlannedSave()
        peak, process = PeakMemory(), psutil.Process()
        before_bytes = process.memory_info().rss
        peak.start()
        self._run(done)
        done.peak_bytes = peak.stop()
        gc.collect()
        done.held_bytes = max(0, process.memory_info().rss - before_bytes)
        return done

    def _run(self, done: PlannedSave) -> None:
        file = self._folder / ".metadata"
        file.unlink(missing_ok=True)
        planner = self._make_planner()
        writer = FileSystemWriter(self._folder, sync_files=False)
        with done.step("local_plan"):
            planner.set_up_planner(
                state_dict=self._coordinator, storage_meta=writer.storage_meta(), is_coordinator=True
            )
            writer.set_up_storage_writer(True, rank=0, use_collectives=True)
            local = writer.prepare_local_plan(planner.create_local_plan())
        sent = self._sent
        if not local.usable:  # it is the one of the save before, on every rank
            sent = [_pickled(SavePlan([], usable=False))] * self._ranks.size
        with done.step("gather"):
            _pickled(local)
            gathered = [pickle.loads(data) for data in sent]
        checks: list[float] = []
        with done.step("global_plan"), validation_timed(checks.append):
            plans, metadata = planner.create_global_plan(gathered)
            plans = writer.prepare_global_plan(plans)
        if checks:
            done.steps["global_plan"] -= sum(checks)
            done.steps["validate"] = sum(checks)
        with done.step("scatter"):
            scattered = [_pickled(plan) for plan in plans]
            planner.finish_plan(pickle.loads(scattered[0]))
        done.gathered_bytes, done.scattered_bytes = _sum(sent), _sum(scattered)
        done.write_items = sum(len(plan.items) for plan in plans)
        if not self._reported:  # what ranks write is the same in every save
            self._reported = [_pickled(write_results(plan, rank)) for rank, plan in enumerate(plans)]
        del gathered, plans, scattered
        with done.step("results"):
            results = [pickle.loads(data) for data in self._reported]
        with done.step("metadata"):
            writer.finish(metadata=metadata, results=results)
        with done.step("broadcast"):
            pickle.loads(_pickled(metadata))  # by rank 0, and by another rank
        done.results_bytes = _sum(self._reported)
        done.metadata_bytes = file.stat().st_size


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's collector from going through millions of plans that all stay, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def alone_on_a_core() -> Iterator[None]:
    """Run on the allowed core that is least busy now and with Python's collector frozen; as before afterwards.

    The collector looks at all objects again and again while plans are made, so that with it even what is linear grows
    like a higher power; and a core that others use makes small sizes look as slow as large ones.
    """
    allowed = os.sched_getaffinity(0)
    busy = psutil.cpu_percent(interval=0.2, percpu=True)
    quiet = min(allowed, key=lambda core: busy[core] if core < len(busy) else 100.0)
    os.sched_setaffinity(0, {quiet})
    gc.collect()
    gc.freeze()
    try:
        with collector_off():
            yield
    finally:
        gc.unfreeze()
        os.sched_setaffinity(0, allowed)


def _pickled(value: object) -> bytes:
    return pickle.dumps(value)


def _sum(parts: list[bytes]) -> int:
    return sum(map(len, parts))
