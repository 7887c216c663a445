"""Ends that were asked for: with a checkpoint where there can be one, and in bounded time."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Cancel, Wake
from tests.support.core import FakeWorker, World, attached, job_spec

TERM = Cancel(job="j", reason="SIGTERM", exit_code=143, checkpoint=True)


def trained(**kwargs: Any) -> World:
    given: dict[str, Any] = {"checkpoints": "/ckpt/j", "interval_s": 1000, **kwargs}
    world = World(job_spec(**given)).start()
    world.step(5)
    return world


def test_a_stop_holds_writes_and_ends() -> None:
    world = trained()
    world.handle(TERM)
    assert world.view.state == "running" and len(world.told(commands.Hold)) == 4
    world.pump()
    written = world.told(commands.Checkpoint)
    assert {c.path for _, c in written} == {"/ckpt/j/checkpoint-5-stop"}  # type: ignore[attr-defined]
    assert [c.lead for _, c in written] == [True, False, False, False]  # type: ignore[attr-defined]
    view = world.view
    assert (view.state, view.exit_code) == ("cancelled", 143)
    assert view.checkpoint == "/ckpt/j/checkpoint-5-stop"
    assert view.reason == "SIGTERM; the state of step 5 is in /ckpt/j/checkpoint-5-stop"


@pytest.mark.parametrize("kwargs", [{"checkpoints": "", "interval_s": 0}, {}])
def test_without_checkpoints_or_in_a_hurry_it_ends_at_once(kwargs: dict[str, Any]) -> None:
    world = trained(**kwargs)
    world.handle(Cancel(job="j", reason="SIGTERM", exit_code=143, checkpoint=bool(kwargs)))
    assert world.view.state == "cancelled" and not world.told(commands.Hold)


def test_before_the_first_step_there_is_nothing_to_write() -> None:
    world = World(job_spec(checkpoints="/ckpt/j"))
    world.attach = False
    world.run(5)
    world.handle(TERM)
    assert world.view.state == "cancelled"


def test_a_second_request_does_not_begin_anew_and_one_without_a_checkpoint_ends() -> None:
    world = trained()
    world.handle(TERM)
    world.handle(TERM)
    assert world.view.state == "running" and len(world.told(commands.Hold)) == 4
    world.handle(Cancel(job="j", reason="now", exit_code=3))
    assert (world.view.state, world.view.exit_code) == ("cancelled", 3)


def test_ranks_that_do_not_come_to_hold_keep_it_waiting_for_a_while_only() -> None:
    world = trained()
    world.rank(2).mute = True
    world.handle(TERM)
    world.run(59)
    assert world.view.state == "running"
    world.run(61)
    assert world.view.state == "cancelled" and "within 60 s" in world.view.reason
    assert not world.view.checkpoint


def test_a_disk_that_is_full_ends_it_too() -> None:
    world = trained()

    def full(worker: FakeWorker, command: m.Message) -> m.Message | None:
        if isinstance(command, commands.Checkpoint) and worker.rank == 1:
            generation, path = command.generation, command.path
            return m.CheckpointFailed(generation=generation, path=path, error="No space left")
        return None

    world.refuse = full
    world.handle(TERM)
    world.pump()
    assert world.view.state == "cancelled" and "No space left" in world.view.reason
    assert not world.view.checkpoint


def test_a_rank_that_dies_meanwhile_is_replaced_first() -> None:
    world = trained(spares=2)
    world.handle(TERM)
    assert world.before(m.Held, 2)
    world.die_silently(world.rank(1))
    world.run(50)
    assert world.view.state == "cancelled", world.view
    assert world.view.checkpoint == "/ckpt/j/checkpoint-5-stop"
    assert world.last.outcome == "RESOLVED" and world.last.victims == [1]


def test_a_stop_in_a_recovery_waits_for_it() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Copied)
    world.handle(TERM)
    assert not world.told(commands.Hold)
    world.run(50)
    assert world.view.state == "cancelled" and world.view.checkpoint


def test_a_job_that_holds_for_want_of_a_spare_has_written_already() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    world.kill_node("n1")
    world.run(5)
    assert world.view.state == "held" and world.view.checkpoint == "/jobs/j/checkpoint-5"
    world.handle(TERM)
    assert (world.view.state, world.view.exit_code) == ("cancelled", 143)
    assert "the state of tick 5 is in /jobs/j/checkpoint-5" in world.view.reason


def test_a_crash_of_the_orchestrator_does_not_end_the_stop() -> None:
    world = trained()
    world.handle(TERM)
    assert world.before(m.Held, 2)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run(50)
    assert (world.view.state, world.view.exit_code) == ("cancelled", 143)
    assert world.view.checkpoint == "/ckpt/j/checkpoint-5-stop"
    generations = [record.generation for record in world.recorded(r.StopBegun)]  # type: ignore[union-attr]
    assert len(generations) == 2 and generations[0] < generations[1]


# ------------------------------------------------------------------ before and without attach


def unattached(**kwargs: Any) -> World:
    world = World(job_spec(**kwargs))
    world.attach = False
    world.run(5)
    return world


def test_a_script_that_never_attaches_starts_again_and_that_is_no_recovery() -> None:
    world = unattached(spares=2)
    assert "nothing is protected before every rank" in world.view.protection
    world.kill(1)
    world.run(5)
    assert world.last.outcome == "OPEN"
    assert "before all ranks had called keepstep.attach" in world.last.reason
    for worker in world.owners():
        worker.state = "done"
        world.say(worker, m.Done(tick=0, version=0))
    world.pump()
    assert world.view.state == "done"
    assert world.last.outcome == "FELL_BACK"
    assert "its progress is unknown and it started again" in world.last.reason


def test_a_death_while_a_script_starts_stays_what_it_was() -> None:
    world = unattached(spares=2)
    world.kill(1)
    world.attach = True
    world.run(5)
    for worker in world.owners():
        world.say(worker, attached(worker.generation))
    world.run(5)
    assert world.last.outcome == "RESOLVED" and world.last.steps_lost == 0
    assert "no step had been made" in world.last.reason


def test_the_steps_of_a_rank_that_dies_alone_are_counted_by_its_page() -> None:
    world = World(job_spec(nodes="n0:2", world=1, local_world=1)).start()
    worker = world.rank(0)
    worker.alive = False
    exited = agent_messages.WorkerExited(
        worker=worker.id, rank=0, code=-9, tail="", version=5, tick=6
    )
    world.agent_says(worker.node, exited)
    world.run(5)
    assert world.view.state == "fell_back" and "about 5 steps" in world.view.reason
    assert world.last.steps_lost == 5
