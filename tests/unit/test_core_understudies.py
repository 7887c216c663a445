"""Understudies: built as presumed ranks, used for that live only, never in the way."""

from __future__ import annotations

from keepstep.core.understudies import FAILURES_MAX
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.job import Migrate, Taint, Wake
from keepstep.model.views import UnderstudyView
from tests.support.core import World, job_spec


def trained(**kwargs: object) -> World:
    world = World(job_spec(**{"understudies": 4, **kwargs})).start()  # type: ignore[arg-type]
    world.step(5)
    world.run()
    return world


def understudies(world: World) -> list[UnderstudyView]:
    return [one for spare in world.view.spares for one in spare.understudies]


def ready_for(world: World) -> list[int]:
    return sorted(one.rank for one in understudies(world) if one.state == "ready")


def of_rank(world: World, rank: int) -> str:
    return next(one.worker for one in understudies(world) if one.rank == rank)


def test_every_rank_has_one_that_is_ready_and_none_is_a_spare_of_its_own() -> None:
    world = trained()
    assert ready_for(world) == [0, 1, 2, 3]
    assert len(world.view.spares) == 1
    assert {world.workers[one.worker].slot for one in understudies(world)} == {0}


def test_fewer_than_ranks_are_spread_over_the_spares() -> None:
    world = trained(nodes="n0:2 n1:2 n2:1 n3:1", spares=2, understudies=2)
    assert ready_for(world) == [0, 1, 2, 3]
    assert [len(spare.understudies) for spare in world.view.spares] == [2, 2]


def test_they_are_started_one_at_a_time_on_a_node() -> None:
    world = World(job_spec(understudies=4)).start()
    started = [w for w in world.workers.values() if w.rank == -1 and w.alive]
    assert len(started) <= 2  # the spare, and the first of four
    world.run()
    assert ready_for(world) == [0, 1, 2, 3]


def test_a_lost_rank_is_taken_over_by_its_understudy() -> None:
    world = trained()
    chosen = of_rank(world, 2)
    world.kill(2)
    world.run()
    world.assert_training()
    assert world.rank(2).id == chosen
    assert world.last.outcome == "RESOLVED" and world.last.steps_lost == 0
    assert not {"newcomer_build", "warm_up"} & set(world.last.timings_ms)  # that was before


def test_it_is_told_its_buddy_with_the_swap() -> None:
    """It has taken its Assign long ago, when it had none."""
    world = trained()
    chosen = of_rank(world, 2)
    world.kill(2)
    world.run()
    swaps = [
        c for w, c in world.told(commands.Swap) if w == chosen and isinstance(c, commands.Swap)
    ]
    assert swaps[0].buddy is not None and not swaps[0].same_buddy


def test_the_other_slot_of_a_node_is_free_although_three_processes_run_there() -> None:
    """Two ranks are lost with their node, and one slot has an understudy for one of them."""
    world = trained(nodes="n0:2 n1:2 n2:2", understudies=1)
    world.kill_node("n0")
    world.run()
    world.assert_training()
    assert sorted(w.node for w in world.owners()) == ["n1", "n1", "n2", "n2"]


def test_those_that_cannot_be_led_on_do_not_use_up_the_patience_with_newcomers() -> None:
    spares = " ".join(f"n{i}:1" for i in range(2, 8))
    world = trained(nodes=f"n0:2 n1:2 {spares}", spares=6, understudies=4)
    assert len(ready_for(world)) == 24

    def refuse(worker: object, command: m.Message) -> m.Message | None:
        if isinstance(command, commands.Copy) and getattr(worker, "id", "") in before:
            return m.CopyFailed(generation=command.generation, reason="position", error="too far")
        return None

    before = {one.worker for one in understudies(world)}
    world.refuse = refuse
    world.kill(2)
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED"
    world.handle(Migrate(job="j", ranks=[1]))
    world.run()
    world.assert_training()
    assert world.last.outcome == "RESOLVED", world.last.reason


def test_a_restart_with_a_node_away_costs_no_understudy() -> None:
    world = trained(nodes="n0:2 n1:2 n2:1 n3:1", spares=2, understudies=4)
    before = {one.worker for one in understudies(world)}
    world.now += 1000 * 1_000_000_000  # long after they were started
    world.restart_core()
    for name in ("n0", "n2", "n3"):
        world.join(name, world.nodes[name].slots)
    world.handle(Wake())
    world.join("n1")
    world.run(60)
    assert {one.worker for one in understudies(world)} == before
    assert len(ready_for(world)) == 8


