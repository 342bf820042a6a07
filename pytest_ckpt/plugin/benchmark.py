"""The bridge to pytest-benchmark: the ranks' seconds become its rows, exactly, and its JSON is our result file."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.records import SaveRecord, to_plain

MISLEADING_OPTIONS = {
    # pytest-benchmark's option (destination, default): ours
    "benchmark_min_rounds": (5, "--ckpt-rounds"),
    "benchmark_max_time": ("1.0", "--ckpt-max-time"),
    "benchmark_warmup": (False, "nothing: one warm-up save is always made and reported as first save"),
}


_ALL_COLUMNS = ["min", "max", "mean", "stddev", "median", "iqr", "outliers", "ops", "rounds", "iterations"]
"""What pytest-benchmark before 5.3 takes where no columns were given."""


class RankClock:
    """pytest-benchmark's timer for a test that measures: it shows the ranks' own seconds, not the controller's.

    It is set to zero before each round and to the round's seconds within it, so that the difference that
    pytest-benchmark takes is the ranks' figure to the last bit.
    """

    __name__ = "seconds_of_the_ranks"

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the reading, in seconds."""
        return self.now

    def play(self, benchmark: Any, seconds: list[float]) -> None:
        """Make `benchmark` hold `seconds`, one round each."""
        readings = iter(seconds)

        def reset() -> None:
            self.now = 0.0

        def advance() -> None:
            self.now = next(readings, 0.0)  # --benchmark-cprofile calls once more than there are rounds

        benchmark.pedantic(advance, setup=reset, rounds=len(seconds))


class Rows:
    """The rows of one test in pytest-benchmark's session."""

    def __init__(self, config: pytest.Config, fixture: Any, clock: RankClock) -> None:
        if not callable(getattr(fixture, "pedantic", None)):
            pytest.fail(
                f"the fixture `benchmark` is overridden and gives {type(fixture).__name__!r}; checkpoint "
                "benchmarks need pytest-benchmark's own: rename the other fixture",
                pytrace=False,
            )
        self._session: Any = config._benchmarksession  # type: ignore[attr-defined]
        self._clock = clock
        self._blank = copy.copy(fixture)
        self._fixture = fixture
        # Else it warns that it was never used, after every failed save and with --benchmark-disable.
        fixture._mode = "ckpt_save(...), ckpt_load(...) or ckpt_plan(...)"

    def add(self, record: SaveRecord, name: str | None) -> None:
        """Add `record` as row `save`, `load` or `plan`, and as row `stall` too where training went on meanwhile."""
        suffix = f":{name}" if name else ""
        self._row(record, suffix, record.scenario.kind, [r.save_s for r in record.rounds])
        if record.scenario.mode != "sync" and record.scenario.is_save:
            self._row(record, suffix + ":stall", "stall", [r.stall_s for r in record.rounds])

    def _row(self, record: SaveRecord, suffix: str, group: str, seconds: list[float]) -> None:
        row = copy.copy(self._blank)
        row.name += suffix
        row.fullname += suffix
        row.group = f"{row.group} {group}" if row.group else group
        row.extra_info = {**self._fixture.extra_info, "ckpt": to_plain(record)}
        rows = self._session.benchmarks  # a rerun of a failed test replaces what the first try measured
        rows[:] = [other for other in rows if other.fullname != row.fullname]
        self._clock.play(row, seconds)


def use_clock(item: pytest.Item) -> RankClock:
    """Give `item` a clock as pytest-benchmark's timer; whatever else its own benchmark mark says stays."""
    clock = RankClock()
    given = item.get_closest_marker("benchmark")
    item.add_marker(pytest.mark.benchmark(**{**(given.kwargs if given else {}), "timer": clock}), append=False)
    return clock


def is_disabled(config: pytest.Config) -> bool:
    """Return whether pytest-benchmark measures nothing in this session (`--benchmark-disable`)."""
    return bool(config._benchmarksession.disabled)  # type: ignore[attr-defined]


def ignored_options(config: pytest.Config) -> list[str]:
    """Return a sentence for each of pytest-benchmark's options that was given and that saves do not heed."""
    sentences = []
    for key, (default, ours) in MISLEADING_OPTIONS.items():
        if str(config.getoption(key, default)) != str(default):
            sentences.append(f"--{key.replace('_', '-')} does not change checkpoint saves: use {ours}")
    return sentences


def wants_wide_table(config: pytest.Config) -> bool:
    """Return whether the user asked for pytest-benchmark's own table: by name, by comparing, or with -v."""
    asked = [config.getoption(f"benchmark_{name}", None) for name in ("compare", "compare_fail", "histogram")]
    columns = config.getoption("benchmark_columns", None)
    return config.get_verbosity() > 0 or any(asked) or columns not in (None, _ALL_COLUMNS)


class ResultFile:
    """The last run, always kept: pytest-benchmark's JSON of the rows that hold checkpoint records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._facts: dict[str, Any] | None = None
        self.path = cache_file(config, "last.json", "figures")

    def write(self) -> None:
        """Write what is known by now, so that a later crash of the run loses nothing that was measured."""
        if self.path is None:
            return
        write_whole(self.path, json.dumps(self.document(), indent=1).encode())

    def document(self) -> dict[str, Any]:
        """Return what is known by now, as plain data."""
        session = self._config._benchmarksession  # type: ignore[attr-defined]
        hook = self._config.hook
        if self._facts is None:  # looking up CPU and commit takes a second, and neither changes
            commit_info = hook.pytest_benchmark_generate_commit_info(config=self._config)
            hook.pytest_benchmark_update_commit_info(config=self._config, commit_info=commit_info)
            self._facts = {"machine_info": session.get_machine_info(), "commit_info": commit_info}
        benchmarks = [row for row in session.benchmarks if "ckpt" in row.extra_info]
        output = hook.pytest_benchmark_generate_json(
            config=self._config, benchmarks=benchmarks, include_data=True, **self._facts
        )
        hook.pytest_benchmark_update_json(config=self._config, benchmarks=benchmarks, output_json=output)
        plain: dict[str, Any] = json.loads(json.dumps(output, default=str))
        return plain


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of the last run in one step: whoever reads it sees this one or the one before."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_bytes(data)
    os.replace(draft, path)


def cache_file(config: pytest.Config, name: str, what: str) -> Path | None:
    """Return where pytest's cache keeps `what` of the last run; None where it keeps nothing, warned of if unwanted."""
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    if cache is None:
        return None
    try:
        return Path(cache.mkdir("ckpt")) / name
    except OSError as error:
        warnings.warn(
            pytest.PytestWarning(f"the {what} of this run are not kept: pytest's cache cannot be written ({error})"),
            stacklevel=2,
        )
        return None


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[Any]) -> Any:
    """Leave our rows out of pytest-benchmark's wide table, which gives way to ours unless it was asked for."""
    if not wants_wide_table(config):
        benchmarks[:] = [bench for bench in benchmarks if "ckpt" not in bench["extra_info"]]
    return (yield)
