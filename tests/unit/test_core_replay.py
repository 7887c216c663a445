"""A restart of the orchestrator: the ledger is replayed, the agents come back."""

from __future__ import annotations

import pytest

from keepstep.errors import UsageError
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Drain, Migrate, Note, Taint, Wake
from tests.support.core import SECOND, World, job_spec

ANSWERS = [
    m.Report,
    agent_messages.StoreOpened,
    m.Arrived,
    m.Ready,
    m.Held,
    m.Staged,
    m.Copied,
    m.Swapped,
    m.Resumed,
]


def trained(**kwargs: object) -> World:
    world = World(job_spec(**kwargs)).start()  # type: ignore[arg-type]
    world.step(5)
    return world


def test_a_running_job_does_not_notice_a_restart() -> None:
    world = trained()
    before = world.view
    world.restart_core()
    sent = len(world.sent)
    world.handle(Wake())
    world.rejoin()
    world.run()
    told = [command for _, command in world.sent[sent:]]
    # Who the buddies were is not on record. They are told again, and nothing else is.
    assert all(
        isinstance(c, agent_messages.Tell) and isinstance(c.command, commands.Buddy) for c in told
    )
    world.assert_training()
    after = world.view
    assert (after.generation, after.ranks) == (
        before.generation,
        [type(v)(**{**to_dict(v), "committed_step": 5}) for v in before.ranks],
    )
    assert [spare.worker for spare in after.spares] == [spare.worker for spare in before.spares]
    assert {spare.state for spare in after.spares} == {"parked"}
    world.kill(2)
    world.run()
    world.assert_training()


def test_warnings_and_readings_are_shown_and_survive_a_restart() -> None:
    world = trained()
    reading = Note(job="j", target="n1/0", signal="fan", reason="slow")
    world.handle(reading)
    world.handle(reading)
    said = m.BuddyLost(generation=0, error="refused")
    world.say(world.rank(0), said)
    world.pump()
    notes = [note.text for note in world.view.notes]
    assert notes == ["signal fan: n1/0: slow", "rank 0 lost its buddy n1: refused"]
    world.restart_core()
    assert [note.text for note in world.view.notes] == notes
    with pytest.raises(UsageError, match="no node 'n7'"):
        world.handle(Note(job="j", target="n7", signal="fan", reason="slow"))


def to_dict(view: object) -> dict[str, object]:
    return {name: getattr(view, name) for name in view.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_restart_in_front_of_any_answer_of_a_recovery(answer: type[m.Message]) -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(answer)
    generation = world.view.generation
    world.restart_core()
    world.handle(Wake())
    assert world.view.state == "recovering"
    world.rejoin()
    world.run()
    world.assert_training()
    assert world.view.generation > generation
    incident = world.last
    assert incident.outcome == "RESOLVED" and incident.victims == [1]
    assert "restarted" in incident.reason
    generations = [record.generation for record in world.recorded(r.AttemptStarted)]  # type: ignore[union-attr]
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("answer", [a for a in ANSWERS if a is not m.Report])
def test_a_restart_in_front_of_any_answer_of_a_planned_move(answer: type[m.Message]) -> None:
    world = trained(spares=2)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(answer)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run()
    world.assert_training()
    assert all(incident.outcome == "RESOLVED" for incident in world.incidents)
    assert world.view.ranks[1].slot != "n0/1"


def test_a_rank_that_died_meanwhile_is_replaced() -> None:
    world = trained()
    world.restart_core()
    worker = world.workers["n1.w2"]
    worker.alive = False
    world.rejoin()
    assert not world.commands(agent_messages.Forget), "its side state is needed"
    world.run()
    assert ("n1", agent_messages.Forget(workers=["n1.w2"])) in world.commands(agent_messages.Forget)
    world.assert_training()
    assert world.last.victims == [2]


def test_an_agent_that_stays_away_is_waited_for_then_lost() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Held)
    world.restart_core()
    world.nodes["n1"].alive = False
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n1"
    world.handle(Wake())
    world.rejoin()
    world.run(8)
    sent = len(world.sent)
    assert world.view.state == "recovering" and not world.told(commands.Swap)
    world.run(60)
    assert len(world.sent) > sent
    world.assert_training()
    assert world.last.victims == [1, 2, 3]


