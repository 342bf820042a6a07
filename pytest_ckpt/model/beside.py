"""What a save cost the training beside it, from its steps. Needs no torch."""

from __future__ import annotations

from statistics import median

from pytest_ckpt.records import TrainingBeside


def training_beside(
    *,
    tokens_per_step: int,
    before_s: float,
    during_s: list[float],
    after_s: float,
    waited_for_staging_s: float,
    flops_per_token: int = 0,
    peak_flops: float | None = None,
) -> TrainingBeside:
    """Return the record; `peak_flops` is that of all ranks' devices together, where it is known.

    At the rate before, the tokens of a step take `before_s`: (1 - before_s / d) d = d - before_s are lost of a step
    of d seconds.
    """
    tokens_per_s = tokens_per_step / before_s
    return TrainingBeside(
        tokens_per_step=tokens_per_step,
        step_s_before=before_s,
        step_s_during=during_s,
        step_s_after=after_s,
        waited_for_staging_s=waited_for_staging_s,
        lost_s=max(0.0, sum(step - before_s for step in during_s)),
        slowdown=median(during_s) / before_s,
        tokens_per_s=tokens_per_s,
        mfu=None if peak_flops is None else tokens_per_s * flops_per_token / peak_flops,
    )
