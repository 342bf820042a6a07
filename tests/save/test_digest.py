"""The digest tells any change of a tensor, and does not depend on how the tensor lies on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from pytest_ckpt.model import values
from pytest_ckpt.save import digest, torch_private
from pytest_ckpt.save.digest import combine, differing, digest_parts

TYPES = [
    *(torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
unhurried = settings(deadline=None)  # the first call of an operation of torch takes long
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """One rank, which is enough to have a mesh: the parts of others are computed from what they would hold."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def of(tensor: torch.Tensor) -> set[int]:
    return combine([digest_parts({"x": tensor})])["x"]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, those of numbers that are none too."""
    size = torch.empty((), dtype=dtype).itemsize
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count * size, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8).view(tensor.numel(), -1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@unhurried
@given(shape=shapes, seed=st.integers(0, 99), data=st.data())
def test_changing_one_bit_changes_the_digest(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    tensor = made(shape, dtype, seed)
    before = of(tensor)
    assert of(tensor.clone()) == before
    raw = bits(tensor)
    place = data.draw(st.integers(0, raw.numel() - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    raw.view(-1)[place] ^= 1 << bit
    assert of(tensor) != before


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@unhurried
@given(shape=shapes, seed=st.integers(0, 99), data=st.data())
def test_swapping_two_elements_changes_the_digest(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    tensor = made(shape, dtype, seed)
    raw = bits(tensor)
    one, other = (data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
    assume(not torch.equal(raw[one], raw[other]))
    before = of(tensor)
    raw[[one, other]] = raw[[other, one]]
    assert of(tensor) != before


def test_elements_that_differ_in_their_highest_bit_alone_do_not_change_places_unseen() -> None:
    tensor = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=torch.float64)
    assert of(tensor) != of(-tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64], ids=str)
@unhurried
@given(shape=shapes.filter(bool), seed=st.integers(0, 99), ranks=st.integers(1, 4), data=st.data())
def test_resharding_does_not_change_the_digest(
    mesh: DeviceMesh, dtype: torch.dtype, shape: tuple[int, ...], seed: int, ranks: int, data: st.DataObject
) -> None:
    tensor = made(shape, dtype, seed)
    dim = data.draw(st.integers(0, len(shape) - 1))
    begins = np.cumsum([0, *(len(c) for c in np.array_split(np.arange(shape[dim]), ranks))])
    parts = [{"x": ([0], part_of(mesh, tensor, dim, int(begin), int(end)))} for begin, end in pairwise(begins)]
    assert combine(parts)["x"] == of(tensor)
    assert combine(parts[:-1]).get("x") != of(tensor) or begins[-2] == begins[-1], "a missing shard is seen"


def part_of(mesh: DeviceMesh, tensor: torch.Tensor, dim: int, begin: int, end: int) -> int:
    """Return the digest of what a rank holds from `begin` to `end` of dimension `dim`, a view into the whole."""
    offsets = [begin if d == dim else 0 for d in range(tensor.ndim)]
    shard = tensor.narrow(dim, begin, end - begin)
    whole = DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_private, "offsets_of_shard", lambda _: tuple(offsets))
        return digest_parts({"x": whole})["x"][1]


def test_slices_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.rand(7, 11)
    expected = of(tensor), of(tensor.T), of(tensor[:, ::2])
    monkeypatch.setattr(digest, "SLICE", 3)
    assert (of(tensor), of(tensor.T), of(tensor[:, ::2])) == expected
    assert of(tensor.T.contiguous()) == expected[1], "strides are no part of it"


def test_replicas_are_apart_and_one_of_those_saved_is_enough(mesh: DeviceMesh) -> None:
    step = torch.tensor(3.0)
    one, other = (digest_parts({"step": step + more}) for more in (0, 1))
    assert len(combine([one, one])["step"]) == 1
    saved, differs = combine([one, other]), combine([one, digest_parts({"step": step + 2})])
    assert differing(saved, combine([one, one])) == differing(saved, combine([other, other])) == []
    assert differing(saved, differs) == ["step"], "of one rank alone"
    replicated = DTensor.from_local(step, mesh, [Replicate()], run_check=False)
    assert digest_parts({"step": replicated})["step"][0] == [0, 0]


def test_tensor_that_is_missing_on_either_side_differs() -> None:
    one, both = ({name: torch.ones(2) for name in names} for names in ("a", "ab"))
    saved, loaded = combine([digest_parts(both)]), combine([digest_parts(one)])
    assert differing(saved, loaded) == ["b"]
    assert differing(loaded, saved) == ["b"]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@unhurried
@given(shape=shapes, seed=st.integers(0, 99))
def test_wiped_tensor_holds_zeros(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    tensor = made(shape, dtype, seed)
    values.wipe(tensor)
    assert not bits(tensor).any()
    view = made((4, 4), dtype, seed)
    values.wipe(view[:, ::2])
    assert not bits(view[:, ::2]).any()
    expanded = torch.ones(1).expand(4)
    values.wipe(expanded)
    assert expanded.all()


def test_what_dcp_cannot_store_is_left_out(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(2), "meta": torch.empty(2, device="meta"), "n": 1}
    assert list(digest_parts(state)) == ["a"]
