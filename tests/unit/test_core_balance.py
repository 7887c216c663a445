"""Ranks that an emergency has left in bad places go to better ones."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.core import balance
from keepstep.errors import UsageError
from keepstep.model.job import Drain, Migrate, Rebalance
from keepstep.model.schedule import Policy
from tests.support.core import SECOND, World, job_spec


def crowded(spares: int = 1, **policy: object) -> World:
    """Three nodes of two slots with one rank each; n1 was lost, and its rank is beside another."""
    spec = job_spec(nodes="n0:2 n1:2 n2:2", world=3, local_world=1, spares=spares)
    world = World(msgspec.structs.replace(spec, policy=Policy(**policy)))  # type: ignore[arg-type]
    world.start()
    world.step(5)
    world.kill_node("n1")
    world.run(100)
    world.assert_training()
    assert places(world)[1] in ("n0", "n2")
    return world


def places(world: World) -> list[str]:
    return [one.node for one in world.view.ranks]


def again(world: World) -> None:
    world.nodes["n1"].agents += 1
    world.join("n1")
    world.run(60)


def plan(world: World) -> list[tuple[int, str, str]]:
    view, ask = world.core.plan(Rebalance(job="j"))
    assert ask is None
    return [(move.rank, move.origin, move.to) for move in view.moves]


def test_a_job_as_it_was_started_has_nothing_to_move() -> None:
    world = World(job_spec(nodes="n0:3 n1:2 n2:2")).start()
    assert plan(world) == []
    world.handle(Rebalance(job="j"))
    assert (world.last.outcome, world.last.victims) == ("RESOLVED", [])
    assert world.last.reason == balance.BALANCED


def test_two_ranks_on_one_node_part_when_another_is_free() -> None:
    world = crowded()
    assert plan(world) == [], "there is no better place yet"
    again(world)
    (rank, _, to) = plan(world)[0]
    assert rank in (0, 1, 2) and to.startswith("n1/") and len(plan(world)) == 1
    world.handle(Rebalance(job="j"))
    world.run(100)
    world.assert_training()
    assert sorted(places(world)) == ["n0", "n1", "n2"] and plan(world) == []
    assert (world.last.trigger, world.last.cause) == ("planned", "rebalance")
    assert (world.last.outcome, world.last.steps_lost) == ("RESOLVED", 0)
    assert "has 2 ranks, and 1 belong on one node" in world.last.reason
    spares = [w for w in world.workers.values() if w.alive and w.state == "parked"]
    assert len(spares) == 1


def test_a_place_without_a_spare_gets_one_first() -> None:
    world = crowded(spares=0)
    again(world)
    view, _ = world.core.plan(Rebalance(job="j"))
    assert [(move.cost, move.to) for move in view.moves] == [("process", "n1/0")]
    world.handle(Rebalance(job="j"))
    world.run(100)
    world.assert_training()
    assert sorted(places(world)) == ["n0", "n1", "n2"]


def test_the_plan_names_what_is_not_used_and_who_stays() -> None:
    world = crowded()
    view, _ = world.core.plan(Rebalance(job="j"))
    said = {one.what.split(" (")[0]: one.why for one in view.rejected}
    assert any("no rank would be better off there" in why for why in said.values())
    stays = [why for what, why in said.items() if what.startswith("rank ")]
    assert len(stays) == 2 and all("no other place is better" in why for why in stays)


def test_a_place_that_is_lost_meanwhile_is_not_waited_for() -> None:
    world = crowded()
    again(world)
    world.handle(Rebalance(job="j"))
    world.kill_node("n1")
    world.run(200)
    world.assert_training()
    assert world.last.cause == "rebalance" and world.last.outcome == "ABORTED"
    assert "is not to be had any more" in world.last.reason


def test_several_moves_are_made_one_after_the_other_also_after_a_restart() -> None:
    spec = job_spec(nodes="n0:4 n1:4 n2:4", world=4, local_world=2, spares=2)
    world = World(spec).start()
    world.step(5)
    world.kill_node("n1")
    world.run(100)
    world.handle(Drain(job="j", node="n0"))
    world.run(100)
    assert places(world) == ["n2"] * 4
    world.nodes["n1"].agents += 1
    world.join("n1", 4)
    world.run(60)
    assert len(plan(world)) == 2
    before = len(world.incidents)
    world.handle(Rebalance(job="j"))
    world.restart_core()
    world.rejoin()
    world.run(300)
    world.assert_training()
    assert len(world.incidents) == before + 1 and world.last.outcome == "RESOLVED"
    assert len(world.last.moves) == 2 and plan(world) == []


def test_it_is_refused_while_something_else_is_going_on() -> None:
    world = crowded(spares=0)
    world.handle(Migrate(job="j", ranks=[0]))
    assert world.last.outcome == "OPEN"
    with pytest.raises(UsageError, match="something else is being moved"):
        world.handle(Rebalance(job="j"))


def test_when_free_waits_for_a_quiet_time() -> None:
    world = crowded(rebalance="when-free", quiet_ns=500 * SECOND)
    again(world)
    world.run(400)
    assert len(world.incidents) == 1
    world.run(600)
    assert [one.cause for one in world.incidents] == ["node-lost", "rebalance"]
    assert sorted(places(world)) == ["n0", "n1", "n2"]
    world.run(3000)
    assert len(world.incidents) == 2


def test_never_is_the_default() -> None:
    world = crowded()
    again(world)
    world.run(5000)
    assert len(world.incidents) == 1


def racked(racks: str, homes: int, **policy: object) -> World:
    names = racks.split()
    nodes = " ".join(f"n{i}:1" for i in range(len(names)))
    spec = job_spec(nodes=nodes, world=homes, local_world=1, spares=len(names) - homes)
    world = World(msgspec.structs.replace(spec, policy=Policy(**policy)), join=False)  # type: ignore[arg-type]
    for index, rack in enumerate(names):
        world.join(f"n{index}", 1, {"rack": rack})
    world.start()
    world.step(5)
    return world


def test_a_rank_whose_buddy_is_in_its_own_rack_moves_apart() -> None:
    # n0 and its buddy n1 are in one rack; n3 and its buddy n4 are not.
    world = racked("a a b a b", homes=3)
    assert [(move[0], move[2]) for move in plan(world)] == [(0, "n3/0")]
    view, _ = world.core.plan(Rebalance(job="j"))
    assert "what hits the rack of n0 hits the copy" in view.moves[0].reason


def test_a_rank_outside_of_its_domain_goes_back_to_it() -> None:
    world = racked("a b c a", homes=2, within=["rack"])
    job = world.core.state("j")
    owner = job.workers[job.owners[0]]
    stranger = next(w for w in job.spares() if w.node == "n2")
    # As after a start from a checkpoint, when n0 was away.
    job.placed_on["n0"].remove(owner)
    job.placed_on["n2"].append(owner)
    owner.node, stranger.node = "n2", "n0"
    job.nodes["n0"].taints.append("not to be used")
    assert plan(world) == [(0, "n2/0", "n3/0")]
    view, _ = world.core.plan(Rebalance(job="j"))
    assert view.moves[0].reason == "rank 0 is outside of its rack a"
    assert job.owners[0] == owner.id, "nothing was changed"
