"""Ranks that raise, die, stop and hang: each is named, in bounded time, and nothing of it is left."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from pytest_ckpt.world.spawned import SpawnedWorld
from tests.world import ranks
from tests.world.conftest import Failed, ready, save, world_folders


def test_rank_that_raises_is_named_within_five_seconds_while_the_other_sits_in_a_collective(
    world: SpawnedWorld,
) -> None:
    before = world.run(ranks.pid)
    failed = Failed(world, lambda: world.run(ranks.raise_while_the_others_wait))
    planted = re.search(r"ValueError: planted at ([\d.]+)", failed.by_rank[1].traceback)
    assert planted is not None
    assert failed.at_s - float(planted[1]) < 5
    assert failed.culprits == [1]
    assert "raise_while_the_others_wait" in failed.by_rank[1].traceback
    assert failed.by_rank[0].what == "waiting"
    assert "in the collective barrier" in failed.text
    after = world.run(ranks.pid)
    assert not set(before) & set(after)


def test_all_ranks_that_raise_by_themselves_are_culprits(world: SpawnedWorld) -> None:
    failed = Failed(world, lambda: world.run(ranks.raise_late_on_the_other))
    assert failed.culprits == [0, 1]


def test_rank_killed_in_mid_save_is_named_with_signal_and_phase(world: SpawnedWorld, tmp_path: Path) -> None:
    ready(world, ranks.small_state)
    failed = Failed(world, lambda: save(world, ranks.killed_writer, tmp_path / "save"))
    assert failed.culprits == [1]
    assert failed.by_rank[1].what == "died"
    assert failed.by_rank[1].phase == "save_round > save > write_data"
    assert "killed by SIGKILL" in failed.by_rank[1].cause
    assert failed.by_rank[0].what == "waiting"


def test_rank_killed_in_the_background_of_an_async_save_is_named(world: SpawnedWorld, tmp_path: Path) -> None:
    ready(world, ranks.small_state)
    failed = Failed(world, lambda: save(world, ranks.killed_writer, tmp_path / "save", "async"))
    assert failed.culprits == [1]
    assert failed.by_rank[1].phase == "save_round; in the background: save > write_data"


def test_rank_stopped_in_mid_save_ends_at_the_deadline_with_its_state_and_the_others_stacks(
    world: SpawnedWorld, tmp_path: Path
) -> None:
    ready(world, ranks.small_state)
    began = time.monotonic()
    failed = Failed(world, lambda: save(world, ranks.stopped_writer, tmp_path / "save", timeout_s=4))
    assert 4 <= failed.at_s - began < 16
    assert failed.culprits == [1]
    assert failed.by_rank[1].what == "stuck"
    assert failed.by_rank[1].phase == "save_round > save > write_data"
    assert failed.by_rank[1].cause == "no reply within 4.00 s (--ckpt-timeout); process stopped"
    assert failed.by_rank[0].what == "waiting"
    assert re.search(r"gather.*\n(.*\n)*.*in save_round", failed.by_rank[0].stack)
    assert "rank.py" not in failed.text, "the harness's own frames tell people nothing"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rank_stuck_in_its_writer_is_named_with_its_stack_and_not_those_in_collectives(
    world: SpawnedWorld, tmp_path: Path, mode: str
) -> None:
    ready(world, ranks.small_state)
    failed = Failed(world, lambda: save(world, ranks.stuck_writer, tmp_path / "save", mode, timeout_s=4))
    assert failed.culprits == [1]
    assert failed.by_rank[1].what == "stuck"
    assert failed.by_rank[1].phase.endswith("save > write_data")
    assert "in sleep_without_end" in failed.by_rank[1].stack
    assert "in the collective" in failed.by_rank[0].cause


def test_ranks_in_collectives_that_do_not_match_are_all_stuck(world: SpawnedWorld) -> None:
    world.run(ranks.pid)
    failed = Failed(world, lambda: world.run(ranks.sit_in_different_collectives, timeout_s=3))
    assert failed.culprits == [0, 1]


def test_rank_stopped_in_the_middle_of_its_reply_does_not_hold_the_world(world: SpawnedWorld) -> None:
    world.run(ranks.pid)
    failed = Failed(world, lambda: world.run(ranks.stop_while_replying, timeout_s=5))
    assert failed.culprits == [1]
    assert list(failed.by_rank) == [1], "the other rank did reply"
    assert failed.by_rank[1].phase == "send the reply"


def test_rank_that_exits_is_named_with_its_status_and_its_last_words(world: SpawnedWorld) -> None:
    failed = Failed(world, lambda: world.run(ranks.exit_hard))
    assert failed.culprits == [1]
    assert failed.by_rank[1].cause == "exited with status 3"
    assert failed.by_rank[1].log_tail.splitlines()[-1] == "last words"


def test_sys_exit_in_a_function_is_a_failure(world: SpawnedWorld) -> None:
    failed = Failed(world, lambda: world.run(ranks.exit_politely))
    assert failed.culprits == [1]
    assert failed.by_rank[1].cause == "SystemExit: enough"


def test_rank_whose_child_holds_its_channel_is_seen_to_be_dead(world: SpawnedWorld) -> None:
    failed = Failed(world, lambda: world.run(ranks.die_with_a_child_that_holds_the_channel, timeout_s=40))
    assert failed.culprits == [1]
    assert "killed by SIGKILL" in failed.by_rank[1].cause


def test_children_of_ranks_end_with_them(world: SpawnedWorld) -> None:
    world.run(ranks.start_a_child)
    Failed(world, lambda: world.run(ranks.raise_while_the_others_wait))


def test_reply_that_is_no_plain_data_is_a_failure_that_says_so(world: SpawnedWorld) -> None:
    failed = Failed(world, lambda: world.run(ranks.return_a_tensor))
    assert failed.culprits == [0, 1]
    assert failed.by_rank[0].phase == "return_a_tensor"
    assert "return_a_tensor returned what is no plain data" in failed.by_rank[0].cause
    assert "Tensor" in failed.by_rank[0].cause


@pytest.mark.parametrize("value", [object(), {1, object()}, 2**70, "\ud800"], ids=repr)
def test_argument_that_is_no_plain_data_leaves_the_world_intact(world: SpawnedWorld, value: object) -> None:
    before = world.run(ranks.pid)
    with pytest.raises(TypeError):
        world.run(ranks.echo, value=value)
    assert world.run(ranks.pid) == before


def test_error_in_the_callers_own_callback_ends_the_ranks(world: SpawnedWorld) -> None:
    """They are at work on a command that nobody waits for any more."""
    world.run(ranks.pid)

    def callback() -> None:
        raise TypeError("the caller's")

    with pytest.raises(TypeError, match="the caller's"):
        world.run(ranks.pid, while_waiting=callback)
    assert world.pids == []
    assert world_folders() == []


def test_phase_of_an_error_that_the_function_handled_is_not_that_of_the_next(
    world: SpawnedWorld, tmp_path: Path
) -> None:
    failed = Failed(world, lambda: world.run(ranks.fail_handled_then_raise, location=str(tmp_path / "save")))
    assert failed.by_rank[1].phase == "fail_handled_then_raise > afterwards"
    assert failed.by_rank[1].cause == "ValueError: another reason"
    assert failed.by_rank[1].hints == []


def test_rank_that_cannot_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SpawnedWorld(2, device="warp-drive")
    failed = Failed(world, lambda: world.run(ranks.pid))
    assert failed.culprits == [0, 1]
    assert "warp" in failed.by_rank[0].cause
    assert failed.by_rank[0].phase == "join the process group"


def test_rank_that_dies_before_it_connects_is_named_with_what_it_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('planted')")
    world = SpawnedWorld(2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = Failed(world, lambda: world.run(ranks.pid))
    assert failed.culprits == [0, 1]
    assert failed.by_rank[0].cause == "exited with status 1"
    assert failed.by_rank[0].phase == "starting"
    assert "ImportError: planted" in failed.by_rank[0].log_tail
