"""The settings of a session: read once, refused early, then frozen; each knows why it has its value."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from pytest_ckpt.errors import CannotFit, SettingError, unknown_name
from pytest_ckpt.measure.devices import cuda_device_count, cuda_memory_bytes
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import Recipe, find_recipe, state_bytes
from pytest_ckpt.model.share import Share, parse_share
from pytest_ckpt.plugin import values
from pytest_ckpt.plugin.options import given_values
from pytest_ckpt.plugin.specs import (
    EngineSpec,
    ModelSpec,
    ReaderSpec,
    WriterSpec,
    engine_spec,
    model_spec,
    reader_spec,
    require_ranks_of_share,
    require_share_possible,
    require_tensors_alone,
    writer_spec,
)
from pytest_ckpt.save.engines import DEFAULT_ENGINE
from pytest_ckpt.save.modes import DEFAULT_MODES, MODES
from pytest_ckpt.save.options import HUGGING_FACE, parse_matrix
from pytest_ckpt.save.writers import DEFAULT_WRITER
from pytest_ckpt.target.spec import TargetSpec, parse_targets
from pytest_ckpt.world.functions import FunctionRef, parse_reference
from pytest_ckpt.world.job import Job, find_job
from pytest_ckpt.world.mesh import MeshShape, parse_mesh

T = TypeVar("T")
_KEEPS = ("none", "failed", "all")
_BASELINES = ("check", "grow", "save", "require", "off")
_FAIL_ON = ("undecided", "known-dcp")
_AUTO_MODELS = ("llama3-8b", "llama3.2-3b", "llama3.2-1b", "llama3-debug")
_PLAN_RANKS = (8, 32, 128, 512)
_PLAN_MODEL = "llama3-8b"
"""What is planned where `auto` would choose a model: the plans hold no tensors, so that memory does not forbid it."""
_DEFAULT = "default"
_PINNING = "cache_staged_state_dict"
"""The writer's option whose staged memory DCP pins."""


@dataclass(frozen=True)
class Preset:
    """What a known trainer does, for what the user left open."""

    modes: tuple[str, ...]
    state: str


_PRESETS = {"torchtitan": Preset(modes=("sync", "async", "async-pinned"), state="fp32-adamw")}
"""torchtitan's async_mode: disabled, async, async_with_pinned_mem; each save by a FileSystemWriter as DCP makes it."""


@dataclass(frozen=True)
class Settings:
    """All options of a session, checked. `reasons` says for each chosen default why it was chosen."""

    targets: tuple[TargetSpec, ...]
    models: tuple[ModelSpec, ...]
    ranks: tuple[int, ...]
    mesh: MeshShape | None
    """None: full shard."""
    share: Share | None
    """None: the ranks are the job."""
    plan_ranks: tuple[int, ...]
    """On paper, for planning alone."""
    device: str
    modes: tuple[str, ...]
    engine: EngineSpec
    writers: tuple[WriterSpec, ...]
    """One for each combination of the writer's options."""
    train: str | None
    """Tokens of a rank in a step, as BATCHxSEQUENCE; None: no training runs beside the saves."""
    overlap: bool
    """Whether an earlier save is under way when an async one is called."""
    rounds: int
    max_time_s: float
    session_time_s: float | None
    timeout_s: float
    keep: str
    probe_bytes: int
    """Most bytes of a probe; zero: none is made."""
    survey: bool
    trace_file: str | None
    baseline: str
    """`check`, `grow`, `save`, `require` or `off`."""
    baseline_folder: Path
    baseline_force: bool
    tolerance: float
    """Share of the throughput."""
    fail_on: tuple[str, ...]
    grace_s: float
    """What a scheduler leaves between SIGTERM and SIGKILL."""
    examples: int
    """State dicts that acceptance makes up for each scenario."""
    hardware: dict[str | None, str]
    """Hardware ids to use, by the target's label; None stands for every target."""
    expected_hardware: dict[str | None, str]
    references: tuple[tuple[FunctionRef, str], ...]
    """The user's functions that options name, each with the option."""
    reasons: dict[str, str]

    @property
    def plan_models(self) -> tuple[ModelSpec, ...]:
        """What planning is measured of: the session's models, and for `auto` one of its own."""
        *given, last = self.models
        if self.reasons.get("model", "").startswith("auto"):
            last = replace(last, name=_PLAN_MODEL)
        return tuple(dict.fromkeys(replace(model, share=None) for model in [*given, last]))

    def model(self, name: str | None) -> ModelSpec:
        """Return the model called `name`, which a test may name without an option, or the first of the session."""
        for model in self.models:
            if name in (None, model.name):
                return model
        return replace(model_spec(str(name), "ckpt_model", self.models[0].recipe), share=self.share)


