"""What the selected tests will need, whether it fits, and the lines that say so before anything is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from pytest_ckpt.errors import CannotFit, SettingError
from pytest_ckpt.measure.memory import available_memory_bytes
from pytest_ckpt.model.budget import parse_tokens, training_bytes, why_untrainable
from pytest_ckpt.model.geometry import find_geometry
from pytest_ckpt.model.share import Share, rank_bytes
from pytest_ckpt.plugin import benchmark, values
from pytest_ckpt.plugin.settings import Settings
from pytest_ckpt.plugin.specs import ModelSpec
from pytest_ckpt.save.engines import DEFAULT_ENGINE
from pytest_ckpt.save.writers import DEFAULT_WRITER
from pytest_ckpt.target.interface import Target
from pytest_ckpt.target.space import require_space
from pytest_ckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pytest_ckpt.plugin.record import SaveRequest
    from pytest_ckpt.plugin.run import Run

ACCEPTANCE_BYTES = 500_000_000
"""Of a target, what acceptance needs at most."""
_RANK_BYTES = 350_000_000
"""Memory of a rank that holds nothing yet: Python with torch imported."""


@dataclass(frozen=True)
class Need:
    """What one scenario needs at most: bytes of the target, and bytes of this host's memory."""

    target: Target
    model: ModelSpec | None
    """None where a test brings its own, which is not known before the test runs."""
    ranks: int
    copies: int
    """Checkpoints that lie on the target at once."""
    device: str
    mode: str | None
    """None where the test says it; of loads `load`."""
    train: str | None = None
    """Tokens of a rank in a step of the training beside the saves."""
    hosts: tuple[int, ...] = ()
    """Of each rank, the number of its host, of which this is 0; empty: all are on this one."""
    replicas: int = 1
    """How often the state is held, each by ranks of its own."""
    writes_replicas: bool = False
    """Whether each of them is written: DCP stores one, an engine that does not plan all."""

    @classmethod
    def of_item(cls, item: pytest.Item, run: Run, tests: int) -> Need:
        """Return the need of one of `tests` tests that save, from its parameters or the session's first of each."""
        settings, params = run.settings, params_of(item)
        ranks = params.get("ckpt_world", settings.ranks[0])
        mesh = settings.mesh
        label = params.get("ckpt_target")
        return cls(
            target=run.target(label if isinstance(label, str) else None),
            model=None if is_overridden(item, "ckpt_model") else settings.model(params.get("ckpt_model")),
            ranks=ranks if isinstance(ranks, int) else settings.ranks[0],
            copies=_copies(settings, tests, _loads(item)),
            device=settings.device,
            mode="load" if _loads(item) else params.get("ckpt_mode"),
            train=None if _loads(item) else settings.train,
            hosts=run.hosts,
            replicas=1 if mesh is None else mesh.replicate,
            writes_replicas=settings.engine.name != DEFAULT_ENGINE,
        )

    @classmethod
    def of_request(cls, request: SaveRequest, run: Run) -> Need:
        """Return the need of a scenario about to run."""
        return cls(
            target=request.target,
            model=request.model,
            ranks=max(request.world.size, request.saved_ranks),
            copies=_copies(run.settings, 1, request.saved_by is not None),
            device=request.world.device,
            mode="load" if request.saved_by is not None else request.mode,
            train=request.train,
            hosts=run.hosts,
            replicas=1 if request.mesh is None else request.mesh.replicate,
            writes_replicas=request.engine.name != DEFAULT_ENGINE,
        )

    def is_part_of(self, planned: Need) -> bool:
        """Return whether what was planned, and found to fit, includes this."""
        return (
            (self.target, self.model, self.ranks) == (planned.target, planned.model, planned.ranks)
            and planned.mode in (None, self.mode)
            and (self.replicas, self.writes_replicas) == (planned.replicas, planned.writes_replicas)
        )

    @property
    def target_bytes(self) -> int | None:
        """Bytes of the target; None for a user's model."""
        state = self._state_bytes
        return None if state is None else state * self.copies * (self.replicas if self.writes_replicas else 1)

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of host memory: the state, the copy that an async save stages, and a checkpoint kept in memory."""
        state = self._state_bytes
        if state is None:
            return None
        held = state * self.replicas + self._training_bytes() if self.device == "cpu" else 0
        staged = 0 if self.mode in ("sync", "load") else state * self.replicas
        stored = (self.target_bytes or 0) if self.target.medium == "memory" else 0
        ranks = self.hosts.count(0) or self.ranks
        return round((held + staged + stored) * self.part_of(0)) + ranks * _RANK_BYTES

    def target_bytes_of(self, host: int) -> int:
        """Return what the ranks of `host` write of the target's bytes."""
        return math.ceil((self.target_bytes or 0) * self.part_of(host))

    def part_of(self, host: int) -> float:
        """Return which part of the state the ranks of `host` hold: the first ranks are the fullest, as FSDP cuts."""
        return self._parts.get(host, 0.0) if self.hosts else 1.0

    @cached_property
    def _parts(self) -> dict[int, float]:
        sizes = [1] * len(self.hosts)
        if self.model is not None and self.model.function is None:
            geometry, share = find_geometry(self.model.name, "ckpt_model"), self.model.share
            shards = len(sizes) // self.replicas if share is None else share.of
            sizes = [rank_bytes(geometry, self.model.recipe, shards, rank % shards) for rank in range(len(sizes))]
        of_hosts: dict[int, float] = dict.fromkeys(self.hosts, 0.0)
        for size, host in zip(sizes, self.hosts, strict=True):
            of_hosts[host] += size / sum(sizes)
        return of_hosts

    def _training_bytes(self) -> int:
        if self.train is None or self.model is None or self.model.function is not None:
            return 0
        geometry = find_geometry(self.model.name, "ckpt_model")
        tokens = parse_tokens(self.train, "--ckpt-train")
        return training_bytes(geometry, self.model.recipe, tokens, self.ranks, replicas=self.replicas)

    def _check_training(self) -> None:
        if self.train is None or self.model is None:
            return
        if self.model.function is not None:
            raise SettingError(
                f"--ckpt-train={self.train} needs a model whose loss is known, and {self.model.name} is your own; "
                "choose one of the geometries, or --ckpt-train=off"
            )
        reason = why_untrainable(find_geometry(self.model.name, "ckpt_model"), parse_tokens(self.train, "--ckpt-train"))
        if reason is not None:
            raise SettingError(f"--ckpt-train={self.train}: {reason}; choose another model, or --ckpt-train=off")

    @property
    def _state_bytes(self) -> int | None:
        return None if self.model is None else self.model.state_bytes

    def check(self, reusable_bytes: int = 0) -> None:
        """Raise `CannotFit` with the figures where target or memory is too small.

        `reusable_bytes` of memory are held by ranks that will let them go.
        """
        self._check_training()
        if self.mode == "load" and self.model is not None:
            refuse_share(self.model.share)
        if self.target_bytes is not None and not self.hosts:  # else it depends on how the hosts see the target
            require_space(self.target_bytes, self.target.free_bytes(), self.target.location)
        need, free = self.memory_bytes, available_memory_bytes() + reusable_bytes
        if self.model is not None and need is not None and need > free:
            instead = "a smaller --ckpt-model or --ckpt-state, fewer --ckpt-ranks"
            if self.mode not in ("sync", "load"):
                instead += ", or --ckpt-mode=sync, which stages no copy"
            raise CannotFit(
                f"{self.model.name} with {self.model.recipe.name} on {self.ranks} ranks"
                f"{', mode ' + self.mode if self.mode else ''} needs {format_bytes(need)} of memory and "
                f"{format_bytes(free)} are available; choose {instead}"
            )


