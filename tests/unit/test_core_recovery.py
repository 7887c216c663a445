"""Unplanned faults: one death, then a second one in front of every answer, and worse."""

from __future__ import annotations

from collections import deque

import pytest

from keepstep.model import agent_messages, commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import AgentSaid, Migrate, Taint, Untaint
from tests.support.core import SECOND, STALL, World, attached, job_spec, says

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


def test_a_killed_rank_is_replaced_and_training_goes_on_from_the_same_step() -> None:
    world = trained()
    victim = world.kill(1)
    world.run()
    world.assert_training()
    assert world.rank(1).id != victim.id
    assert {worker.tick for worker in world.owners()} == {5}
    incident = world.last
    assert (incident.trigger, incident.cause, incident.victims) == (
        "unplanned",
        "process-exit",
        [1],
    )
    assert incident.outcome == "RESOLVED" and incident.steps_lost == 0
    assert incident.decision == "RETRY" and incident.steps_recomputed == 1
    assert incident.moves == [f"rank 1: n0/1 -> {world.view.ranks[1].slot}"]
    assert incident.source == "rank 0, rank 2, rank 3 + side state from own-agent"
    assert incident.pause_ms == pytest.approx(750.0)
    phases = [phase.phase for phase in incident.phases]
    assert phases == ["RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME", "RETIRE"]
    assert all(phase.start_ns >= 0 and phase.duration_ms >= 0 for phase in incident.phases)
    timings = {"abort", "report", "newcomer_build", "warm_up", "copy", "rewire", "first_step"}
    assert set(incident.timings_ms) == timings
    assert "signal 9" in incident.reason and incident.generation == world.view.generation
    assert len(world.view.spares) == 1, "the used spare is replaced"


def test_the_spare_comes_from_another_node_than_the_victim() -> None:
    world = trained(nodes="n0:3 n1:3", spares=2)
    world.kill(0)
    world.run()
    assert world.rank(0).node == "n1"


def test_a_torn_fence_is_committed_for_those_waiting_in_it() -> None:
    world = trained()
    for rank in (0, 2):
        world.rank(rank).in_fence = True
    world.rank(3).tick = 6
    world.kill(1)
    world.run()
    world.assert_training()
    assert world.last.decision == "COMMIT" and world.last.steps_recomputed == 0
    assert {worker.tick for worker in world.owners()} == {6}


def test_a_rank_that_can_not_reach_the_committed_tick_falls_back() -> None:
    world = trained()
    world.rank(3).tick = 6  # nobody else is in the fence: this must never happen
    world.kill(1)
    world.run()
    assert world.view.state == "fell_back" and world.view.exit_code == 4
    assert world.last.outcome == "FELL_BACK" and world.last.steps_lost > 0


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("second", [0, 1, 2, 3])
def test_a_second_death_in_front_of_any_answer_widens_the_incident(
    answer: type[m.Message], second: int
) -> None:
    world = trained(spares=2, nodes="n0:3 n1:3 n2:3")
    world.kill(1)
    assert world.before(answer)
    owner = (
        next(w for w in world.workers.values() if w.alive and w.rank == second)
        if (second != 1)
        else next((w for w in world.workers.values() if w.alive and w.rank == 1), None)
    )
    if owner is None:
        pytest.skip("no newcomer has been chosen in front of this answer")
    world.exit(owner, -9)
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED" and world.last.attempts >= 1
    decided = [record.generation for record in world.recorded(r.Decided)]  # type: ignore[union-attr]
    assert len(set(decided)) == len(decided), "one decision per attempt"


