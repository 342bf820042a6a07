"""The public fixtures. A dimension is parametrized only for tests that request its fixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from pytest_ckpt.accept.trial import Trial
    from pytest_ckpt.plugin.run import Run
    from pytest_ckpt.plugin.settings import ModelSpec, WriterSpec
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
    from pytest_ckpt.plugin.hooks import CLOCK
    from pytest_ckpt.plugin.saver import Saver

    run = _run(request)
    if CLOCK not in request.node.stash:
        _refuse_late(request)
    return Saver(run, request, benchmark)


@pytest.fixture
def ckpt_load(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., SaveRecord]:
    """Load as a benchmark: `ckpt_load(mode=..., saved_ranks=..., model=..., name=...)` returns what was measured.

    What is loaded is saved first, by the same ranks or by `saved_ranks` others. Rows are as those of `ckpt_save`.
    """
    from pytest_ckpt.plugin.hooks import CLOCK
    from pytest_ckpt.plugin.loader import Loader

    run = _run(request)
    if CLOCK not in request.node.stash:
        _refuse_late(request)
    return Loader(run, request, benchmark)


@pytest.fixture
def ckpt_acceptance(
    request: pytest.FixtureRequest, ckpt_target: Any, ckpt_world: Any, ckpt_mode: str, ckpt_writer: Any
) -> Iterator[Trial]:
    """Put a promise to the test: `save`, `load`, `require_equal`, `verify`, and `known` for what DCP is known to do.

    A test that requests it is a promise, by its name, and a line of the table that ends an acceptance run.
    """
    from pytest_ckpt.plugin.acceptance import make_trial

    yield from make_trial(_run(request), request)


def _run(request: pytest.FixtureRequest) -> Run:
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
