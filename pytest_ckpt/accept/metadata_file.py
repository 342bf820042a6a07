"""DCP's `.metadata` read as data: a pickle of which nothing is imported and nothing runs.

Every class that a real `.metadata` names is on a list, and stands here as an inert object that keeps what it is given.
So torch is not needed to read one, and a name that is not on the list is refused before anything is made of it.
The classes are those of torch 2.9 to 2.13 (torch/distributed/checkpoint/metadata.py and filesystem.py).
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Iterator, Set
from typing import Any, NamedTuple, TypeGuard

import msgspec

from pytest_ckpt.errors import CkptError


class UnreadableMetadata(CkptError):
    """The file is damaged, or no pickle: the message is the end of a sentence that begins with the file's name."""


class RefusedMetadata(CkptError):
    """The file names a class or function that no checkpoint needs."""


class OtherFormat(CkptError):
    """The file can be read, and is not what DCP's own writers leave."""


class Place(NamedTuple):
    """Where the bytes of a chunk, or of an object, lie."""

    fqn: str
    offsets: tuple[int, ...] | None
    """Of the chunk in its tensor; None for an object."""
    path: str
    """Relative to the checkpoint's folder, as the file has it: not to be trusted."""
    start: int
    length: int
    transforms: tuple[str, ...] = ()
    """Of the writer's extensions, such as compression; then nothing is known of the bytes."""


class Chunk(NamedTuple):
    """A part of a tensor: offsets and sizes, one for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Tensor(NamedTuple):
    """A whole tensor and its chunks."""

    size: tuple[int, ...]
    dtype: str
    """torch's name without `torch.`, as in `bfloat16`."""
    strided: bool
    chunks: list[Chunk]

    def bytes_of(self, sizes: tuple[int, ...]) -> int | None:
        """Return the bytes of a chunk of `sizes`; None where the dtype does not tell."""
        item = ITEM_BYTES.get(self.dtype)
        return math.prod(sizes) * item if item is not None and self.strided else None


class Listing(msgspec.Struct):
    """What a checkpoint says that it holds."""

    tensors: dict[str, Tensor]
    objects: set[str]
    places: list[Place]


ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by dtype."""

_UNSIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
_SMALL = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


class _Sealed(type):
    """A class whose attributes no pickle can set: BUILD on the class itself would."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__} is not to be changed")


