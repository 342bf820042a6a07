from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.state import TrainingState, user_state

from .checks import CHECKS, CPU, run_checks

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what each check said on each rank of a real gloo world; starting one costs seconds."""
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"world{world}")
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run_checks, args=(rank, world, folder)) for rank in range(world)]
    end = time.monotonic() + DEADLINE_S
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    (folder / "world").write_text(str(world))
    return folder


@pytest.mark.parametrize("check", CHECKS)
def test_holds_on_one_rank(check: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    CHECKS[check](mesh, tmp_path)


@pytest.mark.parametrize("check", CHECKS)
def test_holds_on_several_ranks(check: str, outcomes: Path) -> None:
    for rank in range(int((outcomes / "world").read_text())):
        said = outcomes / f"{check}.{rank}"
        assert said.exists(), f"rank {rank} never finished {check}"
        assert said.read_text() == "", f"rank {rank}"


class _Counter(Stateful):
    def __init__(self) -> None:
        self.weights = torch.ones(300)

    def state_dict(self) -> dict[str, object]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        raise NotImplementedError


def test_advancing_reaches_every_tensor_of_a_users_state() -> None:
    inner = {
        "transposed": torch.ones(70, 90).t(),
        "strided": torch.ones(2000)[::2],
        "half": torch.ones(5, dtype=torch.float16),
        "float8": torch.ones(9).to(torch.float8_e5m2),
        "scales": torch.ones(9).to(torch.float8_e8m0fnu),
        "double": torch.ones(3, 3, dtype=torch.float64, requires_grad=True),
        "ids": torch.ones(4).int(),
        "flags": torch.ones(7).bool(),
    }
    counter = _Counter()
    nested = [inner, (torch.ones(4),)]
    state = TrainingState({"counter": counter, "nested": nested, "complex": torch.ones(4, dtype=torch.complex64)})
    assert state.logical_bytes == 4 * (300 + 6300 + 1000 + 4 + 4) + 5 * 2 + 9 + 9 + 72 + 7 + 32
    state.advance()
    for name, tensor in {**inner, "counter": counter.weights}.items():
        values = tensor.detach().to(torch.float64)
        assert values.isfinite().all(), name
        share = (values != 1).double().mean().item()
        assert 1 / 300 < share <= 0.5, name
    assert state.state_dict["complex"].tolist() != [1, 1, 1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).expand(4, 3),
        torch.ones(3, 3).to_sparse(),
        torch.ones(4, device="meta"),
        torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
    ids=["expanded", "sparse", "meta", "packed"],
)
def test_tensor_whose_elements_are_no_memory_of_their_own_stays_as_it_is(tensor: torch.Tensor) -> None:
    state = TrainingState({"odd": tensor, "plain": torch.ones(4)})
    state.advance()
    assert state.state_dict["odd"] is tensor
    assert state.state_dict["plain"].tolist() != [1, 1, 1, 1]


def test_tensor_under_two_names_is_changed_once() -> None:
    shared = torch.ones(1000)
    once, twice = TrainingState({"a": torch.ones(1000)}), TrainingState({"a": shared, "b": shared})
    once.advance()
    twice.advance()
    assert torch.equal(once.state_dict["a"], shared)
    assert twice.logical_bytes == 8000


def not_a_dict(mesh: DeviceMesh, device: torch.device) -> list[int]:
    return [1]


def broken(mesh: DeviceMesh, device: torch.device) -> dict[str, object]:
    raise ZeroDivisionError("the user's own")


def test_user_function_that_returns_no_dict_is_refused_in_one_sentence(mesh: DeviceMesh) -> None:
    with pytest.raises(SettingError, match=r"model own:state returned 'list'") as refusal:
        user_state(not_a_dict, "own:state", mesh, CPU)
    assert "\n" not in str(refusal.value)


def test_error_inside_the_users_function_is_left_as_it_is(mesh: DeviceMesh) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        user_state(broken, "own:state", mesh, CPU)


PEAK = """
import re, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES
from pytest_ckpt.model.state import make_state

def resident(field):  # getrusage's peak would include the parent's, from before exec
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for recipe in RECIPES.values():
    make_state(GEOMETRIES["llama3-tiny"], recipe, mesh, torch.device("cpu")).advance()
before = resident("VmRSS")
state = make_state(GEOMETRIES["llama3-debug"], RECIPES["fp32-adamw"], mesh, torch.device("cpu"))
state.advance()
print((resident("VmHWM") - before) / state.logical_bytes)
"""


def test_making_and_advancing_a_state_take_little_more_memory_than_the_state() -> None:
    run = subprocess.run([sys.executable, "-c", PEAK], check=True, timeout=120, capture_output=True, text=True)
    assert 0.9 < float(run.stdout.split()[-1]) < 1.15