def test_a_widened_incident_tells_each_death_once() -> None:
    world = trained(spares=2, nodes="n0:3 n1:3 n2:3")
    first = world.kill(1)
    assert world.before(m.Ready)
    second = world.kill(2)
    world.run()
    world.assert_training()
    assert world.last.reason == (
        f"rank 1 ({first.id}) ended with signal 9; then rank 2 ({second.id}) ended with signal 9; "
        "2 ranks moved, no step lost"
    )


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_node_lost_in_front_of_any_answer_is_survived(answer: type[m.Message]) -> None:
    world = trained(spares=2, nodes="n0:2 n1:2 n2:4")
    world.kill(1)
    assert world.before(answer)
    world.kill_node("n0")
    world.run()
    world.assert_training()
    assert {worker.node for worker in world.owners()} == {"n1", "n2"}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_agent_that_loses_its_stream_and_answers_is_asked_again(
    answer: type[m.Message],
) -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(answer)
    for name in ("n0", "n1", "n2"):
        world.lose_agent(name, lose_answers=True)
    world.now += 3 * SECOND
    world.rejoin()
    world.run()
    world.step()  # a lost Resumed shows in the progress
    world.progress()
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED"
    assert not world.recorded(r.NodeLost)


def test_an_agent_that_does_not_come_back_counts_as_a_dead_node() -> None:
    world = trained(nodes="n0:2 n1:2 n2:2", spares=2)
    world.lose_agent("n0")
    world.run(10)
    assert not world.incidents, "an agent lost alone is not an incident yet"
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n0"
    world.run()
    world.assert_training()
    assert world.last.cause == "node-lost" and world.last.victims == [0, 1]


def test_a_worker_of_a_node_declared_dead_is_killed_when_its_agent_returns() -> None:
    world = trained(nodes="n0:2 n1:2 n2:2", spares=2)
    world.lose_agent("n0")
    old = [w for w in world.workers.values() if w.node == "n0"]
    for worker in old:
        worker.mute = True
        worker.rank, worker.state = -1, "starting"  # unreachable: they train with nobody
    world.run()
    world.join("n0")
    world.pump()
    assert not any(worker.alive for worker in old)
    world.assert_training()


def test_nobody_is_called_fenced_while_no_rank_is_in_reach() -> None:
    world = trained(nodes="n0:2 n1:2 n2:2", spares=2)
    world.lose_agent("n0")
    world.run(world.spec.stall_timeout_ns / 1e9 + 1)
    assert world.core.state("j").nodes["n0"].state == "unreachable"
    world.lose_agent("n1", lose_answers=True)
    world.run(500)
    assert not world.recorded(r.NodeLost), "all of them may train on"
    for worker in world.owners():
        worker.tick += 7
    back = world.now
    world.join("n1")
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n0"
    world.run()
    (lost,) = world.recorded(r.NodeLost)
    assert lost.at_ns >= back + world.spec.stall_timeout_ns
    world.assert_training()
    assert world.last.victims == [0, 1]


def test_ranks_that_were_given_up_are_waited_for_when_all_others_die() -> None:
    world = trained(nodes="n0:2 n1:2 n2:4", spares=4)
    world.lose_agent("n0")
    world.run(world.spec.stall_timeout_ns / 1e9 + 1)
    assert world.core.state("j").nodes["n0"].state == "unreachable"
    world.kill_node("n1")
    world.run(500)
    assert world.view.state == "recovering", "what n0 has is all there is"
    world.join("n0")
    world.run()
    world.assert_training()
    assert [record.placement.keys() for record in world.recorded(r.Committed)] == [{2, 3}]


def test_the_store_is_not_opened_where_ranks_die() -> None:
    world = trained(spares=2)
    world.kill_node("n0")
    world.run()
    opened = world.commands(agent_messages.OpenStore)
    assert opened[0][0] == "n0" and opened[-1][0] != "n0"


def test_all_ranks_dead_at_once_falls_back() -> None:
    world = trained()
    for rank in range(4):
        world.kill(rank)
    world.run()
    assert world.view.state == "fell_back" and world.view.exit_code == 4
    assert "lost" in world.view.reason
    assert world.last.outcome == "FELL_BACK"
    assert {node for node, _ in world.commands(agent_messages.Stop)} == {"n0", "n1", "n2"}


def test_without_a_spare_the_free_slot_of_the_dead_rank_is_used() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    world.kill(2)
    world.run()
    world.assert_training()
    assert world.view.ranks[2].slot == "n1/0" and not world.view.checkpoint


