"""Values of tensors that a storage can neither compress nor deduplicate, written in place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHANGE_EVERY_BYTES = 1024


def tensors(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that DCP finds in `state_dict`, with its dotted key, under each of its names.

    Follows nested mappings, lists and tuples, and what a `Stateful` at the top returns.
    """
    for key, value in state_dict.items():
        yield from _nested(str(key), value.state_dict() if isinstance(value, Stateful) else value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, sharing memory: a DTensor's shard, or the tensor itself."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what tells this rank's part of `tensor` from others: where it lies and how many elements it has."""
    part = local(tensor)
    has_memory = part.layout is torch.strided and not part.is_meta
    return part.data_ptr() if has_memory else id(tensor), part.numel()


def generator(tensor: torch.Tensor, *names: object) -> torch.Generator:
    """Return a generator on the tensor's device, seeded by `names` and by which shard this rank holds.

    Ranks that hold replicas of one shard get the same seed, so that replicas stay equal, as in training.
    """
    shard: tuple[int, ...] = ()
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate() or ()
        shard = tuple(c for c, p in zip(coordinate, tensor.placements, strict=False) if not p.is_replicate())
    digest = hashlib.blake2b(repr((names, shard)).encode(), digest_size=8).digest()
    return torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "big") >> 1)


def fill(tensor: torch.Tensor, *names: object, signed: bool = True) -> None:
    """Fill this rank's part of a contiguous float32 or bfloat16 tensor with random values, seeded by `names`.

    All bits are random but two or three: magnitudes lie between 2**-63 and 2, so that no value is subnormal
    or not finite; without `signed` they are positive.
    """
    part = local(tensor).view(-1)
    if part.numel() == 0:
        return
    bits = part.view(_BITS[part.itemsize])
    # Drawing 64 bits at a time is two to three times as fast.
    drawn = bits.view(torch.int64) if bits.nbytes % 8 == 0 else bits
    drawn.random_(torch.iinfo(drawn.dtype).min, None, generator=generator(tensor, *names))
    # Both types have the 8 bits of the exponent below the sign: they become 01xxxxxx.
    top = 1 << 8 * part.itemsize - 2
    bits.bitwise_and_(~top if signed else top - 1)
    bits.bitwise_or_(top >> 1)


def change(tensor: torch.Tensor, turn: int, *names: object) -> None:
    """Give one element in every KiB of this rank's part of a tensor another value, in place.

    Successive turns change successive elements of a KiB, so that none returns to an earlier value until all
    have had their turn, and by chance alone afterwards. Signs and exponents stay: a finite value stays
    finite. Tensors that are sparse, packed or expanded (many elements, one memory) stay as they are.
    """
    part = local(tensor)
    if part.is_complex():
        part = torch.view_as_real(part)
    if part.numel() == 0 or not _is_plain(part):
        return
    _flip(part.view(_BITS[part.itemsize]), turn, 1 << _mantissa_bits(part), generator(tensor, "turn", turn, *names))


def wipe(tensor: torch.Tensor) -> None:
    """Make this rank's part of a tensor zeros, in place: whatever it holds afterwards came from elsewhere.

    A tensor whose elements share memory cannot be written element by element, nor loaded; it stays as it is.
    """
    part = local(tensor)
    if part.numel() and part.layout is torch.strided and not part.is_meta and not _is_expanded(part):
        # By their bits: some types (packed float4) have no arithmetic of their own.
        bits = torch.view_as_real(part) if part.is_complex() else part.view(_BITS.get(part.itemsize, part.dtype))
        with torch.no_grad():
            bits.zero_()


def _mantissa_bits(part: torch.Tensor) -> int:
    if not part.is_floating_point():
        return 1  # an integer becomes its neighbour, a bool its opposite
    # A type of scales (float8_e8m0fnu) has no mantissa: there the last bit of the exponent changes.
    return max(1, round(-math.log2(torch.finfo(part.dtype).eps)))


def _is_plain(part: torch.Tensor) -> bool:
    """Return whether each element is a memory of its own that can be changed: no sparse, expanded or packed tensor."""
    if part.layout is not torch.strided or part.is_meta or part.itemsize not in _BITS:
        return False
    if part.is_floating_point():
        try:
            torch.finfo(part.dtype).eps  # noqa: B018 - packed types (float4) have none, and say so by raising
        except NotImplementedError:
            return False
    return not _is_expanded(part)


def _is_expanded(part: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(part.shape, part.stride(), strict=True))


def _flip(bits: torch.Tensor, turn: int, below: int, random: torch.Generator) -> None:
    if bits.ndim > 1 and not bits.is_contiguous():
        for row in bits.unbind():
            _flip(row, turn, below, random)
        return
    flat = bits.view(-1) if bits.is_contiguous() else bits
    every = _CHANGE_EVERY_BYTES // flat.itemsize
    whole = flat.numel() // every * every
    tail = flat[whole:]
    for chosen in (flat[turn % every : whole : every], tail[turn % max(1, tail.numel()) :][:1]):
        # An exclusive or with anything but zero is sure to change the value.
        chosen.bitwise_xor_(
            torch.randint(1, below, chosen.shape, dtype=flat.dtype, device=flat.device, generator=random)
        )


def _nested(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _nested(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _nested(f"{key}.{index}", item)
