"""Planned and pre-emptive moves: make before break, waves, and faults in between."""

from __future__ import annotations

import pytest

from keepstep.errors import UsageError
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Drain, Migrate, Taint, Untaint
from tests.support.core import World, job_spec

ANSWERS = [
    m.Arrived,
    agent_messages.StoreOpened,
    m.Ready,
    m.Staged,
    m.Held,
    m.Copied,
    m.Swapped,
    m.Resumed,
]


def trained(**kwargs: object) -> World:
    world = World(job_spec(**kwargs)).start()  # type: ignore[arg-type]
    world.step(5)
    return world


def test_a_migrated_rank_moves_while_the_others_train_until_the_hold() -> None:
    world = trained()
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(m.Held)
    assert not world.told(commands.Abort) and world.view.state == "running"
    assert [type(c).__name__ for _, c in world.told(commands.Position)] == ["Position"]
    position = world.told(commands.Position)[0][1]
    assert position.tick == -2 and not position.final  # type: ignore[attr-defined]
    staged = [worker for worker, _ in world.told(commands.Stage)]
    leaver = world.view.ranks[1].worker
    assert leaver not in staged, "the leaver is no member of the new groups"
    assert len(world.told(commands.Hold)) == 4, "but it holds with the others"
    world.run()
    world.assert_training()
    copy = world.told(commands.Copy)[0][1]
    assert copy.sources[0].rank == 1, "the leaver itself is the first source"  # type: ignore[attr-defined]
    incident = world.last
    assert (incident.trigger, incident.cause, incident.outcome) == (
        "planned",
        "migrate",
        "RESOLVED",
    )
    assert incident.decision == "" and incident.steps_recomputed == 0 and incident.attempts == 1
    phases = [phase.phase for phase in incident.phases]
    assert phases == ["RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME", "RETIRE"]
    assert world.told(commands.Leave) and not world.commands(agent_messages.KillWorker)


def test_a_leaver_that_stays_is_killed_after_ten_seconds() -> None:
    world = trained()
    leaver = world.rank(1)

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        return m.Staged(generation=-7) if isinstance(said, commands.Leave) else None

    world.refuse = refuse
    world.handle(Migrate(job="j", ranks=[1]))
    world.run(5)
    assert leaver.alive
    world.run(20)
    assert not leaver.alive
    world.assert_training()


def test_draining_a_node_empties_it_and_its_spares_move_too() -> None:
    world = trained(nodes="n0:3 n1:2 n2:4", spares=2)
    world.handle(Drain(job="j", node="n0"))
    world.run()
    world.assert_training()
    assert not [w for w in world.workers.values() if w.alive and w.node == "n0"]
    assert sorted(world.last.moves)[0].startswith("rank 0: n0/0 -> n2/")
    assert world.view.nodes[0].taints == ["drain"]


def test_more_ranks_than_spares_move_in_waves() -> None:
    world = trained(nodes="n0:2 n1:3", spares=1)
    world.handle(Drain(job="j", node="n0"))
    world.run()
    assert world.last.outcome == "OPEN" and len(world.last.moves) == 1
    assert "waiting for a spare for rank 1" in world.last.reason
    world.join("n7")
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED" and len(world.last.moves) == 2
    assert len(world.recorded(r.Committed)) == 2


def test_without_any_spare_a_drain_waits_and_says_why() -> None:
    world = trained(nodes="n0:4", world=4, local_world=4, spares=0)
    world.handle(Drain(job="j", node="n0"))
    world.run()
    assert world.view.state == "running"
    assert world.last.outcome == "OPEN" and "waiting for a spare" in world.last.reason
    world.handle(Untaint(job="j", target="n0"))
    assert world.last.outcome == "ABORTED" and "untainted" in world.last.reason
    world.assert_training()


@pytest.mark.parametrize("target", ["n1", "n1/0"])
def test_a_taint_moves_its_ranks_pre_emptively(target: str) -> None:
    world = trained(nodes="n0:2 n1:2 n2:4", spares=2)
    world.handle(Taint(job="j", target=target, reason="ecc errors"))
    world.run()
    world.assert_training()
    incident = world.last
    assert incident.trigger == "pre-emptive" and incident.cause == "taint"
    assert incident.victims == ([2, 3] if target == "n1" else [2])
    assert incident.outcome == "RESOLVED" and "ecc errors" in incident.reason
    assert all(world.view.ranks[rank].node == "n2" for rank in incident.victims)


def test_a_taint_under_a_spare_replaces_the_spare() -> None:
    world = trained(nodes="n0:2 n1:2 n2:1 n3:1", spares=1)
    (spare,) = world.view.spares
    world.handle(Taint(job="j", target=spare.slot, reason="hot"))
    world.run()
    (other,) = world.view.spares
    assert other.slot != spare.slot and not world.incidents


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_dying_newcomer_is_replaced_or_was_committed(answer: type[m.Message]) -> None:
    world = trained(spares=2)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(answer)
    newcomer = next(iter(world.told(commands.Assign)))[0]
    world.die_silently(world.workers[newcomer])
    world.run()
    world.assert_training()
    assert world.rank(1).id != newcomer
    planned = world.incidents[0]
    assert planned.outcome == "RESOLVED"
    if answer in (m.Swapped, m.Resumed):
        assert world.last.cause == "process-exit" and world.last.victims == [1]
    else:
        assert planned.attempts == 2 and not world.told(commands.Abort)


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_death_during_a_planned_move_goes_first(answer: type[m.Message], rank: int) -> None:
    world = trained(spares=2, nodes="n0:2 n1:2 n2:3")
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(answer)
    old = world.rank(1).id
    committed = bool(world.recorded(r.Committed))
    world.kill(rank)
    world.run()
    world.assert_training()
    assert all(incident.outcome == "RESOLVED" for incident in world.incidents)
    # With Copied on its way the leaver is not needed any more when its death is heard of.
    assert len(world.incidents) == (1 if (rank, answer) == (1, m.Copied) else 2)
    if rank == 1 and not committed and answer is not agent_messages.StoreOpened:
        newcomer = next(iter(world.told(commands.Assign)))[0]
        assert world.rank(1).id == newcomer, "the half-prepared newcomer is used"
    if not committed:
        assert world.rank(1).id != old, "the planned move is still made"


