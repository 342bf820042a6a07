"""State dicts as specifications: what crosses to ranks is what is built there, on any number of them, at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from pytest_ckpt.accept import states
from pytest_ckpt.accept.states import (
    DTYPES,
    EVERY_KIND,
    OBJECTS,
    WIPED,
    DictSpec,
    ListSpec,
    Node,
    ObjectSpec,
    TensorSpec,
    TiedSpec,
    ValueSpec,
)
from pytest_ckpt.accept.strategies import state_dicts
from pytest_ckpt.model import values
from pytest_ckpt.save.digest import Digests, combine, digest_parts
from pytest_ckpt.world.context import Rank
from pytest_ckpt.world.spawned import SpawnedWorld

CPU = torch.device("cpu")
unhurried = settings(
    deadline=None, max_examples=30, derandomize=True
)  # the first call of an operation of torch takes long
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """One rank, which holds all of every tensor."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def plain(spec: DictSpec) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec))


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.items.values() if isinstance(node, DictSpec) else getattr(node, "items", ()):
        yield from nodes(child)


def digests(state: dict[str, Any]) -> Digests:
    return combine([digest_parts(state)])


def content_in_rank(rank: Rank, *, specs: list[Any], step: int) -> list[Any]:
    """Return the keys, digests and other values of each state on this rank."""
    built = [states.build(msgspec.convert(spec, DictSpec), rank.mesh, rank.device, step) for spec in specs]
    return [[[key for key, _ in values.tensors(s)], digest_parts(s), states.objects(s)] for s in built]


@unhurried
@given(spec=state_dicts())
def test_specification_is_the_same_on_the_other_side(spec: DictSpec) -> None:
    # By how it is written: a number that is none differs from itself.
    assert repr(msgspec.convert(plain(spec), DictSpec)) == repr(spec)


def test_one_of_every_kind_holds_every_dtype_and_object_and_crosses_too() -> None:
    assert msgspec.convert(plain(EVERY_KIND), DictSpec) == EVERY_KIND
    held = list(nodes(EVERY_KIND))
    assert {node.dtype for node in held if isinstance(node, TensorSpec) and node.shard is not None} == set(DTYPES)
    assert {node.kind for node in held if isinstance(node, ObjectSpec)} == set(OBJECTS)
    assert {type(node) for node in held} == {TensorSpec, ValueSpec, ObjectSpec, TiedSpec, ListSpec, DictSpec}


KINDS: dict[str, Callable[[Node], bool]] = {
    "sharded along its second dimension": lambda n: isinstance(n, TensorSpec) and n.shard == 1,
    "sharded and empty": lambda n: isinstance(n, TensorSpec) and n.shard is not None and 0 in n.shape,
    "of one rank": lambda n: isinstance(n, TensorSpec) and n.rank is not None,
    "strided": lambda n: isinstance(n, TensorSpec) and n.strided and len(n.shape) > 1 and 0 not in n.shape,
    "of three dimensions": lambda n: isinstance(n, TensorSpec) and len(n.shape) == 3 and 0 not in n.shape,
    "without dimension": lambda n: isinstance(n, TensorSpec) and n.shape == (),
    "list of tensors": lambda n: isinstance(n, ListSpec) and any(isinstance(i, TensorSpec) for i in n.items),
    "mapping in a mapping": lambda n: (
        isinstance(n, DictSpec) and any(isinstance(i, DictSpec) for i in n.items.values())
    ),
    "tied": lambda n: isinstance(n, TiedSpec),
    "object": lambda n: isinstance(n, ObjectSpec),
    "nothing": lambda n: isinstance(n, ValueSpec) and n.value is None,
    "key in other letters": lambda n: isinstance(n, DictSpec) and any(not key.isascii() for key in n.items),
    "key with a slash": lambda n: isinstance(n, DictSpec) and any("/" in key for key in n.items),
}


