"""The broker between the real core (in the fake world of the unit tests) and a local scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.errors import NoRight, TransientError
from keepstep.model.job import AgentGone, Cancel, Drain, Untaint
from keepstep.model.schedule import START, AgentStart, Ask, Constraints, Place, Policy, Provision
from keepstep.orchestrator.broker import Broker
from tests.schedulers.labs import LocalLab
from tests.support.core import World, job_spec

WAIT_S = 20.0


class Life:
    """One life of an orchestrator: what the broker needs of a driver, and the broker."""

    def __init__(self, world: World, lab: LocalLab, folder: Path) -> None:
        self.world, self.core, self.running = world, world.core, True
        self.folder = folder
        self.broker = Broker(self, lab.again(), self.agent)  # type: ignore[arg-type]

    def submit(self, given: Any) -> Any:
        return self.world.handle(given)

    async def wait_any_change(self) -> None:
        await asyncio.sleep(0.01)

    def agent(self, job: str, node: str) -> AgentStart:
        return AgentStart(
            job=job,
            node=node,
            command=["sleep", "600"],
            env={},
            directory=str(self.folder),
            log=str(self.folder / f"{node}.log"),
        )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        async def wait() -> None:
            self.broker._stopping = False
            running = asyncio.create_task(self.broker.run())
            try:
                async with asyncio.timeout(WAIT_S):
                    while not condition():
                        await asyncio.sleep(0.01)
            except TimeoutError as error:
                raise AssertionError(f"waited for {what}") from error
            finally:
                await self.broker.stop()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(wait())


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    made = LocalLab(tmp_path / "pool")
    yield made
    for lease in made.scheduler.leases():
        made.scheduler.release(lease)


@pytest.fixture
def world(lab: LocalLab) -> World:
    """A job of two nodes, in places of the scheduler."""
    ask = Ask(job="j", op=START, constraints=Constraints(), kinds=["queue"], count=2)
    places = lab.scheduler.acquire(ask, 5).places
    spec = msgspec.structs.replace(
        job_spec(nodes="n0:2 n1:2", spares=0),
        provision=Provision(
            scheduler="local",
            places=dict(zip(("n0", "n1"), places, strict=True)),
            kinds=["idle"],
            back_after_ns=500_000_000,
        ),
    )
    made = World(spec).start()
    made.step(5)
    return made


def ops(lab: LocalLab) -> dict[str, list[str]]:
    return {lease.op: lease.places for lease in lab.scheduler.leases()}


def given(world: World, node: str = "n2") -> str:
    view = world.core.capacity("j")
    return view.places.get(node, "") if view is not None else ""


def returned(world: World, node: str) -> bool:
    view = world.core.capacity("j")
    return view is not None and node not in view.places


def test_a_node_that_is_not_heard_of_is_fenced_replaced_and_given_back(
    world: World, lab: LocalLab, tmp_path: Path
) -> None:
    life = Life(world, lab, tmp_path)
    world.lose_agent("n1", lose_answers=True)
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n1"
    world.run(21)  # the stall timeout, and not what else it would take to be sure
    life.until(lambda: given(world), "a place")
    assert lab.state("c2").state == "down" and lab.state("c2").ours
    assert world.view.nodes[1].state == "dead" and ops(lab)["spare-1"] == ["c3"]
    world.join("n2")
    world.run(60)
    world.assert_training()
    life.until(lambda: returned(world, "n1"), "the old place")
    assert ops(lab) == {START: ["c1"], "spare-1": ["c3"]}
    assert lab.scheduler.leases()[1].instead_of == "c2"


def test_killed_between_acquire_and_its_record_the_next_one_uses_the_same_place(
    world: World, lab: LocalLab, tmp_path: Path
) -> None:
    world.kill_node("n1")
    world.pump()
    ask = Ask(job="j", op="spare-1", constraints=Constraints(), kinds=["idle"], avoid=["c2"])
    before = lab.scheduler.acquire(ask, 5)
    world.restart_core()
    world.rejoin()
    world.pump()
    Life(world, lab, tmp_path).until(lambda: given(world), "a place")
    assert given(world) == before.places[0] and len(ops(lab)) == 2


def test_what_belongs_to_nothing_on_record_goes_back(
    world: World, lab: LocalLab, tmp_path: Path
) -> None:
    for job, op in (("j", "spare-9"), ("somebodys", "spare-1")):
        ask = Ask(job=job, op=op, constraints=Constraints(), kinds=["idle"])
        lab.scheduler.acquire(ask, 5)
    life = Life(world, lab, tmp_path)
    life.until(lambda: "spare-9" not in ops(lab), "the end of a stray lease")
    assert set(ops(lab)) == {START, "spare-1"}
    world.handle(Cancel(job="j", reason="enough", exit_code=3))
    for node in ("n0", "n1"):
        world.handle(AgentGone(job="j", node=node))
    Life(world, lab, tmp_path).until(lambda: START not in ops(lab), "the job's places")
    assert set(ops(lab)) == {"spare-1"}


def test_taints_go_both_ways(world: World, lab: LocalLab, tmp_path: Path) -> None:
    life = Life(world, lab, tmp_path)
    world.handle(Drain(job="j", node="n0", reason="fan"))
    life.until(lambda: lab.state("c1").state == "degraded", "a drained place")
    world.handle(Untaint(job="j", target="n0"))
    life.until(lambda: lab.state("c1").state == "used", "a place as before")
    lab.taint("c2")
    life.until(lambda: world.view.nodes[1].taints, "a drained node")
    assert world.view.nodes[1].taints == ["drain: local: theirs"]


def test_a_refused_right_is_said_once_and_the_core_waits_for_itself(
    world: World, lab: LocalLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(world, lab, tmp_path)
    tried: list[str] = []

    def taint(place: str, level: str, reason: str) -> None:
        tried.append(place)
        raise NoRight(f"{place} cannot be tainted", hint="it needs an operator's rights")

    monkeypatch.setattr(life.broker.scheduler, "taint", taint)
    world.lose_agent("n1", lose_answers=True)
    for worker in world.workers.values():
        worker.alive = worker.alive and worker.node != "n1"
    world.run(21)
    life.until(lambda: given(world), "a place all the same")
    assert tried == ["c2"] and world.view.nodes[1].state == "disconnected"
    assert [n.text for n in world.view.notes if "operator's rights" in n.text]
    world.join("n2")
    world.run(60)
    world.assert_training()


def test_a_scheduler_that_does_not_answer_is_asked_again(
    world: World, lab: LocalLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(world, lab, tmp_path)
    real, calls = life.broker.scheduler.watch, 0

    def watch() -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise TransientError("it does not answer")
        return real()

    monkeypatch.setattr(life.broker.scheduler, "watch", watch)
    lab.taint("c2")
    life.until(lambda: world.view.nodes[1].taints, "a drained node")
    assert calls >= 3


def test_ranks_move_back_when_their_place_is_well_again(
    lab: LocalLab, world: World, tmp_path: Path
) -> None:
    life = Life(world, lab, tmp_path)
    world.kill_node("n1")
    world.pump()
    life.until(lambda: given(world), "a place")
    world.join("n2")
    world.run(60)
    life.until(lambda: returned(world, "n1"), "the old place")
    lab.taint("c2")
    life.until(lambda: life.broker._places["c2"].state == "degraded", "news of it")
    view = world.core.capacity("j")
    assert view is not None and view.want is None and view.origins == {"c2"}
    with lab.scheduler.pool() as pool:  # type: ignore[attr-defined]
        pool.places["c2"] = Place(name="c2", state="free", gpu_type="h200")
    life.until(lambda: "spare-2" in ops(lab) and given(world, "n3"), "the place itself")
    assert ops(lab)["spare-2"] == ["c2"]
    world.join("n3")
    world.run(60)
    world.assert_training()
    life.until(lambda: returned(world, "n2"), "the spare's place")
    assert ops(lab) == {START: ["c1"], "spare-2": ["c2"]} and lab.state("c3").state == "free"


def test_of_two_jobs_the_one_of_higher_priority_is_served_and_the_other_one_yields(
    lab: LocalLab, tmp_path: Path
) -> None:
    """And goes on by itself when there is a place again."""
    lab.occupy(["c5"], low=True)  # somebody else's: it would be the last resort
    worlds: list[World] = []
    for job, priority in (("low", 0), ("high", 5)):
        ask = Ask(job=job, op=START, constraints=Constraints(), kinds=["queue"], count=2)
        places = lab.scheduler.acquire(ask, 5).places
        spec = msgspec.structs.replace(
            job_spec(nodes="n0:2 n1:2", spares=0),
            job=job,
            provision=Provision(
                scheduler="local",
                places=dict(zip(("n0", "n1"), places, strict=True)),
                kinds=["idle", "preempt"] if priority else ["idle"],
                constraints=Constraints(gpu_type="h200"),
            ),
            policy=Policy(priority=priority, grace_ns=0),
        )
        worlds.append(World(spec, beside=worlds[0] if worlds else None).start())
        worlds[-1].step(5)
    low, high = worlds
    high.kill_node("n1")
    life = Life(high, lab, tmp_path)

    def new(world: World) -> str:
        """The node that it was given."""
        for one in worlds:
            one.step()
            one.progress()
            one.run(1)
        view = world.core.capacity(world.spec.job)
        assert view is not None
        return next((node for node in view.places if node not in ("n0", "n1")), "")

    life.until(lambda: new(high), "the place that the other one gave up")
    high.join(new(high))
    high.run(60)
    high.assert_training()
    low.pump()
    assert low.view.state == "held" and low.view.checkpoint and "c5" not in str(ops(lab))
    with lab.scheduler.pool() as pool:  # type: ignore[attr-defined]
        pool.others.clear()

    low.now += 20 * 10**9  # until it asks again
    life.until(lambda: new(low), "a place for the other one")
    low.join(new(low))
    low.run(60)
    low.assert_training()
