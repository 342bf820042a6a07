from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import GEOMETRIES, DeepSeekV3, find_geometry
from pytest_ckpt.model.module import Block, blocks, build_module
from pytest_ckpt.model.recipe import RECIPES, find_recipe, state_bytes

# Parameters and tensors, from the published models: acceptance values.
TABLE = {
    "gpt2": (124_439_808, 148),
    "gpt2-medium": (354_823_168, 292),
    "gpt2-large": (774_030_080, 436),
    "gpt2-xl": (1_557_611_200, 580),
    "llama3.2-1b": (1_235_814_400, 146),
    "llama3.2-3b": (3_212_749_824, 254),
    "llama3-8b": (8_030_261_248, 291),
    "llama3-70b": (70_553_706_496, 723),
    "llama3-405b": (405_853_388_800, 1137),
    "llama2-7b": (6_738_415_616, 291),
    "qwen3-0.6b": (596_049_920, 310),
    "qwen3-1.7b": (1_720_574_976, 310),
    "qwen3-4b": (4_022_468_096, 398),
    "qwen3-8b": (8_190_735_360, 399),
    "qwen3-14b": (14_768_307_200, 443),
    "qwen3-32b": (32_762_123_264, 707),
    "qwen3-30b-a3b": (30_532_122_624, 531),
    "qwen3-235b-a22b": (235_093_634_560, 1037),
    "deepseek-v3": (671_026_404_352, 909),
}


@pytest.mark.parametrize("name", TABLE)
def test_counts_are_those_of_the_published_model(name: str) -> None:
    geometry = GEOMETRIES[name]
    assert (geometry.parameter_count, geometry.tensor_count) == TABLE[name]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_module_has_exactly_the_geometrys_parameters_in_its_order(name: str) -> None:
    geometry = GEOMETRIES[name]
    module = build_module(geometry)
    built = [(key, tuple(weight.shape)) for key, weight in module.named_parameters()]
    assert built == [(p.name, p.shape) for p in geometry.parameters()]
    assert sum(w.numel() for w in module.parameters()) == geometry.parameter_count
    assert set(module.state_dict()) == {key for key, _ in built} | set(geometry.tied)
    for alias, real in geometry.tied.items():
        assert module.get_parameter(alias) is module.get_parameter(real)
    stack = blocks(module, geometry)
    assert len(stack) == geometry.layers
    assert all(type(block) is Block for block in stack)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_blocks_hold_all_but_the_ends(name: str) -> None:
    geometry = GEOMETRIES[name]
    grouped = {geometry.block_of(p.name) for p in geometry.parameters()}
    assert grouped == {None, *(f"{geometry.stack}.{n}" for n in range(geometry.layers))}
    assert geometry.block_of("norm.weight") is None
    assert all(geometry.block_of(key) is None for pair in geometry.tied.items() for key in pair)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("gpt2", "h.0.attn.c_attn.weight", (768, 2304)),
        ("gpt2-xl", "h.47.mlp.c_proj.bias", (1600,)),
        ("llama3-8b", "tok_embeddings.weight", (128256, 4096)),
        ("llama3-8b", "layers.31.attention.wk.weight", (1024, 4096)),
        ("llama3-8b", "layers.0.feed_forward.w2.weight", (4096, 14336)),
        ("llama3-8b", "output.weight", (128256, 4096)),
        ("qwen3-0.6b", "layers.0.attention.wq.weight", (2048, 1024)),
        ("qwen3-0.6b", "layers.27.attention.q_norm.weight", (128,)),
        ("qwen3-30b-a3b", "layers.0.moe.experts.w13", (128, 1536, 2048)),
        ("qwen3-30b-a3b", "layers.0.moe.router.gate.weight", (128, 2048)),
        ("deepseek-v3", "layers.2.feed_forward.w1.weight", (18432, 7168)),
        ("deepseek-v3", "layers.3.moe.shared_experts.w2.weight", (7168, 2048)),
        ("deepseek-v3", "layers.60.attention.wkv_b.weight", (32768, 512)),
        ("deepseek-v3", "layers.60.attention.wkv_a.weight", (576, 7168)),
    ],
)
def test_names_and_shapes_are_the_models_own(model: str, name: str, shape: tuple[int, ...]) -> None:
    assert {p.name: p.shape for p in GEOMETRIES[model].parameters()}[name] == shape


def test_largest_tensor_of_deepseek_has_more_elements_than_32_bits_count() -> None:
    geometry = GEOMETRIES["deepseek-v3"]
    assert isinstance(geometry, DeepSeekV3)
    assert max(p.numel for p in geometry.parameters()) == 7_516_192_768


def test_debug_models_are_small_enough_for_a_laptop() -> None:
    sizes = {name: state_bytes(GEOMETRIES[name], RECIPES["fp32-adamw"]) for name in GEOMETRIES}
    assert sizes["llama3-debug"] == 301_271_040
    assert 5e6 < sizes["llama3-tiny"] < 15e6
    assert 5e6 < sizes["moe-debug"] < 100e6


def test_llama3_8b_is_96_gigabytes_with_its_moments() -> None:
    assert state_bytes(GEOMETRIES["llama3-8b"], RECIPES["fp32-adamw"]) == 96_363_134_976


def test_tied_embedding_is_stored_twice_but_its_moments_once() -> None:
    geometry = GEOMETRIES["llama3.2-1b"]
    assert state_bytes(geometry, RECIPES["weights-bf16"]) == 2 * 1_498_482_688
    assert state_bytes(geometry, RECIPES["fp32-adamw"]) == 4 * 1_498_482_688 + 8 * 1_235_814_400


def test_recipes_take_12_14_and_2_bytes_a_parameter() -> None:
    per_parameter = {name: recipe.bytes_per_parameter for name, recipe in RECIPES.items()}
    assert per_parameter == {"fp32-adamw": 12, "mixed-adamw": 14, "weights-bf16": 2}


def test_unknown_names_are_refused_with_their_source_and_the_nearest_known() -> None:
    with pytest.raises(SettingError, match=r"model 'llama3-8B' \(from --ckpt-model\).*first: llama3-8b,"):
        find_geometry("llama3-8B", "--ckpt-model")
    with pytest.raises(SettingError, match=r"'fp32' \(from ckpt_recipe\).*first: fp32-adamw,"):
        find_recipe("fp32", "ckpt_recipe")
    assert find_geometry("gpt2", "x").name == "gpt2"
    assert find_recipe("weights-bf16", "x").name == "weights-bf16"


def test_geometries_and_recipes_need_no_torch() -> None:
    code = "import sys, pytest_ckpt.model.geometry, pytest_ckpt.model.recipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