def test_a_swap_that_is_said_again_names_the_buddy_of_now() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Swapped)
    world.restart_core()
    world.handle(Wake())
    world.run(30)  # nobody comes, so nobody has a buddy
    sent = len(world.sent)
    world.rejoin()
    world.run()
    world.assert_training()
    buddies: dict[str, m.Address | None] = {}
    for _, command in world.sent[sent:]:
        told = command.command if isinstance(command, agent_messages.Tell) else None
        if isinstance(told, commands.Buddy):
            buddies[command.worker] = told.address
        elif isinstance(told, commands.Swap) and not told.same_buddy:
            buddies[command.worker] = told.buddy
    for rank in range(world.spec.world):
        worker = world.core.state("j").owner(rank)
        assert worker is not None and buddies[worker.id] == world.nodes[worker.buddy].blobs


def test_worker_and_incident_ids_go_on_after_a_restart() -> None:
    world = trained()
    world.kill(1)
    world.run()
    world.step()
    world.restart_core()
    world.rejoin()
    world.kill(1)
    world.run()
    world.assert_training()
    ids = [record.worker for record in world.recorded(r.Placed)]  # type: ignore[union-attr]
    assert len(set(ids)) == len(ids)
    assert [incident.id for incident in world.incidents] == ["j-1", "j-2"]


def test_taints_and_waiting_drains_survive_a_restart() -> None:
    world = trained(nodes="n0:2 n1:3", spares=1)
    world.handle(Taint(job="j", target="n1/2", reason="hot"))
    world.run()
    world.handle(Drain(job="j", node="n0"))
    world.run()
    assert world.last.outcome == "OPEN"
    world.restart_core()
    world.rejoin()
    world.run()
    assert [node.taints for node in world.view.nodes] == [["drain"], ["n1/2: hot"]]
    world.join("n5")
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED" and len(world.last.moves) == 2


def test_a_held_job_goes_on_after_a_restart() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    world.kill_node("n1")
    world.run()
    assert world.view.state == "held"
    world.restart_core()
    world.rejoin()
    world.run()
    assert world.view.state == "held" and world.view.checkpoint
    assert len(world.told(commands.Checkpoint)) == 2
    world.join("n5")
    world.run()
    world.assert_training()


@pytest.mark.parametrize(
    "answer", [agent_messages.StoreOpened, agent_messages.WorkerStarted, m.Attached]
)
def test_a_restart_during_the_start(answer: type[m.Message]) -> None:
    world = World()
    assert world.before(answer)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run()
    if world.view.state == "starting":  # Attached was said to nobody, progress shows it
        world.step()
        world.progress()
        world.run()
    world.assert_training()


@pytest.mark.parametrize("answer", [m.Parked, m.Arrived, m.Ready, m.Copied, m.Swapped])
def test_a_restart_during_a_resume(answer: type[m.Message]) -> None:
    world = World(job_spec(resume="/old/checkpoint-40"))
    assert world.before(answer)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run()
    world.assert_training()


def test_status_and_incidents_of_an_ended_job_survive() -> None:
    world = trained()
    world.kill(1)
    world.run()
    for worker in world.owners():
        worker.state = "done"
        world.say(worker, m.Done(tick=9, version=9))
    world.run()
    before = (world.view, world.incidents)
    world.restart_core()
    assert (world.view, world.incidents) == before
    assert world.core.deadline() is None
    assert world.now > SECOND


def test_a_newcomer_of_an_earlier_term_that_comes_back_late_is_ended_first() -> None:
    """Its agent still takes it for the rank: what all ranks are told must not reach it."""
    world = trained(nodes="n0:3 n1:2 n2:1", spares=2)
    world.handle(Migrate(job="j", ranks=[2]))
    stray = next(iter(world.core.state("j").attempt.newcomers.values()))  # type: ignore[union-attr]
    home = world.workers[stray].node
    world.before(m.Ready)
    world.restart_core()
    for name in world.nodes:
        if name != home:
            world.join(name, world.nodes[name].slots)
    for _ in range(40):  # training goes on, and the wait for the node is over
        world.now += SECOND
        world.step()
        world.progress()
        world.pump()
        deadline = world.core.deadline(world.now)
        if deadline is not None and deadline <= world.now:
            world.handle(Wake())
    assert not world.core.state("j").replayed
    sent = len(world.sent)
    world.join(home, world.nodes[home].slots)
    world.run()
    world.assert_training()
    about = [c for _, c in world.sent[sent:] if getattr(c, "worker", "") == stray]
    assert isinstance(about[0], agent_messages.KillWorker)
    assert not any(isinstance(c, agent_messages.Tell) for c in about)
