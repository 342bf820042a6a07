"""One way of saving, put to the test from the controller: save states, load them, and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from pytest_ckpt.accept import in_rank
from pytest_ckpt.accept.durability import Audit, combine
from pytest_ckpt.accept.faults import CannotPlant, Fault
from pytest_ckpt.accept.known import KNOWN
from pytest_ckpt.accept.states import DictSpec
from pytest_ckpt.accept.verify import verify
from pytest_ckpt.errors import CkptError
from pytest_ckpt.records import Verification
from pytest_ckpt.save.engines import DEFAULT_ENGINE
from pytest_ckpt.save.readers import METADATA, require_found_by_path
from pytest_ckpt.target.interface import WorkFolder
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import listed
from pytest_ckpt.world.interface import RankFailure, World
from pytest_ckpt.world.rounds import Saving

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from pytest_ckpt.save.digest import Digests

T = TypeVar("T")

_MOST_LETTERS = 60
"""Of a value that is named."""
DEFAULT_EXAMPLES = 20
DEFAULT_GRACE_S = 30.0
"""Of Slurm (KillWait) and of Kubernetes (terminationGracePeriodSeconds)."""
_OF_DCP = "torch.distributed.checkpoint"


class CannotSave(CkptError):
    """A save or load of a trial ended with an error that the ranks told."""

    def __init__(self, causes: list[str], ranks: list[int], hints: list[str]) -> None:
        self.causes, self.ranks, self.hints = causes, ranks, hints
        super().__init__("; ".join(dict.fromkeys([*causes, *hints])))


class NotApplicable(CkptError):
    """A promise says nothing of this scenario; the message is why."""


class Content:
    """What a state holds, on all ranks: digests of its tensors, and its other values."""

    def __init__(self, replies: Sequence[dict[str, Any]]) -> None:
        from pytest_ckpt.save.digest import combine

        self.tensors: Digests = combine([reply["tensors"] for reply in replies])
        self.objects: list[dict[str, str]] = [reply["objects"] for reply in replies]

    @property
    def entries(self) -> int:
        """How many tensors and other values."""
        return len(self.tensors) + len(set().union(*self.objects))

    @property
    def unequal_replicas(self) -> list[str]:
        """The keys under which ranks hold different values, of which DCP stores one."""
        return [key for key, digests in self.tensors.items() if len(digests) > 1]

    def differing(self, loaded: Content) -> list[str]:
        """Return what is something else in `loaded`: keys of tensors, paths of other values, with the values."""
        from pytest_ckpt.save.digest import differing

        stored = self.objects[0]  # DCP stores the coordinator's
        other = {
            path: f"{path} ({_shortened(now.get(path, 'nothing'))} instead of {_shortened(value)})"
            for now in loaded.objects
            for path, value in stored.items()
            if now.get(path) != value
        }
        return [*differing(self.tensors, loaded.tensors), *other.values()]


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


class Saved(msgspec.Struct, frozen=True):
    """A save that came to its end."""

    location: str
    spec: DictSpec
    step: int
    content: Any
    """A `Content`: what the state held when it was saved."""
    seconds: float
    """On the slowest rank, from the call to the end."""
    audit: Audit | None = None
    """What was seen of the syncs, where that was asked for."""


class Trial:
    """Saves and loads on `world`, into rounds of `folder`, as `saving` says; every method waits with a deadline.

    A plain failed assertion is a broken promise; `known` and `not_applicable` say what is none.
    """

    def __init__(
        self,
        world: World,
        folder: WorkFolder,
        saving: Saving,
        *,
        world_beside: Callable[[int], World],
        is_memory: bool = False,
        examples: int = DEFAULT_EXAMPLES,
        grace_s: float = DEFAULT_GRACE_S,
        ranks_may_end: bool = True,
    ) -> None:
        self.world, self.folder, self.saving = world, folder, saving
        self.is_memory = is_memory
        """Whether the target is memory, where nothing outlives a power cut."""
        self._ranks_may_end = ranks_may_end
        self.grace_s = grace_s
        """What a scheduler leaves between SIGTERM and SIGKILL."""
        self.met: dict[str, str] = {}
        """Known behaviour of DCP, by its id, and what was seen of it."""
        self._world_beside, self._examples = world_beside, examples
        self._made: list[str] = []

    @property
    def mode(self) -> str:
        """How it saves, as `--ckpt-mode` names it."""
        return self.saving.mode

    def known(self, behaviour: str, seen: str) -> None:
        """Say that the promise is broken in a way that DCP is known for, and what was `seen`: no failure by default."""
        if behaviour not in KNOWN:
            raise ValueError(f"{behaviour!r} is no known behaviour of DCP; known: {', '.join(KNOWN)}")
        self.met[behaviour] = seen

    def not_applicable(self, why: str) -> NoReturn:
        """End the test: the promise says nothing of this scenario, and `why`."""
        raise NotApplicable(why)

    def require_ranks_that_may_end(self) -> None:
        """Not applicable where the ranks that this test ends cannot be started again."""
        if not self._ranks_may_end:
            self.not_applicable("the ranks of a launcher's job cannot be ended and started again: run without it")

    def require_one_host(self) -> None:
        """Not applicable where the ranks do not share this host's folders."""
        if len(set(getattr(self.world, "hosts", ()))) > 1:
            self.not_applicable("the ranks are on several hosts, and this needs them on one")

    def for_all(self, strategy: SearchStrategy[T], check: Callable[[T], None]) -> None:
        """Put `check` to the test with as many examples of `strategy` as --ckpt-examples says, the same in each run."""
        from hypothesis import HealthCheck, Phase, given, settings

        @settings(
            max_examples=self._examples,
            deadline=None,  # a slow disk is no failure
            derandomize=True,  # a nightly run must be red only when something is wrong
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(strategy)
        def checked(example: T) -> None:
            check(example)

        checked()

    def world_of(self, size: int) -> World:
        """Return ranks of another number beside this scenario's own, for what these have to load."""
        return self.world if size == self.world.size else self._world_beside(size)

    @property
    def setup(self) -> dict[str, Any]:
        """What the ranks make the engine from."""
        return {
            "mode": self.saving.mode,
            "writer": listed(self.saving.writer),
            "reader": listed(self.saving.reader),
            "options": self.saving.options,
            "engine": self.saving.engine,
            "engine_factory": listed(self.saving.engine_factory),
        }

    def new_location(self, name: str = "acceptance") -> str:
        """Return where a save may go: inside the work folder, not there yet."""
        self._made.append(self.folder.new_round(name))
        return self._made[-1]

    def run(self, command: Callable[..., Any], *, world: World | None = None, **arguments: Any) -> list[Any]:
        """Run one of `in_rank`'s commands with this trial's engine, on its own world or another."""
        try:
            return (world or self.world).run(command, setup=self.setup, **arguments)
        except RankFailure as failure:
            _require_applicable(rank.cause for rank in failure.culprits)
            raise

    def opened(self) -> list[dict[str, Any]]:
        """Make the engine anew and return what each rank says of it."""
        return self.run(in_rank.open_trial)

    def is_dcps(self, *methods: str) -> bool:
        """Return whether all of the writer's `methods` are DCP's own, so that what they do is known of DCP."""
        modules = self.opened()[0]["methods"]
        return all(str(modules.get(method)).startswith(_OF_DCP) for method in methods)

    def is_read_by_dcp(self, saved: Saved) -> bool:
        """Return whether it is DCP's own code that reads the data of `saved`."""
        module = self.run(in_rank.whose_reader, location=saved.location)[0]
        return str(module).startswith(_OF_DCP)

    def save(
        self,
        spec: DictSpec,
        step: int = 0,
        *,
        location: str | None = None,
        then_step: int | None = None,
        fault: Fault | None = None,
        caught: bool = True,
        audited: bool = False,
        world: World | None = None,
        timeout_s: float | None = None,
    ) -> Saved:
        """Save `spec` at `step`; raise `CannotSave` where the ranks say why they could not.

        `then_step`: training goes on to that step as soon as the save allows it. `fault` happens in this save.
        Without `caught` an error in a rank is a `RankFailure` with traceback and log, as in a benchmark. `audited`: the
        ranks' syncs are watched. `world`: other ranks save.
        """
        location = location or self.new_location()
        replies = self.run(
            in_rank.save,
            world=world,
            spec=msgspec.to_builtins(spec),
            step=step,
            location=location,
            fault=None if fault is None else msgspec.to_builtins(fault),
            then_step=then_step,
            caught=caught,
            audited=audited,
            timeout_s=timeout_s,
        )
        require_no_error(replies)
        seconds = max(reply["seconds"] for reply in replies)
        noted = combine([msgspec.convert(reply["audit"], Audit) for reply in replies]) if audited else None
        return Saved(location, spec, step, Content(replies), seconds, noted)

    def save_model(self, model: Any) -> Saved:
        """Save the session's own model, a `ckpt_model`, as a benchmark does, once."""
        location = self.new_location(model.name)
        self.world.run(
            commands.prepare,
            model=model.name,
            state=model.recipe.name,
            function=listed(model.function),
            **self.setup,
        )
        replies = self.world.run(commands.save_round, location=location, trace=False)
        seconds = max(reply["completed_s"] for reply in replies) - min(reply["called_s"] for reply in replies)
        return Saved(location, DictSpec({}), 0, self._model_content(), seconds)

    def require_equal_model(self, saved: Saved) -> None:
        """Load what `save_model` saved over zeros, and raise `AssertionError` where it is something else."""
        self.world.run(commands.load_round, location=saved.location, cold=False, trace=False)
        self._require_equal(saved, self._model_content())

    def _model_content(self) -> Content:
        return Content([{"tensors": parts, "objects": {}} for parts in self.world.run(commands.digest_state)])

    def verify(self, location: str) -> Verification:
        """Verify a checkpoint from its folder alone; not applicable where its format is none of DCP's own."""
        found = verify(location)
        why = self._why_not_verifiable(found, location)
        if why is not None:
            self.not_applicable(why)
        return found

    def _why_not_verifiable(self, found: Verification, location: str) -> str | None:
        if found.outcome in ("other-format", "refused-metadata"):
            return f"the writer's format is its own: {found.text}"
        reader = self.saving.reader
        if reader is not None and not Path(location, METADATA).exists():
            return f"the format is that of {reader}: without {METADATA} a folder tells nothing by itself"
        return None

    def start_and_never_look(self, spec: DictSpec, fault: Fault) -> None:
        """Begin an async save in which `fault` happens, and return when it has ended, its future unread."""
        self.run(
            in_rank.start_and_never_look,
            spec=msgspec.to_builtins(spec),
            location=self.new_location(),
            fault=msgspec.to_builtins(fault),
        )

    def load(self, spec: DictSpec, location: str, *, world: World | None = None) -> Content:
        """Load `location` into a wiped state of `spec`, on this trial's world or another, and return what it holds."""
        replies = self.run(in_rank.load, world=world, spec=msgspec.to_builtins(spec), location=location)
        require_no_error(replies, "in the load: ")
        return Content(replies)

    def require_equal(self, saved: Saved, *, world: World | None = None, location: str | None = None) -> None:
        """Load `saved` and raise `AssertionError` with the names where it is not, bit for bit, what was saved."""
        try:
            loaded = self.load(saved.spec, location or saved.location, world=world)
        except CannotSave:
            if location is None and self.saving.engine == DEFAULT_ENGINE and self.saving.reader is None:
                require_found_by_path(saved.location)
            raise
        self._require_equal(saved, loaded)

    def _require_equal(self, saved: Saved, loaded: Content) -> None:
        from pytest_ckpt.save.digest import difference_text

        differing = saved.content.differing(loaded)
        if differing:
            raise AssertionError(difference_text(differing, saved.content.entries, "entries"))

    def forget(self, location: str) -> None:
        """Delete a save of this trial."""
        with contextlib.suppress(FileNotFoundError):
            self.folder.remove(location)
        self._made = [made for made in self._made if made != location]

    def close(self, keep: bool = False) -> None:
        """Delete what was saved, or keep it."""
        for location in [] if keep else list(self._made):
            self.forget(location)


def require_no_error(replies: Sequence[dict[str, Any]], where: str = "") -> None:
    """Raise `CannotSave` with what the ranks said, and `where`, if one did not come to its end."""
    told = [reply["error"] for reply in replies if reply.get("error")]
    if not told:
        return
    _require_applicable(one["cause"] for one in told)
    ranks = sorted({origin for one in told for origin in one["origins"]})
    failed = ranks or [number for number, reply in enumerate(replies) if reply.get("error")]
    hints = list(dict.fromkeys(hint for one in told for hint in one["hints"]))
    raise CannotSave([where + cause for cause in dict.fromkeys(one["cause"] for one in told)], failed, hints)


def _require_applicable(causes: Iterable[str]) -> None:
    name = f"{CannotPlant.__name__}: "
    for cause in causes:
        if cause.startswith(name):
            raise NotApplicable(cause.removeprefix(name))
