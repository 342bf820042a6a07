"""Geometries: every parameter of a model by name and shape, as pure data.

Llama 3, Qwen3 and DeepSeek-V3 carry the names that torchtitan gives them, with the experts of a layer stacked
and their gate and up projections fused; GPT-2 carries those of transformers, without the prefix
`transformer.`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

from pytest_ckpt.errors import unknown_name


@dataclass(frozen=True)
class Parameter:
    """One parameter: its full name in the model, and its global shape in elements."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Geometry:
    """Shapes of one decoder-only model; a family says by `parameters` what its layers hold.

    `layers` counts blocks, `dim` is the width of the residual stream and `vocab` the rows of the embedding.
    With `tie` the output projection is the embedding, under a second name.
    """

    stack: ClassVar[str] = "layers"
    embedding: ClassVar[str] = "tok_embeddings.weight"
    output: ClassVar[str] = "output.weight"

    name: str
    layers: int
    dim: int
    vocab: int
    tie: bool

    def parameters(self) -> Iterator[Parameter]:
        """Yield each parameter once, in the order of the modules; a tied one under its first name only."""
        yield Parameter(self.embedding, (self.vocab, self.dim))
        for layer in range(self.layers):
            for name, shape in self._block(layer):
                yield Parameter(f"{self.stack}.{layer}.{name}", shape)
        yield Parameter("norm.weight", (self.dim,))
        if not self.tie:
            yield Parameter(self.output, (self.vocab, self.dim))

    @property
    def tied(self) -> Mapping[str, str]:
        """Second names that `state_dict()` gives to a parameter, each with the first name of the same one."""
        return {self.output: self.embedding} if self.tie else {}

    @cached_property
    def parameter_count(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(p.numel for p in self.parameters())

    @cached_property
    def tensor_count(self) -> int:
        """Number of parameters, each counted once."""
        return sum(1 for _ in self.parameters())

    @cached_property
    def tied_count(self) -> int:
        """Elements that the second names of tied parameters repeat."""
        numel = {p.name: p.numel for p in self.parameters()} if self.tied else {}
        return sum(numel[real] for real in self.tied.values())

    def block_of(self, name: str) -> str | None:
        """Return the block that FSDP shards as one (`layers.3`), or None for what belongs to the root."""
        stack, _, rest = name.partition(".")
        return f"{stack}.{rest.partition('.')[0]}" if stack == self.stack else None

    def _block(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        raise NotImplementedError


@dataclass(frozen=True)
class Llama3(Geometry):
    """Grouped-query attention and a SwiGLU feed-forward of `ffn` hidden units, without biases."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    def _block(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._attention()
        yield from self._feed_forward(layer)
        yield "attention_norm.weight", (self.dim,)
        yield "ffn_norm.weight", (self.dim,)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attention.wq.weight", (queries, self.dim)
        yield "attention.wk.weight", (keys, self.dim)
        yield "attention.wv.weight", (keys, self.dim)
        yield "attention.wo.weight", (self.dim, queries)

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        return _swiglu("feed_forward", self.dim, self.ffn)


@dataclass(frozen=True)
class Qwen3(Llama3):
    """Llama's block with normalised queries and keys."""

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "attention.q_norm.weight", (self.head_dim,)
        yield "attention.k_norm.weight", (self.head_dim,)
        yield from super()._attention()


@dataclass(frozen=True)
class Qwen3MoE(Qwen3):
    """Qwen3 with `experts` feed-forwards of `ffn` hidden units a layer; a token uses `top_k` of them."""

    experts: int
    top_k: int

    def _feed_forward(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        return _routed(self.dim, self.ffn, self.experts)


@dataclass(frozen=True)
class DeepSeekV3(Geometry):
    """Latent attention (MLA); the first `dense_layers` have a SwiGLU of `ffn` units, the others experts.

    Each expert has `expert_ffn` units; `shared` experts see every token beside the `top_k` routed ones. The
    modules for the prediction of several tokens are left out.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_layers: int
    ffn: int
    expert_ffn: int
    experts: int
    shared: int
    top_k: int

    def _block(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "attention.wq_a.weight", (self.q_lora, self.dim)
        yield "attention.q_norm.weight", (self.q_lora,)
        yield "attention.wq_b.weight", (self.heads * (self.nope_dim + self.rope_dim), self.q_lora)
        yield "attention.wkv_a.weight", (self.kv_lora + self.rope_dim, self.dim)
        yield "attention.kv_norm.weight", (self.kv_lora,)
        yield "attention.wkv_b.weight", (self.heads * (self.nope_dim + self.v_dim), self.kv_lora)
        yield "attention.wo.weight", (self.dim, self.heads * self.v_dim)
        yield "attention_norm.weight", (self.dim,)
        yield "ffn_norm.weight", (self.dim,)
        if layer < self.dense_layers:
            yield from _swiglu("feed_forward", self.dim, self.ffn)
        else:
            yield from _routed(self.dim, self.expert_ffn, self.experts)
            yield from _swiglu("moe.shared_experts", self.dim, self.shared * self.expert_ffn)


@dataclass(frozen=True)
class GPT2(Geometry):
    """Multi-head attention, `context` learned positions, biases; linear weights are Conv1D's (in, out)."""

    stack: ClassVar[str] = "h"
    embedding: ClassVar[str] = "wte.weight"
    output: ClassVar[str] = "lm_head.weight"

    heads: int
    context: int

    def parameters(self) -> Iterator[Parameter]:
        """Yield each parameter once, in the order of the modules; a tied one under its first name only."""
        yield Parameter(self.embedding, (self.vocab, self.dim))
        yield Parameter("wpe.weight", (self.context, self.dim))
        for layer in range(self.layers):
            for name, shape in self._block(layer):
                yield Parameter(f"{self.stack}.{layer}.{name}", shape)
        yield Parameter("ln_f.weight", (self.dim,))
        yield Parameter("ln_f.bias", (self.dim,))
        if not self.tie:
            yield Parameter(self.output, (self.vocab, self.dim))

    def _block(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        d = self.dim
        for name, shape in (
            ("ln_1", (d,)),
            ("attn.c_attn", (d, 3 * d)),
            ("attn.c_proj", (d, d)),
            ("ln_2", (d,)),
            ("mlp.c_fc", (d, 4 * d)),
            ("mlp.c_proj", (4 * d, d)),
        ):
            yield f"{name}.weight", shape
            yield f"{name}.bias", shape[-1:]


def _swiglu(prefix: str, dim: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.w1.weight", (hidden, dim)
    yield f"{prefix}.w2.weight", (dim, hidden)
    yield f"{prefix}.w3.weight", (hidden, dim)


def _routed(dim: int, hidden: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "moe.experts.w13", (experts, 2 * hidden, dim)
    yield "moe.experts.w2", (experts, dim, hidden)
    yield "moe.router.gate.weight", (experts, dim)


def _gpt2(name: str, layers: int, dim: int, heads: int) -> GPT2:
    return GPT2(name, layers, dim, vocab=50257, tie=True, heads=heads, context=1024)


# Columns: name, layers, dim, vocab, tied, heads, kv heads, head dim, ffn; then experts, top-k.
_ALL: tuple[Geometry, ...] = (
    _gpt2("gpt2", 12, 768, 12),
    _gpt2("gpt2-medium", 24, 1024, 16),
    _gpt2("gpt2-large", 36, 1280, 20),
    _gpt2("gpt2-xl", 48, 1600, 25),
    Llama3("llama3-tiny", 2, 128, 2048, False, 4, 2, 32, 384),
    Llama3("llama3-debug", 5, 512, 8192, False, 8, 4, 64, 1664),
    Llama3("llama3.2-1b", 16, 2048, 128256, True, 32, 8, 64, 8192),
    Llama3("llama3.2-3b", 28, 3072, 128256, True, 24, 8, 128, 8192),
    Llama3("llama3-8b", 32, 4096, 128256, False, 32, 8, 128, 14336),
    Llama3("llama3-70b", 80, 8192, 128256, False, 64, 8, 128, 28672),
    Llama3("llama3-405b", 126, 16384, 128256, False, 128, 8, 128, 53248),
    Llama3("llama2-7b", 32, 4096, 32000, False, 32, 32, 128, 11008),
    Qwen3("qwen3-0.6b", 28, 1024, 151936, True, 16, 8, 128, 3072),
    Qwen3("qwen3-1.7b", 28, 2048, 151936, True, 16, 8, 128, 6144),
    Qwen3("qwen3-4b", 36, 2560, 151936, True, 32, 8, 128, 9728),
    Qwen3("qwen3-8b", 36, 4096, 151936, False, 32, 8, 128, 12288),
    Qwen3("qwen3-14b", 40, 5120, 151936, False, 40, 8, 128, 17408),
    Qwen3("qwen3-32b", 64, 5120, 151936, False, 64, 8, 128, 25600),
    Qwen3MoE("moe-debug", 3, 256, 2048, False, 4, 2, 64, 256, 8, 2),
    Qwen3MoE("qwen3-30b-a3b", 48, 2048, 151936, False, 32, 4, 128, 768, 128, 8),
    Qwen3MoE("qwen3-235b-a22b", 94, 4096, 151936, False, 64, 4, 128, 1536, 128, 8),
    DeepSeekV3(
        name="deepseek-v3",
        layers=61,
        dim=7168,
        vocab=129280,
        tie=False,
        heads=128,
        q_lora=1536,
        kv_lora=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_layers=3,
        ffn=18432,
        expert_ffn=2048,
        experts=256,
        shared=1,
        top_k=8,
    ),
)

GEOMETRIES: Mapping[str, Geometry] = MappingProxyType({g.name: g for g in _ALL})


def find_geometry(name: str, source: str) -> Geometry:
    """Return the geometry called `name`; `SettingError` naming `source` where there is none."""
    try:
        return GEOMETRIES[name]
    except KeyError:
        raise unknown_name("model", name, GEOMETRIES, source) from None