def test_what_is_left_in_its_slot_is_ended_and_built_anew_elsewhere() -> None:
    world = trained()
    before = {one.worker for one in understudies(world)} - {of_rank(world, 2)}
    spare = world.view.spares[0].worker
    world.kill(2)
    world.run()
    assert not any(world.workers[worker].alive for worker in (*before, spare))
    seats = {(w.node, w.slot) for w in world.owners()}
    assert len(seats) == 4
    assert ready_for(world) == [0, 1, 2, 3]
    assert world.view.spares[0].slot not in {rank.slot for rank in world.view.ranks}


def test_a_rank_without_one_is_taken_over_by_the_standby() -> None:
    world = trained(understudies=1)
    assert ready_for(world) == [0]
    spare = world.view.spares[0].worker
    world.kill(3)
    world.run()
    world.assert_training()
    assert world.rank(3).id == spare


def test_an_understudy_that_fails_leaves_the_seat_to_the_standby_beside_it() -> None:
    world = trained()
    chosen, spare = of_rank(world, 2), world.view.spares[0].worker

    def refuse(worker: object, command: m.Message) -> m.Message | None:
        if isinstance(command, commands.Copy) and getattr(worker, "id", "") == chosen:
            return m.CopyFailed(
                generation=command.generation, reason="position", error="it cannot go on to there"
            )
        return None

    world.refuse = refuse
    world.kill(2)
    world.run()
    world.assert_training()
    assert world.rank(2).id == spare
    assert world.last.outcome == "RESOLVED"


def test_two_victims_do_not_get_two_seats_in_one_slot() -> None:
    world = trained()
    world.kill(1)
    world.kill(2)
    world.run()
    world.assert_training()
    assert len({(w.node, w.slot) for w in world.owners()}) == 4


def test_a_planned_move_uses_it_too() -> None:
    world = trained()
    chosen = of_rank(world, 0)
    world.handle(Migrate(job="j", ranks=[0]))
    world.run()
    world.assert_training()
    assert world.rank(0).id == chosen


def test_a_tainted_slot_loses_all_of_them() -> None:
    world = trained()
    spare = world.view.spares[0]
    gone = {one.worker for one in spare.understudies}
    world.handle(Taint(job="j", target=spare.slot, reason="test"))
    world.run()
    assert not any(world.workers[worker].alive for worker in gone)
    assert ready_for(world) == [0, 1, 2, 3]  # elsewhere


def test_those_that_always_fail_are_given_up_and_the_spare_stays() -> None:
    world = World(job_spec(understudies=2))

    def refuse(worker: object, command: m.Message) -> m.Message | None:
        if isinstance(command, commands.Assign) and command.presumed:
            return m.Failure(generation=0, error_kind="user", error="KeyError: 'x'", version=0)
        return None

    world.refuse = refuse
    world.start()
    world.run()
    world.assert_training()
    assert not understudies(world)
    assert [spare.state for spare in world.view.spares] == ["parked"]
    notes = [note.text for note in world.view.notes if "understudy" in note.text]
    assert len(notes) == FAILURES_MAX
    assert "it raised KeyError: 'x'; no more are started" in notes[-1]


def test_one_that_hangs_is_given_up_in_the_end() -> None:
    world = World(job_spec(understudies=1))
    world.refuse = lambda worker, command: (
        m.Parked(where="again", warm_ns=1)
        if isinstance(command, commands.Assign) and command.presumed
        else None
    )
    world.start()
    world.run(60)
    first = of_rank(world, 0)
    assert world.workers[first].alive
    world.run()
    assert not world.workers[first].alive


def test_after_a_restart_of_the_orchestrator_they_are_known_and_used() -> None:
    world = trained()
    chosen = of_rank(world, 3)
    world.restart_core()
    world.rejoin()
    world.run()
    assert ready_for(world) == [0, 1, 2, 3]
    world.kill(3)
    world.run()
    world.assert_training()
    assert world.rank(3).id == chosen


def test_a_job_without_them_starts_none() -> None:
    world = trained(understudies=0)
    assert not understudies(world)
    assert sum(w.alive for w in world.workers.values()) == 5
