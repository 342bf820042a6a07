"""The forward passes against references written apart from them, and what a step takes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.budget import (
    TokensPerRank,
    flops_per_token,
    parse_tokens,
    peak_flops,
    why_untrainable,
)
from pytest_ckpt.model.forward import next_token_loss
from pytest_ckpt.model.geometry import GEOMETRIES, GPT2, DeepSeekV3, Geometry, Llama3, Qwen3, Qwen3MoE
from pytest_ckpt.model.module import build_module

LLAMA = Llama3("llama", 2, 24, 50, False, 6, 2, 4, 40)
TIED = Llama3("tied", 2, 24, 50, True, 4, 4, 6, 40)
QWEN = Qwen3("qwen", 2, 24, 50, False, 4, 2, 8, 40)
MOE = Qwen3MoE("moe", 2, 24, 50, False, 4, 2, 8, 16, 6, 2)
DEEPSEEK = DeepSeekV3("deepseek", 3, 24, 50, False, 3, 16, 8, 6, 4, 5, 1, 40, 12, 6, 2, 2)
GPT = GPT2("gpt", 2, 24, 50, True, 4, 16)
FAMILIES = {g.name: g for g in (LLAMA, TIED, QWEN, MOE, DEEPSEEK, GPT)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def initialized(geometry: Geometry, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = build_module(geometry, "cpu", dtype)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name or "ln_" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=0.3)
    return module


def tokens_of(geometry: Geometry, batch: int = 2, sequence: int = 9) -> Tensor:
    return torch.randint(geometry.vocab, (batch, sequence), generator=torch.Generator().manual_seed(1))


# References: one sequence, one head and one position at a time, in float64


@dataclass
class Reference:
    weights: dict[str, Tensor]
    eps: float
    theta: float
    neighbours: bool

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name + ".weight"]

    def turned(self, x: Tensor) -> Tensor:
        """x: (positions, dim), as complex numbers that are turned."""
        positions, dim = x.shape
        out = torch.empty_like(x)
        for position in range(positions):
            for pair in range(dim // 2):
                first, second = (2 * pair, 2 * pair + 1) if self.neighbours else (pair, pair + dim // 2)
                angle = position / self.theta ** (2 * pair / dim)
                number = complex(x[position, first], x[position, second]) * complex(math.cos(angle), math.sin(angle))
                out[position, first], out[position, second] = number.real, number.imag
        return out

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = []
        for position in range(len(query)):
            scores = key[: position + 1] @ query[position] / math.sqrt(query.shape[-1])
            share = scores.exp() / scores.exp().sum()
            rows.append(share @ value[: position + 1])
        return torch.stack(rows)

    def swiglu(self, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        gate = x @ w1.T
        return (gate / (1 + (-gate).exp()) * (x @ w3.T)) @ w2.T


def reference_logits(geometry: Llama3, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    qwen = isinstance(geometry, Qwen3)
    ref = Reference(weights, 1e-6 if qwen else 1e-5, 1e6 if qwen else 5e5, neighbours=not qwen)
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(geometry.layers):
        at = f"layers.{layer}."
        normed = ref.norm(at + "attention_norm", x)
        heads = []
        for head in range(geometry.heads):
            group = head // (geometry.heads // geometry.kv_heads)
            of_head = slice(head * geometry.head_dim, (head + 1) * geometry.head_dim)
            of_group = slice(group * geometry.head_dim, (group + 1) * geometry.head_dim)
            query = normed @ weights[at + "attention.wq.weight"][of_head].T
            key = normed @ weights[at + "attention.wk.weight"][of_group].T
            value = normed @ weights[at + "attention.wv.weight"][of_group].T
            if qwen:
                query, key = ref.norm(at + "attention.q_norm", query), ref.norm(at + "attention.k_norm", key)
            heads.append(ref.attended(ref.turned(query), ref.turned(key), value))
        x = x + torch.cat(heads, -1) @ weights[at + "attention.wo.weight"].T
        normed = ref.norm(at + "ffn_norm", x)
        if isinstance(geometry, Qwen3MoE):
            x = x + torch.stack([_expert_mixture(ref, geometry, at, token) for token in normed])
        else:
            x = x + ref.swiglu(normed, *(weights[f"{at}feed_forward.w{n}.weight"] for n in (1, 2, 3)))
    return ref.norm("norm", x) @ weights["output.weight"].T


def _expert_mixture(ref: Reference, geometry: Qwen3MoE, at: str, token: Tensor) -> Tensor:
    share = (ref.weights[at + "moe.router.gate.weight"] @ token).exp()
    best = sorted(range(geometry.experts), key=lambda e: float(share[e]), reverse=True)[: geometry.top_k]
    total = torch.zeros_like(token)
    for expert in best:
        w13, w2 = ref.weights[at + "moe.experts.w13"][expert], ref.weights[at + "moe.experts.w2"][expert]
        made = ref.swiglu(token, w13[: geometry.ffn], w2, w13[geometry.ffn :])
        total += share[expert] / sum(share[e] for e in best) * made
    return total


@pytest.mark.parametrize("geometry", [LLAMA, TIED, QWEN, MOE], ids=lambda g: g.name)
def test_logits_are_those_of_a_reference_written_one_head_and_position_at_a_time(geometry: Llama3) -> None:
    module, tokens = initialized(geometry), tokens_of(geometry)
    weights = {name: weight.detach().double() for name, weight in module.state_dict().items()}
    logits = module(tokens)
    assert logits.shape == (*tokens.shape, geometry.vocab)
    for row, sequence in zip(logits, tokens, strict=True):
        torch.testing.assert_close(row.double(), reference_logits(geometry, weights, sequence), rtol=1e-4, atol=1e-3)


def test_gpt2_logits_are_those_of_torchs_own_transformer_layers() -> None:
    module, tokens = initialized(GPT), tokens_of(GPT)
    weights = module.state_dict()
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: tokens.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    for layer in range(GPT.layers):
        theirs = nn.TransformerEncoderLayer(
            GPT.dim,
            GPT.heads,
            4 * GPT.dim,
            dropout=0,
            activation=lambda t: F.gelu(t, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        at = f"h.{layer}."
        theirs.load_state_dict(
            {
                "self_attn.in_proj_weight": weights[at + "attn.c_attn.weight"].T,
                "self_attn.in_proj_bias": weights[at + "attn.c_attn.bias"],
                "self_attn.out_proj.weight": weights[at + "attn.c_proj.weight"].T,
                "self_attn.out_proj.bias": weights[at + "attn.c_proj.bias"],
                "linear1.weight": weights[at + "mlp.c_fc.weight"].T,
                "linear1.bias": weights[at + "mlp.c_fc.bias"],
                "linear2.weight": weights[at + "mlp.c_proj.weight"].T,
                "linear2.bias": weights[at + "mlp.c_proj.bias"],
                **{f"norm{n}.{p}": weights[f"{at}ln_{n}.{p}"] for n in (1, 2) for p in ("weight", "bias")},
            }
        )
        x = theirs(x, mask, is_causal=True)
    x = F.layer_norm(x, (GPT.dim,), weights["ln_f.weight"], weights["ln_f.bias"])
    torch.testing.assert_close(module(tokens), x @ weights["lm_head.weight"].T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("geometry", FAMILIES.values(), ids=FAMILIES)
def test_a_logit_depends_on_every_earlier_token_and_on_no_later_one(geometry: Geometry) -> None:
    module, tokens = initialized(geometry), tokens_of(geometry, batch=1)
    before = module(tokens)
    for changed in (0, 4):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % geometry.vocab
        same = [torch.allclose(a, b, atol=1e-5) for a, b in zip(before[0], module(other)[0], strict=True)]
        assert same == [True] * changed + [False] * (tokens.shape[1] - changed)


@pytest.mark.parametrize("geometry", FAMILIES.values(), ids=FAMILIES)
def test_the_order_of_earlier_tokens_matters(geometry: Geometry) -> None:
    module, tokens = initialized(geometry), tokens_of(geometry, batch=1)
    swapped = tokens[:, [1, 0, *range(2, tokens.shape[1])]]
    assert not torch.allclose(module(tokens)[0, -1], module(swapped)[0, -1], atol=1e-4)


@pytest.mark.parametrize("geometry", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_reach_every_parameter(geometry: Geometry, dtype: torch.dtype) -> None:
    module, tokens = initialized(geometry, dtype), tokens_of(geometry)
    torch.autograd.backward([next_token_loss(module(tokens[:, :-1]), tokens[:, 1:])])
    for name, weight in module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


@pytest.mark.parametrize("geometry", FAMILIES.values(), ids=FAMILIES)
def test_loss_falls_on_one_batch(geometry: Geometry) -> None:
    module, tokens = initialized(geometry), tokens_of(geometry)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = next_token_loss(module(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward([loss])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# What a step takes


@pytest.mark.parametrize("geometry", [LLAMA, TIED, QWEN, MOE, DEEPSEEK, GPT], ids=lambda g: g.name)
def test_flops_are_those_that_torch_counts_in_the_matrix_products(geometry: Geometry) -> None:
    module, tokens = initialized(geometry), tokens_of(geometry)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.backward([next_token_loss(module(tokens), tokens)])
    vectors = sum(p.numel for p in geometry.parameters() if len(p.shape) == 1)  # 6N counts norms and biases too
    expected = flops_per_token(geometry, tokens.shape[1]) - 6 * vectors
    assert counter.get_total_flops() == expected * tokens.numel()


def test_flops_of_llama3_8b_are_six_a_weight_and_torchtitans_term_of_attention() -> None:
    weights = 8_030_261_248 - 128_256 * 4096
    assert flops_per_token(GEOMETRIES["llama3-8b"], 8192) == 6 * weights + 12 * 32 * 32 * 128 * 8192


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40", None),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_peak_is_that_of_the_named_device_or_unknown(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


class _Unknown(Llama3):
    pass


def test_every_named_geometry_can_be_trained_and_others_say_why_not() -> None:
    assert {why_untrainable(g, TokensPerRank(1, 1024)) for g in GEOMETRIES.values()} == {None}
    own = _Unknown("own", 2, 24, 50, False, 6, 2, 4, 40)
    assert "family (_Unknown) whose forward pass is not known" in str(why_untrainable(own, TokensPerRank(1, 8)))
    too_long = why_untrainable(GEOMETRIES["gpt2"], TokensPerRank(2, 1025))
    assert too_long == "model gpt2 has 1024 positions, and a sequence of 2x1025 is longer"


def test_size_of_a_step_is_batch_by_sequence_and_nothing_else() -> None:
    size = parse_tokens("2x128", "--ckpt-train")
    assert (size, size.total, str(size)) == (TokensPerRank(2, 128), 256, "2x128")
    for wrong in ("", "128", "0x128", "1x0", "1x128x2", "-1x2", "1 x 2", "axb"):
        with pytest.raises(SettingError, match=r"\(from --ckpt-train\) is no size .*BATCHxSEQUENCE, as in 1x128"):
            parse_tokens(wrong, "--ckpt-train")


def test_budgets_and_records_need_no_torch() -> None:
    code = "import sys, pytest_ckpt.model.budget, pytest_ckpt.model.beside; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
