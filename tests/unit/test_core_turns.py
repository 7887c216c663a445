"""Several jobs and few nodes: whose turn it is, and who gives a node up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.control import Core
from keepstep.model import records as r
from keepstep.model.job import Cancel, Migrate, NodeDead, PlaceReturned, SpareGranted, SpareRefused
from keepstep.model.schedule import Constraints, Kind, Policy, Provision
from tests.support.core import SECOND, World, job_spec


def launched(
    job: str,
    nodes: int = 2,
    *,
    priority: int = 0,
    kinds: tuple[Kind, ...] = ("idle",),
    spares: int = 0,
    slots: int = 1,
    beside: World | None = None,
    partition: str = "",
    **policy: object,
) -> World:
    """One rank on each node, on `spares` nodes more none."""
    names = [f"n{i}" for i in range(nodes + spares)]
    ranks = {"world": nodes * slots, "local_world": slots, "spares": spares * slots}
    spec = job_spec(nodes=" ".join(f"{name}:{slots}" for name in names), **ranks)  # type: ignore[arg-type]
    provision = Provision(
        scheduler="test",
        places={name: f"{job}-{name}" for name in names},
        kinds=list(kinds),
        constraints=Constraints(partition=partition),
    )
    policy = {"priority": priority, "grace_ns": 30 * SECOND, **policy}
    spec = msgspec.structs.replace(
        spec,
        job=job,
        directory=f"/jobs/{job}",
        provision=provision,
        policy=Policy(**policy),  # type: ignore[arg-type]
    )
    world = World(spec, beside=beside).start()
    world.step(5)
    return world


class Scheduler:
    """Gives what it has, and what was left in good health. `asked` are jobs in the order in which
    it was asked."""

    def __init__(self, *worlds: World, places: int = 0) -> None:
        self.worlds = {world.spec.job: world for world in worlds}
        self.free = [f"free-{i}" for i in range(places)]
        self.asked: list[str] = []
        self.got: list[str] = []
        self.preempted = 0

    def tour(self) -> bool:
        """True: there was something to do."""
        before = len(self.asked), len(self.free)
        for job, world in self.worlds.items():
            view = world.core.capacity(job)
            if view is None:
                continue
            for node, (place, _) in view.leave.items():
                self.free += [place] if world.nodes[node].alive else []
                world.handle(NodeDead(job=job, node=node))
                world.nodes[node].alive = world.nodes[node].joined = False
                world.handle(PlaceReturned(job=job, node=node))
            if view.want is not None and not view.want.place and view.turn:
                self._answer(world, view.want.op, view.want.node, view.want.kinds)
            world.pump()
        return (len(self.asked), len(self.free)) != before

    def _answer(self, world: World, op: str, node: str, kinds: list[Kind]) -> None:
        job = world.spec.job
        self.asked.append(job)
        assert world.spec.provision is not None
        kinds = kinds or world.spec.provision.kinds
        if self.free and "idle" in kinds:
            place = self.free.pop(0)
        elif "preempt" in kinds:
            self.preempted += 1
            place = f"preempted-{self.preempted}"
        else:
            world.handle(SpareRefused(job=job, op=op, why="all are used"))
            return
        self.got.append(job)
        world.handle(SpareGranted(job=job, op=op, place=place))
        world.join(node, world.spec.local_world)

    def run(self, seconds: int = 40) -> None:
        for _ in range(seconds):
            while self.tour():
                pass
            next(iter(self.worlds.values())).run(1)
            for world in self.worlds.values():
                world.step()
                world.progress()
                world.pump()
                world.now = max(one.now for one in self.worlds.values())
            any_world = next(iter(self.worlds.values()))
            any_world.now += SECOND


def trains(world: World) -> bool:
    return world.view.state == "running"


# --------------------------------------------------------------------------- turns


@settings(max_examples=25, deadline=None)
@given(
    priorities=st.lists(st.integers(0, 2), min_size=2, max_size=4),
    places=st.integers(0, 8),
    shuffle=st.randoms(use_true_random=False),
)
def test_after_a_mass_failure_by_priority_and_one_each_in_turn(
    priorities: list[int], places: int, shuffle: object
) -> None:
    worlds: list[World] = []
    for index, priority in enumerate(priorities):
        beside = worlds[0] if worlds else None
        worlds.append(launched(f"j{index}", 3, priority=priority, beside=beside))
    order = list(worlds)
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    for world in order:
        world.kill_node("n1")
        world.kill_node("n2")
    scheduler = Scheduler(*worlds, places=places)
    scheduler.run(5)
    expected: list[str] = []
    for level in sorted(set(priorities), reverse=True):
        here = [f"j{i}" for i, priority in enumerate(priorities) if priority == level]
        expected += here + here  # each has lost two
    assert scheduler.got == expected[:places]
    scheduler.free += ["late"] * (len(expected) - places)
    scheduler.run(30)
    assert scheduler.got == expected and all(trains(world) for world in worlds)


def test_whoever_was_refused_is_asked_for_before_one_behind_it() -> None:
    first = launched("first", priority=5)
    second = launched("second", priority=1, beside=first)
    scheduler = Scheduler(first, second)
    first.kill_node("n1")
    scheduler.tour()
    assert scheduler.asked == ["first"]
    scheduler.free.append("freed")  # before the first one asks again
    second.kill_node("n1")
    scheduler.run(2)
    assert scheduler.got == ["first"] and trains(first) and second.view.state == "held"


def test_the_patience_of_a_job_begins_with_its_turn() -> None:
    first = launched("first", priority=5)
    second = launched("second", beside=first)
    first.kill_node("n1")
    second.kill_node("n1")
    for _ in range(4):  # the first one is asked for, and is late each time
        second.run(100)
    wanted = second.core.capacity("second")
    assert wanted is not None and wanted.want is not None and wanted.want.op == "spare-1"
    assert len(first.recorded(r.SpareWanted)) > 1


def test_other_constraints_are_no_reason_to_wait() -> None:
    first = launched("first", priority=5, partition="a")
    second = launched("second", beside=first, partition="b")
    first.kill_node("n1")
    second.kill_node("n1")
    views = [first.core.capacity(job) for job in ("first", "second")]
    assert [view.turn for view in views if view is not None] == [True, True]


def test_an_emergency_comes_before_anybodys_pool() -> None:
    rich = launched("rich", priority=9, spares=1, dedicated=1)
    poor = launched("poor", beside=rich)
    rich.kill_node("n1")
    rich.run(5)
    poor.kill_node("n1")
    scheduler = Scheduler(rich, poor, places=1)
    scheduler.run(5)
    assert scheduler.got == ["poor"] and trains(rich) and trains(poor)


# --------------------------------------------------------------------------- who yields

BOTH: tuple[Kind, ...] = ("idle", "preempt")


def test_a_spare_of_a_job_of_lower_priority_is_taken_first() -> None:
    low = launched("low", spares=1)
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    scheduler.run(5)
    assert trains(high) and trains(low) and scheduler.preempted == 0
    (yielded,) = low.recorded(r.NodeYielded)
    assert (yielded.node, yielded.to) == ("n2", "high")  # type: ignore[union-attr]
    assert "job high of priority 5 needs a node" in low.last.reason
    assert scheduler.got == ["high"] and low.view.nodes[2].state == "dead"


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_without_a_spare_holds_its_state_and_goes_on_when_there_is_room(
    restart: bool,
) -> None:
    low = launched("low")
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    scheduler.run(20)
    assert trains(low) and high.view.state == "held", "the grace is not over"
    if restart:
        records = sorted(low.records + high.records, key=lambda record: record.at_ns)
        core = Core()
        core.replay(records)
        for world in (low, high):
            world.core = core
            world.queue.clear()
            for node in world.nodes.values():
                node.joined = False
        for world in (low, high):
            world.rejoin()
    scheduler.run(40)
    assert trains(high), (high.view.reason, low.view.reason)
    assert low.view.state == "held" and low.view.checkpoint and scheduler.preempted == 0
    (one,) = [view for view in low.incidents if view.outcome == "OPEN"]
    assert one.cause == "preempted" and "gave n1 up to job high" in one.reason
    scheduler.free.append("new")
    scheduler.run(40)
    assert trains(low) and trains(high)
    low.assert_training()
    assert all(view.steps_lost == 0 for view in low.incidents)


def test_a_job_that_has_lost_a_node_itself_keeps_what_it_was_to_yield() -> None:
    low = launched("low")
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    scheduler.run(5)
    assert low.view.nodes[1].taints
    mine = low.rank(1)
    low.now += 60 * SECOND  # no step is made: n0 is dead, and nobody knows yet
    low.run(60)
    assert mine.alive, "it may be the only one that has the state"
    low.kill_node("n0")
    low.run(20)
    assert mine.alive and not low.view.nodes[1].taints
    assert any("n1 is kept: job low has lost others" in note.text for note in low.view.notes)
    scheduler.free += ["new-0", "new-1"]
    scheduler.run(60)
    assert trains(low) and trains(high)
    assert all(view.steps_lost == 0 for view in low.incidents)


def test_a_spare_that_has_copies_is_yielded_after_the_next_step() -> None:
    low = launched("low", spares=1)
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    assert low.core.state("low").workers[low.rank(1).id].buddy == "n2"
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    while not low.recorded(r.NodeYielded):
        assert scheduler.tour() or low.now < 2_000 * SECOND
    low.now += 20 * SECOND
    low.run(20)
    view = low.core.capacity("low")
    assert view is not None and not view.leave, "no step was made since others were told"
    low.step()
    low.progress()
    low.pump()
    view = low.core.capacity("low")
    assert view is not None and sorted(view.leave) == ["n2"]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"yields": False}, "does not yield"),
        ({"kinds": ()}, "could not ask for another one"),
        ({"priority": 5}, ""),
        ({"nodes": 1}, "would lose steps"),
    ],
)
def test_if_nobody_can_yield_the_scheduler_may_preempt(policy: dict[str, int], why: str) -> None:
    low = launched("low", **policy)  # type: ignore[arg-type]
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    planned, _ = high.core.plan(Migrate(job="high", ranks=[1]))
    assert all(why in one.why for one in planned.rejected) and bool(planned.rejected) == bool(why)
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    scheduler.run(5)
    assert trains(high) and trains(low) and scheduler.preempted == 1
    assert not low.recorded(r.NodeYielded)


def test_a_plan_names_what_others_would_yield() -> None:
    low = launched("low", spares=1)
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    planned, _ = high.core.plan(Migrate(job="high", ranks=[1]))
    assert [(one.place, one.kind) for one in planned.offers] == [
        ("low-n2", "yield"),
        ("low-n1", "yield"),
        ("low-n0", "yield"),
    ]
    assert planned.offers[0].reason == "a spare of job low (priority 0)"
    assert planned.offers[1].reason == "rank 1 of job low (priority 0) would be drained"


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_that_is_not_needed_any_more_is_kept(ended: bool) -> None:
    low = launched("low")
    high = launched("high", priority=5, kinds=BOTH, beside=low)
    high.kill_node("n1")
    scheduler = Scheduler(low, high)
    scheduler.run(5)
    assert low.view.nodes[1].taints
    if ended:
        high.handle(Cancel(job="high", reason="enough", exit_code=3))
        del scheduler.worlds["high"]
    else:
        high.join("n9", 1)
        high.pump()
    scheduler.run(40)
    assert not low.view.nodes[1].taints and trains(low)
    low.assert_training()
