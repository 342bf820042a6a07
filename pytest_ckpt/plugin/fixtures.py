"""The public fixtures. A dimension is parametrized only for tests that request its fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from pytest_ckpt.accept.trial import Trial
    from pytest_ckpt.plugin.follow import Follow
    from pytest_ckpt.plugin.planner import Planner
    from pytest_ckpt.plugin.run import Run
    from pytest_ckpt.plugin.specs import ModelSpec, WriterSpec
    from pytest_ckpt.records import SaveRecord
    from pytest_ckpt.target.interface import Target
    from pytest_ckpt.world.interface import World


@pytest.fixture(scope="session")
def ckpt_target(request: pytest.FixtureRequest) -> Target:
    """Where checkpoints go: one of `--ckpt-target`."""
    return _run(request).target(getattr(request, "param", None))


@pytest.fixture(scope="session")
def ckpt_model(request: pytest.FixtureRequest) -> ModelSpec:
    """What is saved: one of `--ckpt-model`.

    Override it to save your own state: return a function at module level that takes the device mesh and the device
    and returns a state dict, or its name as `package.module:function`.
    """
    return _run(request).settings.model(getattr(request, "param", None))


@pytest.fixture(scope="session")
def ckpt_world(request: pytest.FixtureRequest) -> World:
    """The ranks that save: one process group of each of `--ckpt-ranks`; `run(function)` runs yours in every rank."""
    run = _run(request)
    return run.world(getattr(request, "param", run.settings.ranks[0]))


@pytest.fixture
def ckpt_mode(request: pytest.FixtureRequest) -> str:
    """How it is saved: one of `--ckpt-mode`."""
    return str(getattr(request, "param", _run(request).settings.modes[0]))


@pytest.fixture(scope="session")
def ckpt_writer(request: pytest.FixtureRequest) -> WriterSpec:
    """The storage writer: `--ckpt-writer`, else FileSystemWriter, with one combination of `--ckpt-writer-opt`."""
    return _run(request).settings.writers[getattr(request, "param", 0)]


@pytest.fixture
def ckpt_save(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., SaveRecord]:
    """Save as a benchmark: `ckpt_save(mode=..., writer=..., model=..., name=...)` returns what was measured.

    Each call is a row of its own; from the second call in a test on, rows need a `name`.
    """
    save: Callable[..., SaveRecord] = _measuring(request, benchmark)
    return save


@pytest.fixture
def ckpt_load(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., SaveRecord]:
    """Load as a benchmark: `ckpt_load(mode=..., saved_ranks=..., model=..., name=...)` returns what was measured.

    What is loaded is saved first, by the same ranks or by `saved_ranks` others. Rows are as those of `ckpt_save`.
    """
    load: Callable[..., SaveRecord] = _measuring(request, benchmark)
    return load


@pytest.fixture(scope="session")
def ckpt_plan_ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks plan a save on paper: one of `--ckpt-plan-ranks`."""
    return int(getattr(request, "param", _run(request).settings.plan_ranks[0]))


@pytest.fixture
def ckpt_plan(request: pytest.FixtureRequest, benchmark: Any) -> Planner:
    """Plan saves as a benchmark: `ckpt_plan(ranks=..., model=..., name=...)` returns what was measured.

    Ranks are on paper: one process does what rank 0 does. Rows are as those of `ckpt_save`. `ckpt_plan.growth()`
    returns how each step grew with the ranks measured in this session.
    """
    planner: Planner = _measuring(request, benchmark)
    return planner


def _measuring(request: pytest.FixtureRequest, benchmark: Any) -> Any:
    from pytest_ckpt.plugin.hooks import CLOCK

    run = _run(request)
    if CLOCK not in request.node.stash:
        _refuse_late(request)
    return run.measuring(str(request.fixturename), request, benchmark)


@pytest.fixture
def ckpt_acceptance(
    request: pytest.FixtureRequest, ckpt_target: Any, ckpt_world: Any, ckpt_mode: str, ckpt_writer: Any
) -> Iterator[Trial | None]:
    """Put a promise to the test: `save`, `load`, `require_equal`, `verify`, and `known` for what DCP is known to do.

    A test that requests it is a promise, by its name, and a line of the table that ends an acceptance run.
    """
    from pytest_ckpt.plugin.acceptance import make_trial

    yield from make_trial(_run(request), request)


def _run(request: pytest.FixtureRequest) -> Run | Follow:
    from pytest_ckpt.plugin.hooks import RUN

    if RUN not in request.config.stash:
        _refuse_late(request)
    return request.config.stash[RUN]


def _refuse_late(request: pytest.FixtureRequest) -> NoReturn:
    pytest.fail(
        f"{request.fixturename} was requested while the tests ran, too late to check targets and memory: "
        "name it among the arguments of the test or of its fixture",
        pytrace=False,
    )