def test_a_killed_node_during_a_drain_of_it_resolves_both() -> None:
    world = trained(spares=2)
    world.handle(Drain(job="j", node="n1"))
    assert world.before(m.Ready)
    world.kill_node("n1")
    world.run()
    world.assert_training()
    drain, loss = world.incidents
    assert drain.outcome == loss.outcome == "RESOLVED" and loss.cause == "node-lost"
    assert loss.id in drain.reason


@pytest.mark.parametrize("reason", ["source-lost", "digest", "position", "side-state-missing"])
def test_a_failed_copy_releases_everybody_and_tries_the_next_spare(reason: str) -> None:
    world = trained(spares=2)
    failures: list[str] = []

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy) and len(failures) < limit:
            failures.append("x")
            return m.CopyFailed(generation=said.generation, reason=reason, error="x")  # type: ignore[arg-type]
        return None

    limit = 1
    world.refuse = refuse
    world.handle(Migrate(job="j", ranks=[1]))
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED" and len(world.told(commands.Release)) == 4
    limit = 99
    failures.clear()
    world.handle(Migrate(job="j", ranks=[2]))
    world.run()
    world.assert_training()
    assert world.last.outcome == "ABORTED" and len(failures) == 3
    assert "nothing changed" in world.last.reason


def test_ranks_that_never_hold_are_released() -> None:
    world = trained()

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Hold) and worker is world.rank(3):
            return m.Staged(generation=-7)
        return None

    world.refuse = refuse
    world.handle(Migrate(job="j", ranks=[1]))
    world.run()
    assert world.last.outcome == "ABORTED"
    world.assert_training()


def test_a_release_lost_with_the_stream_is_said_again() -> None:
    world = trained(spares=2)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(m.Copied)
    world.lose_agent("n1")
    newcomer = world.workers[next(iter(world.told(commands.Assign)))[0]]
    world.exit(newcomer, -9)
    world.pump()
    assert world.rank(2).state == "held"
    world.rejoin()
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED"


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_lost_stream_in_front_of_any_answer_only_delays(answer: type[m.Message]) -> None:
    world = trained(spares=2)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(answer)
    for name in ("n0", "n1", "n2"):
        world.lose_agent(name, lose_answers=True)
    world.rejoin()
    world.run()
    world.step()
    world.progress()
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED" and not world.told(commands.Abort)


def test_a_move_is_dropped_when_the_script_ends_first() -> None:
    world = trained()
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(m.Ready)
    for worker in world.owners():
        worker.state = "done"
        world.say(worker, m.Done(tick=5, version=5))
    world.run()
    assert world.view.state == "done" and world.last.outcome == "ABORTED"


def test_two_migrations_wait_for_each_other() -> None:
    world = trained(spares=1)
    world.handle(Migrate(job="j", ranks=[1]))
    world.handle(Migrate(job="j", ranks=[2]))
    world.run()
    world.assert_training()
    assert [incident.outcome for incident in world.incidents] == ["RESOLVED", "RESOLVED"]


def test_a_rank_already_moving_can_not_be_migrated_again() -> None:
    world = trained()
    world.handle(Migrate(job="j", ranks=[1]))
    before = (world.view, world.incidents)
    with pytest.raises(UsageError, match="already being moved") as error:
        world.core.handle(world.now, Migrate(job="j", ranks=[2, 1]))
    assert error.value.hint and (world.view, world.incidents) == before


def test_a_breaker_defers_taints_that_come_all_at_once_and_looks_again_after_a_minute() -> None:
    world = World(job_spec(nodes="n0:2 n1:2 n2:4", spares=4)).start()
    world.step(3)
    world.handle(Taint(job="j", target="n0", reason="hot"))
    world.handle(Taint(job="j", target="n1", reason="hot"))
    assert [i.victims for i in world.incidents] == [[0, 1]]
    assert "common cause" in world.recorded(r.Deferred)[0].why
    world.run(30)
    assert [i.outcome for i in world.incidents] == ["RESOLVED"]
    world.run(60)
    assert [i.victims for i in world.incidents] == [[0, 1], [2, 3]]
    world.assert_training()


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_drained_node_is_nobodys_buddy_any_more(node: str) -> None:
    """Whether it had ranks or not."""
    world = trained(nodes="n0:2 n1:2 n2:2 n3:2", spares=4)
    before = {worker.buddy for _, worker in world.core.state("j").owning()}
    assert node in before
    world.handle(Drain(job="j", node=node))
    world.run()
    world.assert_training()
    owners = [worker for _, worker in world.core.state("j").owning()]
    assert {worker.buddy for worker in owners} <= {"n0", "n1", "n2", "n3"} - {node}
    last = dict(world.told(commands.Buddy))
    if node == "n2":  # it has no ranks, so nothing moves
        assert set(last) == {worker.id for worker in owners if worker.node == "n1"}