def test_no_slot_left_holds_writes_a_checkpoint_and_goes_on_when_a_node_joins() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    world.kill_node("n1")
    world.run()
    assert world.view.state == "held" and world.view.checkpoint == "/jobs/j/checkpoint-5"
    orders = [command for _, command in world.told(commands.Checkpoint)]
    assert [order.lead for order in orders] == [True, False]  # type: ignore[attr-defined]
    assert set(orders[0].dead) == {2, 3}  # type: ignore[attr-defined]
    assert "no spare for ranks 2, 3" in world.view.reason
    world.join("n9")
    world.run()
    world.assert_training()
    assert {worker.tick for worker in world.owners()} == {5}
    assert len(world.told(commands.Checkpoint)) == 2, "written once"


def test_a_checkpoint_that_can_not_be_written_is_said_tried_again_and_the_job_holds() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    full = True

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Checkpoint) and said.lead and full:
            return m.CheckpointFailed(
                generation=said.generation, path=said.path, error="No space left on device"
            )
        return None

    world.refuse = refuse
    world.kill_node("n1")
    world.run(500)
    said = "rank 0 could not write its part of /jobs/j/checkpoint-5: No space left on device"
    assert world.view.state == "held" and not world.view.checkpoint
    assert said in world.view.reason and said in world.last.reason
    assert [note.text for note in world.view.notes] == [said], "said once, tried several times"
    orders = [command.lead for _, command in world.told(commands.Checkpoint)]  # type: ignore[attr-defined]
    assert orders.count(True) > 2 and orders.count(False) == 1
    full = False
    world.run(100)
    assert world.view.state == "held" and world.view.checkpoint == "/jobs/j/checkpoint-5"
    assert said not in world.view.reason
    world.join("n9")
    world.run()
    world.assert_training()


def test_a_job_that_gives_up_says_that_there_is_no_checkpoint() -> None:
    world = trained(spares=2)

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy):
            return m.CopyFailed(generation=said.generation, reason="digest", error="x")
        if isinstance(said, commands.Checkpoint):
            return m.CheckpointFailed(generation=said.generation, path=said.path, error="full")
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    assert world.view.state == "failed" and "newcomers failed" in world.view.reason
    assert "could not write its part" in world.view.reason


def test_held_goes_on_after_untaint() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    worker = world.rank(3)
    world.handle(Taint(job="j", target="n1/1", reason="ecc"))
    world.exit(worker, -9)
    world.run()
    assert world.view.state == "held"
    world.handle(Untaint(job="j", target="n1/1"))
    world.run()
    world.assert_training()


def test_a_rank_that_does_not_report_is_fenced_and_replaced() -> None:
    world = trained(spares=2)
    stopped = world.rank(2)
    stopped.mute = True
    world.kill(1)
    world.run()
    world.assert_training()
    assert world.last.victims == [1, 2]
    assert not stopped.alive


@pytest.mark.parametrize("command", [commands.Decide, commands.Swap])
def test_a_rank_that_stops_answering_later_is_fenced_too(command: type[m.Message]) -> None:
    world = trained(spares=2)
    deaf = world.rank(2)

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if worker is deaf and isinstance(said, command):
            deaf.mute = True
            return m.Staged(generation=-7)  # nonsense, ignored
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    world.assert_training()
    assert not deaf.alive


def test_a_newcomer_that_is_never_ready_is_replaced_by_the_next_spare() -> None:
    world = trained(spares=2)
    slow: list[str] = []

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Position) and not slow:
            slow.append(worker.id)  # type: ignore[attr-defined]
            return m.Arrived(generation=0)
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    world.assert_training()
    assert slow and world.rank(1).id not in slow


@pytest.mark.parametrize("reason", ["digest", "position", "error"])
def test_a_failed_copy_takes_the_next_spare(reason: str) -> None:
    world = trained(spares=2)
    failed: list[str] = []

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy) and not failed:
            failed.append(worker.id)  # type: ignore[attr-defined]
            return m.CopyFailed(generation=said.generation, reason=reason, error="x")  # type: ignore[arg-type]
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    world.assert_training()
    assert world.rank(1).id not in failed and world.last.attempts == 2


