"""What is saved, and by what: models, writers and engines, as options and tests name them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.model.geometry import find_geometry
from pytest_ckpt.model.recipe import Recipe, state_bytes
from pytest_ckpt.model.share import Share, share_bytes
from pytest_ckpt.records import options_text
from pytest_ckpt.save.engines import DEFAULT_ENGINE, ENGINES, require_engine
from pytest_ckpt.save.options import HUGGING_FACE, Chosen
from pytest_ckpt.save.readers import OF_WRITERS, READERS
from pytest_ckpt.save.writers import WRITERS
from pytest_ckpt.world.functions import FunctionRef, parse_reference, reference


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
class ReaderSpec:
    """A factory of storage readers, by the name that the result file holds."""

    name: str
    factory: FunctionRef


@dataclass(frozen=True)
class WriterSpec:
    """A factory of storage writers, by the name that the result file holds."""

    name: str
    factory: FunctionRef
    options: Chosen = ()
    """What differs from the defaults."""
    reader: ReaderSpec | None = None
    """What reads its format back; None: DCP finds that out by the path."""

    @property
    def label(self) -> str:
        """What differs, as part of a test's id; empty: nothing does."""
        return options_text(dict(self.options))


@dataclass(frozen=True)
class EngineSpec:
    """What saves, by the name that the result file holds."""

    name: str
    factory: FunctionRef | None = None
    """A user's own."""


def model_spec(text: str, source: str, recipe: Recipe) -> ModelSpec:
    """Return the model that `text` names; `SettingError` lists the known ones, nearest first."""
    if ":" in text:
        return ModelSpec(text.replace(":", "."), recipe, parse_reference(text, source))
    return ModelSpec(find_geometry(text, source).name, recipe)


def writer_spec(text: str, source: str) -> WriterSpec:
    """Return the writer that `text` names; `SettingError` lists the known ones, nearest first."""
    if ":" in text:
        return WriterSpec(text, parse_reference(text, source))
    if text not in WRITERS:
        raise unknown_name("writer", text, WRITERS, f"{source}, which takes package.module:function too")
    reader = reader_spec(OF_WRITERS[text], source) if text in OF_WRITERS else None
    return WriterSpec(text, reference(WRITERS[text], "writer"), reader=reader)


def reader_spec(text: str, source: str) -> ReaderSpec:
    """Return the reader that `text` names; `SettingError` lists the known ones, nearest first."""
    if ":" in text:
        return ReaderSpec(text, parse_reference(text, source))
    if text not in READERS:
        raise unknown_name("reader", text, READERS, f"{source}, which takes package.module:function too")
    return ReaderSpec(text, reference(READERS[text], "reader"))


def engine_spec(text: str, source: str) -> EngineSpec:
    """Return the engine that `text` names; `SettingError` where there is none, or it is not installed."""
    if ":" in text:
        return EngineSpec(text, parse_reference(text, source))
    if text not in ENGINES:
        raise unknown_name("engine", text, ENGINES, f"{source}, which takes package.module:factory too")
    require_engine(text)
    return EngineSpec(text)


def require_importable(ref: FunctionRef, source: str) -> None:
    """Raise `SettingError` where the ranks cannot find the package of `ref`; the package itself is not imported."""
    package = ref.module.partition(".")[0]
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # `__main__`, and modules that were made by hand
        found = False
    if not found:
        raise SettingError(
            f"{str(ref)!r} (from {source}) cannot be imported: there is no module {package!r}; write the name of one "
            "that is installed, or lies beside the tests or in PYTHONPATH"
        )


def require_tensors_alone(writer: str, recipe: Recipe) -> None:
    """Raise `SettingError` where `writer` takes tensors alone, and the state has an optimizer's other values too."""
    if writer == HUGGING_FACE and recipe.optimizer_tensors:
        raise SettingError(
            f"writer {writer} takes tensors alone, and {recipe.name} has an optimizer's settings too; "
            "write --ckpt-state=weights-bf16"
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


def require_ranks_of_share(share: Share | None, ranks: int, source: str) -> None:
    """Raise `SettingError` naming `source` where a share is not that of so many `ranks`."""
    if share is not None and share.count != ranks:
        raise SettingError(
            f"share {share} (from {source}) is that of {share.count} ranks and this world has {ranks}; write "
            f"--ckpt-ranks={share.count}, or --ckpt-share={ranks}/{share.of}"
        )