class _StandIn(metaclass=_Sealed):
    """In the place of a class that a pickle names: keeps the arguments and the state that it is given, unlooked at."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _StandIn:
        self = object.__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_StandIn): ...


class _MetadataIndex(_StandIn): ...


class _TensorStorage(_StandIn): ...


class _BytesStorage(_StandIn): ...


class _ChunkStorage(_StandIn): ...


class _Properties(_StandIn): ...


class _StorageInfo(_StandIn): ...


class _Size(_StandIn): ...


class _Layout(_StandIn): ...


class _Unused(_StandIn): ...


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "MetadataIndex"): _MetadataIndex,
    (_METADATA, "TensorStorageMetadata"): _TensorStorage,
    (_METADATA, "BytesStorageMetadata"): _BytesStorage,
    (_METADATA, "ChunkStorageMetadata"): _ChunkStorage,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "StorageMeta"): _Unused,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Unused,
    # Early releases of Python 3.11 pickle an enum's member as getattr(class, name): nothing is looked up here.
    **{(module, "getattr"): _Unused for module in ("builtins", "__builtin__")},  # the latter by protocol 2
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Layout,
    # `StorageMeta.checkpoint_id`: where the checkpoint was written. Python 3.13 has the classes in `pathlib._local`.
    **{(f"pathlib{part}", f"{kind}Path"): _Unused for part in ("", "._local") for kind in ("Posix", "Windows")},
    # A dtype is pickled as its name in torch.
    **{("torch", name): name for name in (*ITEM_BYTES, *_UNSIZED, *_SMALL)},
}


def allowed_names() -> list[str]:
    """Return the names that a `.metadata` may have, in order: `torch.Size` and so on."""
    return sorted(f"{module}.{name}" for module, name in _ALLOWED)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise RefusedMetadata(f"names {module}.{name}, which no checkpoint needs; it isn't loaded") from None

    def persistent_load(self, identifier: object) -> Any:
        raise RefusedMetadata("names an object outside itself, which no checkpoint needs; it isn't loaded")


def read_metadata(data: bytes) -> Listing:
    """Return what the bytes of a `.metadata` list.

    Raises `UnreadableMetadata`, `RefusedMetadata` or `OtherFormat`. Time and memory are bounded by the size of `data`.
    """
    if not data:
        raise UnreadableMetadata("is empty (0 bytes)")
    if data[:1] != b"\x80":
        kind = "all zeros" if not data.strip(b"\0") else "no pickle of protocol 2 or later"
        raise UnreadableMetadata(f"is {kind} ({len(data)} bytes), and so not what DCP writes")
    _check_opcodes(data)
    try:
        loaded = _Reader(io.BytesIO(data)).load()
    except RefusedMetadata:
        raise
    except Exception as error:
        # A damaged pickle fails as it pleases: UnpicklingError, EOFError, KeyError, TypeError, ...
        raise UnreadableMetadata(f"cannot be unpickled: {type(error).__name__}: {_short(error)}") from None
    if not isinstance(loaded, _Metadata):
        raise OtherFormat(f"holds {_kind(loaded)} instead of DCP's Metadata")
    return _listing(_fields(loaded), len(data))


_FIXED, _NEWLINE, _COUNTED = range(3)


def _opcode_table() -> list[tuple[int, int] | None]:
    """Return for each byte how its opcode's argument is told to end, from the standard library's own table."""
    table: list[tuple[int, int] | None] = [None] * 256
    widths = {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
    for opcode in pickletools.opcodes:
        size = 0 if opcode.arg is None else opcode.arg.n
        if size >= 0:
            table[ord(opcode.code)] = (_FIXED, size)
        elif size in widths:
            table[ord(opcode.code)] = (_COUNTED, widths[size])
        elif opcode.name == "GLOBAL":
            table[ord(opcode.code)] = (_NEWLINE, 2)
        # Others with text to the end of a line are those of protocol 0, which torch never writes.
    return table


_TABLE = _opcode_table()
_LONG_BINPUT = pickle.LONG_BINPUT[0]
_STOP = pickle.STOP[0]


def _check_opcodes(data: bytes) -> None:
    """Raise `UnreadableMetadata` where an opcode asks for more memory than the file can need, or the end is missing.

    Lengths that reach past the end, and places in the memo beyond the number of bytes, would have the unpickler
    allocate what they say, up to 64 GB for a file of ten bytes.
    """
    position, end = 0, len(data)
    while position < end:
        code = data[position]
        known = _TABLE[code]
        if known is None:
            raise UnreadableMetadata(f"has an opcode {code:#04x} at byte {position}, which torch does not write")
        if code == _STOP:
            if position + 1 != end:
                raise UnreadableMetadata(f"ends at byte {position + 1} of {end}: what follows is not part of it")
            return
        how, size = known
        position += 1
        if how == _FIXED:
            if code == _LONG_BINPUT and int.from_bytes(data[position : position + 4], "little") > end:
                raise UnreadableMetadata(f"asks at byte {position} for more memory than its {end} bytes can need")
            position += size
        elif how == _COUNTED:
            position += size + int.from_bytes(data[position : position + size], "little")
        else:
            for _ in range(size):
                position = data.find(b"\n", position, position + 1000) + 1 or end
    raise UnreadableMetadata(f"is cut short: its {end} bytes do not reach the end of the pickle")


def _listing(metadata: dict[str, Any], limit: int) -> Listing:
    tensors: dict[str, Tensor] = {}
    objects: set[str] = set()
    seen = 0
    for fqn, stored in _items(metadata.get("state_dict_metadata"), "state_dict_metadata"):
        _require(isinstance(fqn, str), "has a name that is no text")
        if isinstance(stored, _BytesStorage):
            objects.add(fqn)
            continue
        _require(isinstance(stored, _TensorStorage), f"describes {fqn} by {_kind(stored)}")
        tensor = _tensor(_fields(stored), fqn)
        seen += len(tensor.chunks)
        # One list may stand for many tensors in a pickle: that of a writer never does.
        _require(seen <= limit, "lists more chunks than it has bytes")
        tensors[fqn] = tensor
    _check_planned(metadata.get("planner_data"), tensors.keys() | objects)
    places = {}
    for index, info in _items(metadata.get("storage_data"), "storage_data"):
        if not isinstance(index, _MetadataIndex) or not isinstance(info, _StorageInfo):
            raise OtherFormat(f"places entries by {_kind(info)}, not by ranges of files as DCP's own writers do")
        place = _place(_fields(index), _fields(info))
        places[place.fqn, place.offsets] = place
    return Listing(tensors=tensors, objects=objects, places=list(places.values()))


def _check_planned(planned: Any, listed: Set[str]) -> None:
    """Raise `UnreadableMetadata` where a name is damaged in one of the two places that DCP's planner writes it to.

    Only where one sign differs: a planner of the user's own may write there what it likes.
    """
    if not isinstance(planned, dict) or not all(isinstance(fqn, str) for fqn in planned):
        return
    here, there = listed - planned.keys(), planned.keys() - listed
    if len(here) == len(there) == 1:
        (one,), (other,) = here, there
        differ = len(one) != len(other) or sum(a != b for a, b in zip(one, other, strict=True)) > 1
        _require(differ, f"lists {one!r}, and has it as {other!r} among the planner's names")


def _tensor(fields: dict[str, Any], fqn: str) -> Tensor:
    properties, chunks = fields.get("properties"), fields.get("chunks")
    size = _sizes(fields.get("size"), fqn)
    _require(isinstance(chunks, list), f"has no list of chunks for {fqn}")
    state = properties.state if isinstance(properties, _Properties) else None
    _require(isinstance(state, tuple) and len(state) == 5, f"has no properties for {fqn}")
    dtype, layout = state[:2]  # type: ignore[index]
    _require(isinstance(dtype, str), f"has no dtype for {fqn}")
    strided = isinstance(layout, _Layout) and layout.arguments == ("torch.strided",)
    return Tensor(size, dtype, strided, [_chunk(chunk, fqn, len(size)) for chunk in chunks])  # type: ignore[union-attr]


def _chunk(chunk: Any, fqn: str, dimensions: int) -> Chunk:
    _require(isinstance(chunk, _ChunkStorage), f"has {_kind(chunk)} among the chunks of {fqn}")
    fields = _fields(chunk)
    found = Chunk(_sizes(fields.get("offsets"), fqn), _sizes(fields.get("sizes"), fqn))
    _require(len(found.offsets) == len(found.sizes) == dimensions, f"has chunks of {fqn} with other dimensions")
    return found


def _place(index: dict[str, Any], info: dict[str, Any]) -> Place:
    fqn, path = index.get("fqn"), info.get("relative_path")
    start, length = info.get("offset"), info.get("length")
    if not isinstance(fqn, str) or not isinstance(path, str):
        raise UnreadableMetadata("has a place without a name or a file")
    if not _is_size(start) or not _is_size(length):
        raise UnreadableMetadata(f"gives {fqn} no range of bytes")
    offsets = None if index.get("offset") is None else _sizes(index["offset"], fqn)
    transforms = info.get("transform_descriptors") or ()
    _require(
        isinstance(transforms, (list, tuple)) and all(isinstance(one, str) for one in transforms),
        f"has no names of transforms for {fqn}",
    )
    return Place(fqn, offsets, path, start, length, tuple(transforms))


def _sizes(size: Any, fqn: str) -> tuple[int, ...]:
    if isinstance(size, _Size):
        size = size.arguments[0] if len(size.arguments) == 1 else None
    if not isinstance(size, (tuple, list)) or len(size) > 64 or not all(map(_is_size, size)):
        raise UnreadableMetadata(f"has a shape of {fqn} that is none")
    return tuple(size)


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _items(mapping: Any, name: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(mapping, dict):
        raise OtherFormat(f"has {_kind(mapping)} as {name}, not a dictionary as DCP's own writers do")
    return iter(mapping.items())


def _fields(thing: _StandIn) -> dict[str, Any]:
    return thing.state if isinstance(thing.state, dict) else {}


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnreadableMetadata(otherwise)


def _kind(thing: object) -> str:
    return "nothing" if thing is None else type(thing).__name__.lstrip("_")


def _short(error: Exception) -> str:
    return str(error).split("\n")[0][:120] or "no further reason"
