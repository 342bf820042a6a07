"""What a training step takes, from the geometry alone: whether it can run, its FLOPs and its memory. Needs no torch."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import GPT2, DeepSeekV3, Geometry, Llama3, Qwen3, Qwen3MoE
from pytest_ckpt.model.recipe import Recipe

_TRAINABLE = (GPT2, Llama3, Qwen3, Qwen3MoE, DeepSeekV3)
_TOKENS = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
_FLOAT32 = 4

# Dense bfloat16 FLOP/s as NVIDIA's data sheets give them (half of those "with sparsity"); what torchtitan divides by
# for its MFU (torchtitan/tools/utils.py, get_peak_flops). The first name that is found in the device's decides.
_PEAK_FLOPS = (
    (r"H100 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H100", 989e12),
    (r"H200 NVL", 836e12),
    (r"H200", 989e12),
    (r"GH200", 989e12),
    (r"GB200", 2.5e15),
    (r"B200", 2.25e15),
    (r"A100", 312e12),
    (r"A30", 165e12),
    (r"L40S", 362e12),
    (r"L4", 121e12),
)


class TokensPerRank(NamedTuple):
    """Tokens that one rank sees in a step: sequences, and the tokens of each."""

    batch: int
    sequence: int

    @property
    def total(self) -> int:
        """Tokens of one rank in one step."""
        return self.batch * self.sequence

    def __str__(self) -> str:
        return f"{self.batch}x{self.sequence}"


def parse_tokens(text: str, source: str) -> TokensPerRank:
    """Return what BATCHxSEQUENCE names (`1x128`); `SettingError` naming `source` where it names nothing."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise SettingError(f"{text!r} (from {source}) is no size of a training step: write BATCHxSEQUENCE, as in 1x128")
    return TokensPerRank(int(match[1]), int(match[2]))


def why_untrainable(geometry: Geometry, tokens: TokensPerRank) -> str | None:
    """Return why no training step of `tokens` can be run on `geometry`; None where one can."""
    if type(geometry) not in _TRAINABLE:
        return f"model {geometry.name} is of a family ({type(geometry).__name__}) whose forward pass is not known here"
    if isinstance(geometry, GPT2) and tokens.sequence > geometry.context:
        return f"model {geometry.name} has {geometry.context} positions, and a sequence of {tokens} is longer"
    return None


def flops_per_token(geometry: Geometry, sequence: int) -> int:
    """Return the FLOPs of forward and backward for one token, as MFU counts them.

    6 for each weight that a token is multiplied with (PaLM, appendix B: 6N), experts only where it is routed;
    embeddings are looked up, not multiplied, unless one is the output too. And 6 x layers x heads x sequence x (query
    + value width) for attention, the causal half not taken off: torchtitan's 6 N + 12 l h q t, for heads of any shape.
    """
    looked_up = {"wpe.weight"} if geometry.tie else {"wpe.weight", geometry.embedding}
    weights = sum(_used(geometry, p.name, p.numel) for p in geometry.parameters() if p.name not in looked_up)
    heads, widths = _attention(geometry)
    return 6 * weights + 6 * geometry.layers * heads * widths * sequence


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of an NVIDIA GPU, by the name CUDA gives it; None where it is not known."""
    for name, flops in _PEAK_FLOPS:
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return flops
    return None


def training_bytes(
    geometry: Geometry, recipe: Recipe, tokens: TokensPerRank, ranks: int, device: str = "cpu", replicas: int = 1
) -> int:
    """Return about how many bytes steps take beyond the state, over all ranks, where the state lives.

    Sharded: gradients of the weights' type, and the optimizer that trains a state saved without one. In each rank:
    what FSDP gathers (the root, which stays gathered, and two blocks), its gradients and the buffers of the
    collectives, gloo's own too; activations of all layers, as none is recomputed; logits with their gradient;
    temporaries of AdamW. Each of `replicas` has all that is sharded, over its part of the ranks. An estimate: gloo
    ranks were seen to take from 20 % less to 20 % more.
    """
    groups: dict[str | None, int] = defaultdict(int)
    for parameter in geometry.parameters():
        groups[geometry.block_of(parameter.name)] += parameter.numel
    root = groups.pop(None)
    block = max(groups.values())
    largest = max(p.numel for p in geometry.parameters())

    sharded = geometry.parameter_count * recipe.weight_bytes
    if not recipe.optimizer_tensors:
        sharded += geometry.parameter_count * 3 * _FLOAT32
    if device == "cuda":  # AdamW steps all tensors at once there, with temporaries as large as all of them
        sharded += geometry.parameter_count * _FLOAT32
        temporaries = 0
    else:
        temporaries = 3 * math.ceil(largest * replicas / ranks) * _FLOAT32
    gathered = recipe.weight_bytes * (2 * root + 4 * block + 5 * max(root, block))
    activations = recipe.weight_bytes * tokens.total * _activations_per_token(geometry)
    logits = tokens.total * geometry.vocab * (2 * recipe.weight_bytes + 2 * _FLOAT32)
    return replicas * sharded + ranks * (gathered + activations + logits + temporaries)


def _used(geometry: Geometry, name: str, numel: int) -> int:
    if ".moe.experts." in name and isinstance(geometry, Qwen3MoE | DeepSeekV3):
        return numel * geometry.top_k // geometry.experts
    return numel


def _attention(geometry: Geometry) -> tuple[int, int]:
    """Return the heads, and how wide query and value of one are together."""
    if isinstance(geometry, DeepSeekV3):
        return geometry.heads, geometry.nope_dim + geometry.rope_dim + geometry.v_dim
    if isinstance(geometry, Llama3):
        return geometry.heads, 2 * geometry.head_dim
    assert isinstance(geometry, GPT2)
    return geometry.heads, 2 * geometry.dim // geometry.heads


def _activations_per_token(geometry: Geometry) -> int:
    """Elements that all layers keep for the backward: residuals and norms, attention's inputs and output, the ffn's."""
    heads, widths = _attention(geometry)
    hidden = 4 * geometry.dim
    if isinstance(geometry, Qwen3MoE):
        hidden = geometry.top_k * (geometry.ffn + geometry.dim)
    elif isinstance(geometry, DeepSeekV3):
        hidden = max(
            geometry.ffn,
            geometry.top_k * (geometry.expert_ffn + geometry.dim) + geometry.shared * geometry.expert_ffn,
        )
    elif isinstance(geometry, Llama3):
        hidden = geometry.ffn
    return geometry.layers * (6 * geometry.dim + 4 * heads * widths + 5 * hidden)
