"""Functions travel to the ranks as module and name, never as code: what cannot be named is refused."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from pytest_ckpt.errors import SettingError


class FunctionRef(msgspec.Struct, frozen=True):
    """A module-level function by name; `file` is where its module was loaded from, for modules not on the path."""

    module: str
    name: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def reference(function: Callable[..., Any], what: str) -> FunctionRef:
    """Return how a rank can find `function`; `SettingError` for a lambda, closure, method or instance."""
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    if name is None or module is None:
        raise SettingError(
            f"{what} is {type(function).__name__!r}, which the ranks cannot import; write a function at module level"
        )
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "defined inside another function"
        raise SettingError(
            f"{what} {name!r} is {kind}: functions travel to the ranks as module and name, and a closure or lambda "
            "has none; move it to module level"
        )
    if "." in name:
        raise SettingError(f"{what} {name!r} is a method; write a function at module level")
    return FunctionRef(module, name, inspect.getsourcefile(function))


def parse_reference(text: str, source: str) -> FunctionRef:
    """Return the reference that `package.module:function` names; `SettingError` where it has another form."""
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise SettingError(f"{text!r} (from {source}) names no function; write package.module:function")
    return FunctionRef(module, name)


def resolve(ref: FunctionRef, what: str) -> Callable[..., Any]:
    """Import what `ref` names; `SettingError` with the reason where that fails."""
    try:
        module = importlib.import_module(ref.module)
    except ModuleNotFoundError as error:
        if ref.file is None or error.name is None or not ref.module.startswith(error.name):
            raise SettingError(f"{what} {ref} cannot be imported: {error}") from error
        module = _load(ref.module, ref.file)
    except Exception as error:
        raise SettingError(f"{what} {ref} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, ref.name, None)
    if not callable(function):
        raise SettingError(f"{what} {ref}: module {ref.module!r} has no function {ref.name!r}")
    return function  # type: ignore[no-any-return]


def _load(name: str, file: str) -> Any:
    """Load a module from its file: pytest's importlib mode leaves test modules off the path."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingError(f"module {name!r} cannot be loaded from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
