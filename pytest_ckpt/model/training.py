"""Training steps on one rank's state, alone and beside an async save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.beside import training_beside
from pytest_ckpt.model.budget import TokensPerRank, flops_per_token, peak_flops, why_untrainable
from pytest_ckpt.model.forward import next_token_loss
from pytest_ckpt.model.geometry import Geometry
from pytest_ckpt.model.mixed_adamw import MixedAdamW
from pytest_ckpt.model.state import AppState, TrainingState
from pytest_ckpt.records import TrainingBeside

WARM_UP_STEPS = 2
LEARNING_RATE = 1e-9
"""The state's moments are random, no training's: their quotient reaches 1e9, and a step at the usual 1e-3 would throw
weights to 1e6 and gradients beyond float32 soon after. At this rate values stay finite; a step costs the same."""
_BATCHES = 4


class Awaitable(Protocol):
    """Whose `result()` blocks until the end, or raises the cause."""

    def result(self) -> Any:
        """Wait for the end and return what came of it."""


class Pending(Protocol):
    """What a save has come to when its call returns."""

    @property
    def staged(self) -> Awaitable | None:
        """Ends when training may change its state; None: it may already."""

    @property
    def completed(self) -> Awaitable | None:
        """Ends when the checkpoint is complete; None: it is already."""


class StepSpan(NamedTuple):
    """A step on this rank, CLOCK_MONOTONIC seconds."""

    start_s: float
    end_s: float


class Beside(NamedTuple):
    """What ran beside a save: durations are the slowest rank's, equal on all ranks; clock readings are this rank's."""

    steps_s: list[float]
    """Each step without its wait for staging."""
    waited_for_staging_s: float
    spans: list[StepSpan]
    completed_s: float
    """When this rank's upload was complete, not when a step noticed."""
    other_failed: bool
    """Whether the steps ended because another rank's save failed; this rank's is still to be awaited."""


