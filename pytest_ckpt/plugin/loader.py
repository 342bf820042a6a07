"""The object behind the fixture `ckpt_load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.measure.devices import cuda_device_count
from pytest_ckpt.plugin.plan import refuse_share, tolerance_of
from pytest_ckpt.plugin.record import SaveRequest
from pytest_ckpt.plugin.saver import Measuring
from pytest_ckpt.plugin.specs import ModelSpec, WriterSpec
from pytest_ckpt.records import SaveRecord
from pytest_ckpt.target.interface import Target
from pytest_ckpt.world.interface import World

LOAD_MODES = ("warm", "cold")


class Loader(Measuring):
    """Callable in a test: measures the way back of one scenario and adds its row."""

    fixture_name = "ckpt_load"

    def __call__(
        self,
        *,
        mode: str = "warm",
        saved_ranks: int | None = None,
        model: Callable[..., dict[str, Any]] | str | ModelSpec | None = None,
        mesh: str | None = None,
        name: str | None = None,
    ) -> SaveRecord:
        """Save once, then load that again and again into a wiped state; `save_s` is the median of the loads.

        `mode` is `warm`, or `cold`: the page cache is made to forget the checkpoint before each load. The checkpoint is
        written by `saved_ranks` ranks, as many as load it where that is left out; `mesh` is that of the ranks that
        load, and where others save these are a full shard. What was loaded is compared with what
        was saved, tensor by tensor; the test fails where it is something else. All else is as with `ckpt_save`.
        """

        def make_request() -> SaveRequest:
            if mode not in LOAD_MODES:
                raise unknown_name("mode", mode, LOAD_MODES, self.fixture_name)
            target, world = self._made("ckpt_target", "location"), self._made("ckpt_world", "run")
            refuse_share(self._run.settings.share)
            if mode == "cold":
                _skip_where_nothing_is_colder(target)
            return SaveRequest(
                target=target,
                model=self._model(model),
                world=world,
                mode=f"load-{mode}",
                writer=_loadable(self._writer(None)),
                engine=self._run.settings.engine,
                mesh=self._mesh(mesh, world),
                train=None,
                overlap=False,
                title=self._title(name),
                tolerance=tolerance_of(self._request.node, self._run.settings),
                saved_by=self._saving_world(world, saved_ranks),
            )

        return self._measured(name, make_request)

    def _saving_world(self, world: World, saved_ranks: int | None) -> World:
        if saved_ranks is None or saved_ranks == world.size:
            return world
        if saved_ranks < 1:
            raise SettingError(f"{saved_ranks} saved_ranks (from ckpt_load) cannot save; write 1 or more")
        if world.device == "cuda" and saved_ranks > cuda_device_count():
            pytest.skip(
                f"a checkpoint written by {saved_ranks} ranks needs as many CUDA devices, and there are "
                f"{cuda_device_count()}"
            )
        return self._run.world_beside(saved_ranks)


def _skip_where_nothing_is_colder(target: Target) -> None:
    if target.medium == "memory":
        pytest.skip(f"target {target.label} is {target.filesystem}, which is memory: there is no colder way to read it")


def _loadable(writer: WriterSpec) -> WriterSpec:
    if dict(writer.options).get("serialization_format") == "safetensors" and writer.reader is None:
        raise SettingError(
            "serialization_format=safetensors (from --ckpt-writer-opt) is a format that none of DCP's readers reads "
            "back; name one that does (--ckpt-reader), or leave the option out"
        )
    return writer
