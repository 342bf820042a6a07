"""The settings of a session: read once, refused early, then frozen; each knows why it has its value."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from pytest_ckpt.errors import CannotFit, SettingError, unknown_name
from pytest_ckpt.measure.devices import cuda_device_count, cuda_memory_bytes
from pytest_ckpt.measure.hardware_id import check_id
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.model.budget import parse_tokens
from pytest_ckpt.model.geometry import GEOMETRIES, find_geometry
from pytest_ckpt.model.recipe import Recipe, find_recipe, state_bytes
from pytest_ckpt.model.share import Share, parse_share, share_bytes
from pytest_ckpt.plugin.options import given_values
from pytest_ckpt.records import options_text
from pytest_ckpt.save.engines import DEFAULT_ENGINE, ENGINES, require_engine
from pytest_ckpt.save.modes import DEFAULT_MODES, MODES
from pytest_ckpt.save.options import HUGGING_FACE, Chosen, parse_matrix
from pytest_ckpt.save.writers import DEFAULT_WRITER, WRITERS
from pytest_ckpt.target.spec import TargetSpec, parse_targets
from pytest_ckpt.units import parse_bytes, parse_seconds
from pytest_ckpt.world.functions import FunctionRef, parse_reference, reference
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
_TRAIN = {"cpu": "1x64", "cuda": "1x2048"}
"""What `--ckpt-train on` means: tokens of a rank in a step."""
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*")


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: a known geometry, or a user's function that returns a state dict."""

    name: str
    recipe: Recipe
    function: FunctionRef | None = None
    share: Share | None = None
    """What part of a bigger job is held and saved; None: all of it."""

    @property
    def state_bytes(self) -> int | None:
        """Bytes of the tensors that are saved; None for a user's function, whose state is not known before it runs."""
        if self.function or self.share is None:
            return self.whole_bytes
        return share_bytes(find_geometry(self.name, "ckpt_model"), self.recipe, self.share)

    @property
    def whole_bytes(self) -> int | None:
        """Bytes of the whole state, of which a share is only a part; None for a user's function."""
        return None if self.function else state_bytes(find_geometry(self.name, "ckpt_model"), self.recipe)

    @property
    def parameters(self) -> int | None:
        """Unique parameters; None for a user's function."""
        return None if self.function else find_geometry(self.name, "ckpt_model").parameter_count


@dataclass(frozen=True)
class WriterSpec:
    """A factory of storage writers, by the name that the result file holds."""

    name: str
    factory: FunctionRef
    options: Chosen = ()
    """What differs from the defaults."""

    @property
    def label(self) -> str:
        """What differs, as part of a test's id; empty: nothing does."""
        return options_text(dict(self.options))


@dataclass(frozen=True)
class Preset:
    """What a known trainer does, for what the user left open."""

    modes: tuple[str, ...]
    state: str


_PRESETS = {"torchtitan": Preset(modes=("sync", "async", "async-pinned"), state="fp32-adamw")}
"""torchtitan's async_mode: disabled, async, async_with_pinned_mem; each save by a FileSystemWriter as DCP makes it."""