def test_a_lost_source_is_left_out_and_the_others_serve() -> None:
    world = trained()
    asked: list[list[int]] = []

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy):
            asked.append([source.rank for source in said.sources])
            if len(asked) == 1:
                return m.CopyFailed(
                    generation=said.generation, reason="source-lost", error="reset", source=0
                )
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    world.assert_training()
    assert asked == [[0, 2, 3], [2, 3]]


def test_missing_side_state_falls_back_and_says_so() -> None:
    world = trained()

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy):
            return m.CopyFailed(
                generation=said.generation, reason="side-state-missing", error="tick 5"
            )
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    assert world.view.state == "fell_back" and "state of rank 1" in world.view.reason


def test_newcomers_that_always_fail_end_the_job_with_a_checkpoint() -> None:
    world = trained(spares=2)

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Copy):
            return m.CopyFailed(generation=said.generation, reason="digest", error="x")
        return None

    world.refuse = refuse
    world.kill(1)
    world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3
    assert world.view.checkpoint == "/jobs/j/checkpoint-5"
    assert world.view.checkpoint in world.view.reason


def lose_store(world: World) -> int:
    """The newest store ends; its generation."""
    node, command = world.commands(agent_messages.OpenStore)[-1]
    generation: int = command.generation  # type: ignore[attr-defined]
    world.agent_says(node, agent_messages.StoreFailed(generation=generation, error="ended with -9"))
    return generation


def test_a_store_lost_before_anybody_builds_groups_is_replaced_in_the_same_attempt() -> None:
    world = trained()
    world.kill(1)
    assert world.before(m.Report)
    reports = [event for event in world.queue if not says(event, agent_messages.StoreOpened)]
    world.queue = type(world.queue)(e for e in world.queue if e not in reports)
    world.pump()
    assert not world.told(commands.Stage)
    generation = lose_store(world)
    world.queue.extend(reports)
    world.run()
    world.assert_training()
    assert world.view.generation == generation and world.last.attempts == 1
    (first, _), (second, command) = world.commands(agent_messages.OpenStore)[-2:]
    assert command.generation == generation and first != second  # type: ignore[attr-defined]


@pytest.mark.parametrize("answer", [m.Arrived, m.Staged])
def test_a_store_lost_while_groups_are_built_starts_the_next_attempt(
    answer: type[m.Message],
) -> None:
    world = trained()
    world.kill(1)
    assert world.before(answer)
    world.queue = type(world.queue)(e for e in world.queue if not says(e, m.Staged))
    generation = lose_store(world)
    world.run()
    world.assert_training()
    assert world.view.generation > generation and world.last.attempts == 2
    assert world.last.outcome == "RESOLVED"


@pytest.mark.parametrize("answer", [m.Copied, m.Swapped, m.Resumed])
def test_a_store_lost_after_all_groups_are_built_changes_nothing(answer: type[m.Message]) -> None:
    world = trained()
    world.kill(1)
    assert world.before(answer)
    while any(says(event, m.Staged) for event in world.queue):
        world.handle(world.queue.popleft())
    lose_store(world)
    world.run()
    world.assert_training()
    assert world.last.attempts == 1


def test_a_store_lost_while_training_is_noted_only() -> None:
    world = trained()
    lose_store(world)
    world.run()
    world.assert_training()
    assert not world.incidents and "training does not need it" in world.view.notes[0].text


def test_a_store_lost_with_its_node_is_replaced() -> None:
    world = trained(nodes="n0:2 n1:2 n2:2", spares=1)
    world.handle(Taint(job="j", target="n0/1", reason="x"))
    world.run()
    world.kill(0)
    assert world.before(m.Held)
    host = world.commands(agent_messages.OpenStore)[-1][0]
    ranks = {worker.node for worker in world.owners()}
    world.kill_node(host)
    world.run()
    assert world.view.state in ("running", "held"), (host, ranks)


