"""Spare policies: domains, pools that are filled again, jobs that fell back, the way back."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.core.capacity import CapacityView, Want
from keepstep.errors import UsageError
from keepstep.model import records as r
from keepstep.model.job import (
    Drain,
    JobSpec,
    Migrate,
    PlaceHealthy,
    PlaceReturned,
    SpareGranted,
    SpareRefused,
)
from keepstep.model.schedule import Kind, Policy, Provision
from tests.support.core import SECOND, World, job_spec


def given(
    policy: Policy, kinds: tuple[Kind, ...] = ("idle",), back_s: int = 0, **more: object
) -> JobSpec:
    spec = job_spec(**more)  # type: ignore[arg-type]
    places = {node.name: f"p{node.name[1:]}" for node in spec.nodes}
    provision = Provision(
        scheduler="test", places=places, kinds=list(kinds), back_after_ns=back_s * SECOND
    )
    return msgspec.structs.replace(spec, provision=provision, policy=policy)


def look(world: World) -> CapacityView:
    view = world.core.capacity("j")
    assert view is not None
    return view


def wanted(world: World) -> Want:
    want = look(world).want
    assert want is not None
    return want


# --------------------------------------------------------------------------- domains


def racked(racks: str, spares: int = 2, **policy: object) -> World:
    """One rank on each of the first two nodes, spares on the others; racks in order of nodes."""
    names = racks.split()
    nodes = " ".join(f"n{i}:1" for i in range(len(names)))
    spec = job_spec(nodes=nodes, world=2, local_world=1, spares=spares)
    world = World(msgspec.structs.replace(spec, policy=Policy(**policy)), join=False)  # type: ignore[arg-type]
    for index, rack in enumerate(names):
        world.join(f"n{index}", 1, {} if rack == "-" else {"rack": rack})
    world.start()
    world.step(5)
    return world


@pytest.mark.parametrize(
    ("racks", "within", "to"),
    [
        ("a b a b", [], "n3"),  # outside of the failure domain, though n2 comes first
        ("a b a a", [], "n2"),  # better than none
        ("a b b a", ["rack"], "n3"),  # inside of the domain
        ("- b b a", ["rack"], "n2"),  # no domain, any will do
    ],
)
def test_where_a_spare_is_taken(racks: str, within: list[str], to: str) -> None:
    world = racked(racks, within=within)
    planned, _ = world.core.plan(Migrate(job="j", ranks=[0]))
    assert planned.moves[0].to == f"{to}/0"
    world.kill_node("n0")
    world.run()
    world.assert_training()
    assert world.view.ranks[0].node == to


def test_no_spare_of_the_domain_is_no_spare_and_the_other_rank_does_not_wait() -> None:
    world = racked("a b b c", within=["rack"])
    planned, _ = world.core.plan(Migrate(job="j", ranks=[0]))
    assert planned.moves[0].cost == "wait"
    assert {one.why for one in planned.rejected} == {
        "in rack b, and the job stays within rack a",
        "in rack c, and the job stays within rack a",
    }
    world.handle(Migrate(job="j", ranks=[0, 1]))
    world.run()
    assert [rank.node for rank in world.view.ranks] == ["n0", "n2"]
    assert "stays within rack a" in world.incidents[0].reason
    world.join("n4", 1, {"rack": "a"})
    world.run()
    world.assert_training()
    assert [rank.node for rank in world.view.ranks] == ["n4", "n2"]


@pytest.mark.parametrize("restart", [False, True])
def test_the_scheduler_is_asked_for_a_place_of_the_domain(restart: bool) -> None:
    spec = given(
        Policy(within=["nvlink"]), nodes="n0:1 n1:1 n2:1", world=2, local_world=1, spares=1
    )
    world = World(spec, join=False)
    for name, domain in (("n0", "d1"), ("n1", "d1"), ("n2", "d2")):
        world.join(name, 1, {"nvlink": domain, "rack": f"r-{name}"})
    world.start()
    world.step(5)
    _, ask = world.core.plan(Migrate(job="j", ranks=[1]))
    assert ask is not None and ask.near == {"nvlink": "d1"}
    world.kill_node("n1")
    world.pump()
    if restart:
        world.restart_core()
        world.rejoin()
        world.pump()
    assert wanted(world).near == {"nvlink": "d1"} and wanted(world).apart == {"rack": "r-n1"}
    assert world.view.state == "held", "the spare of another domain is none"
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n3", 1, {"nvlink": "d1", "rack": "r9"})
    world.run(100)
    world.assert_training()
    assert world.view.ranks[1].node == "n3"


# --------------------------------------------------------------------------- pools


def pooled(kinds: tuple[Kind, ...] = ("idle", "preempt")) -> World:
    world = World(given(Policy(dedicated=1), kinds, nodes="n0:2 n1:2 n2:2", spares=2)).start()
    world.step(5)
    return world


@pytest.mark.parametrize("planned", [False, True])
def test_a_spare_node_that_was_used_is_replaced_when_all_is_over(planned: bool) -> None:
    world = pooled()
    assert look(world).want is None
    if planned:
        world.handle(Drain(job="j", node="n1"))
    else:
        world.kill_node("n1")
    world.run(100)
    world.assert_training()
    assert {rank.node for rank in world.view.ranks} == {"n0", "n2"}
    want = wanted(world)
    assert (want.node, want.instead_of, want.kinds) == ("n3", "", ["idle"])
    (record,) = world.recorded(r.SpareWanted)
    assert record.reason == "0 of 1 spare nodes are left"  # type: ignore[union-attr]
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n3")
    world.run(100)
    assert look(world).want is None and {spare.node for spare in world.view.spares} == {"n3"}
    world.kill_node("n2")
    world.run(100)
    world.assert_training()
    assert {rank.node for rank in world.view.ranks} == {"n0", "n3"}


def test_a_pool_that_cannot_be_filled_is_asked_for_again_and_an_emergency_does_not_wait() -> None:
    world = pooled()
    world.kill_node("n1")
    world.run(100)
    world.handle(SpareRefused(job="j", op="spare-1", why="all are used"))
    assert look(world).want is None
    world.handle(Drain(job="j", node="n2"))
    assert wanted(world).kinds == [] and wanted(world).instead_of == "p2"
    world = pooled()
    world.kill_node("n1")
    world.run(100)
    world.handle(SpareRefused(job="j", op="spare-1", why="all are used"))
    world.run(16)
    assert wanted(world).op == "spare-2" and world.view.state == "running"


def test_a_pool_that_nobody_may_fill_is_refused() -> None:
    for kinds in ((), ("preempt",)):
        with pytest.raises(UsageError, match="by a scheduler only") as refused:
            pooled(kinds)  # type: ignore[arg-type]
        assert refused.value.hint


# --------------------------------------------------------------------------- after a fall back


@pytest.mark.parametrize("all_nodes", [False, True])
def test_a_job_that_fell_back_asks_for_the_nodes_it_lacks(all_nodes: bool) -> None:
    more = {"nodes": "n0:2 n1:2", "spares": 0, "checkpoints": "/ckpt", "interval_s": 10}
    world = World(given(Policy(), **more)).start()  # type: ignore[arg-type]
    world.step(5)
    world.progress()
    world.run(60)
    assert world.recorded(r.CheckpointSealed), "nothing to go back to"
    world.kill_node("n1")
    if all_nodes:
        world.kill_node("n0")
    else:
        world.kill(0)
        world.kill(1)
    world.run(100)
    assert world.recorded(r.FellBack) and world.view.state == "recovering", world.view
    for number in (1, 2) if all_nodes else (1,):  # the first is wanted before the rest is lost
        assert wanted(world).op == f"spare-{number}"
        world.handle(SpareGranted(job="j", op=f"spare-{number}", place=f"p{number + 6}"))
        world.join(f"n{number + 1}")
        world.run(60)
    world.run(100)
    world.assert_training()
    assert world.last.outcome == "FELL_BACK" and look(world).want is None
    reasons = [record.reason for record in world.recorded(r.SpareWanted)]  # type: ignore[union-attr]
    assert all_nodes == any("goes back to a checkpoint: 2 more" in why for why in reasons)


# --------------------------------------------------------------------------- the way back


@pytest.mark.parametrize(
    ("back", "asked"), [("immediately", [True]), ("quiet", [False, True]), ("never", [])]
)
def test_when_a_rank_moves_back(back: str, asked: list[bool]) -> None:
    policy = Policy(back=back, quiet_ns=600 * SECOND)  # type: ignore[arg-type]
    world = World(given(policy, nodes="n0:2 n1:2", spares=0, back_s=5)).start()
    world.step(5)
    world.kill_node("n1")
    world.pump()
    world.handle(SpareGranted(job="j", op="spare-1", place="p7"))
    world.join("n2")
    world.run(100)
    world.handle(PlaceReturned(job="j", node="n1"))
    assert look(world).origins == ({"p1"} if asked else set())
    for expected in asked:
        world.handle(PlaceHealthy(job="j", place="p1"))
        assert (look(world).want is not None) == expected
        world.now += 700 * SECOND


def test_policies_out_of_range_are_refused() -> None:
    for policy in (Policy(within=["a b"]), Policy(priority=10**9), Policy(grace_ns=-1)):
        with pytest.raises(UsageError) as refused:
            World(given(policy))
        assert refused.value.hint
