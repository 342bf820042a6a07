"""State dicts as plain specifications: a few words that cross to the ranks, which build the same state from them.

A tensor's values are decided by its seed, its path and a step alone, not by how it lies on ranks: worlds of any size
build the same state, and a training step is another number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Union

import msgspec

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128"),
)
"""Of tensors, as torch names them."""
WIPED = "wiped"
"""What stands in a state for each value that is no tensor, before it is loaded."""


class TensorSpec(msgspec.Struct, frozen=True, tag="tensor", kw_only=True):
    """A tensor of `shape`: the same on every rank, sharded, or of one rank alone."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    shard: int | None = None
    """The dimension along which a DTensor is sharded over all ranks, in torch's chunks; None: no DTensor."""
    rank: int | None = None
    """The one rank, modulo the world's size, that has this tensor and its key; None: all have it."""
    strided: bool = False
    """Whether its last two dimensions lie in memory in the other order."""
    seed: int = 0


class ValueSpec(msgspec.Struct, frozen=True, tag="value"):
    """A number, text or nothing; an integer counts the steps."""

    value: bool | int | float | str | None


class ObjectSpec(msgspec.Struct, frozen=True, tag="object"):
    """A value that only pickle can store; `kind` is one of `OBJECTS`."""

    kind: str


class TiedSpec(msgspec.Struct, frozen=True, tag="tied"):
    """The very tensor that stands at the top of the state under the key `to`."""

    to: str


class ListSpec(msgspec.Struct, frozen=True, tag="list"):
    """A list."""

    items: list[Node]


class DictSpec(msgspec.Struct, frozen=True, tag="dict"):
    """A mapping."""

    items: dict[str, Node]


Node = Union[TensorSpec, ValueSpec, ObjectSpec, TiedSpec, ListSpec, DictSpec]  # noqa: UP007 - as above

OBJECTS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: (1, "two", 3.0),
    "complex": lambda: complex(1, -2),
    "path": lambda: PurePosixPath("a/b"),
    "range": lambda: range(3),
    "set": lambda: frozenset({1}),
    "bytes": lambda: b"\x00\xff",
}

EVERY_KIND = DictSpec(
    {
        **{
            f"sharded {dtype}": TensorSpec(shape=(5, 3), dtype=dtype, shard=0, seed=i) for i, dtype in enumerate(DTYPES)
        },
        **{f"size {size}": TensorSpec(shape=(size, 2), shard=0, seed=20 + size) for size in (0, 1, 3, 5)},
        "second dimension": TensorSpec(shape=(2, 5), shard=1, seed=30),
        "larger": TensorSpec(shape=(257, 513), shard=0, seed=31),
        "strided": TensorSpec(shape=(6, 4), strided=True, seed=32),
        "without dimension": TensorSpec(shape=(), dtype="int64", seed=33),
        "of rank 1": TensorSpec(shape=(7,), rank=1, seed=34),
        "nested": DictSpec(
            {
                "list": ListSpec([TensorSpec(shape=(3,), seed=35), ValueSpec("text"), ValueSpec(1.5), ValueSpec(None)]),
                "größe/δ": TensorSpec(shape=(2, 2), dtype="bfloat16", seed=36),
                "objects": DictSpec({kind: ObjectSpec(kind) for kind in OBJECTS}),
            }
        ),
        "tied": TiedSpec("larger"),
        "step": ValueSpec(0),
    }
)
"""One of each: dtypes, sizes that ranks do not divide, layouts, nesting, names, tied weights, values and objects."""


def build(spec: DictSpec, mesh: DeviceMesh, device: torch.device, step: int = 0) -> dict[str, Any]:
    """Return the state that `spec` describes, at `step`, on this rank; collective in nothing."""
    state: dict[str, Any] = _built(spec, (), mesh, device, step)
    for key, node in spec.items.items():
        if isinstance(node, TiedSpec) and node.to in state:
            state[key] = state[node.to]
    return state


def set_step(spec: DictSpec, state: dict[str, Any], mesh: DeviceMesh, device: torch.device, step: int) -> None:
    """Change `state`, in place as training does, to what it is at `step`."""
    _overwrite(state, build(spec, mesh, device, step))


def wipe(state: dict[str, Any]) -> None:
    """Make the tensors of `state` zeros, in place, and put `WIPED` for all other values."""
    from pytest_ckpt.model import values

    for holder, key, value in _leaves(state):
        if _is_tensor(value):
            values.wipe(value)
        else:
            holder[key] = WIPED


def objects(state: dict[str, Any]) -> dict[str, str]:
    """Return what is no tensor in `state`: by its path, how Python writes it."""
    return {path: repr(value) for path, value in _paths(state, ()) if not _is_tensor(value)}


def _built(node: Any, path: tuple[object, ...], mesh: DeviceMesh, device: torch.device, step: int) -> Any:
    if isinstance(node, DictSpec):
        return {
            key: _built(child, (*path, key), mesh, device, step)
            for key, child in node.items.items()
            if not isinstance(child, TiedSpec) and _is_here(child, mesh)
        }
    if isinstance(node, ListSpec):
        return [_built(child, (*path, i), mesh, device, step) for i, child in enumerate(node.items)]
    if isinstance(node, ObjectSpec):
        return OBJECTS[node.kind]()
    if isinstance(node, ValueSpec):
        is_count = isinstance(node.value, int) and not isinstance(node.value, bool)
        return node.value + step if is_count else node.value  # type: ignore[operator]
    return _tensor(node, path, mesh, device, step)


def _is_here(node: Node, mesh: DeviceMesh) -> bool:
    return not isinstance(node, TensorSpec) or node.rank is None or node.rank % mesh.size() == mesh.get_rank()


def _tensor(
    spec: TensorSpec, path: tuple[object, ...], mesh: DeviceMesh, device: torch.device, step: int
) -> torch.Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = _values(spec, path, step).to(device)
    if spec.shard is not None:
        # Without a source rank nothing is sent: every rank takes its part of what all have made alike.
        return distribute_tensor(whole, mesh, [Shard(spec.shard)], src_data_rank=None)
    if spec.strided and whole.ndim > 1:
        return whole.transpose(-1, -2).contiguous().transpose(-1, -2)
    return whole


def _values(spec: TensorSpec, path: tuple[object, ...], step: int) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    digest = hashlib.blake2b(repr((spec.seed, path, step)).encode(), digest_size=8).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    if dtype is torch.bool:
        return torch.randint(0, 2, spec.shape, dtype=torch.uint8, generator=random).bool()
    empty = torch.empty(spec.shape, dtype=dtype)
    bits = torch.randint(0, 256, (empty.numel() * empty.itemsize,), dtype=torch.uint8, generator=random)
    return bits.view(dtype).reshape(spec.shape) if bits.numel() else empty


def _overwrite(old: Any, new: Any) -> None:
    from pytest_ckpt.model import values

    for (holder, key, was), (_, _, now) in zip(_leaves(old), _leaves(new), strict=True):
        if _is_tensor(was):
            values.local(was).copy_(values.local(now))
        else:
            holder[key] = now


def _leaves(container: Any) -> Iterator[tuple[Any, Any, Any]]:
    items = list(container.items()) if isinstance(container, dict) else list(enumerate(container))
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _leaves(value)
        else:
            yield container, key, value


def _paths(value: Any, path: tuple[object, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(child, (*path, key))
    else:
        yield "/".join(map(str, path)), value


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
