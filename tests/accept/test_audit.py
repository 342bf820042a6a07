"""The audit: what it sees of real files, each way of losing bytes or names, and what it leaves behind."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.accept.audit import AuditedSave, audit
from pytest_ckpt.accept.dirty_pages import dirty_bytes
from pytest_ckpt.accept.durability import ADVICE, Audit, combine
from pytest_ckpt.accept.durable import make_durable

from .durable_saves import nothing_is_synced, sync_folder

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TICK_S = 0.02  # of the clock that stamps files, on kernels before 6.13


@pytest.fixture
def location(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    return folder


@pytest.fixture
def telling_pages(tmp_path: Path) -> None:
    """Some file systems and kernels do not say what is dirty."""
    (tmp_path / "dirty").write_bytes(b"x")
    if not dirty_bytes(str(tmp_path / "dirty")):
        pytest.skip("the page cache of this file system does not tell what was not written back")


def write(path: Path, data: bytes = b"x" * 5000, *, flush: bool = True, sync: bool = True) -> None:
    with path.open("wb") as file:
        file.write(data)
        if flush:
            file.flush()
        if sync:
            os.fsync(file.fileno())


def write_and_rename(path: Path) -> None:
    draft = path.with_name(path.name + ".draft")
    write(draft)
    draft.rename(path)


def seen(location: Path, *works: Callable[[], Any]) -> Audit:
    with audit(location) as noted:
        for work in works:
            work()
    return noted.result()


def require(audit: Audit, *sentences: str) -> None:
    assert audit.sentences == list(sentences)
    assert audit.verdict == "not durable"
    assert audit.advice == ADVICE


def require_durable(audit: Audit) -> None:
    assert audit.sentences == []
    assert audit.verdict == "durable"
    assert audit.is_durable
    assert audit.advice is None


# What is durable


def test_files_renamed_and_folder_synced_are_durable(location: Path) -> None:
    def work() -> None:
        write_and_rename(location / "data")
        write(location / "whole")
        sync_folder(location)

    require_durable(seen(location, work))


def test_new_folders_are_durable_once_those_above_are_synced(tmp_path: Path) -> None:
    location = tmp_path / "runs" / "one" / "step-1"

    def work() -> None:
        (location / "part").mkdir(parents=True)
        write(location / "part" / "data", sync=False)
        write(location / "other", sync=False)
        make_durable(location)

    require_durable(seen(location, work))


def test_folder_renamed_into_place_is_durable_once_its_parent_is_synced(tmp_path: Path) -> None:
    draft, location = tmp_path / "draft", tmp_path / "ckpt"

    def work(*, sync: bool) -> None:
        draft.mkdir()
        write(draft / "data")
        sync_folder(draft)
        draft.rename(location)
        if sync:
            sync_folder(tmp_path)

    require_durable(seen(location, lambda: work(sync=True)))
    location.rename(tmp_path / "old")
    require(
        seen(location, lambda: work(sync=False)),
        f"not durable: the rename of {location} was not synced, the name of the folder in {tmp_path} was not synced",
    )


def test_files_opened_for_synced_writes_need_no_fsync(location: Path) -> None:
    def work() -> None:
        descriptor = os.open(location / "data", os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
        os.write(descriptor, b"x" * 100)
        os.close(descriptor)
        sync_folder(location)

    require_durable(seen(location, work))


def test_sync_of_the_whole_host_covers_what_is_there_by_then(tmp_path: Path) -> None:
    location = tmp_path / "new" / "ckpt"

    def work() -> None:
        location.mkdir(parents=True)
        write_and_rename(location / "data")
        write(location / "other", sync=False)
        os.sync()

    require_durable(seen(location, work))

    def late() -> None:
        os.sync()
        write(location / "late", sync=False)

    require(seen(location, late), "not durable: 0 of 5,000 bytes of late were synced, nor the folder")


def test_files_that_the_save_did_not_touch_are_not_asked_for(location: Path) -> None:
    write(location / "of-another", sync=False)

    def work() -> None:
        write(location / "data")
        sync_folder(location)

    require_durable(seen(location, work))


def test_sync_of_the_whole_host_covers_what_is_renamed_into_place_later(location: Path, tmp_path: Path) -> None:
    def work() -> None:
        write(tmp_path / "draft", sync=False)
        os.sync()
        (tmp_path / "draft").rename(location / "data")
        sync_folder(location)

    require_durable(seen(location, work))


def test_file_written_over_in_place_needs_no_sync_of_its_folder(location: Path) -> None:
    write(location / "data")
    time.sleep(TICK_S)
    require_durable(seen(location, lambda: write(location / "data", b"y")))


def test_syncs_of_other_threads_and_by_imported_names_are_seen(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("says_from_os_import")
    exec("from os import fdatasync, replace, open, O_RDONLY, O_DIRECTORY", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def work() -> None:
        with open(location / "draft", "wb", buffering=0) as file:
            file.write(b"x" * 100)
            module.fdatasync(file)
        module.replace(location / "draft", location / "data")
        sync_folder(location)

    def in_thread() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    result = seen(location, in_thread)
    require_durable(result)
    assert [Path(rename.target).name for rename in result.renames] == ["data"]
    assert module.fdatasync is os.fdatasync


def test_functions_that_pathlib_keeps_for_itself_are_seen(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.10, whose paths call what their class took from `os`."""

    class Accessor:
        rename: Callable[..., None] = os.rename

    monkeypatch.setattr(pathlib, "_NormalAccessor", Accessor, raising=False)
    write(location / "draft")
    result = seen(location, lambda: Accessor().rename(location / "draft", location / "data"))
    assert [Path(rename.target).name for rename in result.renames] == ["data"]
    assert vars(Accessor)["rename"] is os.rename


