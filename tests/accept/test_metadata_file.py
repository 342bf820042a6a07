"""`.metadata` is read as DCP's own reader reads it, and nothing in it runs, however it was made."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from pytest_ckpt.accept import metadata_file
from pytest_ckpt.accept.metadata_file import (
    ITEM_BYTES,
    Listing,
    OtherFormat,
    RefusedMetadata,
    UnreadableMetadata,
    allowed_names,
    read_metadata,
)

pytestmark = pytest.mark.timeout(120)

DTYPES = {name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "checkpoint"
    state = {"a": torch.randn(4, 3), "b": {"c": [torch.arange(2), "x"], "d": torch.tensor(1.0)}, "step": 7}
    save(state, storage_writer=FileSystemWriter(path), no_dist=True)
    return path


def expected(metadata: Metadata) -> Listing:
    """What DCP's own classes hold, in ours."""
    tensors, objects = {}, set()
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            objects.add(fqn)
            continue
        chunks = [metadata_file.Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        strided = stored.properties.layout == torch.strided
        tensors[fqn] = metadata_file.Tensor(tuple(stored.size), dtype, strided, chunks)
    places = [
        metadata_file.Place(
            index.fqn,
            None if index.offset is None else tuple(index.offset),
            info.relative_path,
            info.offset,
            info.length,
            tuple(info.transform_descriptors or ()),
        )
        for index, info in metadata.storage_data.items()
    ]
    return Listing(tensors=tensors, objects=objects, places=places)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_real_file_is_read_as_dcp_reads_it(protocol: int, real: Path) -> None:
    metadata = FileSystemReader(str(real)).read_metadata()
    found = read_metadata((real / ".metadata").read_bytes())
    assert found == expected(metadata)
    assert read_metadata(pickle.dumps(metadata, protocol)) == found


shapes = st.lists(st.integers(0, 2**40), max_size=4).map(torch.Size)
names = st.text(max_size=8)


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    described: dict[str, Any] = {}
    placed: dict[Any, Any] = {}
    for fqn in draw(st.lists(names, unique=True, max_size=4)):
        offset = None
        if draw(st.booleans()):
            size = draw(shapes)
            offset = torch.Size([0] * len(size))
            properties = TensorProperties(
                dtype=draw(st.sampled_from(list(DTYPES.values()))),
                layout=draw(st.sampled_from([torch.strided, torch.sparse_coo])),
                memory_format=draw(st.sampled_from([torch.contiguous_format, torch.channels_last])),
            )
            described[fqn] = TensorStorageMetadata(properties, size, [ChunkStorageMetadata(offset, size)])
        else:
            described[fqn] = BytesStorageMetadata()
        transforms = draw(st.none() | st.lists(names, min_size=1, max_size=2))
        info = _StorageInfo(draw(names), draw(st.integers(0, 2**50)), draw(st.integers(0, 2**50)), transforms)
        placed[MetadataIndex(fqn, offset, draw(st.none() | st.integers(0, 9)))] = info
    meta = StorageMeta(draw(st.none() | names | names.map(Path)), draw(names))
    paths = draw(st.dictionaries(names, st.tuples(names | st.integers() | st.booleans() | st.none()), max_size=3))
    return Metadata(described, planner_data=paths, storage_data=placed, storage_meta=meta, version="1.0.0")


@settings(deadline=None)
@given(metadatas())
def test_any_file_that_dcp_can_write_is_read_as_dcp_reads_it(metadata: Metadata) -> None:
    assert read_metadata(pickle.dumps(metadata)) == expected(metadata)


def test_the_sizes_of_elements_are_torchs_and_every_dtype_is_known() -> None:
    for name, size in ITEM_BYTES.items():
        assert DTYPES[name].itemsize == size
    assert {f"torch.{str(dtype).removeprefix('torch.')}" for dtype in DTYPES.values()} <= set(allowed_names())


# Hostile


def refused(data: bytes) -> str:
    with pytest.raises(RefusedMetadata) as caught:
        read_metadata(data)
    return str(caught.value)


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval"),
        (setattr, "builtins.setattr"),
        (torch.load, "torch.serialization.load"),
        (torch.Tensor, "torch.Tensor"),
        (pickle.loads, "_pickle.loads"),
        (builtins.__import__, "builtins.__import__"),
    ],
)
def test_a_function_that_is_not_on_the_list_is_refused_by_its_name(function: Any, name: str, tmp_path: Path) -> None:
    hidden = Metadata({}, planner_data=_Calls(function, f"touch {tmp_path}/ran"), storage_data={})
    assert refused(pickle.dumps(hidden)) == f"names {name}, which no checkpoint needs; it isn't loaded"
    assert list(tmp_path.iterdir()) == []


