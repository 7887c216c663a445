"""Numbers that differ: what is said about them, and what becomes of the job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keepstep.core.differences import SENTENCES_MAX, describe, differences
from keepstep.errors import UsageError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.model.job import Cancel, Migrate, ProceedAnyway, Wake
from keepstep.model.schedule import Policy
from keepstep.model.views import IncidentView
from tests.support.core import SECOND, World, job_spec

COMMON = {"all|weight": "ab", "all|bias": "77"}
OTHER = {"all|weight": "ff", "all|bias": "77"}


def diverged(rank: int = 0, **more: Any) -> m.Diverged:
    given: dict[str, Any] = {
        "generation": 0,
        "tick": 5,
        "version": 5,
        "agreed": 4,
        "witness": "replicas",
        "site": "train_step:7",
        "table": OTHER if rank == 2 else COMMON,
        "number": 1,
    }
    return m.Diverged(**{**given, **more})


def trained(on: Any = "hold", hold_s: int = 0, **kwargs: Any) -> World:
    policy = Policy(on_divergence=on, hold_ns=hold_s * SECOND)
    world = World(msgspec.structs.replace(job_spec(**kwargs), policy=policy)).start()
    world.step(5)
    return world


def all_find(world: World, **more: Any) -> None:
    """Every rank in the same fence."""
    for worker in world.owners():
        worker.in_fence = True
        world.say(worker, diverged(worker.rank, generation=worker.generation, **more))
    world.pump()


def with_checkpoint(on: Any, **kwargs: Any) -> World:
    """One of step 3, and two steps since."""
    policy = Policy(on_divergence=on)
    spec = job_spec(checkpoints="/ckpt/j", interval_s=60, **kwargs)
    world = World(msgspec.structs.replace(spec, policy=policy)).start()
    world.step(3)
    world.run(70)
    assert world.view.checkpoints is not None and world.view.checkpoints.step == 3
    world.step(2)
    return world


def the_one(world: World) -> IncidentView:
    (incident,) = world.incidents
    return incident


# ------------------------------------------------------------------ words


def test_the_odd_ones_out_come_first() -> None:
    found = differences({0: COMMON, 1: COMMON, 2: OTHER, 3: COMMON})
    assert [one.sentence() for one in found] == ["weight: rank 2 has ff, ranks 0, 1, 3 have ab"]
    assert found[0].odd == (2,)


def test_two_ranks_that_differ_are_both_named_and_neither_is_blamed() -> None:
    text, odd = describe({0: diverged(0), 2: diverged(2)})
    assert text == (
        "what replicas share differs between ranks in 'train_step:7' after step 5: "
        "weight: rank 0 has ab, rank 2 has ff"
    )
    assert odd == []


def test_only_ranks_of_one_class_are_compared() -> None:
    tables = {0: {"a|w": "1"}, 1: {"b|w": "2"}, 2: {"a|w": "1"}, 3: {"b|w": "3"}}
    (found,) = differences(tables)
    assert found.groups == (("2", (1,)), ("3", (3,)))


def test_what_a_rank_of_the_class_lacks_is_a_difference() -> None:
    (found,) = differences({0: {"a|w": "1", "a|v": "1"}, 1: {"a|w": "1"}, 2: {}})
    assert found.sentence() == "v: rank 0 has 1, rank 1 has nothing"


def test_words_are_bounded() -> None:
    tables = {rank: {f"a|t{n:03}": str(rank) for n in range(100)} for rank in range(20)}
    said = {rank: diverged(table=table) for rank, table in tables.items()}
    text, _ = describe(said)
    assert text.count("and other ranks have 17 other values") == SENTENCES_MAX
    assert text.endswith("and 92 more") and len(text) < 2000


def test_the_finders_own_sentence_stands_where_tables_show_nothing() -> None:
    said = {1: diverged(table={}, witness="inputs", words="batch 7 has other bytes.")}
    text, odd = describe(said)
    assert text.endswith("batch 7 has other bytes") and odd == []
    text, _ = describe({1: diverged(table={})})
    assert "rank 1 found it" in text


# ------------------------------------------------------------------ hold


def test_hold_stands_and_ends_with_its_own_exit_code_when_nobody_decides() -> None:
    world = trained(hold_s=20)
    all_find(world)
    view = world.view
    assert view.state == "held" and "rank 2 has ff" in view.divergence
    assert {rank.state for rank in view.ranks} == {"holding"}
    incident = the_one(world)
    assert (incident.outcome, incident.cause, incident.victims) == ("OPEN", "divergence", [2])
    assert "all ranks agreed at step 4; newest checkpoint before it: none" in incident.reason
    sent = len(world.sent)
    world.run(19)
    assert world.view.state == "held" and len(world.sent) == sent
    world.run(21)
    assert (world.view.state, world.view.exit_code) == ("diverged", 5)
    assert the_one(world).outcome == "DIVERGED" and "nobody decided" in the_one(world).reason


def test_hold_without_a_limit_waits_for_somebody() -> None:
    world = trained()
    all_find(world)
    world.run(100_000)
    assert world.view.state == "held"
    world.handle(Cancel(job="j", reason="SIGTERM", exit_code=143, checkpoint=True))
    assert (world.view.state, world.view.exit_code) == ("cancelled", 143)
    assert the_one(world).outcome == "DIVERGED"


def test_one_rank_that_speaks_is_listened_to_for_a_moment_only() -> None:
    world = trained()
    world.say(world.rank(2), diverged(2, words="other bytes", table={}))
    world.pump()
    assert world.view.state == "held" and not world.incidents
    world.run(3)
    assert "other bytes" in the_one(world).reason


def test_an_operator_lets_it_go_on_and_that_is_on_record() -> None:
    world = trained()
    all_find(world)
    world.handle(ProceedAnyway(job="j", by="ann"))
    told = world.told(commands.Proceed)
    assert sorted(worker for worker, _ in told) == sorted(w.id for w in world.owners())
    assert {command.number for _, command in told} == {1}  # type: ignore[attr-defined]
    (record,) = world.recorded(r.DivergenceAccepted)
    assert (record.tick, record.by) == (5, "ann")  # type: ignore[union-attr]
    incident = the_one(world)
    assert incident.outcome == "DIVERGED" and "an exception to the guarantee" in incident.reason
    world.assert_training()
    with pytest.raises(UsageError, match="does not stand"):
        world.handle(ProceedAnyway(job="j"))


def test_a_proceed_that_was_lost_is_said_again_and_only_for_what_was_accepted() -> None:
    world = trained()
    all_find(world)
    world.handle(ProceedAnyway(job="j"))
    world.say(world.rank(1), diverged(1))
    world.pump()
    assert len(world.told(commands.Proceed)) == 5 and world.view.state == "running"
    all_find(world, tick=6, version=6, number=2)
    assert world.view.state == "held" and len(world.told(commands.Proceed)) == 5
    assert len(world.incidents) == 2


def test_a_rank_that_dies_while_the_job_stands_is_replaced_when_it_goes_on() -> None:
    world = trained()
    all_find(world)
    world.kill(1)
    world.run(100)
    assert world.view.state == "held" and not world.told(commands.Abort)
    world.handle(ProceedAnyway(job="j"))
    world.run()
    world.assert_training()
    assert the_one(world).outcome == "DIVERGED" and the_one(world).victims == [1, 2]


def test_all_ranks_die_while_it_stands() -> None:
    world = trained()
    all_find(world)
    for rank in range(4):
        world.kill(rank)
    world.run(10)
    assert (world.view.state, world.view.exit_code) == ("diverged", 5)


# ------------------------------------------------------------------ in an incident


def test_a_recovery_whose_first_fence_finds_it_is_not_resolved() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Resumed)
    world.queue.clear()
    all_find(world)
    incident = the_one(world)
    assert (incident.cause, incident.outcome) == ("process-exit", "OPEN")
    world.run(500)
    assert world.view.state == "held"
    world.handle(ProceedAnyway(job="j"))
    for worker in world.owners():
        resumed = m.Resumed(
            generation=worker.generation,
            tick=6,
            version=6,
            last_commit_ns=0,
            first_commit_ns=1,
            median_step_ns=1,
        )
        world.say(worker, resumed)
    world.run()
    assert the_one(world).outcome == "DIVERGED"
    world.assert_training()


def test_a_newcomer_speaks_before_it_joins_and_the_others_wait() -> None:
    world = trained(spares=2, hold_s=0)
    world.kill(1)
    assert world.before(m.Copied)
    world.queue.clear()  # it compares before it says so
    newcomer = next(w for w in world.workers.values() if w.state == "joining")
    word = diverged(1, generation=1, witness="inputs", words="batch 5 has other bytes", table={})
    world.say(newcomer, word)
    world.run(1000)
    assert world.view.state == "held" and newcomer.alive
    assert not world.recorded(r.Committed)
    world.handle(ProceedAnyway(job="j"))
    assert [worker for worker, _ in world.told(commands.Proceed)] == [newcomer.id]
    copied = m.Copied(
        generation=1, tick=5, bytes_copied=1, copy_ns=1, sources=[0], side_state="own-agent"
    )
    world.say(newcomer, copied)
    world.run()
    world.assert_training()
    assert newcomer.alive and the_one(world).outcome == "DIVERGED"


def test_a_planned_move_during_which_it_is_found_is_not_resolved_either() -> None:
    world = trained(on="continue", spares=2)
    world.handle(Migrate(job="j", ranks=[1]))
    assert world.before(m.Ready)
    for worker in world.owners():
        world.queue.appendleft(_event(world, worker, diverged(worker.rank)))
    world.run()
    assert {i.cause: i.outcome for i in world.incidents} == {
        "migrate": "DIVERGED",
        "divergence": "DIVERGED",
    }
    world.assert_training()


def _event(world: World, worker: Any, message: m.WorkerMessage) -> Any:
    world.say(worker, message)
    return world.queue.pop()


def test_a_rank_that_is_asked_to_report_finds_it_again_in_the_retry() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Report)
    world.say(world.rank(0), diverged(0))
    world.run()
    world.assert_training()
    assert the_one(world).outcome == "RESOLVED"


# ------------------------------------------------------------------ fall-back and continue


def test_fall_back_goes_to_the_newest_checkpoint_at_which_all_agreed() -> None:
    world = with_checkpoint("fall-back", spares=2)
    all_find(world)
    world.run(200)
    world.assert_training()
    incident = the_one(world)
    assert incident.outcome == "DIVERGED" and incident.steps_lost == 2
    assert "back to /ckpt/j/checkpoint-3" in incident.reason
    assert {worker.tick for worker in world.owners()} == {3}


@pytest.mark.parametrize("agreed", [2, -1])
def test_fall_back_without_such_a_checkpoint_ends(agreed: int) -> None:
    world = with_checkpoint("fall-back", spares=2)
    all_find(world, agreed=agreed)
    assert (world.view.state, world.view.exit_code) == ("diverged", 5)
    assert "nothing to fall back to" in the_one(world).reason


def test_fall_back_takes_the_one_before_if_the_newest_is_too_late() -> None:
    world = with_checkpoint("fall-back", spares=2)
    world.run(61)
    assert world.view.checkpoints is not None and world.view.checkpoints.step == 5
    world.step(2)
    all_find(world, tick=7, version=7, agreed=4)
    world.run(30)
    world.assert_training()
    assert {worker.tick for worker in world.owners()} == {3}
    assert the_one(world).steps_lost == 4


def test_continue_lets_a_witness_speak_once_about_a_site() -> None:
    world = trained(on="continue")
    all_find(world)
    assert len(world.told(commands.Proceed)) == 4
    assert the_one(world).outcome == "DIVERGED"
    all_find(world, tick=9, version=9, number=2)
    assert len(world.told(commands.Proceed)) == 8 and len(world.incidents) == 1
    all_find(world, tick=9, version=9, number=3, witness="learning-rate")
    assert len(world.told(commands.Proceed)) == 12 and len(world.incidents) == 2
    world.assert_training()


# ------------------------------------------------------------------ a crash of the orchestrator


def test_a_divergence_survives_the_orchestrator() -> None:
    world = trained(hold_s=20)
    all_find(world)
    world.restart_core()
    world.handle(Wake())
    assert world.view.state == "held" and "rank 2 has ff" in world.view.divergence
    world.rejoin()
    world.run(5)
    assert world.view.state == "held" and not world.told(commands.Abort)
    all_find(world)  # they repeat themselves
    world.run(5)
    world.handle(ProceedAnyway(job="j"))
    assert len(world.told(commands.Proceed)) == 4
    assert the_one(world).outcome == "DIVERGED"
    world.assert_training()


def test_who_did_not_hear_proceed_before_a_crash_hears_it_afterwards() -> None:
    world = trained(on="continue")
    all_find(world)
    world.sent.clear()
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run(5)
    all_find(world)
    assert len(world.told(commands.Proceed)) == 4 and len(world.incidents) == 1
    assert the_one(world).outcome == "DIVERGED"


def test_a_crash_while_it_falls_back() -> None:
    world = with_checkpoint("fall-back", spares=2)
    all_find(world)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run(500)
    world.assert_training()
    assert the_one(world).outcome == "DIVERGED" and the_one(world).steps_lost == 2


def test_a_crash_while_a_newcomer_stands_keeps_standing() -> None:
    world = trained(spares=2)
    world.kill(1)
    assert world.before(m.Copied)
    world.queue.clear()
    newcomer = next(w for w in world.workers.values() if w.state == "joining")
    world.say(newcomer, diverged(1, generation=1, words="other bytes", table={}))
    world.run(10)
    world.restart_core()
    world.handle(Wake())
    world.rejoin()
    world.run(100)
    assert world.view.state == "held" and not world.recorded(r.Committed)
    world.handle(ProceedAnyway(job="j"))
    world.run()
    world.assert_training()
    assert the_one(world).outcome == "DIVERGED"


def test_a_job_cannot_fall_back_without_checkpoints() -> None:
    policy = Policy(on_divergence="fall-back")
    with pytest.raises(UsageError, match="there are no checkpoints"):
        World(msgspec.structs.replace(job_spec(), policy=policy))
