"""The object behind the fixture `ckpt_save`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.plugin import benchmark
from pytest_ckpt.plugin.benchmark import Rows
from pytest_ckpt.plugin.hooks import CLOCK
from pytest_ckpt.plugin.item_verdicts import note_verdicts
from pytest_ckpt.plugin.plan import tolerance_of
from pytest_ckpt.plugin.record import SaveRequest
from pytest_ckpt.plugin.run import Run
from pytest_ckpt.plugin.specs import (
    EngineSpec,
    ModelSpec,
    WriterSpec,
    engine_spec,
    model_spec,
    require_ranks_of_share,
    require_share_possible,
    writer_spec,
)
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.save.modes import MODES, why_unavailable
from pytest_ckpt.world.functions import reference
from pytest_ckpt.world.interface import World
from pytest_ckpt.world.mesh import MeshShape, parse_mesh


class Measuring:
    """What `ckpt_save` and its likes have in common: a call is a scenario, measured, judged and kept as a row."""

    fixture_name = ""

    def __init__(self, run: Run, request: pytest.FixtureRequest, fixture: Any) -> None:
        self._run = run
        self._request = request
        self._rows = Rows(request.config, fixture, request.node.stash[CLOCK])
        self._names: list[str | None] = []

    def _measured(self, name: str | None, make_request: Callable[[], SaveRequest]) -> SaveRecord:
        """Measure what `make_request` returns and add its rows, called `name`; what fails ends the test."""
        with self._run.outcome.telling():
            self._claim(name)
            request = make_request()
            record = self._run.measure(request)
            failures: list[str] = []
            if not benchmark.is_disabled(self._request.config):
                record, failures = self._run.baselines.conclude(record, request.target)
        if not benchmark.is_disabled(self._request.config):
            self._rows.add(record, name)
            self._run.outcome.note(self._request.node.nodeid, name, record)
            note_verdicts(self._request.node, name, record, failures)
        return record

    def _title(self, name: str | None) -> str:
        return f"{self._request.node.name}:{name}" if name else str(self._request.node.name)

    def _claim(self, name: str | None) -> None:
        if name in self._names:
            what = "without a name" if name is None else f"named {name!r}"
            raise SettingError(
                f"a second {self.fixture_name} {what} in one test: each call is a row, so give each a name of its own, "
                f"as in {self.fixture_name}(name='eight-threads')"
            )
        self._names.append(name)

    def _fixture(self, name: str) -> Any:
        return self._request.getfixturevalue(name)

    def _made(self, name: str, attribute: str) -> Any:
        value = self._fixture(name)
        if not hasattr(value, attribute):
            raise SettingError(
                f"{name} is {value!r}, which is what the fixture makes its value from; "
                "parametrize it with indirect=True"
            )
        return value

    def _writer(self, writer: Callable[[str], Any] | str | WriterSpec | None) -> WriterSpec:
        if writer is None:
            writer = self._fixture("ckpt_writer")
        if isinstance(writer, WriterSpec):
            return writer
        if isinstance(writer, str):
            return writer_spec(writer, self.fixture_name)
        ref = reference(writer, "writer")
        return WriterSpec(str(ref), ref)

    def _model(self, model: Callable[..., dict[str, Any]] | str | ModelSpec | None) -> ModelSpec:
        if model is None:
            model = self._fixture("ckpt_model")
        if isinstance(model, ModelSpec):
            return model
        settings = self._run.settings
        if isinstance(model, str):
            return replace(model_spec(model, self.fixture_name, settings.models[0].recipe), share=settings.share)
        ref = reference(model, "model")
        return replace(settings.models[0], name=str(ref).replace(":", "."), function=ref)

    def _mesh(self, mesh: str | None, world: World) -> MeshShape | None:
        """Return the mesh of a call, or of the session; None for a full shard."""
        settings = self._run.settings
        if mesh is None:
            shape, source = settings.mesh, "--ckpt-mesh"
        else:
            shape, source = parse_mesh(mesh, self.fixture_name), self.fixture_name
        if shape is None:
            return None
        shape.require_size(world.size, source)
        if settings.share is not None:
            raise SettingError(
                f"mesh {shape} (from {source}) and --ckpt-share={settings.share} do not go together: a share is that "
                "of a full shard; leave one of them out"
            )
        return None if shape.replicate == 1 else shape


class Saver(Measuring):
    """Callable in a test: measures one scenario and adds its rows."""

    fixture_name = "ckpt_save"

    def __call__(
        self,
        *,
        mode: str | None = None,
        writer: Callable[[str], Any] | str | WriterSpec | None = None,
        model: Callable[..., dict[str, Any]] | str | ModelSpec | None = None,
        engine: Callable[..., Any] | str | EngineSpec | None = None,
        mesh: str | None = None,
        name: str | None = None,
    ) -> SaveRecord:
        """Save the model again and again and return the record; its `save_s` and `stall_s` are medians, in seconds.

        `mode` is one of `--ckpt-mode`; `writer` a function at module level from a path to a StorageWriter; `model` one
        from the device mesh and device to a state dict; `engine` the name of one, or a function at module level from
        an `EngineSetup` to an `Engine`; `mesh` is written as for `--ckpt-mesh`. What is left out comes from the
        fixtures. A failed save ends the test with the rank, its phase and cause; what cannot be used ends it with exit
        status 4. Where the save regressed against its baseline, the test fails once it has ended: this returns all the
        same.
        """

        def make_request() -> SaveRequest:
            why = why_unavailable(self._mode(mode), self._made("ckpt_world", "run").device)
            if why is not None:
                pytest.skip(why)
            spec, world, saving = self._model(model), self._made("ckpt_world", "run"), self._engine(engine)
            require_share_possible(spec, saving, self._run.settings.train)
            require_ranks_of_share(spec.share, world.size, "--ckpt-share")
            return SaveRequest(
                target=self._made("ckpt_target", "location"),
                model=spec,
                world=world,
                mode=self._mode(mode),
                writer=self._writer(writer),
                engine=saving,
                mesh=self._mesh(mesh, world),
                train=self._run.settings.train,
                overlap=self._run.settings.overlap and self._mode(mode) != "sync",
                title=self._title(name),
                tolerance=tolerance_of(self._request.node, self._run.settings),
            )

        return self._measured(name, make_request)

    def _engine(self, engine: Callable[..., Any] | str | EngineSpec | None) -> EngineSpec:
        if engine is None:
            return self._run.settings.engine
        if isinstance(engine, EngineSpec):
            return engine
        if isinstance(engine, str):
            return engine_spec(engine, self.fixture_name)
        ref = reference(engine, "engine")
        return EngineSpec(str(ref), ref)

    def _mode(self, mode: str | None) -> str:
        if mode is None:
            return str(self._fixture("ckpt_mode"))
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES, self.fixture_name)
        return mode
