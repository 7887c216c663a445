"""What agents say is heard together: one look at all of it, and none at mere progress."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.core import decide as jobs
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import AgentSaid, AgentsSaid, Migrate, Taint
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


class Together(World):
    """Hands in at once whatever agents have said by now."""

    def pump(self, until: Callable[[AgentSaid], bool] | None = None) -> bool:
        while self.queue:
            found = enumerate(self.queue)
            end = next((at for at, said in found if until is not None and until(said)), None)
            said = [self.queue.popleft() for _ in range(len(self.queue) if end is None else end)]
            self.handle(AgentsSaid(job=self.spec.job, said=said))
            if end is not None:
                return True
        return False


def play(
    story: Callable[[World], None], world_size: int = 4, kind: type[World] = Together
) -> World:
    nodes = " ".join(f"n{number}:2" for number in range(world_size // 2 + 1))
    world = kind(job_spec(nodes=nodes, world=world_size)).start()
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
def test_what_is_heard_together_leads_where_it_leads_one_by_one(
    story: Callable[[World], None],
) -> None:
    alone, together = play(story, 8, World), play(story, 8)
    for world in (alone, together):
        assert [i.outcome for i in world.incidents] == ["RESOLVED"] * len(world.incidents)
    assert [type(record) for record in alone.records] == [type(one) for one in together.records]
    assert [i.moves for i in alone.incidents] == [i.moves for i in together.incidents]
    for incident in (*alone.incidents, *together.incidents):
        phases = [phase.phase for phase in incident.phases]
        assert phases[-4:] == ["COMMIT", "REWIRE", "RESUME", "RETIRE"]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The mode at each look."""
    found: list[str] = []
    settle = jobs.settle

    def counted(job: jobs.Job, out: jobs.Out) -> None:
        found.append(job.mode)
        settle(job, out)

    monkeypatch.setattr(jobs, "settle", counted)
    return found


@pytest.mark.parametrize("story", STORIES)
def test_looks_of_a_migration_do_not_grow_with_its_ranks(
    story: Callable[[World], None], looks: list[str]
) -> None:
    counts = []
    for size in (8, 64):
        looks.clear()
        assert play(story, size).recorded(r.AttemptStarted)
        counts.append(looks.count("running"))
    assert counts[1] <= counts[0] + 2, counts


def test_mere_progress_is_not_looked_at(looks: list[str]) -> None:
    world = Together().start()
    looks.clear()
    world.step()
    world.progress()
    world.run()
    assert not looks


def test_what_is_said_behind_the_end_of_the_job_changes_nothing() -> None:
    world = World(job_spec(nodes="n0:2", world=2, spares=0)).start()
    world.step()
    for worker in world.owners():
        world.say(worker, m.Done(tick=worker.tick, version=worker.tick))
    failure = m.Failure(generation=0, error_kind="user", error="too late", version=1)
    world.say(world.rank(1), failure)
    done, late = list(world.queue)[:2], list(world.queue)[2]
    world.queue.clear()
    world.handle(AgentsSaid(job="j", said=[*done, late]))
    assert world.view.state == "done" and not world.incidents
