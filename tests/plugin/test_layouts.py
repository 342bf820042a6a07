"""`--ckpt-mesh` and `--ckpt-share`, as a user gives them: rows, table, lines, baselines, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_ckpt.errors import SettingError
from pytest_ckpt.model.geometry import GEOMETRIES
from pytest_ckpt.model.recipe import RECIPES, state_bytes
from pytest_ckpt.model.share import PARTIAL, Share, rank_bytes, share_bytes
from pytest_ckpt.plugin.plan import Need
from pytest_ckpt.plugin.settings import Settings, read_settings
from pytest_ckpt.plugin.specs import ModelSpec, model_spec
from pytest_ckpt.target.path import open_target
from pytest_ckpt.target.spec import TargetSpec
from pytest_ckpt.world.mesh import MeshShape

from .project import SAVING_TEST, Project, Result

TINY = GEOMETRIES["llama3-tiny"]
BYTES = state_bytes(TINY, RECIPES["fp32-adamw"])
PLAIN = ("-p", "no:randomly", "--ckpt-probe=off", "--ckpt-rounds=4", "--ckpt-mode=sync")
OWN = """
def test_layouts(ckpt_save, ckpt_world, ckpt_target, ckpt_model):
    for mesh in ("replicate=2,shard=1", "shard=2"):
        record = ckpt_save(mode="sync", mesh=mesh, name=mesh)
        assert record.scenario.mesh == mesh
