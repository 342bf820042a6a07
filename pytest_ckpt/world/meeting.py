"""The ranks of a job come together: rank 0 gets a world to lead, the others what follows it."""

from __future__ import annotations

import os

from pytest_ckpt.world import control
from pytest_ckpt.world.attached import AttachedWorld
from pytest_ckpt.world.control import Hello
from pytest_ckpt.world.follower import Follower
from pytest_ckpt.world.job import JOINED, Job
from pytest_ckpt.world.rank_thread import RankThread

_meetings = 0


def meet(
    job: Job, *, device: str, timeout_s: float, tests: list[str], errors: int
) -> tuple[AttachedWorld, list[Hello]] | Follower:
    """Return rank 0's world with what all ranks said of themselves, or another rank's follower of it.

    `tests` and `errors` are what this rank collected, and `timeout_s` is the deadline of a command. Raises `CannotMeet`
    where ranks are missing. Every rank must come as often as the others: each meeting has a name of its own.
    """
    global _meetings
    _meetings += 1
    job.export(os.environ)
    os.environ[JOINED] = str(os.getpid())
    store = control.job_store(job, _meetings)
    thread = RankThread(job, device, store)
    try:
        me = control.hello(job, thread.status_file, tests, errors)
        if job.rank:
            return Follower(thread, *control.come(store, job, me), timeout_s)
        links = control.Gate(store).admit(job.size, control.JOIN_S)
    except BaseException:
        thread.close()
        raise
    world = AttachedWorld(thread, me, links, device, timeout_s)
    return world, [me, *(hello for _, (_, _, hello) in sorted(links.items()))]
