"""A digest of every tensor of a state that does not depend on how its elements lie on ranks.

The sum over all elements of (bits + 1) times an odd number that the element's place in the whole tensor decides, modulo
2**64. Changing one element always changes it; ranks add theirs up whatever they hold of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pytest_ckpt.model import values
from pytest_ckpt.save import torch_private

SLICE = 1 << 18
"""Elements that are looked at at once: what the digest needs of memory is a few times their 64 bits."""

_NAMED = 3
"""So many of the things that differ are named."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MODULUS = 1 << 64
_FIRST = 0x9E3779B97F4A7C15 - _MODULUS  # torch multiplies signed integers, modulo 2**64 all the same
_SECOND = 0xBF58476D1CE4E5B9 - _MODULUS

Digests = dict[str, set[int]]
"""Of each tensor, by its dotted key: the digests of its replicas, which are one where they are equal."""
Part = tuple[list[int], int]
"""Of a tensor on one rank: which replica this is a part of, and its share of the digest."""


def digest_parts(state_dict: Mapping[str, Any]) -> dict[str, Part]:
    """Return this rank's part in the digest of each tensor that DCP finds in `state_dict`.

    A tensor that is no DTensor is a replica of its own on every rank that has its key.
    """
    return {key: (_replica(tensor), _digest(tensor)) for key, tensor in values.tensors(state_dict) if _is_plain(tensor)}


def combine(parts: Sequence[Mapping[str, Any]]) -> Digests:
    """Return the digests that the ranks' parts, in the order of ranks, add up to."""
    sums: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, own in enumerate(parts):
        for key, (place, digest) in own.items():
            replica = tuple(place) if place else (-1, rank)
            replicas = sums.setdefault(key, {})
            replicas[replica] = (replicas.get(replica, 0) + digest) % _MODULUS
    return {key: set(replicas.values()) for key, replicas in sums.items()}


def differing(saved: Digests, loaded: Digests) -> list[str]:
    """Return the keys whose values after loading are none of those that were saved; DCP stores one of the replicas."""
    return [key for key in dict.fromkeys([*saved, *loaded]) if not loaded.get(key, {-1}) <= saved.get(key, set())]


def difference_text(names: Sequence[str], of: int, noun: str) -> str:
    """Return the sentence that says which of so many things, in the plural, are not what was saved."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    listed = ", ".join(names[:_NAMED])
    return f"what was loaded is not what was saved: {listed}{more} ({len(names)} of {of} {noun} differ)"


def _is_plain(tensor: torch.Tensor) -> bool:
    part = values.local(tensor)
    return part.layout is torch.strided and not part.is_meta


def _replica(tensor: torch.Tensor) -> list[int]:
    """Return the place of this rank among the replicas of a DTensor, one 0 where there is one; nothing for others."""
    if not isinstance(tensor, DTensor):
        return []
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return [0, *(c for c, p in zip(coordinate, tensor.placements, strict=False) if p.is_replicate())]


def _digest(tensor: torch.Tensor) -> int:
    part = values.local(tensor)
    if isinstance(tensor, DTensor):
        whole, offsets = tuple(tensor.shape), torch_private.offsets_of_shard(tensor)
    else:
        whole, offsets = tuple(part.shape), (0,) * part.ndim
    if part.is_complex():
        part, whole, offsets = torch.view_as_real(part.resolve_conj()), (*whole, 2), (*offsets, 0)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for piece, first in _pieces(part.resolve_neg(), 0):
        for begin in range(0, piece.numel(), SLICE):
            elements = piece[begin : begin + SLICE]
            place = _places(first + begin, elements, tuple(part.shape), whole, offsets)
            total += _sum(elements.contiguous(), place)
    return int(total) % _MODULUS


def _pieces(part: torch.Tensor, first: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield one-dimensional views that make up `part`, each with the place of its first element in it."""
    if part.is_contiguous():
        yield part.view(-1), first
    elif part.ndim == 1:
        yield part, first
    else:
        for index, row in enumerate(part.unbind()):
            yield from _pieces(row, first + index * row.numel())


def _places(
    first: int, elements: torch.Tensor, shape: Sequence[int], whole: Sequence[int], offsets: Sequence[int]
) -> torch.Tensor:
    """Return the places in the whole tensor of `elements`, of which the first is number `first` of this rank's."""
    own = torch.arange(first, first + elements.numel(), device=elements.device)
    if tuple(shape[1:]) == tuple(whole[1:]):  # whole rows, as FSDP shards: the places follow one another
        return own.add_(offsets[0] * math.prod(whole[1:])) if shape else own
    places, stride = torch.zeros_like(own), 1
    for size, of_whole, offset in zip(reversed(shape), reversed(whole), reversed(offsets), strict=True):
        places += (own % size + offset) * stride
        own //= size
        stride *= of_whole
    return places


def _sum(elements: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if elements.itemsize <= 4:
        return _weighted(elements.view(_BITS[elements.itemsize]), places)
    # In halves: of two elements that differ in the highest of 64 bits alone, an odd weight shows no change of places.
    halves = elements.view(torch.int32).view(-1, elements.itemsize // 4)
    count = halves.shape[1]
    sums = [_weighted(halves[:, half], places * count + half) for half in range(count)]
    return torch.stack(sums).sum()


def _weighted(bits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    weights = (places + 1).mul_(_FIRST)
    weights.bitwise_xor_((weights >> 32) & 0xFFFFFFFF).mul_(_SECOND)
    weights.bitwise_xor_((weights >> 29) & 0x7FFFFFFFF).bitwise_or_(1)
    return weights.mul_(bits.to(torch.int64).add_(1)).sum()