"""


def layouts(pytester: pytest.Pytester, *options: str) -> Settings:
    return read_settings(pytester.parseconfig(*options))


def rows(project: Project, name: str) -> dict[str, Any]:
    file = json.loads((project.path / name).read_text())
    return {row["name"]: row["extra_info"]["ckpt"] for row in file["benchmarks"]}


@pytest.fixture(scope="module")
def meshes(module_project: Project) -> tuple[Project, Result]:
    """Two meshes of the same two ranks, which cost less to start than four."""
    module_project.write("test_own.py", OWN)
    save = ("--ckpt-baseline=save", "--benchmark-json=run.json", "test_own.py")
    return module_project, module_project.pytest(*PLAIN, "-v", *save).require(0)


@pytest.fixture(scope="module")
def share(meshes: tuple[Project, Result]) -> tuple[Project, Result]:
    """In the same project, so that the baselines of the meshes are there."""
    project, _ = meshes
    project.write("test_it.py", SAVING_TEST)
    save = ("--ckpt-share=2/64", "--ckpt-baseline=grow", "--ckpt-keep=all", "--benchmark-json=share.json")
    result = project.pytest(*PLAIN, *save, "test_it.py")
    assert result.status == 0, result.out
    return project, result


def test_each_mesh_is_a_scenario_of_its_own_and_each_byte_is_written_once(meshes: tuple[Project, Result]) -> None:
    found = rows(meshes[0], "run.json")
    assert [record["scenario"]["mesh"] for record in found.values()] == ["replicate=2,shard=1", "shard=2"]
    for record in found.values():
        for taken in record["rounds"]:
            assert sum(rank["planned_bytes"] for rank in taken["ranks"]) == record["logical_bytes"] == BYTES


def test_table_and_lines_show_meshes_and_who_writes_how_much(meshes: tuple[Project, Result]) -> None:
    meshes[1].lines.fnmatch_lines(
        [
            "name *target *model *ranks *mesh *mode *",
            "replicate=2,shard=1 *disk *2 *replicate=2,shard=1 *sync*",
            "shard=2 *disk *2 *shard=2 *sync*",
            "replicate=2,shard=1: where the time went*",
            "  bytes per rank: least 5.5* MB, median 5.5* MB, most 5.5* MB; over all ranks 11.0 MB, each byte once",
            "  rank 0: *; planned 5.5* MB; wrote *",
        ]
    )


def test_share_writes_the_exact_bytes_of_its_ranks_and_says_what_it_is(share: tuple[Project, Result]) -> None:
    project, result = share
    ((name, record),) = rows(project, "share.json").items()
    assert name == "test_save[disk-llama3-tiny-r2-share2of64-sync]"
    scenario = record["scenario"]
    assert (scenario["share"], scenario["world_size"], scenario["mesh"]) == ("2/64", 2, "shard=64")
    exact = [rank_bytes(TINY, RECIPES["fp32-adamw"], 64, rank) for rank in (0, 1)]
    for taken in record["rounds"]:
        assert [rank["planned_bytes"] for rank in taken["ranks"]] == exact
    assert record["logical_bytes"] == sum(exact)
    (note,) = record["notes"]
    assert note.startswith(
        "share 2/64: planning and metadata are those of 2 ranks, not of 64; what was written is part"
    )
    result.lines.fnmatch_lines(
        [
            "ckpt: *ranks 2 (from --ckpt-share)",
            "ckpt: share 2/64: 2 ranks write what the first 2 of 64 would, which are the fullest; planning and*",
            "ckpt: model llama3-tiny, *: 3?? kB of a checkpoint of 11.0 MB; needs at most *",
            "target *model *ranks *mesh *mode *",
            "disk *llama3-tiny *2 *share 2/64 *sync *",
            "disk llama3-tiny r2 share 2/64 sync: where the time went*",
            "  bytes per rank: *each byte once",
            "sync: share 2/64: planning and metadata are those of 2 ranks, not of 64;*",
        ]
    )
    (kept,) = project.target.iterdir()
    saves = [path for path in kept.iterdir() if path.is_dir()]
    assert len(saves) == 5
    assert all((path / PARTIAL).is_file() for path in saves)


def test_another_mesh_or_share_begins_a_baseline_of_its_own(share: tuple[Project, Result]) -> None:
    project, _ = share
    stored = [json.loads(path.read_text()) for path in sorted((project.path / "baselines").glob("*/*.json"))]
    held = [
        (row["extra_info"]["ckpt"]["scenario"]["mesh"], row["extra_info"]["ckpt"]["scenario"]["share"])
        for document in stored
        for row in document["benchmarks"]
    ]
    assert held == [("replicate=2,shard=1", None), ("shard=2", None), ("shard=64", "2/64")]


def test_ranks_follow_from_mesh_and_share(pytester: pytest.Pytester) -> None:
    hybrid = layouts(pytester, "--ckpt-device=cpu", "--ckpt-mesh=shard=4,replicate=2")
    assert (hybrid.ranks, hybrid.mesh, hybrid.reasons["ranks"]) == ((8,), MeshShape(2, 4), "from --ckpt-mesh")
    share = layouts(pytester, "--ckpt-device=cpu", "--ckpt-share=2/64", "--ckpt-model=llama3-8b")
    assert (share.ranks, share.share, share.reasons["ranks"]) == ((2,), Share(2, 64), "from --ckpt-share")
    assert share.models[0].state_bytes == 2 * 1_505_673_984
    assert share.models[0].whole_bytes == 96_363_134_976
    assert layouts(pytester, "--ckpt-mesh=shard=2", "--ckpt-ranks=2", "--ckpt-device=cpu").ranks == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ckpt-mesh=8"], r"'8' \(from --ckpt-mesh\) is no mesh; write shard=8, or replicate=2,shard=4"),
        (
            ["--ckpt-mesh=replicate=2,shard=2", "--ckpt-ranks=2"],
            r"mesh replicate=2,shard=2 \(from --ckpt-mesh\) has 4 ranks and this world has 2; write --ckpt-ranks=4, or",
        ),
        (["--ckpt-share=64/2"], r"'64/2' \(from --ckpt-share\) is no part of a job: K must be less than N"),
        (
            ["--ckpt-share=2/64", "--ckpt-ranks=4"],
            r"share 2/64 \(from --ckpt-share\) is that of 2 ranks and this world has 4; write --ckpt-ranks=2, or --",
        ),
        (["--ckpt-share=2/64", "--ckpt-mesh=shard=2"], r"--ckpt-mesh=shard=2 and --ckpt-share=2/64 do not go together"),
        (["--ckpt-share=2/64", "--ckpt-train=on"], r"--ckpt-share=2/64 and --ckpt-train=1x64 do not go together"),
        (["--ckpt-share=2/64", "--ckpt-model=own:state"], r"--ckpt-share=2/64 needs a model whose shards are known"),
        (["--ckpt-share=2/64", "--ckpt-engine=own:engine"], r"engine own:engine has no planners; write --ckpt-e"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(
    pytester: pytest.Pytester, options: list[str], message: str
) -> None:
    with pytest.raises(SettingError, match=message) as refusal:
        layouts(pytester, "--ckpt-device=cpu", *options)
    assert "\n" not in str(refusal.value)


def test_memory_is_needed_for_every_replica_and_of_a_share_for_no_more_than_it_is(tmp_path: Path) -> None:
    target = open_target(TargetSpec("disk", str(tmp_path), str(tmp_path), "a test"))
    spec = model_spec("llama3-debug", "a test", RECIPES["fp32-adamw"])
    whole = state_bytes(GEOMETRIES["llama3-debug"], RECIPES["fp32-adamw"])

    def need(model: ModelSpec, mode: str, **given: Any) -> Need:
        return Need(target, model, ranks=4, copies=1, device="cpu", mode=mode, **given)

    def beyond_one(more: Need) -> int:
        return (more.memory_bytes or 0) - (need(spec, more.mode or "").memory_bytes or 0)

    assert beyond_one(need(spec, "sync", replicas=2)) == whole
    assert beyond_one(need(spec, "async", replicas=2)) == 2 * whole, "every rank stages what it holds"
    assert need(spec, "sync", replicas=2).target_bytes == whole
    assert need(spec, "sync", replicas=2, writes_replicas=True).target_bytes == 2 * whole
    part = need(replace(spec, share=Share(4, 8)), "async")
    assert part.target_bytes == share_bytes(GEOMETRIES["llama3-debug"], RECIPES["fp32-adamw"], Share(4, 8))
    assert beyond_one(part) == 2 * (part.target_bytes - whole)


def test_a_host_needs_room_for_what_its_own_ranks_hold(tmp_path: Path) -> None:
    """The first ranks are the fullest: of few experts, or rows, the last ranks have none."""
    target = open_target(TargetSpec("disk", str(tmp_path), str(tmp_path), "a test"))
    recipe, hosts = RECIPES["fp32-adamw"], (0, 0, 0, 1, 1, 1)
    spec = model_spec("moe-debug", "a test", recipe)
    need = Need(target, spec, ranks=6, copies=2, device="cpu", mode="sync", hosts=hosts)
    sizes = [rank_bytes(GEOMETRIES["moe-debug"], recipe, 6, rank) for rank in range(6)]
    assert need.target_bytes == 2 * sum(sizes)
    assert need.target_bytes_of(0) == pytest.approx(2 * sum(sizes[:3]), abs=1)
    assert need.target_bytes_of(1) == pytest.approx(2 * sum(sizes[3:]), abs=1)
    assert need.target_bytes_of(0) > 1.2 * need.target_bytes / 2
    one = replace(need, hosts=())
    assert need.memory_bytes is not None
    assert one.memory_bytes is not None
    assert need.memory_bytes == pytest.approx(sum(sizes[:3]) + 3 * (one.memory_bytes - sum(sizes)) / 6, abs=2)


def test_share_is_never_loaded_and_is_of_a_full_shard(project: Project) -> None:
    project.write("test_it.py", "def test_load(ckpt_load, ckpt_world):\n    ckpt_load()\n")
    refused = project.pytest("--ckpt-share=2/64").require(4)
    refused.lines.fnmatch_lines(["ERROR: --ckpt-share=2/64 writes a part of a checkpoint, which cannot be loaded;*"])
    project.write("test_it.py", "def test_save(ckpt_save, ckpt_world):\n    ckpt_save(mesh='shard=2')\n")
    refused = project.pytest("--ckpt-share=2/64").require(4)
    refused.lines.fnmatch_lines(["*mesh shard=2 (from ckpt_save) and --ckpt-share=2/64 do not go together*"])
