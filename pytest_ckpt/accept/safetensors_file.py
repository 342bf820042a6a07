"""The header of a safetensors file: which tensors it holds, and where, with what DCP adds of their shards.

The format: 8 bytes length of the header, little-endian; the header as JSON; the tensors' bytes
(https://huggingface.co/docs/safetensors). It has no checksum. The tensors lie one behind the other, from the first byte
behind the header to the last of the file; readers refuse what does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pytest_ckpt.errors import CkptError

SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100_000_000
"""As the format's own readers have it."""

_DTYPES = {
    "BOOL": ("bool", 8),
    "F4": ("F4", 4),
    "F6_E2M3": ("F6_E2M3", 6),
    "F6_E3M2": ("F6_E3M2", 6),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F64": ("float64", 64),
}
"""torch's name and the bits of an element, for all that safetensors 0.8 has; it refuses others."""


class DamagedHeader(CkptError):
    """The header is not what the format says: the message is the end of a sentence that begins with the file's name."""


class Shard(NamedTuple):
    """One tensor of a file, or the part of one."""

    dtype: str
    """torch's name; the format's where that has none."""
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    """In the whole tensor."""
    start: int
    """In the file."""
    length: int


class Header(NamedTuple):
    """What the header says."""

    shards: dict[str, Shard]
    """By the tensors' names."""
    data_start: int
    """In the file: where the first tensor's bytes have to begin."""


class Misplaced(NamedTuple):
    """What is wrong with where the tensors lie: `hole`, `overlap` or `size-differs`, whose, and half of a sentence."""

    kind: str
    name: str
    text: str


def misplaced(header: Header, file_bytes: int) -> Iterator[Misplaced]:
    """Yield where the tensors do not lie one behind the other up to the end of the file, of `file_bytes`.

    A range that ends after the end is not told: it is found where the ranges are read.
    """
    end, before = header.data_start, ""
    for name, shard in sorted(header.shards.items(), key=lambda item: (item[1].start, item[1].length)):
        if shard.start > end:
            yield Misplaced("hole", name, f"lies {shard.start - end} bytes too far on: they belong to no tensor")
        elif shard.start < end:
            yield Misplaced("overlap", name, f"lies on bytes that are also those of {before}")
        if shard.start + shard.length >= end:
            end, before = shard.start + shard.length, name
    if end < file_bytes:
        yield Misplaced("size-differs", "", f"has {file_bytes - end} bytes behind its last tensor that belong to none")


def read_header(read: Callable[[int, int], bytes], begins: int, file_bytes: int) -> Header:
    """Return the header; `read(start, length)` gives bytes of the file, in which the format begins at `begins`.

    Raises `DamagedHeader`. Where the tensors lie is `misplaced`'s to check.
    """
    room = file_bytes - begins
    if room < 8:
        raise DamagedHeader(f"has {room} bytes, too few for a header of safetensors")
    length = int.from_bytes(read(begins, 8), "little")
    if length > min(room - 8, MOST_HEADER_BYTES):
        raise DamagedHeader(f"says that its header has {length} bytes, of {room - 8} that follow")
    try:
        header = json.loads(read(begins + 8, length).decode("utf-8"), object_pairs_hook=_each_once)
        about = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in about.values()):
            raise ValueError(about)
        shards = about.get("DCP_SHARDING_INFO", "{}")
        offsets = {name: one["saved_offsets"] for name, one in json.loads(shards).items()}
        data = begins + 8 + length
        return Header({name: _shard(name, described, offsets, data) for name, described in header.items()}, data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedHeader(f"has a damaged header of safetensors ({type(error).__name__})") from None


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that comes twice, of which Python would keep the last, and one that UTF-8 does not have."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        name.encode("utf-8")
        if name in found:
            raise ValueError(name)
        found[name] = value
    return found


def _shard(name: str, described: dict[str, Any], offsets: dict[str, Any], data: int) -> Shard:
    sizes = tuple(described["shape"])
    begin, end = described["data_offsets"]
    if described["dtype"] not in _DTYPES:
        raise DamagedHeader(f"gives {name} the dtype {described['dtype']!r}, which safetensors 0.8 does not have")
    dtype, bits = _DTYPES[described["dtype"]]
    place = tuple(offsets.get(name, (0,) * len(sizes)))
    numbers = (*sizes, begin, end, *place)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(place) != len(sizes):
        raise ValueError(name)
    if end < begin or 8 * (end - begin) != math.prod(sizes) * bits:
        raise ValueError(name)
    return Shard(dtype, sizes, place, data + begin, end - begin)
