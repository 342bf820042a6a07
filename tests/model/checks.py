"""What must hold for a real FSDP state on every rank of a world; run in-process and in spawned ranks."""

from __future__ import annotations

import datetime
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pytest_ckpt.model import values
from pytest_ckpt.model.geometry import GEOMETRIES, Geometry, Llama3, Qwen3MoE
from pytest_ckpt.model.mixed_adamw import MixedAdamW
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.model.state import AppState, TrainingState, make_state, user_state

CPU = torch.device("cpu")
# No dimension divides by 2 or 4; of four ranks some get nothing of the heads' norms and of the experts.
TIED = Llama3("uneven-tied", 2, 30, 101, True, 3, 1, 10, 70)
MOE = Qwen3MoE("uneven-moe", 2, 21, 37, False, 2, 1, 3, 6, 3, 1)
TINY = GEOMETRIES["llama3-tiny"]
SMALL: tuple[Geometry, ...] = (TIED, MOE)
DEADLINE = datetime.timedelta(seconds=30)

Check = Callable[[DeviceMesh, Path], None]


def bits(state: TrainingState) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of every tensor, as bytes."""
    return {
        key: values.local(t).clone().contiguous().reshape(-1).view(torch.uint8)
        for key, t in values.tensors(state.state_dict)
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def made(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def logical_bytes_are_what_dcp_plans(mesh: DeviceMesh, folder: Path) -> None:
    for geometry in SMALL:
        for recipe in RECIPES.values():
            state = make_state(geometry, recipe, mesh, CPU)
            path = made(folder / geometry.name / recipe.name)
            save(state.state_dict, checkpoint_id=path)
            stored = FileSystemReader(path).read_metadata().state_dict_metadata
            planned = sum(
                chunk.sizes.numel() * meta.properties.dtype.itemsize
                for meta in stored.values()
                if isinstance(meta, TensorStorageMetadata) and len(meta.size)
                for chunk in meta.chunks
            )
            assert planned == state.logical_bytes == state_bytes(geometry, recipe)


def a_saved_state_comes_back_bit_for_bit(mesh: DeviceMesh, folder: Path) -> None:
    for geometry in SMALL:
        for recipe in RECIPES.values():
            state = make_state(geometry, recipe, mesh, CPU)
            state.advance()
            before = bits(state)
            path = made(folder / geometry.name / recipe.name)
            save(state.state_dict, checkpoint_id=path)
            fresh = make_state(geometry, recipe, mesh, CPU, seed=1)
            for other in (state, fresh):
                other.advance()
                changed = bits(other)
                for key, tensor in values.tensors(other.state_dict):
                    if tensor.ndim and before[key].numel():
                        assert not torch.equal(before[key], changed[key]), key
                load(other.state_dict, checkpoint_id=path)
                assert_same(before, bits(other))
            for key, tensor in values.tensors(fresh.state_dict):
                wanted = recipe.weight_dtype if key.startswith("app.model.") else "float32"
                assert tensor.dtype == getattr(torch, wanted), key


def tied_weights_stay_one_parameter(mesh: DeviceMesh, folder: Path) -> None:
    app = make_state(TIED, RECIPES["fp32-adamw"], mesh, CPU).state_dict["app"]
    assert app.model.output.weight is app.model.tok_embeddings.weight
    whole = app.state_dict()
    assert {"output.weight", "tok_embeddings.weight"} <= set(whole["model"])
    assert set(whole["optim"]["state"]) == {p.name for p in TIED.parameters()}


def values_are_finite_and_incompressible(mesh: DeviceMesh, folder: Path) -> None:
    for recipe in RECIPES.values():
        state = make_state(TINY, recipe, mesh, CPU)
        for _ in range(2):
            seconds = [t for key, t in values.tensors(state.state_dict) if key.endswith("exp_avg_sq")]
            assert all((values.local(t) > 0).all() for t in seconds)
            assert all(values.local(t).isfinite().all() for _, t in values.tensors(state.state_dict))
            for key, part in bits(state).items():
                if part.numel() >= 1 << 14:
                    raw = part.numpy().tobytes()
                    assert len(zlib.compress(raw)) > 0.93 * len(raw), key
            state.advance()


def no_two_shards_hold_the_same_block(mesh: DeviceMesh, folder: Path) -> None:
    state = make_state(TINY, RECIPES["fp32-adamw"], mesh, CPU)
    own = [block for part in bits(state).values() for block in _blocks(part) if len(block) >= 64]
    gathered: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    all_blocks = [block for rank in gathered for block in rank]
    assert len(set(all_blocks)) == len(all_blocks)


def advancing_changes_every_block_and_never_goes_back(mesh: DeviceMesh, folder: Path) -> None:
    for geometry in (TINY, TIED):
        for recipe in RECIPES.values():
            state = make_state(geometry, recipe, mesh, CPU)
            seen = {key: [{block} for block in _blocks(part)] for key, part in bits(state).items()}
            for _ in range(3):
                state.advance()
                for key, tensor in values.tensors(state.state_dict):
                    if tensor.ndim:
                        now = bits_of(tensor)
                        for earlier, block in zip(seen[key], _blocks(now), strict=True):
                            assert block not in earlier, key
                            earlier.add(block)


def replicas_of_a_shard_stay_equal(mesh: DeviceMesh, folder: Path) -> None:
    world = dist.get_world_size()
    if world < 2:
        return
    hybrid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    state = make_state(TIED, RECIPES["mixed-adamw"], hybrid, CPU)
    for _ in range(2):
        own = {key: part.numpy().tobytes() for key, part in bits(state).items()}
        gathered: list[dict[str, bytes]] = [{} for _ in range(world)]
        dist.all_gather_object(gathered, own)
        assert gathered[: world // 2] == gathered[world // 2 :]
        state.advance()
    assert state.logical_bytes == state_bytes(TIED, RECIPES["mixed-adamw"])


def mixed_adamw_steps_like_adamw_in_float32_and_resumes(mesh: DeviceMesh, folder: Path) -> None:
    def give_gradients(app: AppState, turn: int) -> None:
        for name, weight in app.model.named_parameters():
            weight.grad = torch.empty_like(weight)
            values.fill(weight.grad, "gradient", turn, name)

    def step(app: AppState, turn: int) -> None:
        give_gradients(app, turn)
        assert isinstance(app.optimizer, MixedAdamW)
        app.optimizer.step()

    app = make_state(TIED, RECIPES["mixed-adamw"], mesh, CPU).state_dict["app"]
    app.optimizer.state.clear()
    copies = [w.detach().to(torch.float32, copy=True).requires_grad_() for w in app.model.parameters()]
    reference = torch.optim.AdamW(copies)
    path = made(folder)
    for turn in range(4):
        step(app, turn)
        for copy, weight in zip(copies, app.model.parameters(), strict=True):
            copy.grad = weight.grad.to(torch.float32)
        reference.step()
        for copy, weight in zip(copies, app.model.parameters(), strict=True):
            assert isinstance(weight, DTensor)
            master = app.optimizer.state[weight]["master"]
            assert torch.equal(values.local(master), values.local(copy))
            assert torch.equal(values.local(weight), values.local(copy).to(torch.bfloat16))
        if turn == 1:
            save({"app": app}, checkpoint_id=path)
    resumed = make_state(TIED, RECIPES["mixed-adamw"], mesh, CPU, seed=5)
    load(resumed.state_dict, checkpoint_id=path)
    for turn in (2, 3):
        step(resumed.state_dict["app"], turn)
    assert_same(bits(TrainingState({"app": app})), bits(resumed))


def rank_local_keys(mesh: DeviceMesh, device: torch.device) -> dict[str, object]:
    rank = dist.get_rank()
    return {
        "everywhere": torch.ones(10, dtype=torch.float64),
        f"stage{rank}": {"weights": [torch.zeros(rank + 1)], "step": torch.tensor(3.0), "name": "x"},
    }


def users_keys_of_every_rank_are_counted_once(mesh: DeviceMesh, folder: Path) -> None:
    state = user_state(rank_local_keys, "rank_local_keys", mesh, CPU)
    ranks = dist.get_world_size()
    assert state.logical_bytes == 80 + 4 * ranks * (ranks + 1) // 2


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        logical_bytes_are_what_dcp_plans,
        a_saved_state_comes_back_bit_for_bit,
        tied_weights_stay_one_parameter,
        values_are_finite_and_incompressible,
        no_two_shards_hold_the_same_block,
        advancing_changes_every_block_and_never_goes_back,
        replicas_of_a_shard_stay_equal,
        mixed_adamw_steps_like_adamw_in_float32_and_resumes,
        users_keys_of_every_rank_are_counted_once,
    )
}


def run_checks(rank: int, world: int, folder: Path) -> None:
    """Run every check on one spawned rank; `<check>.<rank>` in `folder` says how it went ("" is well)."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=DEADLINE)
    mesh = init_device_mesh("cpu", (world,))
    for name, check in CHECKS.items():
        try:
            check(mesh, folder / "saved" / name)
            outcome = ""
        except Exception:
            outcome = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(outcome)
        if outcome:
            raise SystemExit(1)  # the others cannot go on without this rank
    dist.destroy_process_group()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return values.local(tensor).contiguous().reshape(-1).view(torch.uint8)


def _blocks(part: torch.Tensor) -> list[bytes]:
    raw = part.numpy().tobytes()
    return [raw[start : start + 4096] for start in range(0, len(raw), 4096)]
