"""Periodic checkpoints, and going back to one."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Migrate, Wake
from tests.support.core import SECOND, FakeWorker, World, job_spec

NODES = "n0:1 n1:1 n2:1 n3:1 n4:1"


def saving(world: World | None = None, **kwargs: Any) -> World:
    """A job of three ranks on three nodes, with two spare nodes; trained for five steps."""
    options: dict[str, Any] = {"nodes": NODES, "world": 3, "local_world": 1, "spares": 1} | kwargs
    world = World(job_spec(checkpoints="/c/j", interval_s=30, **options)).start()
    world.step(5)
    return world


def saved(**kwargs: Any) -> World:
    """With a complete checkpoint of step 5; three steps later."""
    world = saving(**kwargs)
    world.run(40)
    assert world.view.checkpoints is not None and world.view.checkpoints.step == 5
    world.step(3)
    world.progress()
    world.pump()
    return world


def ask(world: World) -> None:
    """Until the next one has been asked for; its parts are on their way."""
    deadline = world.core.deadline()
    assert deadline is not None
    world.now = deadline
    world.handle(Wake())
    assert world.told(commands.Snapshot)


def lose_state(world: World) -> None:
    """Node and buddy of rank 1 are lost together."""
    for name in ("n1", "n2"):
        world.kill_node(name)

    def refuse(worker: FakeWorker, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy) and not said.checkpoint and worker.rank == 1:
            return m.CopyFailed(
                generation=said.generation, reason="side-state-missing", error="held by nobody"
            )
        return None

    world.refuse = refuse


def assert_fell_back(world: World, lost: int = 3) -> None:
    world.assert_training()
    assert {worker.tick for worker in world.owners()} == {5}
    incident = world.last
    assert (incident.outcome, incident.steps_lost) == ("FELL_BACK", lost), incident
    assert "/c/j/checkpoint-5" in incident.reason
    copies = [c for _, c in world.told(commands.Copy) if c.checkpoint]  # type: ignore[attr-defined]
    assert {c.checkpoint for c in copies} == {"/c/j/checkpoint-5"}  # type: ignore[attr-defined]


def test_one_rank_is_told_and_all_write() -> None:
    world = saving()
    world.run(40)
    (told,) = world.told(commands.Snapshot)
    assert told[0] == world.rank(0).id
    (record,) = world.recorded(r.CheckpointSealed)
    assert isinstance(record, r.CheckpointSealed)
    assert (record.path, record.tick) == ("/c/j/checkpoint-5", 5)
    assert (record.snapshot_ns, record.write_ns) == (2_000_002, SECOND + 2), "the slowest rank's"
    view = world.view.checkpoints
    assert view is not None and not view.saving and view.interval_s == 30
    assert view.cost_ms == pytest.approx(2.0, rel=0.01)


def test_the_next_one_keeps_the_last_one() -> None:
    world = saved()
    world.run(40)
    seals = [seal for _, seal in world.told(commands.Seal)]
    assert [seal.keep for seal in seals] == [[], ["/c/j/checkpoint-5"]]  # type: ignore[attr-defined]
    assert [seal.tick for seal in seals] == [5, 8]  # type: ignore[attr-defined]


def test_nothing_is_written_without_a_directory() -> None:
    world = World(job_spec()).start()
    world.step(3)
    world.run()
    assert not world.told(commands.Snapshot) and world.view.checkpoints is None


def test_a_slow_disk_puts_the_next_one_off_and_says_so() -> None:
    world = saving()
    ask(world)
    slow = [world.queue.popleft() for _ in range(len(world.queue))]
    world.run(100)
    assert len(world.told(commands.Snapshot)) == 1
    assert world.view.checkpoints is not None and world.view.checkpoints.put_off == 1
    assert "3 of 3 parts are missing" in world.view.notes[-1].text
    world.queue.extend(slow)
    world.run(10)
    assert world.recorded(r.CheckpointSealed)


def test_a_full_disk_is_said_and_it_is_tried_again() -> None:
    world = saving()
    full = True

    def refuse(worker: FakeWorker, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Snapshot) and full:
            return m.SaveFailed(number=said.number, error="No space left on device")
        return None

    world.refuse = refuse
    world.run(40)
    assert not world.recorded(r.CheckpointSealed)
    assert "No space left" in world.view.notes[-1].text
    full = False
    world.run(40)
    assert world.recorded(r.CheckpointSealed)


def test_an_attempt_drops_what_is_not_complete() -> None:
    world = saving()
    ask(world)
    assert world.before(m.Saved, rank=1)
    world.die_silently(world.rank(1))
    world.run(20)
    world.assert_training()
    first, *others = [c.number for _, c in world.told(commands.Snapshot)]  # type: ignore[attr-defined]
    assert others and others[0] > first, "asked for again when it was over"
    (record,) = world.recorded(r.CheckpointSealed)
    assert isinstance(record, r.CheckpointSealed) and record.tick == 5


def test_a_sealer_that_dies_is_replaced() -> None:
    world = saving()
    ask(world)
    assert world.before(m.Sealed)
    world.die_silently(world.rank(0))
    world.run(20)
    world.assert_training()
    assert len(world.told(commands.Seal)) == 2 and world.recorded(r.CheckpointSealed)


def test_a_seal_that_is_lost_with_a_stream_is_asked_for_again() -> None:
    """Also if the agent comes back while something else is going on."""
    world = saving()
    ask(world)
    assert world.before(m.Sealed)
    home = world.rank(0).node
    world.kill(2)
    world.lose_agent(home, lose_answers=True)
    world.pump()
    assert world.core.state("j").attempt is not None
    world.join(home, 1)
    world.run(20)
    world.assert_training()
    assert len(world.told(commands.Seal)) == 2 and world.recorded(r.CheckpointSealed)


def test_what_was_said_is_said_again_when_an_agent_comes_back() -> None:
    world = saving()
    ask(world)
    assert world.before(m.Saved, rank=2)
    world.lose_agent("n2", lose_answers=True)
    world.join("n2", 1)
    assert [worker for worker, _ in world.told(commands.Snapshot)][-1] == world.rank(2).id
    world.run(5)
    assert world.recorded(r.CheckpointSealed)


def test_who_came_back_before_the_tick_was_known_says_it_again_too() -> None:
    world = saving()
    ask(world)
    world.queue.clear()  # all have written, and nobody was heard
    for name in ("n0", "n1", "n2"):
        world.lose_agent(name)
    for name in ("n2", "n1", "n0"):
        world.join(name)
    world.run(10)
    assert len(world.recorded(r.CheckpointSealed)) == 1


def test_node_and_buddy_lost_go_back_to_the_checkpoint() -> None:
    world = saved(nodes="n0:2 n1:1 n2:1 n3:1 n4:1")
    lose_state(world)
    before = world.view.generation
    world.run(60)
    assert_fell_back(world)
    (record,) = world.recorded(r.FellBack)
    assert isinstance(record, r.FellBack) and record.steps_lost == 3
    forgotten = [c for _, c in world.commands(agent_messages.Forget) if c.before]  # type: ignore[attr-defined]
    told = {c.before for c in forgotten}  # type: ignore[attr-defined]
    assert told <= {record.generation} and before < record.generation <= world.view.generation
    world.step(2)
    world.kill(0)
    world.run(60)
    world.assert_training()
    assert world.last.outcome == "RESOLVED", "and what follows is an incident like any other"


def test_all_ranks_lost_at_once_go_back_too() -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3)
    world.kill_node("n0")
    world.run(60)
    assert_fell_back(world)
    assert "no rank is left alive" in world.last.reason


def test_the_end_of_a_job_that_fell_back_is_a_good_one() -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3)
    world.kill_node("n0")
    world.run(60)
    for worker in world.owners():
        worker.state = "done"
        world.say(worker, m.Done(tick=9, version=9))
    world.run()
    assert (world.view.state, world.view.exit_code) == ("done", 0)


def test_without_room_the_job_ends_and_says_how_to_go_on() -> None:
    world = saved(nodes="n0:3 n1:1", local_world=3)
    world.kill_node("n0")
    world.run(60)
    assert (world.view.state, world.view.exit_code) == ("fell_back", 4)
    assert "--resume /c/j/checkpoint-5" in world.view.reason
    assert (world.last.outcome, world.last.steps_lost) == ("FELL_BACK", 3)


def test_a_checkpoint_that_does_not_help_is_not_tried_for_ever() -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3, spares=3)
    for _ in range(3):
        for worker in world.owners():
            worker.tick = 8
            world.exit(worker, -9)
        world.run(20)
        world.assert_training()
    for worker in world.owners():
        world.exit(worker, -9)
    world.run(60)
    assert (world.view.state, world.view.exit_code) == ("fell_back", 4)
    assert "3 times before" in world.view.reason


def damaged(world: World, path: str, why: str = "checkpoint") -> None:
    def refuse(worker: FakeWorker, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy) and said.checkpoint == path and worker.rank == 1:
            reason: Any = why
            return m.CopyFailed(generation=said.generation, reason=reason, error="a digest")
        return None

    world.refuse = refuse


def saved_twice(**kwargs: Any) -> World:
    """With checkpoints of steps 5 and 8; two steps later."""
    world = saved(nodes="n0:3 n1:3", local_world=3, spares=3, **kwargs)
    world.run(40)
    assert world.view.checkpoints is not None and world.view.checkpoints.step == 8
    world.step(2)
    world.progress()
    world.pump()
    return world


@pytest.mark.parametrize("why", ["checkpoint", "side-state-missing"])
def test_from_a_damaged_checkpoint_the_job_goes_further_back(why: str) -> None:
    world = saved_twice()
    damaged(world, "/c/j/checkpoint-8", why)
    world.kill_node("n0")
    world.run(120)
    first, second = world.recorded(r.FellBack)
    assert isinstance(first, r.FellBack) and isinstance(second, r.FellBack)
    assert (first.path, first.steps_lost) == ("/c/j/checkpoint-8", 2)
    assert (second.path, second.steps_lost) == ("/c/j/checkpoint-5", 3)
    assert "checkpoint-8 cannot be read: a digest" in second.reason
    assert_fell_back_to(world, 5, lost=5)
    world.restart_core()
    assert world.view.checkpoints is not None and world.view.checkpoints.step == 5


def assert_fell_back_to(world: World, tick: int, lost: int) -> None:
    world.assert_training()
    assert {worker.tick for worker in world.owners()} == {tick}
    assert (world.last.outcome, world.last.steps_lost) == ("FELL_BACK", lost), world.last


def test_with_no_other_checkpoint_a_damaged_one_ends_the_job() -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3, spares=3)
    damaged(world, "/c/j/checkpoint-5")
    world.kill_node("n0")
    world.run(120)
    assert world.view.state == "failed" and "could not copy (checkpoint)" in world.view.reason


def test_a_planned_move_that_was_going_on_is_given_up() -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3)
    world.handle(Migrate(job="j", ranks=[2]))
    world.before(m.Ready)
    world.kill_node("n0")
    world.run(60)
    world.assert_training()
    outcomes = {i.cause: i.outcome for i in world.incidents}
    assert outcomes["migrate"] in ("ABORTED", "RESOLVED")
    assert outcomes["node-lost"] == "FELL_BACK"


ANSWERS = [
    agent_messages.WorkerExited,
    m.Parked,
    m.Arrived,
    m.Ready,
    m.Staged,
    m.Copied,
    m.Swapped,
    m.Resumed,
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_restart_while_going_back(answer: type[m.Message]) -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3)
    for worker in world.owners():
        world.exit(worker, -9)
    world.pump(lambda _: bool(world.recorded(r.FellBack)))
    assert world.recorded(r.FellBack)
    world.before(answer)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run(60)
    world.assert_training()
    assert {worker.tick for worker in world.owners()} == {5}
    assert sum(incident.steps_lost for incident in world.incidents) == 3
    assert "FELL_BACK" in {incident.outcome for incident in world.incidents}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_death_while_going_back(answer: type[m.Message]) -> None:
    world = saved(nodes="n0:3 n1:3", local_world=3)
    for worker in world.owners():
        world.exit(worker, -9)
    world.pump(lambda _: bool(world.recorded(r.FellBack)))
    world.before(answer)
    alive = [w for w in world.workers.values() if w.alive]
    if alive:
        world.exit(alive[-1], -9)
    world.run(60)
    world.assert_training()
    assert sum(incident.steps_lost for incident in world.incidents) == 3


def test_a_node_that_comes_back_later_is_told_to_forget_its_copies() -> None:
    world = saved(nodes="n0:3 n1:3 n2:3", local_world=3)
    world.lose_agent("n2")
    world.kill_node("n0")
    world.run(5)
    world.join("n2", 3)
    world.run(60)
    world.assert_training()
    assert [
        c.before for node, c in world.commands(agent_messages.Forget) if node == "n2" and c.before
    ]  # type: ignore[attr-defined]


def test_a_rank_on_a_node_out_of_reach_is_known_to_be_gone_first() -> None:
    """Never two owners: a job that goes back waits until nothing of before can run."""
    world = saved(nodes="n0:1 n1:1 n2:1 n3:3", spares=3)
    node = world.core.state("j").nodes["n0"]
    world.lose_agent("n0")
    while node.state != "unreachable":
        world.now = world.core.deadline() or 0
        world.handle(Wake())
    for rank in (1, 2):
        world.die_silently(world.rank(rank))
    world.pump()
    assert node.state == "disconnected", "what it has is all there is: it is waited for"
    since = world.now
    while not world.recorded(r.FellBack):
        world.now = world.core.deadline() or 0
        world.handle(Wake())
    assert world.now - since > 60 * SECOND
    while node.state != "dead":
        assert world.core.state("j").mode == "waiting"
        world.now = world.core.deadline() or 0
        world.handle(Wake())
    world.nodes["n0"].alive = world.workers["n0.w0"].alive = False
    world.run(60)
    world.assert_training()
    assert world.last.outcome == "FELL_BACK"


def test_ranks_that_are_only_out_of_reach_may_train_and_nobody_takes_their_place() -> None:
    """One node was given up, then all others fall silent: no death is known."""
    world = saved(nodes="n0:1 n1:1 n2:1 n3:3", spares=3)
    node = world.core.state("j").nodes["n0"]
    world.lose_agent("n0")
    while node.state != "unreachable":
        world.now = world.core.deadline() or 0
        world.handle(Wake())
    for name in ("n1", "n2"):
        world.lose_agent(name)
    end = world.now + 3600 * SECOND
    while (deadline := world.core.deadline()) is not None and deadline < end:
        world.now = deadline
        world.handle(Wake())
    assert not world.recorded(r.FellBack)
