"""Start-up, resume, operators' mistakes, injection, cancelling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.errors import UsageError
from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import (
    AgentSaid,
    Cancel,
    CoreInput,
    Drain,
    InjectNow,
    InjectSpec,
    Migrate,
    Submit,
    Taint,
    Untaint,
    Wake,
)
from tests.support.core import SECOND, World, attached, job_spec


def trained(**kwargs: object) -> World:
    world = World(job_spec(**kwargs)).start()  # type: ignore[arg-type]
    world.step(5)
    return world


def test_the_world_starts_a_job_by_itself() -> None:
    World().start().assert_training()


def test_agents_join_then_the_store_opens_then_all_ranks_start() -> None:
    world = World(join=False)
    for name in ("n0", "n1"):
        world.join(name)
        assert not world.sent
    world.join("n2")
    assert world.sent == [("n0", agent_messages.OpenStore(generation=0))]
    world.run()
    started = [command for _, command in world.commands(agent_messages.StartWorker)]
    assert [command.rank for command in started] == [0, 1, 2, 3, -1]  # type: ignore[attr-defined]
    assert [command.slot for command in started] == [0, 1, 0, 1, 0]  # type: ignore[attr-defined]
    assert started[0].buddy == world.nodes["n1"].blobs  # type: ignore[attr-defined]
    assert started[2].buddy == world.nodes["n2"].blobs  # type: ignore[attr-defined]
    assert started[4].worker == "n2.w4"  # type: ignore[attr-defined]
    view = world.view
    assert view.state == "running" and view.node_loss_protected
    assert [rank.slot for rank in view.ranks] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    assert [spare.state for spare in view.spares] == ["parked"]


def test_a_start_that_waits_for_a_node_does_not_wake_the_core_all_the_time() -> None:
    world = World()
    world.attach = False
    world.run()
    world.lose_agent("n0")
    world.kill(3)
    world.pump()
    assert world.view.state == "starting"
    world.now += 5 * SECOND
    world.handle(Wake())
    due = world.core.deadline(world.now)
    assert due is None or due > world.now + SECOND


def test_a_spare_node_that_is_late_does_not_delay_the_start_for_long() -> None:
    world = World(join=False)
    world.join("n0")
    world.join("n1")
    assert not world.sent
    world.now += 3 * SECOND
    world.handle(Wake())
    assert world.commands(agent_messages.OpenStore)
    world.pump()
    world.join("n2")
    world.run()
    world.assert_training()
    assert len(world.view.spares) == 1


def test_an_agent_that_never_joins_ends_the_start_if_no_slot_is_left() -> None:
    world = World(job_spec(nodes="n0:2 n1:2"), join=False)
    world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3


def test_one_node_says_that_its_loss_is_not_protected() -> None:
    world = trained(nodes="n0:5", world=4, local_world=4)
    assert not world.view.node_loss_protected and "n0" in world.view.protection
    started = [command for _, command in world.commands(agent_messages.StartWorker)]
    assert all(command.buddy is None for command in started)  # type: ignore[attr-defined]


def test_a_death_before_all_attached_starts_everybody_again() -> None:
    world = World()
    world.attach = False
    world.pump()
    first = world.owners()
    for worker in first[:3]:
        worker.state = "running"
        world.say(worker, attached(0))
    world.exit(first[3], -9)
    world.attach = True
    world.run()
    world.assert_training()
    assert not any(worker.alive for worker in first)
    assert world.view.generation == 1 and not world.told(commands.Abort)
    assert world.last.cause == "start" and world.last.outcome == "RESOLVED"


def test_a_node_lost_at_the_start_moves_its_ranks_to_free_slots() -> None:
    world = World()
    world.attach = False
    world.pump()
    world.kill_node("n1")
    world.attach = True
    world.run()
    world.assert_training()
    assert {worker.node for worker in world.owners()} == {"n0", "n2"}


def test_a_node_lost_without_a_sign_at_the_start_is_waited_for_and_then_left() -> None:
    world = World(job_spec(nodes="n0:2 n1:2 n2:2", spares=0))
    world.attach = False
    world.run(5)
    world.lose_agent("n1", lose_answers=True)
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n1"
    world.attach = True
    world.run(2 * world.spec.stall_timeout_ns / 1e9 + 60)
    assert world.view.state == "running"
    assert {rank.slot for rank in world.view.ranks} == {"n0/0", "n0/1", "n2/0", "n2/1"}


def test_ranks_that_always_die_at_the_start_end_the_job() -> None:
    world = World()
    world.attach = False
    for _ in range(6):
        world.pump()
        if world.view.state == "starting":
            world.kill(0)
    world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3
    assert len(world.recorded(r.StartBegun)) == 4


@pytest.mark.parametrize("by_exit", [True, False])
def test_an_exception_at_the_start_is_the_users(by_exit: bool) -> None:
    world = World()
    world.attach = False
    world.pump()
    worker = world.rank(2)
    if not by_exit:
        failure = m.Failure(generation=0, error_kind="user", error="Boom\nKeyError: 'x'", version=0)
        world.say(worker, failure)
    world.exit(worker, 1, "Boom\nKeyError: 'x'")
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 1)
    assert "KeyError" in world.view.traceback


@pytest.mark.parametrize("order", [("user", "usage"), ("usage", "user"), ("comm", "usage")])
def test_a_script_that_is_refused_at_the_start_used_it_wrongly(order: tuple[Any, Any]) -> None:
    world = World()
    world.attach = False
    world.pump()
    errors = {"usage": "UsageError: attach: no\nhint: do", "user": "KeyError", "comm": "reset"}
    for rank, kind in enumerate(order):
        failure = m.Failure(generation=0, error_kind=kind, error=errors[kind], version=0)
        world.say(world.rank(rank), failure)
    world.exit(world.rank(order.index("usage")), 1, "")
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 2)
    assert world.view.reason.endswith("raised UsageError: attach: no, before the first step")
    assert "hint: do" in world.view.traceback


def test_a_script_that_is_refused_when_others_have_attached_did_the_same() -> None:
    world = World()
    world.run()
    for rank, kind in ((1, "user"), (2, "usage")):
        failure = m.Failure(generation=0, error_kind=kind, error=f"{kind} error", version=0)  # type: ignore[arg-type]
        world.say(world.rank(rank), failure)
        world.exit(world.rank(rank), 1, "")
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 2)
    assert world.view.traceback == "usage error"


def test_an_exception_at_the_start_beside_a_kill_is_its_effect() -> None:
    world = World()
    world.attach = False
    world.pump()
    world.say(world.rank(2), m.Failure(generation=0, error_kind="user", error="reset", version=0))
    world.kill(1)
    world.attach = True
    world.run()
    world.assert_training()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"0": [0, 1, 2, 3]},
            "rank 0 has a process group '1' with ranks 0, 2, and rank 2 does not",
        ),
        (
            {"0": [0, 1, 2, 3], "1": [2, 3]},
            "process group '1' has ranks 0, 2 on rank 0 and ranks 2, 3 on rank 2",
        ),
    ],
)
def test_process_groups_that_differ_between_ranks_end_the_job(
    other: dict[str, list[int]], words: str
) -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    everyone = [0, 1, 2, 3]
    groups = {0: {"0": everyone, "1": [0, 2]}, 1: {"0": everyone}, 2: other, 3: {"0": everyone}}
    for worker in world.owners():
        said = msgspec.structs.replace(attached(0), members=groups[worker.rank])
        world.say(worker, said)
    world.run(5)
    assert world.view.state == "failed" and world.view.exit_code == 2
    assert words in world.view.reason and "hint: create the same groups" in world.view.reason


def test_a_group_of_some_ranks_is_no_mismatch() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    for worker in world.owners():
        mine = {
            "0": [0, 1, 2, 3],
            f"half-{worker.rank % 2}": [worker.rank % 2, worker.rank % 2 + 2],
        }
        world.say(worker, msgspec.structs.replace(attached(0), members=mine))
    world.run(5)
    assert world.view.state == "running"


def test_a_newcomer_with_other_process_groups_is_refused_at_once() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    for worker in world.owners():
        said = msgspec.structs.replace(attached(0), members={"0": [0, 1, 2, 3]})
        world.say(worker, said)
    world.run(5)
    world.kill(1)
    assert world.before(m.Arrived, 1)
    newcomer = next(w for w in world.workers.values() if w.alive and w.rank == 1)
    world.queue.clear()
    world.say(newcomer, msgspec.structs.replace(attached(1), members={"0": [0, 1, 2]}))
    world.pump()
    assert not newcomer.alive
    assert world.commands(agent_messages.KillWorker)[-1][1].worker == newcomer.id  # type: ignore[attr-defined]


def where(world: World, **ranks: str) -> None:
    """`r0="attaching"`: what the progress page of rank 0 says."""
    for worker in world.owners():
        state = agent_messages.WorkerState(
            worker=worker.id,
            slot=worker.slot,
            pid=9,
            rank=worker.rank,
            where=ranks.get(f"r{worker.rank}", "building"),
        )
        world.agent_says(worker.node, agent_messages.Progress(workers=[state]))


def test_a_rank_that_never_attaches_is_started_again_once_and_then_named() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    first = world.rank(2)
    where(world, r0="attaching", r1="attaching", r3="attaching")
    world.pump()
    assert world.view.state == "starting"
    assert world.view.reason == "waiting for rank 2 to call keepstep.attach; ranks 0, 1, 3 did"
    world.run(62)
    assert world.view.state == "starting" and not first.alive and world.rank(2) is not first
    words = "rank 2 did not come to keepstep.attach within 60 s after ranks 0, 1, 3"
    assert (world.last.cause, world.last.victims, world.last.reason) == ("start", [2], words)
    where(world, r0="attaching", r1="attaching", r3="attaching")
    world.run(62)
    assert world.view.state == "failed" and world.view.exit_code == 3
    assert f"{words}, in two starts (hint: every rank must call" in world.view.reason


def test_a_script_that_ends_without_attach_beside_others_in_it_is_named() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    where(world, r0="attaching")
    world.say(world.rank(1), m.Done(tick=0, version=0))
    world.pump()
    assert world.view.state == "failed" and world.view.exit_code == 2
    words = "the script of rank 1 ended without keepstep.attach while rank 0 waited in it"
    assert words in world.view.reason


def test_a_long_construction_is_no_hang_but_it_is_said_once() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(3_000)
    assert world.view.state == "starting" and not world.incidents
    assert [note.text for note in world.view.notes] == [
        "ranks 0, 1, 2, 3 did not call keepstep.attach yet, 60 s after the start: until then hangs "
        "are not seen and nothing is protected"
    ]
    for worker in world.owners():
        world.say(worker, attached(0))
    world.run(5)
    assert world.view.state == "running" and not world.view.reason


def test_a_store_lost_before_all_attached_starts_everybody_again() -> None:
    world = World(job_spec())
    world.attach = False
    world.run(5)
    world.attach = True
    world.agent_says("n0", agent_messages.StoreFailed(generation=0, error="ended with -9"))
    world.run(30)
    world.assert_training()
    assert world.view.generation == 1
    assert world.last.reason.startswith("the store on n0 was lost: ended with -9")


def test_a_script_without_attach_runs_to_its_end() -> None:
    world = World()
    world.attach = False
    world.pump()
    for worker in world.owners():
        world.say(worker, m.Done(tick=0, version=0))
    world.run()
    assert (world.view.state, world.view.exit_code) == ("done", 0)


# ------------------------------------------------------------------ resume


def test_a_resumed_job_takes_all_state_from_the_checkpoint() -> None:
    world = World(job_spec(resume="/old/checkpoint-40"))
    world.run()
    world.assert_training()
    copies = [command for _, command in world.told(commands.Copy)]
    assert len(copies) == 4
    assert all(c.checkpoint == "/old/checkpoint-40" and not c.sources for c in copies)  # type: ignore[attr-defined]
    assert all(c.tick == -3 for _, c in world.told(commands.Position))  # type: ignore[attr-defined]
    assert [rank.slot for rank in world.view.ranks] == ["n0/0", "n0/1", "n1/0", "n1/1"]
    incident = world.last
    assert (incident.trigger, incident.cause, incident.outcome) == ("planned", "resume", "RESOLVED")
    assert incident.moves[0] == "rank 0: checkpoint -> n0/0"
    world.step(3)
    world.kill(0)
    world.run()
    world.assert_training()


@pytest.mark.parametrize("answer", [m.Parked, m.Arrived, m.Ready, m.Staged, m.Copied, m.Swapped])
def test_a_death_while_resuming_is_survived(answer: type[m.Message]) -> None:
    world = World(job_spec(resume="/old/checkpoint-40"))
    assert world.before(answer)
    worker = next(w for w in world.workers.values() if w.alive)
    world.exit(worker, -9)
    world.run()
    world.assert_training()


def test_a_checkpoint_without_side_state_can_not_be_resumed() -> None:
    world = World(job_spec(resume="/old/checkpoint-40"), join=False)

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy):
            return m.CopyFailed(
                generation=said.generation, reason="side-state-missing", error="rank 1"
            )
        return None

    world.refuse = refuse
    for name in world.nodes:
        world.join(name)
    world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3
    assert "/old/checkpoint-40" in world.view.reason


# ------------------------------------------------------------------ operators


@pytest.mark.parametrize(
    "event",
    [
        Migrate(job="x", ranks=[0]),
        Migrate(job="j", ranks=[4]),
        Migrate(job="j", ranks=[-1]),
        Migrate(job="j", ranks=[]),
        Migrate(job="j", ranks=[1, 1]),
        Drain(job="j", node="n9"),
        Taint(job="j", target="n9", reason="x"),
        Taint(job="j", target="n0/7", reason="x"),
        Taint(job="j", target="n0/a", reason="x"),
        Taint(job="j", target="n0", reason=""),
        Untaint(job="j", target="n0"),
        Submit(spec=job_spec()),
        InjectNow(job="j", inject=InjectSpec(id="i", action="kill", rank=9)),
        InjectNow(job="j", inject=InjectSpec(id="i", action="kill-node", node="n9")),
        InjectNow(job="j", inject=InjectSpec(id="i", action="kill", rank=0, step=1, point="?")),
        Cancel(job="x", reason="x", exit_code=130),
    ],
)
def test_bad_input_is_refused_with_a_hint_and_changes_nothing(event: CoreInput) -> None:
    world = trained()
    before = (world.view, world.incidents, world.core.deadline())
    with pytest.raises(UsageError) as error:
        world.core.handle(world.now, event)
    assert error.value.hint
    assert (world.view, world.incidents, world.core.deadline()) == before


@pytest.mark.parametrize(
    "spec",
    [
        job_spec(world=3),
        job_spec(nodes="n0:2"),
        job_spec(nodes="n0:1 n1:2"),
        job_spec(nodes="n0:2 n0:2"),
        job_spec(spares=-1),
        job_spec(inject=[InjectSpec(id="i", action="kill", rank=9, step=1)]),
    ],
)
def test_a_bad_job_is_refused(spec: object) -> None:
    world = World()
    with pytest.raises(UsageError):
        world.core.handle(world.now, Submit(spec=spec))  # type: ignore[arg-type]
    assert len(world.core.jobs()) == 1


def test_cancel_stops_everything_with_the_given_exit_code() -> None:
    world = trained()
    world.kill(1)
    world.before(m.Held)
    world.handle(Cancel(job="j", reason="Ctrl-C", exit_code=130))
    assert (world.view.state, world.view.exit_code) == ("cancelled", 130)
    assert len(world.commands(agent_messages.Stop)) == 3 and world.core.deadline() is None
    assert world.last.outcome == "ABORTED"
    world.pump()
    with pytest.raises(UsageError, match="ended"):
        world.handle(Migrate(job="j", ranks=[1]))
    world.join("n0")
    assert world.sent[-1] == ("n0", agent_messages.Stop(grace_ns=0))


def test_nothing_can_be_migrated_before_the_job_runs() -> None:
    world = World(join=False)
    with pytest.raises(UsageError, match="starting"):
        world.handle(Migrate(job="j", ranks=[1]))


def test_unknown_jobs_have_no_views() -> None:
    world = World()
    for ask in (world.core.job, world.core.incidents):
        with pytest.raises(UsageError) as error:
            ask("nope")
        assert "j" in error.value.hint


# ------------------------------------------------------------------ spares and buddies


def test_a_dead_spare_is_replaced_and_a_slot_that_kills_three_is_tainted() -> None:
    world = trained(nodes="n0:2 n1:2 n2:1 n3:1", spares=1)
    for _ in range(3):
        (spare,) = world.view.spares
        assert spare.slot == "n2/0"
        world.exit(world.workers[spare.worker], 1)
        world.run()
    (spare,) = world.view.spares
    assert spare.slot == "n3/0" and world.view.nodes[2].taints == ["n2/0: repeated failures"]
    assert not world.incidents


def test_worker_ids_are_never_used_again() -> None:
    world = trained()
    for rank in (0, 1, 2, 3, 0):
        world.kill(rank)
        world.run()
        world.step()
    ids = [record.worker for record in world.recorded(r.Placed)]  # type: ignore[union-attr]
    assert len(set(ids)) == len(ids)


def test_a_rank_that_lost_its_buddy_gets_the_next_one() -> None:
    world = trained()
    worker = world.rank(0)
    world.say(worker, m.BuddyLost(generation=0, error="reset"))
    world.run()
    assert world.told(commands.Buddy) == [
        (worker.id, commands.Buddy(address=world.nodes["n2"].blobs))
    ]


def test_the_buddy_of_the_only_node_left_is_nobody() -> None:
    world = trained(nodes="n0:2 n1:2", world=2)
    world.kill_node("n1")
    world.say(world.rank(0), m.BuddyLost(generation=0, error="reset"))
    world.run()
    assert world.told(commands.Buddy)[-1][1] == commands.Buddy(address=None)


# ------------------------------------------------------------------ injection


def test_injects_of_the_spec_are_armed_with_the_rank_and_not_again_after_they_fired() -> None:
    kill = InjectSpec(id="k", action="kill", rank=1, step=3, point="in_fence")
    world = trained(inject=[kill])
    arms = world.told(commands.Arm)
    armed = commands.Arm(inject="k", action="kill", step=3, point="in_fence")
    assert arms == [(world.rank(1).id, armed)]
    world.say(world.rank(1), m.InjectFired(inject="k", point="in_fence", version=3))
    world.kill(1)
    world.run()
    world.assert_training()
    assert world.view.injects_fired == ["k"] and len(world.told(commands.Arm)) == 1


def test_an_inject_of_a_later_step_moves_with_its_rank() -> None:
    world = trained(inject=[InjectSpec(id="k", action="kill", rank=1, step=50)])
    world.kill(1)
    world.run()
    assert [worker for worker, _ in world.told(commands.Arm)] == ["n0.w1", world.rank(1).id]


def test_an_inject_of_the_step_being_made_is_not_armed_again() -> None:
    world = trained(inject=[InjectSpec(id="k", action="kill", rank=1, step=5)])
    world.kill(1)  # its InjectFired was lost
    world.run()
    world.assert_training()
    assert len(world.told(commands.Arm)) == 1


def test_kill_stop_and_kill_node_at_once() -> None:
    world = trained(spares=2)
    victim = world.rank(1)
    world.handle(InjectNow(job="j", inject=InjectSpec(id="a", action="kill", rank=1)))
    assert not victim.alive
    world.run()
    world.assert_training()
    world.handle(InjectNow(job="j", inject=InjectSpec(id="b", action="stop", rank=2, seconds=1.5)))
    assert world.sent[-1][1] == agent_messages.SendSignal(
        worker=world.rank(2).id, signal=19, resume_after_ns=1_500_000_000
    )
    world.handle(InjectNow(job="j", inject=InjectSpec(id="c", action="kill-node", node="n1")))
    assert world.sent[-1] == ("n1", agent_messages.KillNode())
    world.kill_node("n1")
    world.run()
    world.assert_training()
    assert world.view.injects_fired == ["a", "b", "c"]


def test_a_node_is_killed_at_the_step_it_was_planned_for() -> None:
    inject = InjectSpec(id="k", action="kill-node", node="n1", step=7)
    world = trained(inject=[inject])
    world.progress()
    world.run()
    assert not world.commands(agent_messages.KillNode)
    world.step(3)
    world.progress()
    world.run()
    assert world.commands(agent_messages.KillNode) == [("n1", agent_messages.KillNode())]
    assert world.view.injects_fired == ["k"]


def test_progress_shows_in_the_view() -> None:
    world = trained()
    world.progress()
    world.pump()
    view = world.view
    assert view.committed_step == 5 and view.steps_per_s == 2.0
    assert {rank.state for rank in view.ranks} == {"running"}
    assert AgentSaid  # the world speaks through it