def test_a_member_of_an_enum_as_python_3_11_pickles_it_is_looked_up_nowhere() -> None:
    hidden = Metadata({}, planner_data=_Calls(getattr, TensorProperties, "no_such_name"), storage_data={})
    assert read_metadata(pickle.dumps(hidden)).places == []


def test_a_name_is_looked_up_as_a_whole() -> None:
    for module, name in (
        ("torch", "Size.__class__"),
        ("torch", "Size.__mro__"),
        ("torch.Size", "__class__"),
        ("os", ""),
    ):
        data = b"\x80\x04" + _text(module) + _text(name) + b"\x93."
        assert f"names {module}.{name}," in refused(data)


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def test_references_out_of_the_file_are_refused() -> None:
    assert "outside itself" in refused(b"\x80\x04" + _text("x") + b"Q.")


def test_state_cannot_be_given_to_the_classes_themselves() -> None:
    """BUILD on a class instead of an object would change it for all that is read later."""
    size = b"\x80\x04" + _text("torch") + _text("Size") + b"\x93"
    before = vars(metadata_file._Size).copy()
    for state in (b"}" + _text("arguments") + b"K\x01s", b"N}" + _text("__setstate__") + b"K\x01s\x86"):
        with pytest.raises((UnreadableMetadata, OtherFormat)):
            read_metadata(size + state + b"b.")
    assert dict(vars(metadata_file._Size)) == before


@pytest.mark.parametrize(
    "bad",
    [
        {"state_dict_metadata": None},
        {"state_dict_metadata": {"w": 3}},
        {"state_dict_metadata": {3: BytesStorageMetadata()}},
        {"storage_data": None},
        {"storage_data": {"w": "__0_0.distcp"}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", -1, 3)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", 0, 2**70)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo("f", 0, True)}},
        {"storage_data": {MetadataIndex("w"): _StorageInfo(None, 0, 3)}},  # type: ignore[arg-type]
        {"storage_data": {MetadataIndex(None, [0]): _StorageInfo("f", 0, 3)}},  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_is_no_listing_is_not_taken_for_one(bad: dict[str, Any]) -> None:
    with pytest.raises((UnreadableMetadata, OtherFormat)):
        read_metadata(pickle.dumps(Metadata(**{"state_dict_metadata": {}, "storage_data": {}, **bad})))


def test_other_things_than_metadata_are_another_format() -> None:
    things: list[object] = [{"weight": 1}, [], "x", None, torch.Size([1])]
    for thing in things:
        with pytest.raises(OtherFormat, match="instead of DCP's Metadata"):
            read_metadata(pickle.dumps(thing))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04]r\xff\xff\xff\x7f.",  # LONG_BINPUT: place 2**31 of the memo, 32 GB
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",  # BINBYTES8
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",  # BYTEARRAY8
        b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",  # LONG4
        b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",  # FRAME
        b"\x80\x02]p2000000000\n.",  # PUT, of protocol 0
    ],
)
def test_a_few_bytes_cannot_ask_for_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((UnreadableMetadata, OtherFormat)):
            read_metadata(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


def test_one_list_of_chunks_for_many_tensors_is_not_gone_through_for_each() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 3000
    stored = TensorStorageMetadata(TensorProperties(), torch.Size([1]), chunks)
    with pytest.raises(UnreadableMetadata, match="more chunks than it has bytes"):
        read_metadata(pickle.dumps(Metadata({str(number): stored for number in range(3000)}, storage_data={})))


# Damaged


def test_empty_foreign_and_cut_files_are_told_apart(real: Path) -> None:
    data = (real / ".metadata").read_bytes()
    for damaged, words in [
        (b"", "is empty"),
        (b"\0" * 500, "all zeros"),
        (b"{}", "no pickle"),
        (data[: len(data) // 2], "cut short"),
        (data + b"\0", "what follows is not part of it"),
    ]:
        with pytest.raises(UnreadableMetadata, match=words):
            read_metadata(damaged)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_ends_in_anything_but_a_listing_or_an_error_of_ours(data: st.DataObject, real: Path) -> None:
    whole = bytearray((real / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)) | st.just(len(whole)))
    with contextlib.suppress(UnreadableMetadata, RefusedMetadata, OtherFormat):
        read_metadata(bytes(whole[:cut]))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_end_in_anything_but_a_listing_or_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(UnreadableMetadata, RefusedMetadata, OtherFormat):
        read_metadata(b"\x80\x04" + data + b".")
