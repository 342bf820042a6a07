"""Hypothesis strategies for whole state dicts, as specifications that ranks build; for tests of your own too.

    from hypothesis import given
    from pytest_ckpt.accept.strategies import state_dicts

    @given(state_dicts())
    def test_my_writer(spec): ...      # in a rank: pytest_ckpt.accept.states.build(spec, mesh, device)

An example is a few words, not tensors: it crosses to live ranks, and Hypothesis shrinks it there.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pytest_ckpt.accept.states import (
    DTYPES,
    OBJECTS,
    DictSpec,
    ListSpec,
    Node,
    ObjectSpec,
    TensorSpec,
    TiedSpec,
    ValueSpec,
)

_SURROGATES: Any = ("Cs",)
"""Which UTF-8 cannot write."""
MOST_ELEMENTS = 7
"""Along one dimension: enough for uneven and empty shards on up to six ranks."""


def names() -> st.SearchStrategy[str]:
    """Keys: parameter-like, of any letters, with blanks and slashes, never empty.

    Without dots: DCP joins the keys of nested mappings with dots, and refuses two that come out the same.
    """
    letters = st.characters(exclude_characters=".", exclude_categories=_SURROGATES)
    return st.one_of(
        st.sampled_from(["weight", "bias", "layers", "0", "exp_avg", "größe", "a/b"]),
        st.text(letters, min_size=1, max_size=8),
    )


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> TensorSpec:
    """Tensors of up to three dimensions: replicated, sharded along any of them, strided, or of one rank alone."""
    shape = tuple(draw(st.lists(st.integers(0, MOST_ELEMENTS), max_size=3)))
    kind = draw(st.sampled_from(["replicated", "sharded", "strided", "of one rank"]))
    return TensorSpec(
        shape=shape,
        dtype=draw(st.sampled_from(dtypes)),
        shard=draw(st.integers(0, len(shape) - 1)) if kind == "sharded" and shape else None,
        rank=draw(st.integers(0, 3)) if kind == "of one rank" else None,
        strided=kind == "strided",
        seed=draw(st.integers(0, 2**16)),
    )


def values() -> st.SearchStrategy[Node]:
    """What is no tensor: numbers, text, nothing, and objects that pickle stores."""
    plain: st.SearchStrategy[Any] = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**62), 2**62),
        st.floats(),
        st.text(st.characters(exclude_categories=_SURROGATES), max_size=10),
    )
    return st.one_of(plain.map(ValueSpec), st.sampled_from(sorted(OBJECTS)).map(ObjectSpec))


@st.composite
def state_dicts(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, max_entries: int = 5) -> DictSpec:
    """Whole state dicts: nested mappings and lists of tensors and values, some of the tensors tied."""
    # A tensor of one rank alone stands in mappings only: a list of another length on each rank is no state to load.
    shared = tensors(dtypes).map(
        lambda spec: spec if spec.rank is None else TensorSpec(shape=spec.shape, seed=spec.seed)
    )
    leaves: st.SearchStrategy[Node] = st.one_of(tensors(dtypes), values())
    nested: st.SearchStrategy[Any] = st.recursive(
        leaves,
        lambda child: st.one_of(
            st.dictionaries(names(), child, min_size=1, max_size=3).map(DictSpec),
            st.lists(st.one_of(shared, values()), min_size=1, max_size=3).map(ListSpec),
        ),
        max_leaves=6,
    )
    entries: dict[str, Node] = draw(st.dictionaries(names(), nested, min_size=1, max_size=max_entries))
    tied: list[str] = [key for key, node in entries.items() if isinstance(node, TensorSpec) and node.rank is None]
    if draw(st.booleans()) and tied:
        name = draw(names().filter(lambda name: name not in entries))
        entries = {**entries, name: TiedSpec(draw(st.sampled_from(tied)))}
    return DictSpec(entries)
