"""Saves as the plugin makes them where torchrun started the ranks; commanded as `bare_save.py` is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from pytest_ckpt.world import commands
from pytest_ckpt.world.attached import AttachedWorld
from pytest_ckpt.world.follower import Follower
from pytest_ckpt.world.job import find_job
from pytest_ckpt.world.meeting import meet

from .bare_save import ANSWER
from .sides import default_writer, process_id

_FOREVER_S = 12 * 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--state", required=True)
    options = parser.parse_args()
    job = find_job(os.environ)
    assert job is not None, "start this with torchrun"
    met = meet(job, device="cpu", timeout_s=_FOREVER_S, tests=[], errors=0)
    if isinstance(met, Follower):
        met.follow("all saves")
        met.wait_for_end(60)
        met.close()
        return
    world, _ = met
    world.begin_call("a pair")
    lead(world, {"model": options.model, "state": options.state, "function": None})
    world.end_call({"value": None})
    world.end(0, "all saves are made", 60)


def lead(world: AttachedWorld, given: dict[str, Any]) -> None:
    world.run(commands.prepare, **given)
    print(ANSWER + json.dumps(world.run(process_id)), flush=True)
    mode = ""
    for line in sys.stdin:
        command = json.loads(line)
        if command["mode"] != mode:
            mode = command["mode"]
            world.run(commands.prepare, **given, mode=mode, writer=default_writer())
        replies = world.run(commands.save_round, location=command["location"])
        print(ANSWER + json.dumps(replies), flush=True)


if __name__ == "__main__":
    main()
