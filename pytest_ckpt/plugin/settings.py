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
from pytest_ckpt.plugin.options import given_values
from pytest_ckpt.records import options_text
from pytest_ckpt.save.engines import DEFAULT_ENGINE, ENGINES, require_engine
from pytest_ckpt.save.modes import DEFAULT_MODES, MODES
from pytest_ckpt.save.options import HUGGING_FACE, Chosen, parse_matrix
from pytest_ckpt.save.writers import DEFAULT_WRITER, WRITERS
from pytest_ckpt.target.spec import TargetSpec, parse_targets
from pytest_ckpt.units import parse_bytes, parse_seconds
from pytest_ckpt.world.functions import FunctionRef, parse_reference, reference

T = TypeVar("T")
_KEEPS = ("none", "failed", "all")
_BASELINES = ("check", "grow", "save", "require", "off")
_FAIL_ON = ("undecided", "known-dcp")
_AUTO_MODELS = ("llama3-8b", "llama3.2-3b", "llama3.2-1b", "llama3-debug")
_DEFAULT = "default"
_TRAIN = {"cpu": "1x64", "cuda": "1x2048"}
"""What `--ckpt-train on` means: tokens of a rank in a step."""
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*")


@dataclass(frozen=True)
class ModelSpec:
    """A model by name: a known geometry, or a user's function that returns a state dict."""

    name: str
    recipe: Recipe
    function: FunctionRef | None = None

    @property
    def state_bytes(self) -> int | None:
        """Bytes of the state's tensors; None for a user's function, whose state is not known before it is made."""
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

    def model(self, name: str | None) -> ModelSpec:
        """Return the model called `name`, which a test may name without an option, or the first of the session."""
        for model in self.models:
            if name in (None, model.name):
                return model
        return model_spec(str(name), "ckpt_model", self.models[0].recipe)


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
        return Settings(
            targets=tuple(map(self._from_ini_folder, parse_targets(given_values(self._config, "target")))),
            models=self._models(recipe, device),
            ranks=self._ranks(device),
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

    def _ranks(self, device: str) -> tuple[int, ...]:
        ranks = tuple(dict.fromkeys(self._many("ranks", _positive)))
        gpus = cuda_device_count() if device == "cuda" else None
        if not ranks:
            self._reasons["ranks"] = "all visible GPUs" if gpus else "default on cpu"
            return (gpus or 2,)
        for count, (_, source) in zip(ranks, given_values(self._config, "ranks"), strict=False):
            if gpus is not None and count > gpus:
                raise SettingError(
                    f"{count} ranks (from {source}) need {count} CUDA devices and there are {gpus}; "
                    f"write {gpus} or less, or --ckpt-device=cpu"
                )
        return ranks

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
        raise SettingError(f"{text!r} (from {source}) is no whole number above zero; write 1, 2, 4 ...")
    return number


def _seconds(text: str, source: str) -> float:
    if not text:
        return 0.0
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SettingError(f"{error} (from {source})") from error