class DarkNetwork:
    """Groups can not be built, `limit` times in all."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.failures = self.limit = 0
        world.refuse = self._refuse

    def _refuse(self, worker: object, said: m.Message) -> m.Message | None:
        if not isinstance(said, commands.Stage) or worker is not self._world.rank(0):
            return None
        if self.failures == self.limit:
            return None
        self.failures += 1
        return m.StageFailed(generation=said.generation, error="rendezvous")


def test_groups_that_can_not_be_built_are_tried_for_minutes_then_given_up() -> None:
    world = trained()
    network = DarkNetwork(world)
    network.limit = 2
    world.kill(1)
    world.run()
    world.assert_training()
    network.limit = 7  # a network that needs a minute
    world.kill(2)
    world.run()
    world.assert_training()
    network.limit = 1_000_000
    world.kill(3)
    world.run()
    assert "could not be built" in world.view.reason
    assert world.view.state == "failed" and world.view.exit_code == 3


def test_a_rank_that_dies_three_times_at_one_tick_ends_the_job() -> None:
    world = trained(spares=3, nodes="n0:4 n1:4")
    for _ in range(3):
        world.kill(1)
        world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3
    assert "rank 1 died 3 times" in world.view.reason


def test_deaths_at_different_ticks_are_no_reason_to_give_up() -> None:
    world = trained()
    for _ in range(6):
        world.kill(1)
        world.run()
        world.assert_training()
        world.step()


# ------------------------------------------------------------------ exceptions


def fail(world: World, rank: int, kind: str, error: str) -> None:
    worker = world.rank(rank)
    worker.error_kind, worker.error = kind, error
    world.say(
        worker,
        m.Failure(
            generation=worker.generation,
            error_kind=kind,  # type: ignore[arg-type]
            error=error,
            version=worker.tick,
        ),
    )


def test_a_users_exception_ends_the_job_with_its_traceback() -> None:
    world = trained()
    fail(world, 2, "user", "Traceback ...\nValueError: bad batch")
    world.run()
    view = world.view
    assert (view.state, view.exit_code) == ("failed", 1)
    assert view.traceback.endswith("ValueError: bad batch") and "rank 2" in view.reason
    assert world.last.outcome == "FAILED"


def test_a_users_exception_after_a_death_is_its_effect() -> None:
    world = trained()
    fail(world, 2, "user", "RuntimeError: loss is NaN")
    world.kill(1)
    world.run()
    world.assert_training()
    assert world.last.cause == "process-exit"


def test_lost_connections_without_a_victim_are_built_again() -> None:
    world = trained()
    fail(world, 2, "comm", "Connection reset")
    fail(world, 3, "comm", "Connection reset")
    world.run()
    world.assert_training()
    assert world.last.cause == "connection" and world.last.moves == []


def test_connections_that_never_hold_end_the_job() -> None:
    world = trained()
    for _ in range(10):
        fail(world, 2, "comm", "Connection reset")
        world.run()
    assert world.view.state == "failed" and world.view.exit_code == 3


def test_groups_that_can_not_be_built_again_are_no_connections_lost_again() -> None:
    world = trained()
    network = DarkNetwork(world)
    network.limit = 8  # a network that needs two minutes
    fail(world, 2, "comm", "Connection reset")
    world.run()
    world.assert_training()
    assert network.failures == 8 and world.last.attempts == 9
    network.limit = 1_000_000
    fail(world, 2, "comm", "Connection reset")
    world.run()
    assert "could not be built" in world.view.reason and "the state of tick" in world.view.reason
    assert world.view.state == "failed" and world.view.exit_code == 3


def test_a_device_error_replaces_the_rank_after_fencing_it() -> None:
    world = trained()
    broken = world.rank(2)
    fail(world, 2, "device", "CUDA error: ECC")
    world.run()
    world.assert_training()
    assert not broken.alive and world.last.cause == "device-error"
    assert agent_messages.KillWorker(worker=broken.id) in [command for _, command in world.sent]


def test_a_device_error_seen_only_in_a_report_is_fenced() -> None:
    world = trained(spares=2)
    broken = world.rank(2)
    broken.error_kind, broken.error = "device", "ECC"
    world.kill(1)
    world.run()
    world.assert_training()
    assert not broken.alive and world.last.victims == [1, 2]


# ------------------------------------------------------------------ hangs


def stall(world: World, rank: int, **facts: object) -> None:
    worker = world.rank(rank)
    seen: dict[str, object] = {
        "version": worker.tick,
        "tick": worker.tick,
        "marks": 50,
        "where": "fence",
        "heartbeat_age_ns": 0,
        "stopped": False,
        "cpu_busy": False,
    }
    message = agent_messages.Stalled(worker=worker.id, rank=rank, **(seen | facts))  # type: ignore[arg-type]
    world.agent_says(worker.node, message)


@pytest.mark.parametrize(
    "facts",
    [
        {"stopped": True},
        {"heartbeat_age_ns": STALL + 1},
        {"marks": 49, "where": "compute"},
        {"cpu_busy": True},
    ],
)
def test_the_culprit_of_a_hang_is_fenced_and_replaced(facts: dict[str, object]) -> None:
    world = trained()
    culprit = world.rank(2)
    for rank in (0, 1, 3):
        stall(world, rank)
    world.pump()
    assert not world.incidents, "not every rank stands still"
    stall(world, 2, **facts)
    culprit.mute = True
    world.run()
    world.assert_training()
    assert world.last.cause == "hang" and world.last.victims == [2] and not culprit.alive


def test_a_hang_without_a_culprit_is_a_warning_once() -> None:
    world = trained()
    for _ in range(2):
        for rank in range(4):
            stall(world, rank)
    world.run()
    assert not world.incidents and len(world.recorded(r.Warned)) == 1


def test_a_rank_that_moves_again_is_no_hang() -> None:
    world = trained()
    for rank in range(3):
        stall(world, rank, stopped=rank == 1)
    worker = world.rank(0)
    world.agent_says(worker.node, agent_messages.Unstalled(worker=worker.id))
    stall(world, 3)
    world.run()
    assert not world.incidents


def test_who_waited_long_in_a_fence_is_not_blamed_when_the_others_hold() -> None:
    world = trained()
    world.handle(Migrate(job="j", ranks=[1]))
    for rank in (2, 3):  # while rank 0 takes its time
        stall(world, rank, marks=49 + rank)
    assert world.before(m.Held, 2)
    assert not world.recorded(r.SignalSeen), "they have passed the fence too"
    world.run()
    world.assert_training()
    assert not world.recorded(r.SignalSeen) and world.last.outcome == "RESOLVED"


def test_who_still_stands_a_stall_timeout_after_the_others_hold_is_blamed() -> None:
    world = trained()
    hung = world.rank(3)
    world.handle(Migrate(job="j", ranks=[1]))
    stall(world, 3, stopped=True)
    assert world.before(m.Held)
    hung.mute = True
    world.queue = deque(event for event in world.queue if not says(event, m.Held, 3))
    world.run()
    world.assert_training()
    assert not hung.alive and any(i.cause == "hang" for i in world.incidents)


def test_who_waited_long_in_the_last_fence_is_not_blamed_when_the_others_end() -> None:
    world = trained()
    for rank in (2, 3):
        stall(world, rank, marks=49 + rank)
    for rank in range(4):
        done(world, rank)
    world.run()
    assert not world.recorded(r.SignalSeen) and world.view.state == "done"


# ------------------------------------------------------------------ the end


def done(world: World, rank: int) -> None:
    worker = world.rank(rank)
    worker.state = "done"
    world.say(worker, m.Done(tick=worker.tick, version=worker.tick))


UNEVEN = "the script of rank 1 has ended, and rank {} began another step"


def test_ranks_that_train_on_where_another_one_has_ended_are_told_so() -> None:
    world = trained()
    done(world, 1)
    world.pump()
    world.now += STALL
    for rank in (0, 2, 3):
        stall(world, rank, marks=rank, where="outside" if rank else "compute")
        world.rank(rank).computing = not rank
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 1)
    assert UNEVEN.format(0) in world.view.reason and "same number of steps" in world.view.reason
    assert not world.recorded(r.SignalSeen), "and nobody is blamed for it"


def test_a_rank_that_dies_where_another_one_has_ended_does_not_hide_it() -> None:
    world = trained()
    done(world, 1)
    world.rank(0).computing = False
    world.kill(3)
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 1)
    assert UNEVEN.format(2) in world.view.reason


def test_all_done_finishes_every_rank_and_stops_the_agents() -> None:
    world = trained()
    for rank in range(4):
        done(world, rank)
    world.run()
    assert (world.view.state, world.view.exit_code) == ("done", 0)
    told = {worker for worker, _ in world.told(commands.Finish)}
    assert {world.rank(rank).id for rank in range(4)} <= told  # and the spares
    stops = [command for _, command in world.commands(agent_messages.Stop)]
    assert [isinstance(s, agent_messages.Stop) and s.finished for s in stops] == [True] * 3
    assert world.core.deadline() is None


def test_a_script_that_raises_and_ends_is_not_replaced() -> None:
    world = trained()
    victim = world.rank(2)
    world.say(victim, m.Failure(generation=0, error_kind="user", error="ValueError: no", version=1))
    world.exit(victim, code=1)
    world.run()
    assert (world.view.state, world.view.exit_code) == ("failed", 1)
    assert world.view.traceback == "ValueError: no"


def test_a_rank_that_dies_after_others_are_done_is_replaced_alone() -> None:
    world = trained()
    for rank in range(3):
        done(world, rank)
    world.pump()
    world.kill(3)
    world.run()
    assert world.view.state == "done" and world.last.outcome == "RESOLVED"
    swaps = [command for _, command in world.told(commands.Swap)]
    assert [swap.solo for swap in swaps] == [True]  # type: ignore[attr-defined]


def test_a_done_rank_that_dies_needs_no_successor() -> None:
    world = trained()
    for rank in range(3):
        done(world, rank)
    world.pump()
    world.exit(world.rank(0), -9)
    world.run()
    assert not world.incidents
    done(world, 3)
    world.run()
    assert world.view.state == "done"


def test_a_rank_in_the_last_fence_applies_it_when_another_is_done() -> None:
    world = trained()
    done(world, 0)
    world.rank(0).tick = 6
    for rank in (1, 2):
        world.rank(rank).in_fence = True
    world.kill(3)
    world.run()
    assert world.view.state == "done"
    assert {w.tick for w in world.workers.values() if w.rank >= 0 and w.id != "n1.w3"} == {6}


# ------------------------------------------------------------------ what is ignored


def test_old_and_foreign_messages_change_nothing() -> None:
    world = trained()
    world.kill(1)
    world.run()
    worker = world.rank(0)
    dead = world.workers["n0.w1"]
    report = m.Report(generation=0, tick=99, version=99, in_fence=False, computing=False)
    address = m.Address("h", 1)
    nonsense: list[tuple[str, agent_messages.AgentMessage]] = [
        (worker.node, agent_messages.WorkerSaid(worker=worker.id, rank=0, said=report)),
        (worker.node, agent_messages.WorkerSaid(worker="n7.w9", rank=0, said=report)),
        ("n1", agent_messages.WorkerSaid(worker=worker.id, rank=0, said=report)),
        (dead.node, agent_messages.WorkerSaid(worker=dead.id, rank=1, said=attached(0))),
        (dead.node, agent_messages.WorkerExited(worker=dead.id, rank=1, code=-9, tail="")),
        (
            worker.node,
            agent_messages.WorkerSaid(worker=worker.id, rank=0, said=m.Staged(generation=1)),
        ),
        (
            worker.node,
            agent_messages.WorkerSaid(
                worker=worker.id, rank=0, said=m.Swapped(generation=1, swap_ns=1)
            ),
        ),
        (worker.node, agent_messages.StoreOpened(generation=55, store=address)),
        (worker.node, agent_messages.StoreFailed(generation=0, error="x")),
        ("n9", agent_messages.StopDone()),
    ]
    before = (world.view, world.incidents, world.core.deadline())
    for node, message in nonsense:
        outcome = world.handle(AgentSaid(job="j", node=node, message=message))
        assert not outcome.records and not outcome.sends, message
    assert (world.view, world.incidents, world.core.deadline()) == before


def test_an_agent_that_was_started_anew_is_offered_as_a_buddy_again() -> None:
    world = trained(nodes="n0:2 n1:2", spares=0)
    world.lose_agent("n1")
    for rank in (0, 1):
        world.say(world.rank(rank), m.BuddyLost(generation=0, error="refused"))
    world.pump()
    assert [b.address for _, b in world.told(commands.Buddy)] == [None, None]  # alone for now
    world.nodes["n1"].agents += 1
    world.join("n1")
    told = dict(world.told(commands.Buddy)[2:])
    assert told == {
        world.rank(rank).id: commands.Buddy(address=world.nodes["n1"].blobs) for rank in (0, 1)
    }
    # One that only lost its stream has not moved: only its own ranks are told, once more, because
    # what they were told may have been lost with the stream.
    world.lose_agent("n0")
    world.join("n0")
    assert dict(world.told(commands.Buddy)[4:]) == told
    assert world.incidents == []
    world.assert_training()


def without_side_state(_: object, command: m.Message) -> m.Message | None:
    if not isinstance(command, commands.Copy):
        return None
    return m.CopyFailed(
        generation=command.generation, reason="side-state-missing", error="held by nobody"
    )


def test_side_state_is_not_lost_while_an_agent_that_may_have_it_is_away() -> None:
    world = trained()
    world.refuse = without_side_state
    world.kill(1)
    assert world.before(m.CopyFailed)
    # Neither the victim's neighbours nor the newcomer: somebody else who may be its buddy.
    away = next(n for n in world.nodes if n not in (world.rank(0).node, "n2"))
    world.lose_agent(away)
    world.pump()
    assert world.view.state == "recovering" and len(world.told(commands.Copy)) == 1
    world.refuse = None
    world.join(away)
    world.run()
    assert world.last.outcome == "RESOLVED"
    world.assert_training()


def test_side_state_that_nobody_has_is_lost_when_everybody_is_there() -> None:
    world = trained()
    world.refuse = without_side_state
    world.kill(1)
    world.run()
    assert world.view.state == "fell_back"
    assert len(world.told(commands.Copy)) == 2


def test_side_state_of_a_rank_that_died_while_its_agent_was_away_is_not_forgotten() -> None:
    world = trained()
    victim = world.rank(3)
    world.lose_agent(victim.node)
    world.die_silently(victim)
    world.join(victim.node)
    world.run()
    assert world.last.outcome == "RESOLVED"
    # Only once another process has its live.
    sent = [command for _, command in world.sent]
    committed = next(i for i, c in enumerate(sent) if isinstance(c, agent_messages.Tell)
                     and isinstance(c.command, commands.Swap))  # fmt: skip
    forgotten = [
        i
        for i, c in enumerate(sent)
        if isinstance(c, agent_messages.Forget) and victim.id in c.workers
    ]
    assert all(i > committed for i in forgotten)
    world.assert_training()


def test_an_init_record_that_nobody_has_is_asked_for_again_and_then_lost() -> None:
    """Owner and buddy are gone: replacing the newcomer would not help, and no slot is to blame."""
    world = trained(nodes="n0:1 n1:1 n2:1 n3:1 n4:1", world=3, local_world=1, spares=2)
    assigned: list[str] = []

    def refuse(worker: object, said: m.Message) -> m.Message | None:
        if isinstance(said, commands.Assign) and said.rank == 1:
            assigned.append(worker.id)  # type: ignore[attr-defined]
            return m.CopyFailed(
                generation=said.generation, reason="side-state-missing", error="held by nobody"
            )
        return None

    world.refuse = refuse
    world.kill_node("n1")
    world.kill_node("n2")
    world.run(30)
    assert len(assigned) == 2 and len(set(assigned)) == 1
    assert (world.view.state, world.view.exit_code) == ("fell_back", 4)
    assert not any(node.taints for node in world.view.nodes)
