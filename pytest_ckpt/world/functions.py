"""Functions travel to the ranks as module and name, never as code: what cannot be named is refused."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, overload

import msgspec

from pytest_ckpt.errors import SettingError


class FunctionRef(msgspec.Struct, frozen=True):
    """A module-level function by name; `file` is where its module was loaded from, for modules not on the path."""

    module: str
    name: str
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@overload
def listed(ref: FunctionRef) -> list[Any]: ...
@overload
def listed(ref: None) -> None: ...
def listed(ref: FunctionRef | None) -> list[Any] | None:
    """Return the plain data from which a rank makes `ref` again: `FunctionRef(*listed)`."""
    return None if ref is None else [ref.module, ref.name, ref.file]


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
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, name, None) is not function:
        raise SettingError(
            f"{what} {name!r} is not what {module}.{name} refers to, so the ranks would run something else; "
            "give it a name of its own at module level"
        )
    return FunctionRef(module, name, getattr(loaded, "__file__", None))


def parse_reference(text: str, source: str) -> FunctionRef:
    """Return the reference that `package.module:function` names; `SettingError` where it has another form."""
    module, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise SettingError(f"{text!r} (from {source}) names no function; write package.module:function")
    return FunctionRef(module, name)


def resolve(ref: FunctionRef, what: str) -> Callable[..., Any]:
    """Import what `ref` names; `SettingError` with the reason where that fails."""
    try:
        module = _import(ref)
    except (Exception, SystemExit) as error:
        reason = str(error) if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"
        raise SettingError(f"{what} {ref} cannot be imported: {reason}") from error
    function = getattr(module, ref.name, None)
    if not callable(function):
        raise SettingError(f"{what} {ref}: {_why_no_function(module, ref)}")
    return function  # type: ignore[no-any-return]


def _why_no_function(module: ModuleType, ref: FunctionRef) -> str:
    if hasattr(module, ref.name):
        return f"{ref.name!r} of module {ref.module!r} is {type(getattr(module, ref.name)).__name__!r} and no function"
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    near = difflib.get_close_matches(ref.name, names, n=3, cutoff=0.0)
    return f"module {ref.module!r} has no function {ref.name!r}" + (f"; nearest: {', '.join(near)}" if near else "")


def _import(ref: FunctionRef) -> ModuleType:
    """Return the module by its name, or from its file where the name means nothing or another module here.

    pytest's importlib mode leaves test modules off the path, every folder may have a `conftest`, and a script's
    `__main__` is not a rank's.
    """
    if ref.file is None:
        return importlib.import_module(ref.module)
    if ref.module != "__main__":
        try:
            module = importlib.import_module(ref.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{ref.module}.".startswith(f"{error.name}."):
                raise  # the module was found; what it imports was not
            return _load(ref.module, ref.file)
        if _same_file(getattr(module, "__file__", None), ref.file):
            return module
    return _load(f"{ref.module.strip('_')}_{zlib.crc32(ref.file.encode()):08x}", ref.file)


def _load(name: str, file: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)