def test_strategy_makes_up_what_states_are_made_of() -> None:
    seen: set[str] = set()

    @settings(max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(state_dicts())
    def look(spec: DictSpec) -> None:
        held = list(nodes(spec))
        seen.update(name for name, is_kind in KINDS.items() if any(map(is_kind, held)))

    look()
    assert seen == set(KINDS)


@unhurried
@given(spec=state_dicts())
def test_no_two_entries_have_the_same_name_for_dcp(spec: DictSpec) -> None:
    """DCP joins the keys on the way with dots, and refuses two that come out the same."""

    def names(node: Node, path: str) -> Iterator[str]:
        if isinstance(node, DictSpec | ListSpec):
            items = node.items.items() if isinstance(node, DictSpec) else enumerate(node.items)
            for key, child in items:
                yield from names(child, f"{path}.{key}")
        else:
            yield path

    found = list(names(spec, ""))
    assert len(set(found)) == len(found)


@unhurried
@given(spec=state_dicts())
def test_state_is_what_its_specification_says(spec: DictSpec, mesh: DeviceMesh) -> None:
    state = states.build(spec, mesh, CPU)
    assert list(state) == sorted(state, key=list(spec.items).index)

    def check(node: Node, value: Any) -> None:
        if isinstance(node, DictSpec | ListSpec):
            assert isinstance(value, dict) == isinstance(node, DictSpec)
            children = node.items.values() if isinstance(node, DictSpec) else node.items
            own = [value[key] for key in node.items] if isinstance(node, DictSpec) else value
            for child, of_child in zip(children, own, strict=True):
                check(child, of_child)
        elif isinstance(node, TiedSpec):
            assert value is state[node.to]
        elif isinstance(node, TensorSpec):
            assert (tuple(value.shape), value.dtype) == (node.shape, getattr(torch, node.dtype))
            assert isinstance(value, DTensor) == (node.shard is not None)
            if node.shard is not None:
                assert value.placements == (Shard(node.shard),)
            if node.strided and len(node.shape) > 1 and min(node.shape) > 1:
                assert not value.is_contiguous()
        elif isinstance(node, ObjectSpec):
            assert value == OBJECTS[node.kind]()
        else:
            assert repr(value) == repr(node.value)

    check(spec, state)


@unhurried
@given(spec=state_dicts())
def test_state_is_the_same_each_time_and_another_at_another_step(spec: DictSpec, mesh: DeviceMesh) -> None:
    first, again, later = (states.build(spec, mesh, CPU, step) for step in (1, 1, 2))
    assert digests(first) == digests(again)
    assert states.objects(first) == states.objects(again)
    # Of 8 bytes and more, two draws that are equal are not to be expected.
    changed = {key for key, tensor in values.tensors(first) if tensor.nbytes >= 8 and tensor.dtype is not torch.bool}
    assert not [key for key in changed if digests(first)[key] == digests(later)[key]]


def test_tensors_of_one_state_differ_from_each_other(mesh: DeviceMesh) -> None:
    """Else a writer that mixes them up would not be noticed."""
    alike = TensorSpec(shape=(5, 3), seed=1)
    state = states.build(DictSpec({"a": alike, "b": alike, "c": ListSpec([alike, alike])}), mesh, CPU)
    assert len(set().union(*digests(state).values())) == 4


@unhurried
@given(spec=state_dicts())
def test_step_changes_the_state_in_place(spec: DictSpec, mesh: DeviceMesh) -> None:
    state = states.build(spec, mesh, CPU, 1)
    places = {key: values.local(tensor).data_ptr() for key, tensor in values.tensors(state)}
    states.set_step(spec, state, mesh, CPU, 2)
    expected = states.build(spec, mesh, CPU, 2)
    assert digests(state) == digests(expected)
    assert states.objects(state) == states.objects(expected)
    assert {key: values.local(tensor).data_ptr() for key, tensor in values.tensors(state)} == places


def test_whole_numbers_count_the_steps_and_truths_do_not(mesh: DeviceMesh) -> None:
    spec = DictSpec({"count": ValueSpec(3), "yes": ValueSpec(True), "text": ValueSpec("3")})
    assert states.build(spec, mesh, CPU, 4) == {"count": 7, "yes": True, "text": "3"}


@unhurried
@given(spec=state_dicts())
def test_nothing_is_left_of_a_state_that_was_wiped(spec: DictSpec, mesh: DeviceMesh) -> None:
    state = states.build(spec, mesh, CPU)
    names = list(states.objects(state))
    states.wipe(state)
    assert states.objects(state) == dict.fromkeys(names, repr(WIPED))
    for _, tensor in values.tensors(state):
        assert not values.local(tensor).contiguous().view(-1).view(torch.uint8).any()


def test_ranks_of_any_number_build_the_same_state(mesh: DeviceMesh) -> None:
    """Of 2 and of 5 rows three ranks have none, one or two; what one rank alone has it has in any world."""
    made_up: list[DictSpec] = []

    @settings(max_examples=30, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(state_dicts())
    def collect(spec: DictSpec) -> None:
        made_up.append(spec)

    collect()
    specs = [EVERY_KIND, *made_up]
    world = SpawnedWorld(3, timeout_s=60)
    try:
        by_rank = world.run(content_in_rank, specs=[plain(spec) for spec in specs], step=4)
    finally:
        world.close()
    for number, spec in enumerate(specs):
        state = states.build(spec, mesh, CPU, 4)
        assert combine([rank[number][1] for rank in by_rank]) == digests(state)
        for rank in by_rank:
            assert rank[number][2] == states.objects(state)
    own = [["of rank 1" in rank[0][0]] for rank in by_rank]
    assert own == [[False], [True], [False]]
