"""The object behind the fixture `ckpt_plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.judge.growth import LEAST_SIZES, PlanGrowth, alike, growth_of
from pytest_ckpt.plugin.paper import PaperNeed
from pytest_ckpt.plugin.plan import is_overridden, params_of, tolerance_of
from pytest_ckpt.plugin.record import SaveRequest, planner_of
from pytest_ckpt.plugin.saver import Measuring
from pytest_ckpt.plugin.specs import EngineSpec, ModelSpec, WriterSpec, writer_spec
from pytest_ckpt.records import PLAN, SaveRecord
from pytest_ckpt.save.engines import DEFAULT_ENGINE
from pytest_ckpt.save.options import OPTIONS
from pytest_ckpt.save.writers import DEFAULT_WRITER
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.paper import PaperWorld

_PLANNER_OPTIONS = [option.name for option in OPTIONS if option.owner == "planner"]


class Planner(Measuring):
    """Callable in a test: measures the planning of one scenario and adds its row."""

    fixture_name = "ckpt_plan"

    def __call__(
        self,
        *,
        ranks: int | None = None,
        model: str | ModelSpec | None = None,
        planner: Callable[..., Any] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> SaveRecord:
        """Plan saves by `ranks` ranks on paper, again and again; `save_s` is what planning takes of rank 0's CPU.

        What is left out comes from the fixtures `ckpt_plan_ranks` and `ckpt_model`. `options` are those of DCP's
        planner, as `enable_plan_caching=True`; `planner` is a class or function at module level that takes them and
        returns another `SavePlanner`. All else is as with `ckpt_save`, but nothing is saved.
        """

        def make_request() -> SaveRequest:
            if planner is None:
                _check(options)
            count = int(self._fixture("ckpt_plan_ranks")) if ranks is None else ranks
            if count < 1:
                raise SettingError(f"{count} ranks (from {self.fixture_name}) plan nothing; write 1 or more")
            need = PaperNeed(replace(self._model(model), share=None), count)  # rank 0 plans for all ranks
            need.check()
            writer = writer_spec(DEFAULT_WRITER, self.fixture_name)
            return SaveRequest(
                target=self._run.target(),
                model=need.model,
                world=PaperWorld(count, self._run.settings.timeout_s),
                mode=PLAN,
                writer=WriterSpec(writer.name, writer.factory, _chosen(options)),
                engine=EngineSpec(DEFAULT_ENGINE),
                train=None,
                overlap=False,
                title=self._title(name),
                tolerance=tolerance_of(self._request.node, self._run.settings),
                planner=None if planner is None else reference(planner, "planner"),
            )

        return self._measured(name, make_request)

    def growth(
        self,
        *,
        model: str | ModelSpec | None = None,
        planner: Callable[..., Any] | None = None,
        **options: Any,
    ) -> PlanGrowth:
        """Return how each step grows with the ranks, from what this session has measured of the same scenario.

        The test is skipped where that are fewer than four numbers of ranks.
        """
        spec = self._model(model)
        ref = None if planner is None else reference(planner, "planner")
        wanted = dict(_chosen(options)) | planner_of(ref)
        records = [
            record
            for record in self._run.outcome.records
            if record.scenario.is_plan
            and (record.scenario.model, record.scenario.state) == (spec.name, spec.recipe.name)
            and record.scenario.options == wanted
        ]
        groups = alike(records)
        growth = growth_of(groups[0]) if groups else None
        if growth is None:
            sizes = sorted({record.scenario.world_size for record in records})
            pytest.skip(
                f"growth needs {LEAST_SIZES} numbers of ranks measured in this session, and of {spec.name} there are "
                f"{len(sizes)}; give more by --ckpt-plan-ranks"
            )
        return growth

    def _model(self, model: Callable[..., dict[str, Any]] | str | ModelSpec | None) -> ModelSpec:
        if model is None and not self._chooses_model():
            return self._run.settings.plan_models[0]
        return super()._model(model)

    def _chooses_model(self) -> bool:
        """Return whether the test says which model: by a parameter, or a fixture of its own."""
        return "ckpt_model" in params_of(self._request.node) or is_overridden(self._request.node, "ckpt_model")


def _check(options: dict[str, Any]) -> None:
    for name in options:
        if name not in _PLANNER_OPTIONS:
            raise unknown_name("option of DCP's planner", name, _PLANNER_OPTIONS, "ckpt_plan")


def _chosen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the options that differ from the planner's defaults, which are all off."""
    return tuple((name, value) for name, value in sorted(msgspec.to_builtins(options).items()) if value is not False)