def refuse_share(share: Share | None) -> None:
    """Raise `SettingError` where what is to be loaded would be a share."""
    if share is not None:
        raise SettingError(
            f"--ckpt-share={share} writes a part of a checkpoint, which cannot be loaded; measure loads without that "
            "option"
        )


def sort_by_world(items: list[pytest.Item], settings: Settings) -> None:
    """Sort the tests that are parametrized by world among the places that they have, others stay where they are.

    pytest sorts by session-wide parameters too, but with several of them it comes back to an earlier world.
    """
    orders: dict[str, list[Any]] = {
        "ckpt_world": list(settings.ranks),
        "ckpt_model": [model.name for model in settings.models],
        "ckpt_target": [target.label for target in settings.targets],
    }

    def key(item: pytest.Item) -> list[int]:
        params = params_of(item)
        return [order.index(p) if (p := params.get(name)) in order else len(order) for name, order in orders.items()]

    places = [place for place, item in enumerate(items) if "ckpt_world" in params_of(item)]
    for place, item in zip(places, sorted([items[place] for place in places], key=key), strict=True):
        items[place] = item


def tolerance_of(item: pytest.Item, settings: Settings) -> float:
    """Return the margin of a test's scenarios: its own, by the mark `ckpt`, or the session's."""
    for mark in item.iter_markers("ckpt"):
        source = f"the mark ckpt of {item.name}"
        unknown = [*map(repr, mark.args), *(name for name in mark.kwargs if name != "tolerance")]
        if unknown:
            raise SettingError(
                f"{unknown[0]} (from {source}) is not known there; write pytest.mark.ckpt(tolerance='5%')"
            )
        if "tolerance" in mark.kwargs:
            return values.tolerance(mark.kwargs["tolerance"], source)
    return settings.tolerance


def is_overridden(item: Any, name: str) -> bool:
    """Return whether a fixture of this plugin is replaced by a user's own for `item` (a test function's node)."""
    # Also for a fixture that the test does not request by itself: `ckpt_save` does, when it is called.
    definitions = item.session._fixturemanager.getfixturedefs(name, item)
    return bool(definitions) and not definitions[-1].func.__module__.startswith("pytest_ckpt.plugin")


def target_of(item: pytest.Item, run: Run) -> Target:
    """Return the target of a test, from its parameters or the session's first."""
    label = params_of(item).get("ckpt_target")
    return run.target(label if isinstance(label, str) else None)


