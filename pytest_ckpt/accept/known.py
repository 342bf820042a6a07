"""Promises that DCP itself is known to break: a closed set, each with what it means and how to live with it.

Every one was seen with torch 2.13; where a later torch, or a writer of your own, keeps the promise, the test holds.
"""

from __future__ import annotations

import msgspec


class KnownBehaviour(msgspec.Struct, frozen=True):
    """What DCP does, what that means for who relies on it, and what helps."""

    id: str
    does: str
    means: str
    advice: str


KNOWN = {
    known.id: known
    for known in (
        KnownBehaviour(
            "not-durable",
            "DCP's FileSystemWriter calls fsync on .metadata before it is written out, and never on the folder",
            "a power cut soon after the save returned can take the whole checkpoint, although sync_files is on",
            "call pytest_ckpt.accept.durable.make_durable(path) after the save: fsync of .metadata and of the folder",
        ),
        KnownBehaviour(
            "overwrite-mixes",
            "a save into a folder that holds a checkpoint replaces its files one by one, and .metadata last",
            "when such a save fails, the folder loads without an error as half the new and half the old state",
            "save each checkpoint into a fresh folder, and delete old ones when the new one is complete",
        ),
        KnownBehaviour(
            "crc-not-checked",
            "dcp.load does not compare what it reads with the checksums that were saved",
            "a flipped byte on the storage loads without an error as another value",
            "run pytest-ckpt verify on a checkpoint before you rely on it",
        ),
        KnownBehaviour(
            "replicas-reduced",
            "of values that differ from rank to rank under one key DCP saves one, and says nothing",
            "after a load all ranks hold the value of one of them",
            "put the rank's number into the key of what differs, such as the state of a data loader",
        ),
        KnownBehaviour(
            "optimizer-not-initialised",
            "dcp.load fills the entries that a state dict has; that of an optimizer that never stepped has none",
            "weights load, the optimizer's moments do not, and no error is raised: training goes on with zeros",
            "take it with torch.distributed.checkpoint.state_dict.get_state_dict, which initialises the optimizer",
        ),
        KnownBehaviour(
            "thread-errors-lost",
            "with thread_count above 1 an error in one of FileSystemWriter's own threads ends that thread and no more",
            "a full disk or a failed read of a tensor: the save reports success, and its checkpoint cannot be loaded",
            "use thread_count=1, or run pytest-ckpt verify on each checkpoint before older ones are deleted",
        ),
        KnownBehaviour(
            "orphans-left",
            "a save by fewer ranks into a folder leaves the files of the ranks that are gone",
            "the folder takes more space than the checkpoint needs; nothing refers to those files",
            "save each checkpoint into a fresh folder",
        ),
        KnownBehaviour(
            "unread-future",
            "an async save that failed tells it through its future alone",
            "a program that never reads it ends with exit status 0 and no checkpoint",
            "call result() on the future of each async save, at the latest before the next one",
        ),
    )
}