def read_settings(config: pytest.Config) -> Settings:
    """Return the session's settings; `SettingError` for the first value that cannot be used."""
    return _Reader(config).read()


class _Reader:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reasons: dict[str, str] = {}

    def read(self) -> Settings:
        device = self._device()
        engine = self._one("engine", engine_spec, DEFAULT_ENGINE)
        preset = self._one("preset", _preset, "")
        recipe = self._one("state", find_recipe, preset.state if preset else "fp32-adamw")
        mesh, share = self._one("mesh", parse_mesh, ""), self._one("share", parse_share, "")
        settings = Settings(
            targets=tuple(map(self._from_ini_folder, parse_targets(given_values(self._config, "target")))),
            models=tuple(replace(model, share=share) for model in self._models(recipe, device)),
            ranks=self._ranks(device, mesh, share),
            mesh=mesh,
            share=share,
            plan_ranks=tuple(dict.fromkeys(self._many("plan-ranks", values.positive)))
            or self._defaulted("plan-ranks", _PLAN_RANKS),
            device=device,
            modes=tuple(dict.fromkeys(self._many("mode", values.one_of("mode", MODES))))
            or self._defaulted("mode", preset.modes if preset else DEFAULT_MODES),
            engine=engine,
            writers=self._writers(engine.name, recipe),
            train=self._one("train", values.train_on(device), "off"),
            overlap=self._one("overlap", values.on_or_off, "off"),
            rounds=self._one("rounds", values.positive, "5"),
            max_time_s=self._one("max-time", values.seconds, "15m"),
            session_time_s=self._one("session-time", values.seconds, "") or None,
            timeout_s=self._one("timeout", values.seconds, "30m"),
            keep=self._one("keep", values.one_of("value of --ckpt-keep", _KEEPS), "none"),
            probe_bytes=self._one("probe", values.probe_bytes, "2GiB"),
            survey=self._one("survey", values.on_or_off, "off"),
            trace_file=self._one("trace", lambda text, source: text, "") or None,
            baseline=self._one("baseline", values.one_of("value of --ckpt-baseline", _BASELINES), "check"),
            baseline_folder=self._baseline_folder(),
            baseline_force=self._one("baseline-force", values.on_or_off, "off"),
            tolerance=self._one("tolerance", values.tolerance, "10%"),
            fail_on=self._one("fail-on", values.some_of("outcome", _FAIL_ON), ""),
            grace_s=self._one("grace", values.seconds, "30s"),
            examples=self._one("examples", values.positive, "20"),
            hardware=dict(self._many("hardware", values.labelled_id)),
            expected_hardware=dict(self._many("expect-hardware", values.labelled_id)),
            references=tuple(
                (parse_reference(text, source), source)
                for name in ("model", "writer", "reader", "engine")
                for text, source in given_values(self._config, name)
                if ":" in text
            ),
            reasons=self._reasons,
        )
        for model in settings.models:
            require_share_possible(model, settings.engine, settings.train)
        if share is not None and any(dict(writer.options).get("enable_consolidation") for writer in settings.writers):
            raise SettingError(
                f"--ckpt-share={share} leaves enable_consolidation nothing to put together, as nobody writes the rest "
                "of each tensor; leave one of them out"
            )
        return settings

    def _from_ini_folder(self, spec: TargetSpec) -> TargetSpec:
        # A relative path in an ini file means one folder, wherever pytest is started.
        ini = self._config.inipath
        if ini is None or not spec.source.startswith("ini ") or os.path.isabs(os.path.expanduser(spec.given)):
            return spec
        return replace(spec, location=os.path.join(ini.parent, spec.given))

    def _baseline_folder(self) -> Path:
        given = given_values(self._config, "baseline-dir")
        if not given:
            return self._config.rootpath / "baselines"
        text, source = given[0]
        ini = self._config.inipath
        folder = Path(text).expanduser()
        folder = ini.parent / folder if ini is not None and source.startswith("ini ") else Path.cwd() / folder
        if folder.exists() and not folder.is_dir():
            raise SettingError(f"{text!r} (from {source}) is no folder; write one that holds baselines")
        return folder

    def _many(self, name: str, parse: Callable[[str, str], T]) -> list[T]:
        return [parse(text, source) for text, source in given_values(self._config, name)]

    def _one(self, name: str, parse: Callable[[str, str], T], default: str) -> T:
        given = given_values(self._config, name)
        if given:
            return parse(*given[0])
        self._reasons[name] = _DEFAULT
        return parse(default, _DEFAULT)

    def _defaulted(self, name: str, value: T) -> T:
        self._reasons[name] = _DEFAULT
        return value

    def _writers(self, engine: str, recipe: Recipe) -> tuple[WriterSpec, ...]:
        plain = self._one("writer", writer_spec, DEFAULT_WRITER)
        choices = parse_matrix(given_values(self._config, "writer-opt"), plain.name, engine)
        require_tensors_alone(plain.name, recipe)
        if any(dict(options).get(_PINNING) for options in choices) and self._device() == "cpu":
            raise SettingError(
                f"{_PINNING}=on (from --ckpt-writer-opt) needs CUDA: DCP keeps what it stages in pinned memory, which "
                "a machine without an accelerator has not; leave it off"
            )
        needs_safetensors = plain.name == HUGGING_FACE or any("safetensors" in dict(c).values() for c in choices)
        if needs_safetensors and importlib.util.find_spec("safetensors") is None:
            raise SettingError(
                f"writer {plain.name} writes safetensors, which is not installed; pip install safetensors"
            )
        reader = self._reader(engine) or plain.reader
        return tuple(replace(plain, options=options, reader=reader) for options in choices)

    def _reader(self, engine: str) -> ReaderSpec | None:
        given = given_values(self._config, "reader")
        if not given:
            return None
        text, source = given[0]
        if engine != DEFAULT_ENGINE:
            raise SettingError(
                f"reader {text!r} (from {source}) is for loads by DCP, and engine {engine} has its own; leave it out"
            )
        return reader_spec(text, source)

    def _device(self) -> str:
        given = given_values(self._config, "device")
        count = cuda_device_count()
        if not given:
            self._reasons["device"] = f"{count} CUDA devices found" if count else "no CUDA device found"
            return "cuda" if count else "cpu"
        device, source = given[0]
        if device not in ("cpu", "cuda"):
            raise unknown_name("device", device, ("cpu", "cuda"), source)
        if device == "cuda" and not count:
            raise SettingError(f"device 'cuda' (from {source}): torch finds no CUDA device here; write cpu")
        return device

    def _ranks(self, device: str, mesh: MeshShape | None, share: Share | None) -> tuple[int, ...]:
        if mesh is not None and share is not None:
            raise SettingError(
                f"--ckpt-mesh={mesh} and --ckpt-share={share} do not go together: a share is that of a full shard; "
                "leave one of them out"
            )
        layout = ("mesh", mesh.size) if mesh is not None else ("share", share.count) if share is not None else None
        ranks = self._possible_ranks(device, layout)
        if mesh is not None:
            for count in ranks:
                mesh.require_size(count, given_values(self._config, "mesh")[0][1])
        for count in ranks if share is not None else ():
            require_ranks_of_share(share, count, given_values(self._config, "share")[0][1])
        return ranks

    def _possible_ranks(self, device: str, layout: tuple[str, int] | None) -> tuple[int, ...]:
        """Return the ranks that were asked for; `layout` is an option that names a number, for where none were."""
        ranks = tuple(dict.fromkeys(self._many("ranks", values.positive)))
        sources = [source for _, source in given_values(self._config, "ranks")]
        gpus = cuda_device_count() if device == "cuda" else None
        job = find_job(os.environ)
        if job is not None:
            return self._ranks_of(job, ranks, gpus)
        if not ranks and layout is not None:
            ranks, sources = (layout[1],), [given_values(self._config, layout[0])[0][1]]
            self._reasons["ranks"] = f"from {sources[0]}"
        if not ranks:
            self._reasons["ranks"] = "all visible GPUs" if gpus else "default on cpu"
            return (gpus or 2,)
        for count, source in zip(ranks, sources, strict=False):
            if gpus is not None and count > gpus:
                raise SettingError(
                    f"{count} ranks (from {source}) need {count} CUDA devices and there are {gpus}; "
                    f"write {gpus} or less, or --ckpt-device=cpu"
                )
        return ranks

    def _ranks_of(self, job: Job, ranks: tuple[int, ...], gpus: int | None) -> tuple[int, ...]:
        if ranks not in ((), (job.size,)):
            _, source = given_values(self._config, "ranks")[0]
            raise SettingError(
                f"{', '.join(map(str, ranks))} ranks (from {source}) are not the {job.size} that {job.launcher} "
                f"started; leave the option out, or start pytest without {job.launcher}"
            )
        if gpus is not None and 1 < gpus < job.local_size:  # one: each rank may be shown its own alone
            raise SettingError(
                f"the {job.local_size} ranks that {job.launcher} started on this node need as many CUDA devices and "
                f"there are {gpus}; start {gpus} or less, or write --ckpt-device=cpu"
            )
        self._reasons["ranks"] = f"as many as {job.launcher} started"
        return (job.size,)

    def _models(self, recipe: Recipe, device: str) -> tuple[ModelSpec, ...]:
        given = [(text, source) for text, source in given_values(self._config, "model") if text != "auto"]
        models = [model_spec(text, source, recipe) for text, source in given]
        if len(models) < len(given_values(self._config, "model")) or not models:
            models.append(self._auto_model(recipe, device))
        return tuple(dict.fromkeys(models))

    def _auto_model(self, recipe: Recipe, device: str) -> ModelSpec:
        if device == "cpu":
            self._reasons["model"] = "auto on cpu"
            return ModelSpec("llama3-debug", recipe)
        room = min(cuda_memory_bytes() * cuda_device_count() * 3 // 4, available_memory_bytes() // 2)
        for name in _AUTO_MODELS:
            if state_bytes(GEOMETRIES[name], recipe) <= room:
                self._reasons["model"] = "auto: the largest llama3 up to 8b that fits device and host memory"
                return ModelSpec(name, recipe)
        raise CannotFit(f"no llama3 model fits the {room} bytes of device and host memory; give --ckpt-model")


def _preset(text: str, source: str) -> Preset | None:
    if text and text not in _PRESETS:
        raise unknown_name("preset", text, _PRESETS, source)
    return _PRESETS.get(text)


def of_label(ids: dict[str | None, str], label: str) -> str | None:
    """Return the hardware id that was given for the target `label`, or for every target; None where none was."""
    return ids.get(label, ids.get(None))


def default_root() -> str:
    """Return the folder below which pytest makes its temporary ones, where the default target lies; made by no one."""
    return os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()
