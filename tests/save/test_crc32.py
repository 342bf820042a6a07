"""Without crc32 means without, whichever thread or process serialises; with it, every entry has one."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pytest_ckpt.save.writers import file_system_writer
from pytest_ckpt.world import commands
from pytest_ckpt.world.functions import listed, reference
from pytest_ckpt.world.spawned import SpawnedWorld


@pytest.fixture(scope="module")
def world() -> Iterator[SpawnedWorld]:
    world = SpawnedWorld(1)
    yield world
    world.close()


def entries_with_checksums(checkpoint: Path) -> set[bool]:
    """Return, over all tensors of a checkpoint, whether the checksums that torch.save wrote are those of the bytes."""
    found = set()
    for info in FileSystemReader(str(checkpoint)).read_metadata().storage_data.values():
        with (checkpoint / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        if data[:2] == b"PK":  # tensors are zip archives, other objects are pickles or archives too
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                found.add(archive.testzip() is None)
    return found


@pytest.mark.parametrize("crc32", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async", "async-staged", "async-process"])
def test_checksums_are_there_as_the_option_says_in_every_thread(
    mode: str, crc32: bool, world: SpawnedWorld, tmp_path: Path
) -> None:
    ref = reference(file_system_writer, "writer")
    options: dict[str, Any] = {"thread_count": 3, "crc32": crc32}
    world.run(
        commands.prepare,
        model="llama3-tiny",
        state="weights-bf16",
        function=None,
        mode=mode,
        writer=listed(ref),
        options=options,
    )
    for number in range(2):
        world.run(commands.save_round, location=str(tmp_path / str(number)))
        assert entries_with_checksums(tmp_path / str(number)) == {crc32}
    world.run(commands.close_engine)