def acceptance_lines(run: Run, targets: Sequence[Target]) -> list[str]:
    """Return the lines that say what promises are put to the test on."""
    settings = run.settings
    lines = [
        f"ckpt: acceptance: torch {version('torch')}, {settings.device}, engine {settings.engine.name}, "
        f"{_writers(settings)}; {settings.examples} made-up state dicts a scenario (--ckpt-examples); small states, "
        f"at most {format_bytes(ACCEPTANCE_BYTES)} of a target"
    ]
    for target in targets:
        lines += _target_lines(target)
    return lines


def warning_lines(run: Run, warnings: Sequence[str]) -> list[str]:
    """Return a line for each thing that the user should know before anything is written."""
    told = [*dict.fromkeys(warnings), *benchmark.ignored_options(run.config)]
    return [f"ckpt: warning: {sentence}" for sentence in told]


def header_lines(run: Run, needs: list[Need]) -> list[str]:
    """Return the lines that say what was chosen, why, and how it fits."""
    settings = run.settings
    why = {name: f" ({reason})" for name, reason in settings.reasons.items()}
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    ranks = ", ".join(str(count) for count in dict.fromkeys(need.ranks for need in needs))
    lines = [
        f"ckpt: torch {version('torch')}, {settings.device}{why.get('device', '')}, {backend}, "
        f"ranks {ranks}{why.get('ranks', '')}{f', mesh {settings.mesh}' if settings.mesh is not None else ''}",
        f"ckpt: {settings.rounds} round{'s' if settings.rounds > 1 else ''}{why.get('rounds', '')} after one warm-up "
        f"save, at most {format_seconds(settings.max_time_s)} a scenario; engine {settings.engine.name}"
        f"{why.get('engine', '')}, {_writers(settings)}; keep {settings.keep}",
    ]
    if settings.share is not None:
        count, of = settings.share.count, settings.share.of
        lines.append(
            f"ckpt: share {settings.share}: {count} ranks write what the first {count} of {of} would, which are the "
            f"fullest; planning and metadata are those of {count} ranks, not of {of}; the checkpoint is partial and "
            "never loaded"
        )
    if benchmark.is_disabled(run.config):
        lines.append("ckpt: benchmarks are disabled (--benchmark-disable): one save each, nothing is judged")
    for target in dict.fromkeys(need.target for need in needs):
        lines += _target_lines(target)
    for model in dict.fromkeys(need.model for need in needs):
        if model is None:
            lines.append("ckpt: model of the test's own: its size is known once it is made")
            continue
        own = [need for need in needs if need.model == model]
        reason = settings.reasons.get("model", "")
        name = f"{model.name} ({reason})" if reason.startswith("auto") and model == settings.models[-1] else model.name
        if model.state_bytes is None:
            lines.append(f"ckpt: model {name}: its size is known once it is made")
            continue
        lines.append(
            f"ckpt: model {name}, {model.recipe.name}{why.get('state', '')}: {format_bytes(model.state_bytes)} "
            f"{_of_what(model)}; needs at most {format_bytes(max(n.target_bytes or 0 for n in own))} of a target and "
            f"{format_bytes(max(n.memory_bytes or 0 for n in own))} of {format_bytes(available_memory_bytes())} "
            "memory: fits"
        )
    return lines


def _target_lines(target: Target) -> list[str]:
    memory = ", which is memory and no disk" if target.medium == "memory" else ""
    return [
        f"ckpt: target {target.label} = {target.location} ({target.filesystem} on {target.mount}{memory}; "
        f"{format_bytes(target.free_bytes())} free)",
        *(
            f"ckpt: left by a killed run: {left.path} ({format_bytes(left.bytes)}); "
            f"`pytest-ckpt clean {target.location}` removes it"
            for left in target.leftovers()
        ),
    ]


def _of_what(model: ModelSpec) -> str:
    if model.share is None or model.whole_bytes is None:
        return "a checkpoint"
    return f"of a checkpoint of {format_bytes(model.whole_bytes)}"


def _writers(settings: Settings) -> str:
    writer = settings.writers[0]
    reader = "" if writer.reader is None else f", read back by {writer.reader.name}"
    if len(settings.writers) > 1:
        return f"writer {writer.name} with {len(settings.writers)} combinations of options{reader}"
    synced = ", every file synced" if writer.name == DEFAULT_WRITER and "sync_files" not in dict(writer.options) else ""
    return f"writer {writer.name}{synced}{f' with {writer.label}' if writer.label else ''}{reader}"


def space_line(target: Target) -> str:
    """Return what a failed save leaves to know about its target's space."""
    try:
        free = f"{format_bytes(target.free_bytes())} free now"
    except OSError as error:
        free = f"not reachable any more ({error.strerror})"
    return f"target {target.label} = {target.location}: {free}"


def params_of(item: pytest.Item) -> dict[str, Any]:
    """Return what a test is parametrized with, by name."""
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


def _loads(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", [])
    return "ckpt_load" in fixtures and "ckpt_save" not in fixtures


def _copies(settings: Settings, tests: int, loads: bool) -> int:
    at_once = 2 if settings.overlap and not loads else 1
    saves = 1 if loads else settings.rounds + 1
    return at_once * (saves * tests if settings.keep == "all" else 1)
