"""What pytest asks of the plugin at every session: decide whether there is anything to do.

Nothing heavy is imported here; where tests that save were selected, a `Run` is registered and does the rest.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ckpt.plugin.options import add_options, any_given, given_values

if TYPE_CHECKING:
    from pytest_ckpt.plugin.attached import Attached
    from pytest_ckpt.plugin.benchmark import RankClock
    from pytest_ckpt.plugin.follow import Follow
    from pytest_ckpt.plugin.run import Run
    from pytest_ckpt.plugin.settings import Settings

RUN: pytest.StashKey[Run | Follow] = pytest.StashKey()
CLOCK: pytest.StashKey[RankClock] = pytest.StashKey()
_SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
_ATTACHED: pytest.StashKey[Attached] = pytest.StashKey()

_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_MEASURING = ("ckpt_save", "ckpt_load", "ckpt_plan")
_ACCEPTING = "ckpt_acceptance"
_DIMENSIONS = ("ckpt_target", "ckpt_model", "ckpt_world", "ckpt_plan_ranks", "ckpt_mode", "ckpt_writer")
_MARKS = {
    "ckpt(tolerance)": "the share of throughput that a scenario of this test may lose, as tolerance='5%'",
    "ckpt_save": "benchmarks of checkpoint saves",
    "ckpt_load": "benchmarks of checkpoint loads",
    "ckpt_acceptance": "what a checkpoint promises, put to the test",
    "ckpt_planning": "benchmarks of DCP's planning, by many ranks on paper",
    "ckpt_tune": "searches for better settings; to come",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and their ini twins."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; refuse bad options before anything else happens.

    It comes before pytest-benchmark's, which reads what to compare with, and where that looks no baseline lies.
    """
    for mark, meaning in _MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning} (pytest-ckpt).")
    if any_given(config):
        _settings(config)
    if os.environ.get("RANK") or os.environ.get("SLURM_PROCID"):
        _attach(config)
    if config.getoption("benchmark_compare", None) is True:
        from pytest_ckpt.plugin import comparing

        comparing.compare_with_newest(config, _settings(config))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_benchmark_compare_machine_info(machine_info: dict[str, Any], compared_benchmark: dict[str, Any]) -> None:
    """Keep pytest-benchmark from warning of another machine: a baseline names no host, and its id has been matched."""
    from pytest_ckpt.plugin import comparing

    if comparing.is_baseline(compared_benchmark):
        compared_benchmark["machine_info"] = machine_info


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of our suites, collect that of saves, and others where their mark or path is named: they take as long again."""
    name = collection_path.stem.removeprefix("test_")
    if f"ckpt_{name}" not in _MARKS or name == "save" or collection_path.suffix not in (".py", ""):
        return None
    own = Path(__file__).parents[1] / "suites"
    is_ours = collection_path.parent.resolve() == own.resolve()
    return True if is_ours and f"ckpt_{name}" not in config.option.markexpr else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the dimensions that a test requests, by plain labels and in a fixed order."""
    requested = [
        name for name in _DIMENSIONS if name in metafunc.fixturenames and not _is_settled_by_test(metafunc, name)
    ]
    if not requested:
        return
    settings = _settings(metafunc.config)
    plans = "ckpt_plan" in metafunc.fixturenames
    values: dict[str, list[Any]] = {
        "ckpt_target": [target.label for target in settings.targets] or ["local"],
        "ckpt_model": [model.name for model in (settings.plan_models if plans else settings.models)],
        "ckpt_world": list(settings.ranks),
        "ckpt_plan_ranks": list(settings.plan_ranks),
        "ckpt_mode": list(settings.modes),
        "ckpt_writer": list(range(len(settings.writers))),
    }
    special = settings.mesh is not None and settings.mesh.replicate > 1
    mesh = f"-{settings.mesh}" if special else _share_label(settings)
    labels = {
        "ckpt_world": [f"r{count}{mesh}" for count in settings.ranks],
        "ckpt_plan_ranks": [f"r{count}" for count in settings.plan_ranks],
        "ckpt_writer": [writer.label or "default" for writer in settings.writers],
    }
    for name in requested:
        if name == "ckpt_writer" and labels[name] == ["default"]:
            continue  # an id shows only what is not as always
        ids = labels.get(name)
        metafunc.parametrize(name, values[name], ids=ids, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of one world, and of one model in it, next to each other: both take long to make."""
    if any("ckpt_world" in _fixtures(item) for item in items):
        from pytest_ckpt.plugin.plan import sort_by_world

        sort_by_world(items, _settings(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Take note of the selected tests that save; give each its clock, or the reason why it cannot run here."""
    config = session.config
    using = [item for item in session.items if any(n.startswith("ckpt_") for n in _fixtures(item))]
    attached = config.stash.get(_ATTACHED, None)
    if attached is not None and (using or any_given(config)) and not _why_not_here(config):
        attached.join(session, _settings(config))
    if not using:
        return
    reason = _why_not_here(config)
    if reason:
        for item in using:
            item.add_marker(pytest.mark.skip(reason=reason))
        return
    running = [item for item in using if not item.get_closest_marker("skip")]
    saving = [item for item in running if set(_MEASURING) & set(_fixtures(item))]
    accepting = [item for item in running if _ACCEPTING in _fixtures(item)]
    if saving and not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "tests that save need pytest-benchmark, which is switched off (-p no:benchmark); run without that option"
        )
    from pytest_ckpt.errors import SettingError
    from pytest_ckpt.plugin import benchmark, comparing
    from pytest_ckpt.plugin.baselines import Baselines
    from pytest_ckpt.plugin.item_verdicts import ItemVerdicts
    from pytest_ckpt.plugin.outcome import Outcome
    from pytest_ckpt.plugin.run import Run

    settings = _settings(config)
    for item in saving:
        item.stash[CLOCK] = benchmark.use_clock(item)
    if attached is not None and attached.follow is not None:
        config.stash[RUN] = attached.follow
        if accepting:
            from pytest_ckpt.plugin.acceptance import Following

            config.pluginmanager.register(Following(attached.follow), "ckpt-promises")
        return
    baselines = Baselines(config, settings)
    run = Run(config, settings, Outcome(config, baselines), baselines, attached.lead if attached else None)
    config.stash[RUN] = run
    try:
        run.plan(saving, accepting)
    except SettingError as error:
        raise pytest.UsageError(str(error)) from error
    if comparing.FILES in config.stash:
        comparing.compare_saves(config, [item.nodeid for item in saving])
    for name, plugin in {
        "ckpt-run": run,
        "ckpt-outcome": run.outcome,
        "ckpt-benchmark": benchmark,
        "ckpt-verdicts": ItemVerdicts(),
    }.items():
        config.pluginmanager.register(plugin, name)
    if accepting:
        from pytest_ckpt.plugin import acceptance

        acceptance.register(config, run)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say at once where saves will not run."""
    reason = _why_not_here(config)
    return f"ckpt: checkpoint saves are skipped: {reason}" if reason and any_given(config) else None


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say why nothing was saved: benchmarks are off here, or a target was given and no selected test saves to it."""
    reason = _why_not_here(config)
    if reason:
        skipped = sum(reason in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
        if skipped:
            terminalreporter.write_line(f"ckpt: {skipped} tests were skipped: {reason}", yellow=True)
        return
    targets = given_values(config, "target")
    if not targets or RUN in config.stash or exitstatus not in _COMPLETE:
        return
    text, source = targets[0]
    if terminalreporter.stats.get("deselected"):
        terminalreporter.write_line(
            f"ckpt: a target was given ({source}) and no test that saves was selected", yellow=True
        )
        return
    path = shlex.quote(text)
    terminalreporter.write_line(
        f"ckpt: a target was given ({source}) and no test that saves was collected; run "
        f"`pytest-ckpt run {path}`, or `pytest --pyargs pytest_ckpt.suites --ckpt-target={path}`",
        yellow=True,
    )


def _attach(config: pytest.Config) -> None:
    """Be ready to meet the other ranks of the job, where torchrun or srun started this process."""
    from pytest_ckpt.errors import SettingError
    from pytest_ckpt.world.job import find_job

    try:
        job = find_job(os.environ)
    except SettingError as error:
        raise pytest.UsageError(str(error)) from error
    if job is not None:
        from pytest_ckpt.plugin.attached import Attached

        config.stash[_ATTACHED] = Attached(config, job)
        config.pluginmanager.register(config.stash[_ATTACHED], "ckpt-attached")
        if any_given(config):  # else it is not known yet whether this session is one of ours
            config.stash[_ATTACHED].write_no_reports()


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
    # Its own entry point is loaded wherever it is installed; only this object knows whether it is active.
    if getattr(config.pluginmanager.get_plugin("codspeed_plugin"), "is_codspeed_enabled", False):
        return "pytest-codspeed is active and takes pytest-benchmark's place; run without --codspeed"
    return None


def _share_label(settings: Settings) -> str:
    return "" if settings.share is None else f"-share{settings.share.count}of{settings.share.of}"


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _is_settled_by_test(metafunc: pytest.Metafunc, name: str) -> bool:
    marks = metafunc.definition.iter_markers("parametrize")
    arguments = [mark.args[0] if mark.args else mark.kwargs.get("argnames", ()) for mark in marks]
    named = [part.strip() for a in arguments for part in (a.split(",") if isinstance(a, str) else a)]
    if name in named:
        return True
    from pytest_ckpt.plugin.plan import is_overridden

    return is_overridden(metafunc.definition, name)
