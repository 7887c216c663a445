"""Nodes from a scheduler that is asked, refuses, is late, or answers after a restart."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.core.capacity import CapacityView, Want
from keepstep.errors import UsageError
from keepstep.model import records as r
from keepstep.model.job import (
    Drain,
    NodeDead,
    PlaceHealthy,
    PlaceReturned,
    SpareGranted,
    SpareRefused,
)
from keepstep.model.schedule import Kind, Provision
from tests.support.core import World, job_spec


def provided(kinds: tuple[Kind, ...] = ("idle",), back_s: int = 0) -> World:
    """Two nodes with two ranks each, and no spare."""
    spec = msgspec.structs.replace(
        job_spec(nodes="n0:2 n1:2", spares=0),
        provision=Provision(
            scheduler="test",
            places={"n0": "p0", "n1": "p1"},
            kinds=list(kinds),
            back_after_ns=back_s * 1_000_000_000,
        ),
    )
    world = World(spec).start()
    world.step(5)
    return world


def look(world: World) -> CapacityView:
    view = world.core.capacity("j")
    assert view is not None
    return view


def wanted(world: World) -> Want:
    want = look(world).want
    assert want is not None
    return want


def written(world: World, kind: type[r.BaseRecord]) -> list[r.BaseRecord]:
    return [record for record in world.records if isinstance(record, kind)]


def test_as_long_as_there_is_room_nobody_is_asked() -> None:
    world = provided()
    world.kill(3)  # its slot is free again
    world.run(100)
    world.assert_training()
    assert not written(world, r.SpareWanted) and look(world).leave == {}


def test_a_lost_node_is_replaced_by_one_of_the_scheduler_and_goes_back() -> None:
    world = provided()
    world.kill_node("n1")
    world.pump()
    want = wanted(world)
    assert (want.op, want.node, want.instead_of, want.avoid) == ("spare-1", "n2", "p1", ["p1"])
    assert world.view.state == "held" and look(world).leave == {}
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))  # said twice, noted once
    assert look(world).start == {"n2": "p7"} and len(written(world, r.SpareGiven)) == 1
    world.join("n2")
    world.run(100)
    world.assert_training()
    assert {rank.node for rank in world.view.ranks} == {"n0", "n2"}
    view = look(world)
    assert view.want is None and view.leave == {"n1": ("p1", "spare-1")}
    assert view.ops == {"start", "spare-1"}
    world.handle(PlaceReturned(job="j", node="n1"))
    world.handle(PlaceReturned(job="j", node="n1"))
    assert look(world).leave == {} and look(world).places == {"n0": "p0", "n2": "p7"}
    assert len(written(world, r.NodeReturned)) == 1


def test_a_drained_node_is_left_when_nothing_runs_there() -> None:
    world = provided()
    world.handle(Drain(job="j", node="n0", reason="fan"))
    assert wanted(world).instead_of == "p0" and world.view.state == "running"
    assert look(world).taint == {"n0": ("p0", "drain: fan")} and look(world).leave == {}
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n2")
    world.run(100)
    world.assert_training()
    assert look(world).leave == {"n0": ("p0", "spare-1")}
    world.handle(NodeDead(job="j", node="n0"))
    world.handle(PlaceReturned(job="j", node="n0"))
    world.run(100)
    assert world.view.state == "running" and look(world).leave == {}


def test_a_refusal_is_said_once_and_asked_again_later() -> None:
    world = provided()
    world.kill_node("n1")
    world.pump()
    for number in (1, 2):
        world.handle(SpareRefused(job="j", op=f"spare-{number}", why="all are used"))
        assert look(world).want is None and look(world).ops == {"start"}
        world.run(16)
        assert wanted(world).op == f"spare-{number + 1}"
    notes = [note.text for note in world.view.notes if "all are used" in note.text]
    assert notes == ["the scheduler gives no node: all are used"]
    assert world.view.state == "held"


def test_a_place_without_an_agent_is_given_up_and_a_late_answer_changes_nothing() -> None:
    world = provided()
    world.kill_node("n1")
    world.pump()
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.run(185)
    assert look(world).want is None and "spare-1" not in look(world).ops
    assert look(world).start == {} and "n2" not in look(world).places
    world.run(16)
    assert wanted(world).op == "spare-2" and wanted(world).node == "n3"
    with pytest.raises(UsageError, match="does not want spare-1"):
        world.handle(SpareGranted(job="j", op="spare-1", place="p8"))
    world.join("n2")  # nobody was quick enough to end it
    world.run(100)
    world.assert_training()
    assert look(world).ops == {"start", "spare-1"} and look(world).places["n2"] == "p7"


def test_a_want_is_over_when_the_node_comes_from_elsewhere() -> None:
    world = provided()
    world.kill_node("n1")
    world.pump()
    world.join("n9")
    world.run(100)
    world.assert_training()
    assert look(world).want is None and look(world).ops == {"start"}
    (denied,) = written(world, r.SpareDenied)
    assert denied.why == "it is not needed any more"  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [False, True])
def test_a_restarted_orchestrator_goes_on_with_the_same_operation(given: bool) -> None:
    world = provided()
    world.kill_node("n1")
    world.pump()
    if given:
        world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.restart_core()
    want = wanted(world)
    assert (want.op, want.node, want.place) == ("spare-1", "n2", "p7" if given else "")
    world.rejoin()
    world.pump()
    if not given:
        world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n2")
    world.run(100)
    world.assert_training()
    world.restart_core()
    world.rejoin()
    world.run(100)
    assert look(world).leave == {"n1": ("p1", "spare-1")}
    assert len(written(world, r.SpareWanted)) == 1


def test_one_place_after_the_other_until_it_is_enough() -> None:
    spec = msgspec.structs.replace(
        job_spec(nodes="n0:1 n1:1 n2:1", world=3, local_world=1, spares=0),
        provision=Provision(
            scheduler="test", places={"n0": "p0", "n1": "p1", "n2": "p2"}, kinds=["idle"]
        ),
    )
    world = World(spec).start()
    world.step(5)
    world.kill_node("n1")
    world.kill_node("n2")
    world.pump()
    for number, node in ((1, "n3"), (2, "n4")):
        assert wanted(world).node == node
        world.handle(SpareGranted(job="j", op=f"spare-{number}", place=f"p{number + 6}"))
        world.join(node, slots=1)
        world.pump()
    world.run(100)
    world.assert_training()
    assert look(world).want is None and sorted(look(world).leave) == ["n1", "n2"]


def test_a_job_that_may_ask_nobody_does_not_ask() -> None:
    world = provided(kinds=())
    world.kill_node("n1")
    world.run(100)
    assert not written(world, r.SpareWanted) and world.view.state == "held"


def test_a_job_without_a_scheduler_wants_nothing() -> None:
    world = World(job_spec())
    assert world.core.capacity("j") is None


def replaced(back_s: int = 5) -> World:
    """The job has lost n1 in p1, and n2 in p7 stands in for it."""
    world = provided(back_s=back_s)
    world.kill_node("n1")
    world.pump()
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n2")
    world.run(100)
    world.handle(PlaceReturned(job="j", node="n1"))
    return world


@pytest.mark.parametrize("restart", [False, True])
def test_a_place_that_is_well_again_gets_its_ranks_back(restart: bool) -> None:
    world = replaced()
    assert look(world).origins == {"p1"}
    world.handle(PlaceHealthy(job="j", place="p1"))
    world.handle(PlaceHealthy(job="j", place="p1"))
    want = wanted(world)
    assert (want.op, want.node, want.only, want.instead_of) == ("spare-2", "n3", "p1", "p7")
    if restart:
        world.restart_core()
        world.rejoin()
        world.pump()
    world.handle(SpareGranted(job="j", op="spare-2", place="p1"))
    world.join("n3")
    world.run(100)
    world.assert_training()
    assert {rank.node for rank in world.view.ranks} == {"n0", "n3"}
    assert world.last.trigger == "planned" and "well again" in world.last.reason
    view = look(world)
    assert view.leave == {"n2": ("p7", "spare-2")} and view.taint == {}
    world.handle(NodeDead(job="j", node="n2"))
    world.handle(PlaceReturned(job="j", node="n2"))
    assert look(world).places == {"n0": "p0", "n3": "p1"} and look(world).origins == set()
    assert look(world).ops == {"start", "spare-2"}


def test_nobody_moves_back_in_an_emergency_or_without_being_told_to() -> None:
    world = replaced(back_s=0)
    assert look(world).origins == set()
    world = replaced()
    world.handle(Drain(job="j", node="n0"))
    world.handle(PlaceHealthy(job="j", place="p1"))
    assert wanted(world).only == "" and wanted(world).instead_of == "p0"
    world = replaced()
    world.handle(PlaceHealthy(job="j", place="p99"))
    assert look(world).want is None


def test_a_place_that_is_gone_again_changes_nothing() -> None:
    world = replaced()
    world.handle(PlaceHealthy(job="j", place="p1"))
    world.handle(SpareRefused(job="j", op="spare-2", why="somebody was faster"))
    world.run(100)
    world.assert_training()
    assert look(world).want is None and {r.node for r in world.view.ranks} == {"n0", "n2"}
    world.handle(PlaceHealthy(job="j", place="p1"))
    assert wanted(world).op == "spare-3"


def test_a_loss_on_the_way_back_uses_the_node_that_comes() -> None:
    world = replaced()
    world.handle(PlaceHealthy(job="j", place="p1"))
    world.handle(SpareGranted(job="j", op="spare-2", place="p1"))
    world.kill_node("n2")
    world.pump()
    world.join("n3")
    world.run(100)
    world.assert_training()
    assert {rank.node for rank in world.view.ranks} == {"n0", "n3"}
    assert sorted(look(world).leave) == ["n2"]