# What is not


def test_bytes_after_the_last_sync_are_counted(location: Path) -> None:
    def work() -> None:
        with (location / "data").open("wb", buffering=0) as file:
            file.write(b"x" * 3000)
            os.fsync(file.fileno())
            file.write(b"x" * 2000)
        write(location / "other")
        sync_folder(location)

    require(seen(location, work), "not durable: 3,000 of 5,000 bytes of data were synced")


def test_bytes_that_are_added_within_one_tick_of_the_clock_are_counted(location: Path) -> None:
    """Kernels before 6.13 stamp files every 4 ms: the size tells what the time does not."""

    def work() -> None:
        with (location / "data").open("wb", buffering=0) as file:
            file.write(b"x" * 3000)
            os.fsync(file.fileno())
            then = os.fstat(file.fileno())
            file.write(b"x" * 2000)
            os.utime(file.fileno(), ns=(then.st_atime_ns, then.st_mtime_ns))
        sync_folder(location)

    require(seen(location, work), "not durable: 3,000 of 5,000 bytes of data were synced")


def test_bytes_that_arrive_during_a_sync_are_not_counted(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    with (location / "data").open("wb", buffering=0) as file:
        file.write(b"x" * 3000)

        def sync_while_another_thread_writes(fd: int) -> None:
            real(fd)
            file.write(b"x" * 2000)

        monkeypatch.setattr(os, "fsync", sync_while_another_thread_writes)
        result = seen(location, lambda: os.fsync(file.fileno()))
    require(result, "not durable: 3,000 of 5,000 bytes of data were synced")


def test_sync_before_flushing_covers_nothing(location: Path) -> None:
    def work() -> None:
        write(location / "data", b"x" * 100, flush=False)
        sync_folder(location)

    require(seen(location, work), "not durable: 0 of 100 bytes of data were synced")


def test_files_never_synced_are_counted_together(location: Path) -> None:
    def work() -> None:
        for name in "abcde":
            write(location / name, b"x" * 1000, sync=name == "c")
        sync_folder(location)

    require(seen(location, work), "not durable: 0 of 4,000 bytes of 4 files (a, b, d and 1 more) were synced")


def test_write_in_place_after_the_last_sync_is_seen(location: Path) -> None:
    def work() -> None:
        with (location / "data").open("wb", buffering=0) as file:
            file.write(b"x" * 3000)
            os.fsync(file.fileno())
            time.sleep(TICK_S)
            file.seek(0)
            file.write(b"header")
        sync_folder(location)

    require(seen(location, work), "not durable: data was written to after the last sync")


def test_rename_after_the_folder_was_synced_is_seen(location: Path) -> None:
    def work() -> None:
        write(location / "draft")
        sync_folder(location)
        time.sleep(TICK_S)
        (location / "draft").replace(location / "data")

    require(seen(location, work), "not durable: the rename of data was not synced, nor the folder")


def test_rename_of_what_has_gone_since_is_not_asked_for(location: Path) -> None:
    def work() -> None:
        write_and_rename(location / "data")
        (location / "data").rename(location / "old")
        kept = open(location / "old", "rb")  # noqa: SIM115 - else its number is free for the next file
        (location / "old").unlink()
        write(location / "data")
        kept.close()

    require(seen(location, work), "not durable: the folder was not synced")


def test_folder_that_was_not_synced_since_a_name_was_made_in_it_is_seen(location: Path) -> None:
    def work() -> None:
        (location / "part").mkdir()
        sync_folder(location)
        time.sleep(TICK_S)
        write(location / "part" / "data")

    require(seen(location, work), "not durable: the folder was not synced")


def test_name_of_a_new_folder_is_asked_for_in_its_parent(tmp_path: Path) -> None:
    location = tmp_path / "ckpt"

    def work() -> None:
        sync_folder(tmp_path)  # too early
        location.mkdir()
        write(location / "data")
        sync_folder(location)

    require(seen(location, work), f"not durable: the name of the folder in {tmp_path} was not synced")


def test_failed_sync_is_no_sync(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"), audit(location) as noted:
        write(location / "data")
    require(noted.result(), "not durable: 0 of 5,000 bytes of data were synced, nor the folder")


@pytest.mark.usefixtures("telling_pages")
def test_fsync_that_does_nothing_is_found_out_by_the_page_cache(location: Path) -> None:
    with nothing_is_synced():
        result = seen(location, lambda: write(location / "data"), lambda: make_durable(location))
    require(result, "not durable: 5,000 of 5,000 bytes of data lie in the page cache only, though fsync returned")
    assert msgspec.structs.replace(result, pages_tell=False).is_durable


@pytest.mark.usefixtures("telling_pages")
def test_writer_outside_python_is_found_out_by_the_page_cache(location: Path) -> None:
    result = seen(location, lambda: torch.save({}, str(location / "data.pt")), lambda: sync_folder(location))
    size = (location / "data.pt").stat().st_size
    require(result, f"not durable: 0 of {size:,} bytes of data.pt were synced")
    assert not result.opened


def test_what_cannot_be_seen_is_called_neither_durable_nor_lost(location: Path) -> None:
    """Another process has written, and perhaps synced."""
    target = location / "data"

    def work() -> None:
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={target}", "bs=100", "count=1", "conv=fsync"], check=True, timeout=30
        )
        sync_folder(location)

    result = seen(location, work)
    assert result.verdict == "cannot tell"
    assert result.advice == ADVICE
    assert result.sentences == [
        "cannot tell: 0 of 100 bytes of data were synced as far as can be seen "
        "(written outside Python, or by another process)"
    ]
    require_durable(seen(location, work, lambda: make_durable(location)))


def test_nothing_saved_is_not_durable(tmp_path: Path) -> None:
    result = seen(tmp_path / "ckpt", lambda: None)
    assert result.verdict == "cannot tell"
    assert result.sentences == [f"cannot tell: there is no file in {tmp_path / 'ckpt'}"]


def test_checkpoint_deleted_before_the_new_one_is_named_is_told_and_not_durability(location: Path) -> None:
    def replace(*, delete_first: bool) -> None:
        write(location / "draft", b"y")
        if delete_first:
            (location / ".metadata").unlink()
        (location / "draft").rename(location / ".metadata")
        make_durable(location)

    write(location / ".metadata")
    result = seen(location, lambda: replace(delete_first=True))
    assert result.is_durable
    assert result.sentences == [
        "a moment without any checkpoint: .metadata was deleted before the new one got its name"
    ]
    require_durable(seen(location, lambda: replace(delete_first=False)))

    def delete_later() -> None:
        replace(delete_first=False)
        (location / ".metadata").unlink()
        write(location / "data")
        make_durable(location)

    require_durable(seen(location, delete_later))


# Writers of DCP


def saved_by(writer: Any, location: Path, state: dict[str, Any]) -> list[str]:
    return seen(location, lambda: save(state, storage_writer=writer, no_dist=True)).sentences


def finish(location: Path, names: int) -> None:
    """The last step of a save whose state has so many names."""
    location.mkdir()
    metadata = Metadata({f"layers.{index}.weight": BytesStorageMetadata() for index in range(names)})
    FileSystemWriter(location).finish(metadata, [])


def test_large_metadata_is_synced_without_its_end(tmp_path: Path) -> None:
    """What a pickle's last frame leaves in the stream's buffer is lost; it may be nothing, and the name is lost too."""
    for number in range(1000, 4000, 60):
        result = seen(tmp_path / "ckpt", partial(finish, tmp_path / "ckpt", number))
        size = (tmp_path / "ckpt" / ".metadata").stat().st_size
        synced = max(sync.bytes for sync in result.syncs)
        if synced < size:
            said = f"{synced:,} of {size:,} bytes of .metadata were synced, its rename was not, nor the folder"
        else:
            said = "the rename of .metadata was not synced, nor the folder"
        assert result.sentences[0] == f"not durable: {said}"
        shutil.rmtree(tmp_path / "ckpt")
        if 0 < synced < size:
            return
    pytest.fail("no part of a large metadata was ever left out")


def test_small_safetensors_files_are_not_synced_either(tmp_path: Path) -> None:
    """What is shorter than a buffer is still in it when DCP syncs; torch.save flushes, safetensors do not."""
    writer = FileSystemWriter(tmp_path / "ckpt", serialization_format=SerializationFormat.SAFETENSORS)
    (said,) = saved_by(writer, tmp_path / "ckpt", {"weight": torch.rand(10)})
    assert "2 files (.metadata, __0_0.distcp) were synced" in said
    assert said.startswith("not durable: 0 of ")


def test_index_of_the_hugging_face_writer_is_not_synced(tmp_path: Path) -> None:
    state = {"weight": torch.rand(5000)}
    (said,) = saved_by(HuggingFaceStorageWriter(str(tmp_path / "ckpt")), tmp_path / "ckpt", state)
    assert said.endswith("bytes of model.safetensors.index.json were synced, nor the folder")


# Ranks, and what is left behind


def test_audits_of_ranks_travel_as_plain_data_and_add_up(location: Path) -> None:
    first = seen(location, lambda: write(location / "__0_0.distcp"))
    second = seen(location, lambda: write(location / "__1_0.distcp"), lambda: write_and_rename(location / ".metadata"))
    travelled = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(one)), type=Audit) for one in (second, first)
    ]
    both = combine(travelled)
    assert [Path(entry.path).name for entry in both.after if not entry.folder] == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    require(both, "not durable: the rename of .metadata was not synced, nor the folder")
    require_durable(combine([*travelled, seen(location, lambda: make_durable(location))]))
    late = seen(location, lambda: None)  # a rank that came when the files were there already
    assert combine([late, *travelled]).sentences == both.sentences
    assert combine([late]).is_durable
    with pytest.raises(ValueError, match="no audit to combine"):
        combine([])


