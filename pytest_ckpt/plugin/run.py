"""One session that saves: its targets, worlds and work folders, and the scenarios measured with them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_ckpt.errors import SettingError, TooSlow, unknown_name
from pytest_ckpt.measure.hardware import driver_version
from pytest_ckpt.plugin import benchmark, paper, plan
from pytest_ckpt.plugin.baselines import Baselines
from pytest_ckpt.plugin.hosts import Hosts
from pytest_ckpt.plugin.interrupts import end_ignoring, ending_signals_interrupt
from pytest_ckpt.plugin.lead import Lead, LeadingWorld
from pytest_ckpt.plugin.outcome import Outcome
from pytest_ckpt.plugin.record import Origin, SaveRequest, make_record, scenario_of
from pytest_ckpt.plugin.settings import Settings, default_root
from pytest_ckpt.plugin.specs import require_importable
from pytest_ckpt.plugin.survey import SURVEY_BYTES, Survey, prediction_lines
from pytest_ckpt.plugin.terminal import TerminalProgress
from pytest_ckpt.records import PLAN, SaveRecord
from pytest_ckpt.target.interface import Target, WorkFolder
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.space import require_space
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.units import format_seconds
from pytest_ckpt.world.interface import RankFailure, World
from pytest_ckpt.world.job import why_this_node_only
from pytest_ckpt.world.loads import measure_loads
from pytest_ckpt.world.planning import PlanningSetup, measure_planning
from pytest_ckpt.world.rounds import LEAST_ROUNDS, Measured, RoundsPlan, Saving, measure_rounds
from pytest_ckpt.world.spawned import SpawnedWorld
from pytest_ckpt.world.spread import SpreadFolder

if TYPE_CHECKING:
    from pytest_ckpt.plugin.plan import Need
    from pytest_ckpt.plugin.saver import Measuring


@dataclass(eq=False)  # plugins are kept in sets
class Run:
    """Registered as a plugin of its own once tests that need ranks were selected; owns worlds and work folders."""

    config: pytest.Config
    settings: Settings
    outcome: Outcome
    baselines: Baselines
    lead: Lead | None = None
    """Of an attached world, whose ranks run the same tests; None: the ranks are started here."""

    def __post_init__(self) -> None:
        self._needs: list[Need] = []
        self._on_paper: list[paper.PaperNeed] = []
        self._accepting: list[Target] = []
        self._warnings: list[str] = []
        self._targets: dict[str, Target] = {}
        self._folders: dict[str, WorkFolder] = {}
        self._worlds: dict[int, World] = {}
        self._hosts = Hosts(self.config, self.lead) if self.lead is not None and self.lead.is_on_many_hosts else None
        self._survey = Survey(self.settings.probe_bytes, self.settings.survey)
        self._state_bytes = 0
        self._failed: set[str] = set()
        self._began = time.monotonic()

    def plan(self, saving: list[pytest.Item], accepting: Sequence[pytest.Item] = ()) -> None:
        """Take note of the tests that measure, and of those that put a promise to the test.

        Raises `SettingError` for what cannot work, before anything is written.
        """
        alone = why_this_node_only(os.environ)
        if alone is not None:
            self._warnings.append(alone)
        for ref, source in self.settings.references if saving or accepting else ():
            require_importable(ref, source)
        self._accepting = list(dict.fromkeys(plan.target_of(item, self) for item in accepting))
        for target in self._accepting:
            self._warnings += target.check()
            if self._hosts is None:
                require_space(plan.ACCEPTANCE_BYTES, target.free_bytes(), target.location)
        for item in accepting:
            if "ckpt_model" in getattr(item, "fixturenames", ()):
                plan.Need.of_item(item, self, tests=1).check()
        if accepting or any(paper.plans_only(item) for item in saving):
            self._require_full_shard("acceptance" if accepting else "planning on paper")
        self._on_paper = [paper.PaperNeed.of_item(item, self) for item in saving if paper.plans_only(item)]
        self._needs = [
            plan.Need.of_item(item, self, tests=len(saving)) for item in saving if not paper.plans_only(item)
        ]
        if self._on_paper:  # nothing is written, but it is by the target that baselines are kept
            self.baselines.open(self.target(), self._survey.identity(self.target()))
        for target in dict.fromkeys(need.target for need in self._needs):
            self._warnings += target.check()
            self.baselines.open(target, self._survey.identity(target))
        for spec in self.settings.targets:  # of those that no selected test uses, the baselines count all the same
            target = self.target(spec.label)
            self.baselines.open(target, self._survey.identity(target), used=False)
        self.baselines.check_labels()
        for item in saving:
            plan.tolerance_of(item, self.settings)
        for need in self._needs:
            need.check()
        for on_paper in self._on_paper:
            on_paper.check()
        if self.settings.trace_file is not None and saving:
            self.outcome.open_trace(self.settings.trace_file)

    def pytest_report_collectionfinish(self) -> list[str]:
        """Print what was chosen and why."""
        if self.config.get_verbosity() < 0:
            return []
        lines = plan.acceptance_lines(self, self._accepting) if self._accepting else []
        lines += plan.header_lines(self, self._needs) if self._needs else []
        lines += paper.header_lines(self._on_paper, self.settings)
        if self._needs or self._on_paper:
            lines += self.baselines.header_lines()
        if not lines:
            return []
        leading = self.lead.header_lines() if self.lead is not None else []
        return [*leading, *lines, *plan.warning_lines(self, self._warnings)]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        """Open the work folders, run the tests, and leave nothing behind however they end."""
        if _only_looks(self.config):
            return (yield)
        self._began = time.monotonic()
        with ending_signals_interrupt(ctrl_c=self.lead is not None):
            try:
                targets = [*self._accepting, *(need.target for need in self._needs)]
                for target in targets:
                    self.folder(target)
                if self._hosts is not None and targets:
                    for target in self._accepting:  # whatever the ranks, each host may have to hold all of it
                        most = plan.ACCEPTANCE_BYTES
                        self._hosts.require_space(target, self.folder(target), most, lambda _: plan.ACCEPTANCE_BYTES)
                    for need in self._needs:
                        self._require_space_on_hosts(need)
                    self._hosts.compare()
                return (yield)
            except (SettingError, RankFailure) as error:
                raise pytest.UsageError(str(error)) from error
            finally:
                self.close()

    def pytest_unconfigure(self) -> None:
        """The reports are written: whatever ends this process may do so now."""
        end_ignoring()

    def _require_space_on_hosts(self, need: Need) -> None:
        if self._hosts is not None and need.target_bytes is not None:
            folder = self.folder(need.target)
            self._hosts.require_space(need.target, folder, need.target_bytes, need.target_bytes_of)

    def target(self, label: str | None = None) -> Target:
        """Return the target called `label`, or the first; resolved once."""
        specs = {spec.label: spec for spec in self.settings.targets or (self._default_target(),)}
        label = label or next(iter(specs))
        if label not in specs:
            raise unknown_name("target label", label, specs, "ckpt_target")
        if label not in self._targets:
            self._targets[label] = open_target(specs[label])
        return self._targets[label]

    def folder(self, target: Target) -> WorkFolder:
        """Return this run's work folder on `target`; the first time it is made, after trying what a save needs."""
        if target.label not in self._folders:
            self._folders[target.label] = target.open()
            if self._hosts is not None:
                self._folders[target.label] = self._hosts.folder(target, self._folders[target.label])
        return self._folders[target.label]

    def world(self, size: int) -> World:
        """Return the world of `size` ranks; others are closed first, so that memory is never held twice."""
        for other in self._worlds.values():
            if other.size != size:
                other.close()
        return self.world_beside(size)

    def world_beside(self, size: int) -> World:
        """Return the world of `size` ranks and leave others as they are; whoever asks keeps memory from being short.

        An attached one has its ranks: the test is skipped where others are needed.
        """
        if self.lead is not None and size != self.lead.world.size:
            pytest.skip(
                f"an attached world has its {self.lead.world.size} ranks; loads with another number of ranks need the "
                "spawned one: run pytest without a launcher"
            )
        if size not in self._worlds:
            self._worlds[size] = self._new_world(size)
        return self._worlds[size]

    @property
    def hosts(self) -> tuple[int, ...]:
        """Of each rank, the number of its host, where they are on several; empty: all are on this one."""
        return tuple(self.lead.world.hosts) if self.lead is not None and self._hosts is not None else ()

    def _new_world(self, size: int) -> World:
        if self.lead is not None:
            return LeadingWorld(self.lead)
        return SpawnedWorld(size, self.settings.device, self.settings.timeout_s)

    def measuring(self, name: str, request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., SaveRecord]:
        """Return the object behind the fixture `name`: in an attached world, a call that all ranks make."""
        from pytest_ckpt.plugin.loader import Loader
        from pytest_ckpt.plugin.planner import Planner
        from pytest_ckpt.plugin.saver import Saver

        made: dict[str, type[Measuring]] = {"ckpt_save": Saver, "ckpt_load": Loader, "ckpt_plan": Planner}
        measure: Any = made[name](self, request, benchmark)
        return measure if self.lead is None else self.lead.measuring(name, measure)

    @cached_property
    def origin(self) -> Origin:
        """What this session's records say of where they come from."""
        return Origin(uuid.uuid4().hex, self.baselines.hardware, driver_version())

    def measure(self, request: SaveRequest) -> SaveRecord:
        """Measure one scenario and judge it; failed rounds of the ranks end the test with their report."""
        saves = request.mode != PLAN
        if saves:
            need = plan.Need.of_request(request, self)
            if not any(need.is_part_of(planned) for planned in self._needs):
                need.check(reusable_bytes=self._state_bytes)
                self._require_space_on_hosts(need)
        allowed_s = self._allowed_s()
        started = time.monotonic()
        self._state_bytes = request.model.state_bytes or 0 if saves else self._state_bytes
        self.baselines.open(request.target, self._survey.identity(request.target))
        began = datetime.now(timezone.utc)
        failed_before = request.target.label in self._failed
        self._failed.add(request.target.label)  # until the opposite is known: an interrupt is a failure too
        written = _bytes_in(self.folder(request.target)) if saves else _nothing_written
        progress = TerminalProgress(self.config, request.title, written)
        measured = self._measure(request, allowed_s, progress)
        record = self._judged(request, measured, began)
        if self.baselines.wants_second_look(record, request.target):
            left_s = allowed_s - (time.monotonic() - started)
            measured = self._second_look(request, measured, left_s, progress)
            record = self._judged(request, measured, began, looks=2)
        if not failed_before:
            self._failed.discard(request.target.label)
        self.outcome.note_spans(request.title, measured.spans)
        return record

    def _measure(self, request: SaveRequest, allowed_s: float, progress: TerminalProgress) -> Measured:
        settings = self.settings
        saving = Saving(
            mode=request.mode if request.saved_by is None else "sync",
            writer=request.writer.factory,
            reader=None if request.writer.reader is None else request.writer.reader.factory,
            model=request.model.name,
            state=request.model.recipe.name,
            function=request.model.function,
            options=dict(request.writer.options),
            engine=request.engine.name,
            engine_factory=request.engine.factory,
            train=request.train,
            overlap=request.overlap,
            mesh=None if request.mesh is None else str(request.mesh),
            share=None if request.model.share is None else str(request.model.share),
        )
        rounds = RoundsPlan(
            rounds=settings.rounds,
            max_time_s=allowed_s,
            single=benchmark.is_disabled(self.config),
            keep_all=settings.keep == "all",
            keep_failed=settings.keep == "failed",
            devices=self._survey.devices(request.target),
        )
        try:
            if request.mode == PLAN:
                return measure_planning(request.world, _setup(request), rounds, progress)
            folder = self.folder(request.target)
            if request.saved_by is not None:
                if self._hosts is not None:
                    self._hosts.require_loadable(request.target)
                cold = request.mode == "load-cold"
                return measure_loads(request.saved_by, request.world, folder, saving, rounds, progress, cold=cold)
            self._probe(request, progress)
            return measure_rounds(request.world, folder, saving, rounds, progress)
        except RankFailure as failure:
            if failure.is_usage:
                raise SettingError(failure.culprits[0].cause) from None
            raise pytest.fail.Exception(
                f"{failure}\nwhile {request.title} was measured; {plan.space_line(request.target)}", pytrace=False
            ) from None

    def _second_look(
        self, request: SaveRequest, measured: Measured, left_s: float, progress: TerminalProgress
    ) -> Measured:
        """Return `measured` with more rounds, from fresh ranks, or with a note that there was no time for them."""
        progress.say(f"ckpt: {request.title}: undecided, so a second look is taken")
        needed_s = (LEAST_ROUNDS + 1) * median(taken.save_s for taken in measured.rounds)
        try:
            if needed_s > left_s:
                raise TooSlow(f"{format_seconds(max(0, left_s))} are left, and it needs {format_seconds(needed_s)}")
            fresh = request.world.renew()
            again = self._measure(request, left_s, progress)
        except TooSlow as error:
            note = f"no second look was taken: {error}"
            return msgspec.structs.replace(measured, notes=[*measured.notes, note])
        where = "by fresh ranks" if fresh else "by the same ranks, since functions of the test's own ran in them"
        return measured.and_again(again, f"{len(again.rounds)} of the rounds are a second look, {where}")

    def _judged(self, request: SaveRequest, measured: Measured, began: datetime, looks: int = 1) -> SaveRecord:
        targets = list(self._targets.values())
        name = self.baselines.id_of(request.target)
        spread = ""
        if self._hosts is not None:
            spread = self._hosts.spread_text(request.target)
            notes = dict.fromkeys([*measured.notes, *self._hosts.notes])
            measured = msgspec.structs.replace(measured, notes=list(notes))
        record = make_record(request, measured, began, self._survey, targets, self.origin, name, spread)
        return self.baselines.judged(record, request.target, request.tolerance, looks)

    def _probe(self, request: SaveRequest, progress: TerminalProgress) -> None:
        """Probe every target of the session before the first save, so that each record can name a faster one."""
        if benchmark.is_disabled(self.config):
            return
        state = request.model.state_bytes or SURVEY_BYTES
        for target in dict.fromkeys([request.target, *(need.target for need in self._needs)]):
            if self._survey.probe(target, request.world, self.folder(target), state, progress):
                probes = self._survey.probes_of(target, request.world)
                assert probes is not None
                for line in prediction_lines(target, scenario_of(request), state, probes):
                    progress.say(line)
                if self._hosts is not None:
                    self._hosts.say_rates(target, probes)
        self._survey.probe_others(list(self._targets.values()), request.world, progress)

    def _require_full_shard(self, what: str) -> None:
        settings = self.settings
        if settings.share is not None:
            raise SettingError(f"--ckpt-share={settings.share} says nothing of {what}; run that without it")
        if settings.mesh is not None and settings.mesh.replicate > 1:
            raise SettingError(
                f"--ckpt-mesh={settings.mesh} says nothing of {what}, which has a full shard; leave it out"
            )

    @property
    def is_closed(self) -> bool:
        """Whether the work folders are gone, or kept, already."""
        return not self._folders

    def close(self) -> None:
        """End the ranks, then remove or keep the work folders."""
        try:
            for world in self._worlds.values():
                world.close()
        finally:
            self._worlds.clear()
            for label, folder in self._folders.items():
                keep = self.settings.keep == "all" or (self.settings.keep == "failed" and label in self._failed)
                try:
                    kept = folder.close(keep=keep)
                except OSError as error:
                    self.outcome.left.append(f"{folder.location} ({error})")
                else:
                    self.outcome.kept += [kept] if kept else []
            self._folders.clear()

    def _allowed_s(self) -> float:
        session_s = self.settings.session_time_s
        if session_s is None:
            return self.settings.max_time_s
        left_s = session_s - (time.monotonic() - self._began)
        if left_s <= 0:
            raise TooSlow(
                f"too slow for the time allowed: the {format_seconds(session_s)} of --ckpt-session-time had passed "
                "before this scenario began; give more time or select fewer scenarios"
            )
        return min(self.settings.max_time_s, left_s)

    def _default_target(self) -> TargetSpec:
        if self.lead is not None:
            location = self.lead.default_location()
            return TargetSpec("local", location, location, "the default")
        factory = getattr(self.config, "_tmp_path_factory", None)
        if factory is None:
            raise SettingError(
                "there is no default target without pytest's temporary folders (-p no:tmpdir); give --ckpt-target=DIR"
            )
        # Asking for the base folder would make it.
        root = default_root() if _only_looks(self.config) else str(factory.getbasetemp())
        return TargetSpec("local", root, root, "the default")


def _bytes_in(folder: WorkFolder) -> Callable[[str], int]:
    """Return what tells a folder's bytes while ranks are busy: of several hosts' disks, this one's."""
    return folder.own_bytes_in if isinstance(folder, SpreadFolder) else folder.bytes_in


def _nothing_written(location: str) -> int:
    return 0


def _setup(request: SaveRequest) -> PlanningSetup:
    return PlanningSetup(
        model=request.model.name,
        state=request.model.recipe.name,
        state_bytes=request.model.state_bytes or 0,
        options=dict(request.writer.options),
        planner=request.planner,
    )


def _only_looks(config: pytest.Config) -> bool:
    return bool(config.option.collectonly or config.getoption("setupplan", False))
