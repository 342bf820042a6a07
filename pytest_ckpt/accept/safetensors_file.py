"""The header of a safetensors file: which tensors it holds, and where, with what DCP adds of their shards.

The format: 8 bytes length of the header, little-endian; the header as JSON; the tensors' bytes
(https://huggingface.co/docs/safetensors). It has no checksum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from pytest_ckpt.errors import CkptError

SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100_000_000
"""As the format's own readers have it."""

_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "C64": ("complex64", 8),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}


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


def read_header(read: Callable[[int, int], bytes], begins: int, file_bytes: int) -> dict[str, Shard]:
    """Return the tensors by name; `read(start, length)` gives bytes of the file, which begins at `begins`.

    Raises `DamagedHeader`. A range that ends after `file_bytes` is the caller's to find.
    """
    room = file_bytes - begins
    if room < 8:
        raise DamagedHeader(f"has {room} bytes, too few for a header of safetensors")
    length = int.from_bytes(read(begins, 8), "little")
    if length > min(room - 8, MOST_HEADER_BYTES):
        raise DamagedHeader(f"says that its header has {length} bytes, of {room - 8} that follow")
    try:
        header = json.loads(read(begins + 8, length))
        shards = header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}")
        offsets = {name: one["saved_offsets"] for name, one in json.loads(shards).items()}
        data = begins + 8 + length
        return {name: _shard(name, described, offsets, data) for name, described in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedHeader(f"has a damaged header of safetensors ({type(error).__name__})") from None


def _shard(name: str, described: dict[str, Any], offsets: dict[str, Any], data: int) -> Shard:
    sizes = tuple(described["shape"])
    begin, end = described["data_offsets"]
    dtype, item = _DTYPES.get(described["dtype"], (described["dtype"], None))
    place = tuple(offsets.get(name, (0,) * len(sizes)))
    numbers = (*sizes, begin, end, *place)
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(place) != len(sizes):
        raise ValueError(name)
    if end < begin or (item is not None and end - begin != math.prod(sizes) * item):
        raise ValueError(name)
    return Shard(dtype, sizes, place, data + begin, end - begin)