class TrainingSteps:
    """Steps of a real training of `state`, made by `make_state` from `geometry`, on synthetic tokens.

    Ranks agree after each step on `control_group`, which nothing else uses meanwhile, least of all the save: FSDP's
    collectives need all of them to take the same number of steps. Without a group there is this rank alone. The
    agreement is no part of a step's duration. A state saved without an optimizer is trained with one of its own.
    """

    def __init__(
        self,
        state: TrainingState,
        geometry: Geometry,
        tokens: TokensPerRank,
        device: torch.device,
        control_group: ProcessGroup | None = None,
        *,
        seed: int = 0,
        learning_rate: float = LEARNING_RATE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if reason := why_untrainable(geometry, tokens):
            raise SettingError(f"no training beside the save: {reason}")
        app = state.state_dict.get("app")
        if not isinstance(app, AppState):
            raise SettingError("no training beside the save: the state is the user's own, whose loss is not known")
        self._model = app.model
        self._optimizer: Optimizer = app.optimizer or MixedAdamW(app.model.parameters())
        self._device, self._group, self._clock = device, control_group, clock
        self._learning_rate = learning_rate
        ranks = control_group.size() if control_group is not None else 1
        rank = control_group.rank() if control_group is not None else 0
        self.tokens_per_step = tokens.total * ranks
        self._flops_per_token = flops_per_token(geometry, tokens.sequence)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._peak_flops = None if peak is None else peak * ranks
        drawn = torch.randint(
            geometry.vocab,
            (_BATCHES, tokens.batch, tokens.sequence + 1),
            generator=torch.Generator().manual_seed(seed * 1_000_003 + rank),
        ).to(device)
        self._batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in drawn]
        self._taken = 0

    def step(self, before_optimizer: Callable[[], None] | None = None) -> torch.Tensor:
        """Take one step, forward to optimizer, and return its loss on this rank. Collective.

        `before_optimizer` is called when nothing but the change of the state is left to do.
        """
        tokens, targets = self._batches[self._taken % _BATCHES]
        self._taken += 1
        loss = next_token_loss(self._model(tokens), targets)
        torch.autograd.backward([loss])
        if before_optimizer is not None:
            before_optimizer()
        with _learning_rate(self._optimizer, self._learning_rate):
            self._optimizer.step()
        self._model.zero_grad(set_to_none=True)
        return loss.detach()

    def run_before(self, count: int, warm_up: int = WARM_UP_STEPS) -> float:
        """Take `count` steps after `warm_up` others and return their median seconds on the slowest rank. Collective."""
        return median([self._alone() for _ in range(warm_up + count)][warm_up:])

    def run_after(self, count: int) -> float:
        """Take `count` steps and return their median seconds on the slowest rank. Collective."""
        return self.run_before(count, warm_up=0)

    def run_while(self, pending: Pending, least: int = 1) -> Beside:
        """Take steps, `least` or more, until the save that `pending` stands for is complete on all ranks. Collective.

        A step waits for staging before its optimizer, as torchtitan's does. Where a rank's save fails all ranks stop
        after the same step, and that rank raises its cause.
        """
        upload = _Watched(pending.completed)
        staging = _Staging(pending.staged, self._clock)
        steps_s: list[float] = []
        spans: list[StepSpan] = []
        waited_s = 0.0
        while True:
            span, own_wait_s = self._beside(staging)
            error = staging.error or upload.error
            unfinished, failed, step_s, wait_s = self._slowest(
                float(upload.ended_s is None),
                float(error is not None),
                span.end_s - span.start_s - own_wait_s,
                own_wait_s,
            )
            steps_s.append(step_s)
            spans.append(span)
            waited_s += wait_s
            if error is not None:
                raise error
            if failed or (not unfinished and len(steps_s) >= least):
                ended_s = upload.ended_s
                if ended_s is not None:
                    upload.join()
                return Beside(steps_s, waited_s, spans, span.end_s if ended_s is None else ended_s, bool(failed))

    def summary(self, before_s: float, beside: Beside, after_s: float) -> TrainingBeside:
        """Return the record of a round."""
        return training_beside(
            tokens_per_step=self.tokens_per_step,
            before_s=before_s,
            during_s=beside.steps_s,
            after_s=after_s,
            waited_for_staging_s=beside.waited_for_staging_s,
            flops_per_token=self._flops_per_token,
            peak_flops=self._peak_flops,
        )

    def _alone(self) -> float:
        start = self._clock()
        self.step()
        self._synchronize()
        return self._slowest(self._clock() - start)[0]

    def _beside(self, staging: _Staging) -> tuple[StepSpan, float]:
        waited_s = 0.0

        def wait() -> None:
            nonlocal waited_s
            self._synchronize()  # what the device still computes is no waiting
            waited_s = staging.wait()

        start = self._clock()
        self.step(wait if staging.open else None)
        self._synchronize()
        return StepSpan(start, self._clock()), waited_s

    def _slowest(self, *own: float) -> list[float]:
        if self._group is None:
            return list(own)
        everyones = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(everyones, dist.ReduceOp.MAX, group=self._group)
        largest: list[float] = everyones.tolist()
        return largest

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Staging:
    """The wait for staging, once; its error is kept until the ranks agree to stop."""

    def __init__(self, staged: Awaitable | None, clock: Callable[[], float]) -> None:
        self._staged, self._clock = staged, clock
        self.error: BaseException | None = None

    @property
    def open(self) -> bool:
        return self._staged is not None

    def wait(self) -> float:
        """Return the seconds that it took."""
        assert self._staged is not None
        start = self._clock()
        try:
            self._staged.result()
        except BaseException as error:
            self.error = error
        self._staged = None
        return self._clock() - start


class _Watched:
    """Waits on a thread of its own, so that the moment of the end is noted and not the step after it."""

    def __init__(self, awaited: Awaitable | None) -> None:
        self.ended_s: float | None = None
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if awaited is None:
            self.ended_s = time.monotonic()
        else:
            self._thread = threading.Thread(target=self._wait, args=(awaited,), name="ckpt-upload", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Let the thread end, once the upload has."""
        if self._thread is not None:
            self._thread.join()

    def _wait(self, awaited: Awaitable) -> None:
        try:
            awaited.result()
        except BaseException as error:
            self.error = error
        else:
            self.ended_s = time.monotonic()


@contextmanager
def _learning_rate(optimizer: Optimizer, rate: float) -> Iterator[None]:
    """Step at `rate`; what is saved keeps the optimizer's own."""
    own = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = rate
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr
