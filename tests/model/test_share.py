"""A share of a bigger job, against what FSDP itself would give its ranks."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model import values
from pytest_ckpt.model.geometry import GEOMETRIES, Geometry
from pytest_ckpt.model.recipe import RECIPES, Recipe, state_bytes
from pytest_ckpt.model.share import Share, chunk, parse_share, rank_bytes, share_bytes
from pytest_ckpt.model.share_state import ShareState, make_share

from .checks import MOE, TIED, TINY

CPU = torch.device("cpu")
ADAMW, MIXED = RECIPES["fp32-adamw"], RECIPES["mixed-adamw"]


def parts(state: ShareState) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in values.tensors(state.state_dict) if tensor.ndim}


@given(length=st.integers(1, 300), ranks=st.integers(1, 80))
def test_chunks_are_those_of_torch_and_the_rest_is_empty(length: int, ranks: int) -> None:
    cut = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        start, rows = chunk(length, ranks, rank)
        own = cut[rank].tolist() if rank < len(cut) else []
        assert list(range(start, start + rows)) == own


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("geometry", [TINY, TIED, MOE, GEOMETRIES["llama3-8b"]], ids=lambda g: g.name)
@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_bytes_of_all_ranks_are_those_of_the_state(geometry: Geometry, recipe: Recipe, ranks: int) -> None:
    each = [rank_bytes(geometry, recipe, ranks, rank) for rank in range(ranks)]
    assert sum(each) == state_bytes(geometry, recipe)
    assert each == sorted(each, reverse=True), "the first ranks are the fullest"
    if ranks > 1:
        assert share_bytes(geometry, recipe, Share(2, ranks)) == sum(each[:2])


def test_two_of_64_ranks_of_llama3_8b_hold_what_was_counted_by_hand() -> None:
    # Vocabulary 128256, width 4096, 32 layers, all of which 64 divides: each rank has a 64th of 12 bytes a parameter.
    assert rank_bytes(GEOMETRIES["llama3-8b"], ADAMW, 64, 0) == 8_030_261_248 * 12 // 64 == 1_505_673_984


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", r"'2' \(from --x\) is no share of a job: write K/N, as in 2/64"),
        ("0/4", "write K/N"),
        ("1/2/3", "write K/N"),
        ("4/4", r"'4/4' \(from --x\) is no part of a job: .*--ckpt-ranks=4"),
        ("5/4", "K must be less than N"),
    ],
)
def test_what_is_no_share_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        parse_share(text, "--x")


def test_share_is_read_as_it_is_written() -> None:
    assert (parse_share(" 2 / 64 ", "--x"), parse_share("", "--x")) == (Share(2, 64), None)
    assert str(Share(2, 64)) == "2/64"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("geometry", [TIED, MOE], ids=lambda geometry: geometry.name)
def test_state_holds_the_bytes_of_its_rank_and_counts_those_of_the_share(geometry: Geometry, recipe: Recipe) -> None:
    share = Share(3, 4)
    states = [make_share(geometry, recipe, share, rank, CPU) for rank in range(3)]
    for rank, state in enumerate(states):
        held = sum(tensor.nbytes for tensor in parts(state).values())
        assert held == rank_bytes(geometry, recipe, 4, rank)
        assert state.logical_bytes == share_bytes(geometry, recipe, share)
        assert all(tensor.isfinite().all() for tensor in parts(state).values())
        for name, kept in state.state_dict["app"].get("optim", {}).get("state", {}).items():
            if "master" in kept:
                assert torch.equal(state.state_dict["app"]["model"][name], kept["master"].bfloat16())
    assert sum(state.wholes == states[0].wholes for state in states) == 3


def test_values_are_as_incompressible_as_those_of_a_whole_state_and_no_two_ranks_hold_the_same() -> None:
    one, other = (parts(make_share(TINY, ADAMW, Share(2, 4), rank, CPU)) for rank in (0, 1))
    for key, tensor in one.items():
        assert not torch.equal(tensor, other[key]), key
        raw = tensor.numpy().tobytes()
        if len(raw) >= 1 << 14:
            assert len(zlib.compress(raw)) > 0.93 * len(raw), key


def test_advancing_changes_every_chunk_and_tied_weights_stay_one_memory() -> None:
    state = make_share(TIED, MIXED, Share(1, 4), 0, CPU)
    model = state.state_dict["app"]["model"]
    assert model["output.weight"] is model["tok_embeddings.weight"]
    before = {key: tensor.clone() for key, tensor in parts(state).items()}
    state.advance()
    for key, tensor in parts(state).items():
        assert tensor.numel() == 0 or not torch.equal(tensor, before[key]), key
