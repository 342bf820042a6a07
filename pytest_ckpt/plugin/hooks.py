"""What pytest asks of the plugin at every session: decide whether there is anything to do.

Nothing heavy is imported here; where tests that save were selected, a `Run` is registered and does the rest.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ckpt.plugin.options import add_options, any_given, given_values

if TYPE_CHECKING:
    from pytest_ckpt.plugin.benchmark import RankClock
    from pytest_ckpt.plugin.run import Run
    from pytest_ckpt.plugin.settings import Settings

RUN: pytest.StashKey[Run] = pytest.StashKey()
CLOCK: pytest.StashKey[RankClock] = pytest.StashKey()
_SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()

_DIMENSIONS = ("ckpt_target", "ckpt_model", "ckpt_world", "ckpt_mode")
_MARKS = {
    "ckpt_save": "benchmarks of checkpoint saves",
    "ckpt_load": "benchmarks of checkpoint loads",
    "ckpt_acceptance": "what a checkpoint promises, put to the test",
    "ckpt_planning": "benchmarks of DCP's planning",
    "ckpt_tune": "searches for better settings",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and their ini twins."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; refuse bad options before anything else happens."""
    for mark, meaning in _MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning} (pytest-ckpt).")
    if any_given(config):
        _settings(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the dimensions that a test requests, by plain labels and in a fixed order."""
    requested = [name for name in _DIMENSIONS if name in metafunc.fixturenames]
    if not requested:
        return
    settings = _settings(metafunc.config)
    values: dict[str, list[Any]] = {
        "ckpt_target": [target.label for target in settings.targets] or ["local"],
        "ckpt_model": [model.name for model in settings.models],
        "ckpt_world": list(settings.ranks),
        "ckpt_mode": list(settings.modes),
    }
    overridden = [name for name in requested if _is_overridden(metafunc, name)]
    for name in requested:
        if name not in overridden:
            ids = [f"r{count}" for count in settings.ranks] if name == "ckpt_world" else None
            metafunc.parametrize(name, values[name], ids=ids, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take note of the tests that save; give each its clock, or the reason why it cannot run here."""
    saving = [item for item in items if "ckpt_save" in getattr(item, "fixturenames", ())]
    using = [item for item in items if any(n.startswith("ckpt_") for n in getattr(item, "fixturenames", ()))]
    if not using:
        return
    if saving and not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "tests that save need pytest-benchmark, which is switched off (-p no:benchmark); run without that option"
        )
    reason = _why_not_here(config)
    if reason:
        for item in using:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    from pytest_ckpt.plugin import benchmark
    from pytest_ckpt.plugin.run import Run

    for item in saving:
        item.stash[CLOCK] = benchmark.use_clock(item)
    run = config.stash[RUN] = Run(config, _settings(config), list(using))
    config.pluginmanager.register(run, "ckpt-run")
    config.pluginmanager.register(benchmark, "ckpt-benchmark")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say at once where saves will not run."""
    reason = _why_not_here(config)
    return f"ckpt: checkpoint saves are skipped: {reason}" if reason and any_given(config) else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what to run where a target was given and no selected test saves to it."""
    targets = given_values(config, "target")
    if targets and RUN not in config.stash and not hasattr(config, "workerinput") and not _why_not_here(config):
        terminalreporter.write_line(
            f"ckpt: a target was given ({targets[0][1]}) and no test that saves was collected; run "
            f"`pytest-ckpt run {targets[0][0]}`, or `pytest --pyargs pytest_ckpt.suites --ckpt-target={targets[0][0]}`",
            yellow=True,
        )


def _settings(config: pytest.Config) -> Settings:
    if _SETTINGS not in config.stash:
        from pytest_ckpt.errors import SettingError
        from pytest_ckpt.plugin.settings import read_settings

        try:
            config.stash[_SETTINGS] = read_settings(config)
        except SettingError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_SETTINGS]


def _why_not_here(config: pytest.Config) -> str | None:
    if os.environ.get("PYTEST_XDIST_WORKER") or config.getoption("dist", "no") != "no":
        return "pytest-xdist is active, and saves that run side by side measure each other; run without -n"
    if config.pluginmanager.hasplugin("codspeed") and config.getoption("codspeed", False):
        return "pytest-codspeed is active and takes pytest-benchmark's place; run without --codspeed"
    return None


def _is_overridden(metafunc: pytest.Metafunc, name: str) -> bool:
    definitions = metafunc._arg2fixturedefs.get(name, ())
    return bool(definitions) and not definitions[-1].func.__module__.startswith("pytest_ckpt.plugin")