@dataclass(frozen=True)
class EngineSpec:
    """What saves, by the name that the result file holds."""

    name: str
    factory: FunctionRef | None = None
    """A user's own."""


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
            plan_ranks=tuple(dict.fromkeys(self._many("plan-ranks", _positive)))
            or self._defaulted("plan-ranks", _PLAN_RANKS),
            device=device,
            modes=tuple(dict.fromkeys(self._many("mode", _mode)))
            or self._defaulted("mode", preset.modes if preset else DEFAULT_MODES),
            engine=engine,
            writers=self._writers(engine.name, recipe),
            train=self._one("train", _train_on(device), "off"),
            overlap=self._one("overlap", _on_or_off, "off"),
            rounds=self._one("rounds", _positive, "5"),
            max_time_s=self._one("max-time", _seconds, "15m"),
            session_time_s=self._one("session-time", _seconds, "") or None,
            timeout_s=self._one("timeout", _seconds, "30m"),
            keep=self._one("keep", _keep, "none"),
            probe_bytes=self._one("probe", _probe_bytes, "2GiB"),
            survey=self._one("survey", _on_or_off, "off"),
            trace_file=self._one("trace", lambda text, source: text, "") or None,
            baseline=self._one("baseline", _baseline, "check"),
            baseline_folder=self._baseline_folder(),
            baseline_force=self._one("baseline-force", _on_or_off, "off"),
            tolerance=self._one("tolerance", parse_tolerance, "10%"),
            fail_on=self._one("fail-on", _fail_on, ""),
            grace_s=self._one("grace", _seconds, "30s"),
            examples=self._one("examples", _positive, "20"),
            hardware=dict(self._many("hardware", _labelled_id)),
            expected_hardware=dict(self._many("expect-hardware", _labelled_id)),
            references=tuple(
                (parse_reference(text, source), source)
                for name in ("model", "writer", "engine")
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
        plain = self._one("writer", _writer, DEFAULT_WRITER)
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
        return tuple(replace(plain, options=options) for options in choices)

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
        ranks = tuple(dict.fromkeys(self._many("ranks", _positive)))
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


def require_ranks_of_share(share: Share | None, ranks: int, source: str) -> None:
    """Raise `SettingError` naming `source` where a share is not that of so many `ranks`."""
    if share is not None and share.count != ranks:
        raise SettingError(
            f"share {share} (from {source}) is that of {share.count} ranks and this world has {ranks}; write "
            f"--ckpt-ranks={share.count}, or --ckpt-share={ranks}/{share.of}"
        )


def require_share_possible(model: ModelSpec, engine: EngineSpec, train: str | None) -> None:
    """Raise `SettingError` where the model's share, if it has one, cannot be made or saved."""
    if model.share is None:
        return
    given = f"--ckpt-share={model.share}"
    if model.function is not None:
        raise SettingError(
            f"{given} needs a model whose shards are known, and {model.name} is your own; choose one of the "
            "geometries, or leave the option out"
        )
    if engine.name != DEFAULT_ENGINE:
        raise SettingError(
            f"{given} is saved by DCP with a planner of ours, and engine {engine.name} has no planners; write "
            f"--ckpt-engine={DEFAULT_ENGINE}, or leave the option out"
        )
    if train is not None:
        raise SettingError(
            f"{given} and --ckpt-train={train} do not go together: a share is plain chunks of tensors, with which "
            "nothing can be trained; leave one of them out"
        )


def model_spec(text: str, source: str, recipe: Recipe) -> ModelSpec:
    """Return the model that `text` names; `SettingError` lists the known ones, nearest first."""
    if ":" in text:
        return ModelSpec(text.replace(":", "."), recipe, parse_reference(text, source))
    return ModelSpec(find_geometry(text, source).name, recipe)


def of_label(ids: dict[str | None, str], label: str) -> str | None:
    """Return the hardware id that was given for the target `label`, or for every target; None where none was."""
    return ids.get(label, ids.get(None))


def default_root() -> str:
    """Return the folder below which pytest makes its temporary ones, where the default target lies; made by no one."""
    return os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()


def require_importable(ref: FunctionRef, source: str) -> None:
    """Raise `SettingError` where the ranks cannot find the package of `ref`; the package itself is not imported."""
    package = ref.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise SettingError(
            f"{str(ref)!r} (from {source}) cannot be imported: there is no module {package!r}; write the name of one "
            "that is installed, or lies beside the tests or in PYTHONPATH"
        )


def writer_spec(text: str, source: str) -> WriterSpec:
    """Return the writer that `text` names; `SettingError` lists the known ones, nearest first."""
    if ":" in text:
        return WriterSpec(text, parse_reference(text, source))
    if text not in WRITERS:
        raise unknown_name("writer", text, WRITERS, f"{source}, which takes package.module:function too")
    return WriterSpec(text, reference(WRITERS[text], "writer"))


def _mode(text: str, source: str) -> str:
    if text not in MODES:
        raise unknown_name("mode", text, MODES, source)
    return text


def _probe_bytes(text: str, source: str) -> int:
    if text == "off":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingError(f"{error}, or off (from {source})") from error


def _on_or_off(text: str, source: str) -> bool:
    if text not in ("on", "off"):
        raise unknown_name("value of a switch", text, ("on", "off"), source)
    return text == "on"


def require_tensors_alone(writer: str, recipe: Recipe) -> None:
    """Raise `SettingError` where `writer` takes tensors alone, and the state has an optimizer's other values too."""
    if writer == HUGGING_FACE and recipe.optimizer_tensors:
        raise SettingError(
            f"writer {writer} takes tensors alone, and {recipe.name} has an optimizer's settings too; "
            "write --ckpt-state=weights-bf16"
        )


def engine_spec(text: str, source: str) -> EngineSpec:
    """Return the engine that `text` names; `SettingError` where there is none, or it is not installed."""
    if ":" in text:
        return EngineSpec(text, parse_reference(text, source))
    if text not in ENGINES:
        raise unknown_name("engine", text, ENGINES, f"{source}, which takes package.module:factory too")
    require_engine(text)
    return EngineSpec(text)


def _train_on(device: str) -> Callable[[str, str], str | None]:
    def parse(text: str, source: str) -> str | None:
        if text == "off":
            return None
        if text == "on":
            return _TRAIN[device]
        try:
            return str(parse_tokens(text, source))
        except SettingError as error:
            raise SettingError(f"{error}; or on, or off") from None

    return parse


def parse_tolerance(text: object, source: str) -> float:
    """Return the share that `text` names (`10%`, `0.1`); `SettingError` where it is not between 0 and 1."""
    match = _SHARE.fullmatch(str(text))
    share = round(float(match[1]) / (100 if match[2] else 1), 12) if match else 0.0
    if not 0 < share < 1:
        raise SettingError(
            f"tolerance {str(text)!r} (from {source}) is no share between 0 and 100 %; write it as 10% or 0.1"
        )
    return share


def _baseline(text: str, source: str) -> str:
    if text not in _BASELINES:
        raise unknown_name("value of --ckpt-baseline", text, _BASELINES, source)
    return text


def _fail_on(text: str, source: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in _FAIL_ON:
            raise unknown_name("outcome", name, _FAIL_ON, source)
    return names


def _labelled_id(text: str, source: str) -> tuple[str | None, str]:
    label, equals, name = text.rpartition("=")
    return (label if equals else None), check_id(name, source)


def _preset(text: str, source: str) -> Preset | None:
    if text and text not in _PRESETS:
        raise unknown_name("preset", text, _PRESETS, source)
    return _PRESETS.get(text)


def _keep(text: str, source: str) -> str:
    if text not in _KEEPS:
        raise unknown_name("value of --ckpt-keep", text, _KEEPS, source)
    return text


def _writer(text: str, source: str) -> WriterSpec:
    return writer_spec(text, source)


def _positive(text: str, source: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        several = f"; several values: {source} once for each" if "," in text else "; write 1, 2, 4 ..."
        raise SettingError(f"{text!r} (from {source}) is no whole number above zero{several}")
    return number


def _seconds(text: str, source: str) -> float:
    if not text:
        return 0.0
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SettingError(f"{error} (from {source})") from error