FUNCTIONS = ("fsync", "fdatasync", "sync", "rename", "replace", "unlink", "remove", "open")


def real_functions() -> list[Any]:
    return [getattr(os, name) for name in FUNCTIONS] + [io.open, open, time.sleep]


def test_functions_are_put_back_even_after_an_error(location: Path) -> None:
    before = real_functions()
    with pytest.raises(KeyError), audit(location):
        assert os.fsync is not before[0]
        raise KeyError
    assert real_functions() == before


def test_watched_functions_take_the_arguments_of_the_real_ones(location: Path) -> None:
    def work() -> None:
        descriptor = os.open(path=location / "draft", flags=os.O_WRONLY | os.O_CREAT, mode=0o600)
        os.write(descriptor, b"x")
        os.fsync(fd=descriptor)
        os.close(descriptor)
        os.rename(src=location / "draft", dst=os.fsencode(location / "data"))
        folder = os.open(location, os.O_RDONLY)
        os.rename("data", "named", src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
        os.close(folder)
        with open(file=location / "gone", mode="x", encoding="utf-8"):
            pass
        os.unlink(path=location / "gone")
        sync_folder(location)
        for mistaken in (folder, "text"):
            with pytest.raises((OSError, TypeError, AttributeError)):
                os.fsync(mistaken)  # type: ignore[arg-type]
        assert pickle.loads(pickle.dumps(os.fsync)) is os.fsync

    require_durable(seen(location, work))


def test_function_that_others_wrapped_meanwhile_stays_theirs(location: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", os.sync)  # put back at the end
    with audit(location) as noted:
        inner = os.sync
        os.sync = theirs = lambda: inner()
    assert os.sync is theirs
    os.sync()
    assert noted._syncs == []


def test_audits_within_each_other_both_see(location: Path) -> None:
    before = real_functions()
    with audit(location) as outer, audit(location) as inner:
        write(location / "data")
        sync_folder(location)
    require_durable(outer.result())
    require_durable(inner.result())
    assert real_functions() == before


def test_result_before_the_end_is_refused(location: Path) -> None:
    with pytest.raises(RuntimeError, match="the audit is not over"):
        AuditedSave(location).result()


def test_making_durable_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(NotADirectoryError, match=f"{name} is no folder"):
            make_durable(tmp_path / name)


def test_pipes_and_broken_links_do_not_stop_making_durable(location: Path) -> None:
    os.mkfifo(location / "pipe")
    (location / "link").symlink_to("nowhere")
    make_durable(location)
