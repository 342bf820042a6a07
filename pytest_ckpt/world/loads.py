"""A scenario's loads, from the controller: save once, then load it again and again, each time into a wiped state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pytest_ckpt.errors import LoadDiffers
from pytest_ckpt.measure.resources import PageCacheWatch
from pytest_ckpt.records import Round
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.world import commands
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.rounds import Measured, Progress, RoundsPlan, Saving, ScenarioRun

if TYPE_CHECKING:
    from pytest_ckpt.save.digest import Digests


def measure_loads(
    save_world: World,
    load_world: World,
    folder: WorkFolder,
    saving: Saving,
    plan: RoundsPlan,
    progress: Progress,
    *,
    cold: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Save once as `saving` says on `save_world`, then load that on `load_world`: one warm-up, then rounds as planned.

    `cold`: the page cache is made to forget the checkpoint before each load. After each, what the tensors hold is
    compared with what was saved, and `LoadDiffers` raised where that is something else. Else as `measure_rounds`.
    """
    try:
        return _LoadRun(save_world, load_world, folder, saving, plan, progress, clock, cold).measure()
    finally:
        progress.done()


class _LoadRun(ScenarioRun):
    noun = "load"

    def __init__(
        self,
        save_world: World,
        load_world: World,
        folder: WorkFolder,
        saving: Saving,
        plan: RoundsPlan,
        progress: Progress,
        clock: Callable[[], float],
        cold: bool,
    ) -> None:
        super().__init__(save_world, folder, saving, plan, progress, clock)
        self.load_world, self.cold = load_world, cold
        self.location = ""
        self.notes: list[str] = []

    @property
    def mesh(self) -> str | None:
        """That of the scenario is the mesh of the ranks that load; other ranks that save are a full shard."""
        return self.saving.mesh if self.world is self.load_world else None

    def measure(self) -> Measured:
        """See `measure_loads`."""
        began = self.clock()
        self.location = self.folder.new_round(f"{self.saving.model}-load")
        keep = self.plan.keep_all or self.plan.keep_failed
        try:
            self._save_once()
            self.world = self.load_world
            self.before_s = self.clock() - began
            measured = super().measure()
            keep = self.plan.keep_all
        finally:
            if not keep:
                with contextlib.suppress(OSError):  # why a load failed is what people must read
                    self.folder.remove(self.location)
        return msgspec.structs.replace(measured, notes=[*measured.notes, *self.notes])

    def once(self, what: str) -> Round:
        """Load once, in a step called `what`, and compare what was loaded with what was saved."""
        self.progress.step(what, None, 0)
        self.cache = PageCacheWatch()
        self.cache.look()
        replies = self.run(commands.load_round, location=self.location, cold=self.cold, trace=self.plan.trace)
        self.progress.step(f"{what}: comparing", None, 0)
        self._require_equal(self._digests())
        if self.cold:
            why = next((reply["not_dropped"] for reply in replies if reply["not_dropped"] is not None), None)
            note = "cold: page cache dropped" if why is None else f"cold: fadvise only ({why})"
            self.notes = list(dict.fromkeys([*self.notes, note]))
        return self.summarize(replies)

    def _save_once(self) -> None:
        other = self.world is not self.load_world
        if other and not self.load_world.renew():  # the state is not to be held twice
            self.load_world.run(commands.release)
        self.prepare()
        self.saved = self.closing_the_engine(self._save)
        if other:
            self.world.close()

    def _save(self) -> Digests:
        self.progress.step("the save that is loaded", self.location, self.logical_bytes)
        replies = self.run(commands.save_round, location=self.location, trace=False)
        self.stored_bytes = replies[0]["stored_bytes"]
        self.folder_bytes = self.bytes_left(self.location)
        self.progress.step("the save that is loaded: its digest", None, 0)
        return self._digests()

    def _digests(self) -> Digests:
        from pytest_ckpt.save.digest import combine

        return combine(self.run(commands.digest_state))

    def _require_equal(self, loaded: Digests) -> None:
        from pytest_ckpt.save.digest import difference_text, differing

        keys = differing(self.saved, loaded)
        if keys:
            raise LoadDiffers(difference_text(keys, len(self.saved), "tensors"))
