"""The other side of each comparison: a script for torchrun that saves as any training would, without the plugin.

It takes from pytest_ckpt the training state alone (`make_state`), so that both sides save the same. Rank 0 reads a
command per line from stdin, `{"mode": "sync", "location": "/path"}`, and answers with a line on stdout; the script ends
with its stdin, so that it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh

from pytest_ckpt.model.geometry import find_geometry
from pytest_ckpt.model.recipe import find_recipe
from pytest_ckpt.model.state import make_state

ANSWER = "bare_save: "
_FOREVER = timedelta(hours=12)  # ranks wait for the next command in a collective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--state", required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo", timeout=_FOREVER)
    control = dist.new_group(backend="gloo", timeout=_FOREVER)
    saving = dist.new_group(backend="gloo", timeout=_FOREVER)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    state = make_state(find_geometry(options.model, "--model"), find_recipe(options.state, "--state"), mesh, _CPU)
    _answer(control, {"pid": os.getpid()})

    while (command := _next_command(control)) is not None:
        state.advance()
        writer = FileSystemWriter(command["location"], sync_files=True)
        dist.barrier(group=control)
        called = time.monotonic()
        if command["mode"] == "sync":
            save(state.state_dict, storage_writer=writer, process_group=saving)
            returned = time.monotonic()
        else:
            upload: Any = async_save(state.state_dict, storage_writer=writer, process_group=saving)
            returned = time.monotonic()
            upload.result()
        completed = time.monotonic()
        _answer(control, {"called_s": called, "returned_s": returned, "completed_s": completed})
    dist.destroy_process_group()


_CPU = torch.device("cpu")


def _next_command(group: dist.ProcessGroup) -> dict[str, str] | None:
    line = sys.stdin.readline() if dist.get_rank() == 0 else ""
    shared = [line]
    dist.broadcast_object_list(shared, src=0, group=group)
    return json.loads(shared[0]) if shared[0].strip() else None


def _answer(group: dist.ProcessGroup, own: dict[str, Any]) -> None:
    replies: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, replies, dst=0, group=group)
    if replies is not None:
        print(ANSWER + json.dumps(replies), flush=True)


if __name__ == "__main__":
    main()
