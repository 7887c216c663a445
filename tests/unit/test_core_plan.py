"""A plan says what would be done, why, and why not otherwise; it changes nothing."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.errors import UsageError
from keepstep.model.job import Drain, Migrate
from keepstep.model.schedule import Kind, Provision
from keepstep.model.views import PlanView
from tests.support.core import World, job_spec


def trained(kinds: tuple[Kind, ...] | None = None, **given: object) -> World:
    spec = job_spec(**given)  # type: ignore[arg-type]
    if kinds is not None:
        places = {node.name: f"p{node.name[1:]}" for node in spec.nodes}
        provision = Provision(scheduler="slurm", places=places, kinds=list(kinds))
        spec = msgspec.structs.replace(spec, provision=provision)
    world = World(spec).start()
    world.step(5)
    return world


def plan(world: World, given: Migrate | Drain) -> PlanView:
    """Asked twice it says the same, and what operators see is as before."""
    before = msgspec.json.encode((world.view, world.incidents))
    seen, _ = world.core.plan(given)
    assert world.core.plan(given)[0] == seen
    assert msgspec.json.encode((world.view, world.incidents)) == before
    return seen


def targets(seen: PlanView) -> list[tuple[int, str, str]]:
    return [(move.rank, move.to, move.cost) for move in seen.moves]


def test_what_is_planned_is_what_happens() -> None:
    world = trained(spares=2)
    seen = plan(world, Drain(job="j", node="n0", reason="fan"))
    assert targets(seen) == [(0, "n2/0", "spare"), (1, "n2/1", "spare")]
    assert seen.asked == "drain n0" and seen.then[0].startswith("n0 is tainted")
    world.handle(Drain(job="j", node="n0", reason="fan"))
    world.run()
    assert [(rank.rank, rank.slot) for rank in world.view.ranks[:2]] == [
        (move.rank, move.to) for move in seen.moves
    ]


def test_alternatives_are_named_with_their_reasons() -> None:
    world = trained(nodes="n0:3 n1:2 n2:2", spares=3)
    seen = plan(world, Migrate(job="j", ranks=[0]))
    assert targets(seen) == [(0, "n2/0", "spare")]
    why = {one.what.partition(" ")[0]: one.why for one in seen.rejected}
    assert "on the node of rank 0" in why["n0/2"]
    assert why["n2/1"] == "as good as n2/0, and behind it in the order of nodes"
    world.lose_agent("n2")
    seen = plan(world, Migrate(job="j", ranks=[0]))
    assert targets(seen) == [(0, "n0/2", "spare")]
    assert {one.why for one in seen.rejected} == {"node n2 is disconnected"}


def test_a_drained_nodes_own_spares_are_of_no_use() -> None:
    world = trained(nodes="n0:3 n1:3", spares=2)
    seen = plan(world, Drain(job="j", node="n0"))
    assert targets(seen) == [(0, "n1/2", "spare"), (1, "", "wait")]
    assert [one.why for one in seen.rejected] == ["its node is the one to be drained"]
    assert "no scheduler may be asked" in seen.moves[1].reason


def test_without_a_standby_a_free_slot_then_the_scheduler() -> None:
    world = trained(kinds=("reserved", "idle"), nodes="n0:2 n1:2 n2:1", spares=0)
    given = Migrate(job="j", ranks=[0, 1])
    seen, ask = world.core.plan(given)
    assert targets(seen) == [(0, "n2/0", "process"), (1, "", "scheduler")]
    assert "slurm is asked for a node (reserved, then idle)" in seen.moves[1].reason
    assert ask is not None and (ask.kinds, ask.avoid) == (["reserved", "idle"], ["p0"])
    assert "rank 1" in seen.then[0]
    seen = plan(world, Drain(job="j", node="n2"))
    assert seen.moves == [] and "p2 is drained in slurm" in seen.then[1]


@pytest.mark.parametrize(
    "given",
    [
        Migrate(job="j", ranks=[9]),
        Migrate(job="j", ranks=[]),
        Drain(job="j", node="n9"),
        Drain(job="nobody", node="n0"),
    ],
)
def test_bad_requests_are_refused_as_the_real_ones_are(given: Migrate | Drain) -> None:
    with pytest.raises(UsageError) as refused:
        trained().core.plan(given)
    assert refused.value.hint
