"""Events that are not looked at: nothing may follow from them, and there must be many of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.core import decide as jobs
from keepstep.core import quiet
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Migrate, Taint
from tests.support.core import World, job_spec


def kill(world: World) -> None:
    world.kill(1)


def kill_two(world: World) -> None:
    world.kill(1)
    world.before(m.Held)
    world.kill(2)


def migrate(world: World) -> None:
    world.handle(Migrate(job="j", ranks=[1]))


def taint(world: World) -> None:
    world.handle(Taint(job="j", target="n0/1", reason="hot"))


def neighbours_fail(world: World) -> None:
    """A rank dies, and what its neighbours raise is heard before their Reports."""
    victim = world.kill(1)
    for worker in world.owners():
        if worker is not victim:
            failure = m.Failure(generation=0, error_kind="comm", error="reset by peer", version=1)
            world.say(worker, failure)


def hang(world: World) -> None:
    for worker in world.owners():
        stalled = agent_messages.Stalled(
            worker=worker.id,
            rank=worker.rank,
            version=1,
            tick=1,
            marks=worker.rank != 1,
            where="compute",
            heartbeat_age_ns=0,
            stopped=False,
            cpu_busy=False,
        )
        world.agent_says(worker.node, stalled)


STORIES = [kill, kill_two, migrate, taint, neighbours_fail, hang]


def play(story: Callable[[World], None], world_size: int = 4) -> World:
    nodes = " ".join(f"n{number}:2" for number in range(world_size // 2 + 1))
    world = World(job_spec(nodes=nodes, world=world_size)).start()
    world.step()
    story(world)
    world.progress()
    world.run()
    world.step()
    world.progress()
    world.run()
    world.assert_training()
    return world


@pytest.mark.parametrize("story", STORIES)
def test_a_core_that_always_looks_decides_the_same(
    story: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = play(story, 8)
    monkeypatch.setattr(quiet, "follows_nothing", lambda *_: False)
    slow = play(story, 8)
    assert quick.records == slow.records
    assert quick.sent == slow.sent
    assert [i.outcome for i in quick.incidents] == ["RESOLVED"] * len(quick.incidents)


@pytest.mark.parametrize("story", STORIES)
def test_looks_of_a_migration_do_not_grow_with_its_ranks(
    story: Callable[[World], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    settle = jobs.settle

    def counted(job: jobs.Job, out: jobs.Out) -> None:
        nonlocal looks
        looks += job.mode == "running"
        settle(job, out)

    monkeypatch.setattr(jobs, "settle", counted)
    counts = []
    for size in (8, 64):
        looks = 0
        assert play(story, size).recorded(r.AttemptStarted)
        counts.append(looks)
    assert counts[1] <= counts[0] + 2, counts


def test_parts_of_a_checkpoint_are_not_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    settle = jobs.settle

    def counted(job: jobs.Job, out: jobs.Out) -> None:
        nonlocal looks
        looks += 1
        settle(job, out)

    nodes = " ".join(f"n{number}:2" for number in range(33))
    world = World(job_spec(nodes=nodes, world=64, checkpoints="/c/j", interval_s=30)).start()
    world.step(2)
    monkeypatch.setattr(jobs, "settle", counted)
    world.run(40)
    assert len(world.recorded(r.CheckpointSealed)) == 1 and looks < 10, looks
