"""What the selected tests will need, whether it fits, and the lines that say so before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ckpt.errors import CannotFit
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.plugin.settings import ModelSpec
from pytest_ckpt.target.interface import Target
from pytest_ckpt.target.space import require_space
from pytest_ckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pytest_ckpt.plugin.run import Run

_RANK_BYTES = 350_000_000
"""Memory of a rank that holds nothing yet: Python with torch imported."""


@dataclass(frozen=True)
class Need:
    """What one test needs at most: bytes of the target, and bytes of this host's memory."""

    target: Target
    model: ModelSpec
    ranks: int
    copies: int
    """Checkpoints that lie on the target at once."""
    device: str
    mode: str | None

    @classmethod
    def of_item(cls, item: pytest.Item, run: Run) -> Need:
        """Return the need of one collected test, from its parameters or the session's first of each."""
        params = _params(item)
        settings = run.settings
        models = {model.name: model for model in settings.models}
        keeps_all = settings.keep == "all"
        return cls(
            target=target_of(item, run),
            model=models.get(params.get("ckpt_model", ""), settings.models[0]),
            ranks=params.get("ckpt_world", settings.ranks[0]),
            copies=(settings.rounds + 1) * len(run.items) if keeps_all else 1,
            device=settings.device,
            mode=params.get("ckpt_mode"),
        )

    @property
    def target_bytes(self) -> int | None:
        """Bytes of the target; None for a user's model."""
        state = self.model.state_bytes
        return None if state is None else state * self.copies

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of host memory: the state, the copy that an async save stages, and a checkpoint kept in memory."""
        state = self.model.state_bytes
        if state is None:
            return None
        held = state if self.device == "cpu" else 0
        staged = 0 if self.mode == "sync" else state
        stored = state * self.copies if self.target.medium == "memory" else 0
        return held + staged + stored + self.ranks * _RANK_BYTES

    def check(self) -> None:
        """Raise `CannotFit` with the figures where target or memory is too small."""
        if self.target_bytes is not None:
            require_space(self.target_bytes, self.target.free_bytes(), self.target.location)
        need, free = self.memory_bytes, available_memory_bytes()
        if need is not None and need > free:
            raise CannotFit(
                f"{self.model.name} with {self.model.recipe.name} on {self.ranks} ranks"
                f"{', mode ' + self.mode if self.mode else ''} needs {format_bytes(need)} of memory and "
                f"{format_bytes(free)} are available; choose a smaller --ckpt-model, or --ckpt-mode=sync, "
                "which stages no copy"
            )


def target_of(item: pytest.Item, run: Run) -> Target:
    """Return the target that a collected test will save to."""
    return run.target(_params(item).get("ckpt_target"))


def header_lines(run: Run, needs: list[Need]) -> list[str]:
    """Return the lines that say what was chosen, why, and how it fits."""
    settings = run.settings
    why = {name: f" ({reason})" for name, reason in settings.reasons.items()}
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    ranks = ", ".join(str(count) for count in dict.fromkeys(need.ranks for need in needs))
    lines = [
        f"ckpt: torch {version('torch')}, {settings.device}{why.get('device', '')}, {backend}, "
        f"ranks {ranks}{why.get('ranks', '')}",
        f"ckpt: {settings.rounds} rounds{why.get('rounds', '')} after one warm-up save, at most "
        f"{format_seconds(settings.max_time_s)} a scenario; writer {settings.writer.name}"
        f"{', every file synced' if settings.writer.name == 'FileSystemWriter' else ''}; keep {settings.keep}",
    ]
    if not _benchmarks_run(run.config):
        lines.append("ckpt: benchmarks are disabled (--benchmark-disable): one save each, nothing is judged")
    for target in dict.fromkeys(need.target for need in needs):
        memory = ", which is memory and no disk" if target.medium == "memory" else ""
        lines.append(
            f"ckpt: target {target.label} = {target.location} ({target.filesystem} on {target.mount}{memory}; "
            f"{format_bytes(target.free_bytes())} free)"
        )
        lines += [
            f"ckpt: left by a killed run: {left.path} ({format_bytes(left.bytes)}); "
            f"`pytest-ckpt clean {target.location}` removes it"
            for left in target.leftovers()
        ]
    for model in dict.fromkeys(need.model for need in needs):
        own = [need for need in needs if need.model == model]
        reason = settings.reasons.get("model", "")
        name = f"{model.name} ({reason})" if reason.startswith("auto") and model == settings.models[-1] else model.name
        if model.state_bytes is None:
            lines.append(f"ckpt: model {name}: its size is known once it is made")
            continue
        lines.append(
            f"ckpt: model {name}, {model.recipe.name}{why.get('state', '')}: {format_bytes(model.state_bytes)} a "
            f"checkpoint; needs at most {format_bytes(max(n.target_bytes or 0 for n in own))} of a target and "
            f"{format_bytes(max(n.memory_bytes or 0 for n in own))} of {format_bytes(available_memory_bytes())} "
            "memory: fits"
        )
    return lines + [f"ckpt: warning: {sentence}" for sentence in _ignored(run.config)]


def space_line(target: Target) -> str:
    """Return what a failed save leaves to know about its target's space."""
    return f"target {target.label} = {target.location}: {format_bytes(target.free_bytes())} free now"


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


def _benchmarks_run(config: pytest.Config) -> bool:
    return not config._benchmarksession.disabled  # type: ignore[attr-defined]


def _ignored(config: pytest.Config) -> list[str]:
    from pytest_ckpt.plugin.benchmark import ignored_options

    return ignored_options(config)
