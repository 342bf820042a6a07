"""Forward passes of the geometries' families, on the parameters that FSDP has gathered in a module.

They compute what the published models compute, so that a step costs what a real one costs: matrix products, attention
and experts of the real shapes. Left out is what costs nothing or needs more than the geometry tells: dropout, scaled
rotary frequencies for long contexts, losses and biases that balance experts, DeepSeek's limit of expert groups.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from pytest_ckpt.model.geometry import GPT2, DeepSeekV3, Geometry, Llama3, Qwen3, Qwen3MoE


class Forward(Protocol):
    """The three parts of a forward pass; the root module computes the first and the last, a block the other."""

    def embed(self, root: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the residual stream (batch, sequence, dim) that enters the first block."""
        ...

    def block(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind a block."""
        ...

    def logits(self, root: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, sequence, vocab)."""
        ...


def find_forward(geometry: Geometry) -> Forward | None:
    """Return what computes `geometry`; None for a family that is not known here (`why_untrainable` tells)."""
    match geometry:
        case GPT2():
            return _GPT2(geometry)
        case DeepSeekV3():
            return _DeepSeekV3(geometry)
        case Qwen3MoE():
            return _Qwen3MoE(geometry)
        case Qwen3():
            return _Qwen3(geometry)
        case Llama3():
            return _Llama3(geometry)
    return None


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in float32, as torchtitan computes it."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class _Rotary:
    """Rotary positions: pairs of a head's elements are turned by an angle that grows with the position.

    Pairs are neighbours (`interleaved`: Llama's own code, DeepSeek's) or lie half a head apart (Qwen's).
    """

    def __init__(self, dim: int, theta: float, interleaved: bool) -> None:
        self._dim, self._theta, self._interleaved = dim, theta, interleaved
        self._cached: tuple[tuple[int, torch.device], torch.Tensor, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn `x` (..., sequence, dim), in float32."""
        cos, sin = self._table(x.shape[-2], x.device)
        wide = x.float()
        if self._interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = wide.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return turned.to(x.dtype)

    def _table(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (length, device)
        if self._cached is None or self._cached[0] != key:
            exponents = torch.arange(0, self._dim, 2, device=device, dtype=torch.float32) / self._dim
            angles = torch.outer(torch.arange(length, device=device).float(), self._theta**-exponents)
            self._cached = key, angles.cos(), angles.sin()
        return self._cached[1:]


class _Llama3:
    eps = 1e-5
    theta = 500_000.0
    interleaved = True

    def __init__(self, geometry: Llama3) -> None:
        self._geometry = geometry
        self._rotary = _Rotary(geometry.head_dim, self.theta, self.interleaved)

    def embed(self, root: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, root.get_parameter(self._geometry.embedding))

    def block(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attention(block, self._norm(block, "attention_norm", hidden))
        return hidden + self._feed_forward(block, self._norm(block, "ffn_norm", hidden))

    def logits(self, root: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(root, "norm", hidden), root.get_parameter(self._geometry.output))

    def _attention(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        g = self._geometry
        queries = _heads(_linear(block, "attention.wq", x), g.heads)
        keys = _heads(_linear(block, "attention.wk", x), g.kv_heads)
        values = _heads(_linear(block, "attention.wv", x), g.kv_heads)
        queries, keys = self._positioned(block, "q_norm", queries), self._positioned(block, "k_norm", keys)
        repeats = g.heads // g.kv_heads
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return _linear(block, "attention.wo", _joined(attended))

    def _positioned(self, block: nn.Module, norm: str, heads: torch.Tensor) -> torch.Tensor:
        return self._rotary(heads)

    def _feed_forward(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return _swiglu(block, "feed_forward", x)

    def _norm(self, module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(module, name, x, self.eps)


class _Qwen3(_Llama3):
    eps = 1e-6
    theta = 1_000_000.0
    interleaved = False

    def _positioned(self, block: nn.Module, norm: str, heads: torch.Tensor) -> torch.Tensor:
        return self._rotary(self._norm(block, f"attention.{norm}", heads))


class _Qwen3MoE(_Qwen3):
    def __init__(self, geometry: Qwen3MoE) -> None:
        super().__init__(geometry)
        self._top_k = geometry.top_k

    def _feed_forward(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores = _linear(block, "moe.router.gate", x).float().softmax(dim=-1)
        return _routed(block, x, scores, self._top_k)


class _DeepSeekV3:
    eps = 1e-6
    theta = 10_000.0
    route_scale = 2.5

    def __init__(self, geometry: DeepSeekV3) -> None:
        self._geometry = geometry
        self._rotary = _Rotary(geometry.rope_dim, self.theta, interleaved=True)

    def embed(self, root: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, root.get_parameter(self._geometry.embedding))

    def block(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._attention(block, _rms_norm(block, "attention_norm", hidden, self.eps))
        x = _rms_norm(block, "ffn_norm", hidden, self.eps)
        return hidden + (self._experts(block, x) if hasattr(block, "moe") else _swiglu(block, "feed_forward", x))

    def logits(self, root: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(_rms_norm(root, "norm", hidden, self.eps), root.get_parameter(self._geometry.output))

    def _attention(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        g = self._geometry
        latent = _rms_norm(block, "attention.q_norm", _linear(block, "attention.wq_a", x), self.eps)
        plain, turned = _parts(_heads(_linear(block, "attention.wq_b", latent), g.heads), g.nope_dim, g.rope_dim)
        queries = torch.cat((plain, self._rotary(turned)), dim=-1)
        latent, turned = _parts(_linear(block, "attention.wkv_a", x), g.kv_lora, g.rope_dim)
        latent = _rms_norm(block, "attention.kv_norm", latent, self.eps)
        plain, values = _parts(_heads(_linear(block, "attention.wkv_b", latent), g.heads), g.nope_dim, g.v_dim)
        # All heads share the part of the key that carries the position.
        shared = self._rotary(turned.unsqueeze(1)).expand(-1, g.heads, -1, -1)
        keys = torch.cat((plain, shared), dim=-1)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return _linear(block, "attention.wo", _joined(attended))

    def _experts(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores = _linear(block, "moe.router.gate", x).float().sigmoid()
        routed = _routed(block, x, scores, self._geometry.top_k, self.route_scale)
        return routed + _swiglu(block, "moe.shared_experts", x)


class _GPT2:
    eps = 1e-5

    def __init__(self, geometry: GPT2) -> None:
        self._geometry = geometry

    def embed(self, root: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        positions = root.get_parameter("wpe.weight")[: tokens.shape[1]]
        return F.embedding(tokens, root.get_parameter(self._geometry.embedding)) + positions

    def block(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        joined = self._linear(block, "attn.c_attn", self._norm(block, "ln_1", hidden))
        queries, keys, values = (_heads(part, self._geometry.heads) for part in joined.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self._linear(block, "attn.c_proj", _joined(attended))
        inner = F.gelu(self._linear(block, "mlp.c_fc", self._norm(block, "ln_2", hidden)), approximate="tanh")
        return hidden + self._linear(block, "mlp.c_proj", inner)

    def logits(self, root: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._norm(root, "ln_f", hidden), root.get_parameter(self._geometry.output))

    def _norm(self, module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = module.get_parameter(f"{name}.weight"), module.get_parameter(f"{name}.bias")
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    def _linear(self, module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, module.get_parameter(f"{name}.weight").t(), module.get_parameter(f"{name}.bias"))


def _linear(module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.get_parameter(f"{name}.weight"))


def _rms_norm(module: nn.Module, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    weight = module.get_parameter(f"{name}.weight")
    return F.rms_norm(x, weight.shape, weight, eps)


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _parts(x: torch.Tensor, *widths: int) -> tuple[torch.Tensor, ...]:
    return torch.split(x, list(widths), dim=-1)


def _joined(heads: torch.Tensor) -> torch.Tensor:
    return heads.transpose(1, 2).flatten(-2)


def _swiglu(module: nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = _linear(module, f"{name}.w1", x), _linear(module, f"{name}.w3", x)
    return _linear(module, f"{name}.w2", F.silu(gate) * up)


def _routed(block: nn.Module, x: torch.Tensor, scores: torch.Tensor, top_k: int, scale: float = 1.0) -> torch.Tensor:
    """Return what each token's `top_k` experts make of it, weighted by their share of the `scores`."""
    tokens, flat = x.flatten(0, 1), scores.flatten(0, 1)
    best, chosen = flat.topk(top_k, dim=-1)
    shares = scale * best / best.sum(dim=-1, keepdim=True)
    # Sorted by expert, so that each sees its tokens in one matrix.
    order = chosen.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(chosen.flatten(), minlength=flat.shape[-1]).tolist()
    rows = order // top_k
    # unbind, not an index for each: the gradient of an index is as large as all experts.
    experts = zip(
        torch.split(tokens[rows], counts),
        block.get_parameter("moe.experts.w13").unbind(),
        block.get_parameter("moe.experts.w2").unbind(),
        strict=True,
    )
    made = torch.cat([_expert(part, w13, w2) for part, w13, w2 in experts if len(part)])
    weighted = made * shares.flatten()[order].unsqueeze(-1).to(made.dtype)
    return torch.zeros_like(tokens).index_add(0, rows, weighted).view_as(x)


def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)
