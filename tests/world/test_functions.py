"""Functions travel as module and name; what cannot is refused before a rank is told."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.world.functions import FunctionRef, parse_reference, reference, resolve
from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@traced
def decorated(rank: Any) -> str:
    return "decorated"


def shadowed() -> int:
    return 1


first_shadowed = shadowed


def shadowed() -> int:  # type: ignore[no-redef]
    return 2


class Instance:
    def __call__(self) -> None: ...
    def method(self) -> None: ...


def outer() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "is a lambda"),
        (outer(), "is defined inside another function"),
        (Instance.method, "is a method"),
        (Instance().method, "is a method"),
        (Instance(), "'Instance', which the ranks cannot import"),
        (functools.partial(shadowed), "'partial', which the ranks cannot import"),
        (first_shadowed, "is not what .*shadowed refers to"),
    ],
)
def test_function_that_has_no_name_of_its_own_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(SettingError, match=reason) as caught:
        reference(function, "writer")
    assert str(caught.value).startswith("writer ")


def test_refused_function_starts_no_rank() -> None:
    world = SpawnedWorld(1)
    with pytest.raises(SettingError, match="lambda"):
        world.run(lambda rank: None)
    assert world.pids == []


def test_decorated_function_is_found_in_its_own_module() -> None:
    ref = reference(decorated, "function")
    assert ref.file == __file__
    assert resolve(ref, "function") is decorated


@pytest.mark.parametrize("text", ["module", "module:", ":function", "a b:c", "a:b.c", "a:b()", "a..b:c", "a:b:c"])
def test_text_that_names_no_function_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match=r"\(from --ckpt-writer\) names no function; write package.module:function"):
        parse_reference(text, "--ckpt-writer")


def test_text_that_names_a_function_resolves() -> None:
    assert resolve(parse_reference("os.path:join", "x"), "writer") is os.path.join


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        (FunctionRef("no_such_module", "f"), "cannot be imported: No module named 'no_such_module'"),
        (FunctionRef("os", "no_such_function"), "module 'os' has no function 'no_such_function'"),
        (FunctionRef("os", "sep"), "'sep' of module 'os' is 'str' and no function"),
    ],
)
def test_function_that_is_not_there_is_named(ref: FunctionRef, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        resolve(ref, "writer")


@pytest.fixture
def load_by_file(tmp_path: Path) -> Iterator[Callable[[str, str], ModuleType]]:
    """Load a module as pytest's importlib mode does: by its file, in a folder that is not on the path."""
    loaded = []

    def load(name: str, source: str) -> ModuleType:
        file = tmp_path / f"{name.rpartition('.')[2]}_.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        loaded.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["by_file", "some.folder.by_file"])
def test_module_loaded_by_file_reaches_the_ranks(
    world: SpawnedWorld, load_by_file: Callable[[str, str], ModuleType], name: str
) -> None:
    module = load_by_file(name, "def answer(rank): return 40 + rank.rank\n")
    assert world.run(module.answer) == [40, 41]
    assert world.run(module.answer) == [40, 41]


def test_module_of_the_same_name_elsewhere_on_the_path_is_not_taken_for_it(
    world: SpawnedWorld, load_by_file: Callable[[str, str], ModuleType]
) -> None:
    """Every folder may have a `conftest`, and a script's `__main__` is not a rank's."""
    world.run(ranks.pid)
    module = load_by_file("colorsys", "def answer(rank): return 'mine'\n")
    assert world.run(module.answer) == ["mine", "mine"]


def test_function_of_a_script_reaches_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from pytest_ckpt.world.spawned import SpawnedWorld\n"
        "def answer(rank): return 'from the script'\n"
        "if __name__ == '__main__':\n"
        "    world = SpawnedWorld(1)\n"
        "    print(*world.run(answer))\n"
        "    world.close()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "from the script\n", done.stderr


def test_module_that_fails_to_load_is_named_with_its_reason_each_time(tmp_path: Path) -> None:
    broken = tmp_path / "broken_one.py"
    broken.write_text("1 / 0")
    for _ in range(2):
        with pytest.raises(SettingError, match="model broken_one:f cannot be imported: ZeroDivisionError"):
            resolve(FunctionRef("broken_one", "f", str(broken)), "model")


def test_missing_import_inside_a_found_module_is_not_taken_for_the_module(tmp_path: Path) -> None:
    needy = tmp_path / "needy.py"
    needy.write_text("import no_such_dependency")
    with pytest.raises(SettingError, match="model needy:f cannot be imported: No module named 'no_such_dependency'"):
        resolve(FunctionRef("needy", "f", str(needy)), "model")
