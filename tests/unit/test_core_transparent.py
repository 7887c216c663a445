"""Jobs whose ranks move as images of their processes: what is asked of whom, and when."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.errors import UsageError
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model.job import Migrate
from tests.support.core import FakeWorker, World, job_spec


def trained() -> World:
    world = World(msgspec.structs.replace(job_spec(), mode="transparent")).start()
    world.step(5)
    return world


def test_nobody_connects_before_the_image_lives_and_the_stopped_process_is_killed() -> None:
    world = trained()
    leaver = world.rank(1)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(m.Copied)
    assert len(world.told(commands.Hold)) == 4
    assert not world.told(commands.Stage), "a process that is dumped has no connections"
    copy = world.told(commands.Copy)[0][1]
    assert isinstance(copy, commands.Copy)
    assert copy.holders[0] == world.nodes[leaver.node].blobs, "the image is where the process is"
    assert not world.commands(agent_messages.KillWorker), (
        "the source is there until the move is committed"
    )
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED"
    assert [kill.worker for _, kill in world.commands(agent_messages.KillWorker)] == [leaver.id]  # type: ignore[attr-defined]
    assert not world.told(commands.Leave), "it is stopped, and would not hear it"
    assert world.rank(1) is not leaver


def test_workers_are_started_in_capsules() -> None:
    world = trained()
    starts = [start for _, start in world.commands(agent_messages.StartWorker)]
    assert starts and all(start.transparent for start in starts)  # type: ignore[attr-defined]


def test_a_refusal_ends_the_incident_before_anybody_holds() -> None:
    world = trained()

    def refuse(worker: FakeWorker, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Assign):
            return m.CopyFailed(generation=said.generation, reason="refused", error="a socket")
        return None

    world.refuse = refuse
    world.handle(Migrate(job="j", ranks=[1]))
    world.run()
    world.assert_training()
    assert world.last.outcome == "ABORTED" and world.last.attempts == 1
    assert "a socket" in world.last.reason and not world.told(commands.Hold)


def test_ranks_that_cannot_hold_say_so_and_train_on() -> None:
    world = trained()

    def refuse(worker: FakeWorker, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Hold):
            return m.CopyFailed(generation=said.generation, reason="refused", error="uneven")
        return None

    world.refuse = refuse
    world.handle(Migrate(job="j", ranks=[1]))
    world.run()
    world.assert_training()
    assert world.last.outcome == "ABORTED" and "uneven" in world.last.reason


def test_ranks_that_held_for_nothing_connect_again_and_the_network_is_not_blamed() -> None:
    world = trained()
    world.say(
        world.rank(0),
        m.Failure(generation=0, error_kind="undone", error="a move was undone", version=5),
    )
    world.run()
    world.assert_training()
    last = world.last
    assert (last.cause, last.victims, last.moves) == ("undone-move", [], [])
    assert last.outcome == "RESOLVED" and last.reason.startswith("a move was undone")


def test_a_dead_rank_ends_the_job_and_says_why() -> None:
    world = trained()
    world.die_silently(world.rank(2))
    world.run()
    assert world.view.state == "fell_back" and world.view.exit_code == 4
    assert "survives planned moves only" in world.view.reason


def test_understudies_and_checkpoints_are_refused() -> None:
    spec = msgspec.structs.replace(job_spec(understudies=1), mode="transparent")
    with pytest.raises(UsageError, match="no understudies"):
        World(spec)
