"""Who holds the others up: the judge, and what follows from it."""

from __future__ import annotations

import msgspec
import pytest

from keepstep.core.stragglers import STEPS, ratios, stand_out
from keepstep.errors import UsageError
from keepstep.model import agent_messages
from keepstep.model import records as r
from keepstep.model.schedule import Policy
from tests.support.core import SECOND, World, job_spec

MS = 1_000_000
AFTER_S = 16  # a look every two seconds


# --------------------------------------------------------------------------- the judge


def test_ratios_are_to_the_lower_median_of_all_ranks() -> None:
    assert ratios({0: 10, 1: 20}) == ({0: 1.0, 1: 2.0}, 10)
    assert ratios({0: 10, 1: 10, 2: 18, 3: 10})[0][2] == 1.8
    assert ratios({0: 10}) == ({}, 0) and ratios({0: 0, 1: 0, 2: 5}) == ({}, 0)


def test_one_that_is_much_slower_stands_out() -> None:
    own = {0: 10, 1: 11, 2: 18, 3: 10}
    assert stand_out(own, 20, 1.5, {}) == {2: 1.8}
    assert stand_out(own, 20, 2.0, {}) == {}


def test_what_costs_less_than_a_tenth_of_a_step_does_not() -> None:
    assert stand_out({0: 10, 1: 10, 2: 18}, 1000, 1.5, {}) == {}


def test_many_that_are_slow_have_a_common_cause() -> None:
    own = dict.fromkeys(range(11), 10) | {1: 20, 2: 20}
    assert stand_out(own, 20, 1.5, {}) == {1: 2.0, 2: 2.0}
    assert stand_out(own | {3: 20}, 20, 1.5, {}) == {}


def test_a_straggler_stays_one_until_it_is_half_way_back() -> None:
    own = {0: 100, 1: 100, 2: 130}
    assert stand_out(own, 200, 1.5, {2: True}) == {2: 1.3}
    assert stand_out(own, 200, 1.5, {2: False}) == {}
    assert stand_out(own | {2: 120}, 200, 1.5, {2: True}) == {}


# --------------------------------------------------------------------------- in a job


class Paced:
    """A job whose ranks take so many ms alone, of steps of 50 ms."""

    def __init__(self, do: str = "move", labels: dict[str, dict[str, str]] | None = None) -> None:
        policy = Policy(stragglers=do, straggler_after_ns=AFTER_S * SECOND)  # type: ignore[arg-type]
        spec = job_spec(nodes="n0:1 n1:1 n2:1 n3:1 n4:1", world=3, local_world=1, spares=1)
        self.world = World(msgspec.structs.replace(spec, policy=policy), join=False)
        for index in range(5):
            self.world.join(f"n{index}", 1, (labels or {}).get(f"n{index}", {}))
        self.world.start()
        self.world.step(5)
        self.steps: dict[str, int] = {}
        self.own = {0: 10, 1: 10, 2: 10}

    def train(self, seconds: int) -> None:
        world = self.world
        for _ in range(seconds):
            world.now += SECOND
            world.step(20)
            for worker in world.owners():
                self.steps[worker.id] = self.steps.get(worker.id, 0) + 20
                state = agent_messages.WorkerState(
                    worker=worker.id,
                    slot=worker.slot,
                    pid=9,
                    rank=worker.rank,
                    generation=worker.generation,
                    version=worker.tick,
                    tick=worker.tick,
                    steps_per_s=20.0,
                    own_ns=self.own[worker.rank] * MS,
                    own_steps=self.steps[worker.id],
                )
                world.agent_says(worker.node, agent_messages.Progress(workers=[state]))
            world.run(0)

    def said(self) -> list[str]:
        seen = [x for x in self.world.recorded(r.SignalSeen) if x.signal == "straggler"]  # type: ignore[attr-defined]
        return [one.detail for one in seen]  # type: ignore[attr-defined]


def test_equal_ranks_are_no_stragglers() -> None:
    paced = Paced()
    paced.train(60)
    assert not paced.said() and not paced.world.incidents
    assert [one.own_ms for one in paced.world.view.ranks] == [10, 10, 10]


def test_it_is_said_once_and_taken_back() -> None:
    paced = Paced("report")
    paced.train(10)
    paced.own[2] = 18
    paced.train(15)
    assert not paced.said()
    paced.train(20)
    assert len(paced.said()) == 1 and not paced.world.incidents
    assert paced.said()[0].startswith("n2/0: rank 2 takes 1.8 x the median of ")
    assert "rank 2 takes 1.8 x" in paced.world.view.stragglers[0]
    assert any("straggler" in note.text for note in paced.world.view.notes)
    paced.own[2] = 10
    paced.train(10)
    assert paced.said()[1:] == ["n2/0: rank 2 is no straggler any more"]
    assert paced.world.view.stragglers == []


def test_a_moment_is_not_enough() -> None:
    paced = Paced()
    for _ in range(5):
        paced.own[2] = 30
        paced.train(12)
        paced.own[2] = 10
        paced.train(4)
    assert not paced.said() and not paced.world.incidents


def test_it_is_moved_as_planned_and_its_place_is_tainted() -> None:
    paced = Paced()
    paced.own[1] = 20
    paced.train(30)
    world = paced.world
    world.run(60)
    world.assert_training()
    (incident,) = world.incidents
    assert (incident.trigger, incident.cause) == ("planned", "straggler")
    assert (incident.outcome, incident.steps_lost) == ("RESOLVED", 0)
    assert incident.reason.startswith("straggler: rank 1 takes 2.0 x the median of ")
    assert incident.moves == ["rank 1: n1/0 -> n3/0"]
    steps = int(incident.reason.split("median of ")[1].split()[0])
    assert steps >= STEPS
    assert world.view.nodes[1].taints[0].startswith("straggler: ")


def test_the_slowest_goes_first_and_then_there_is_a_rest() -> None:
    paced = Paced()
    paced.own |= {1: 20, 2: 10}
    paced.train(30)
    paced.world.run(60)
    paced.own |= {1: 10, 2: 30}
    paced.train(3 * AFTER_S)
    assert len(paced.world.incidents) == 1
    assert any(f"within {5 * AFTER_S} s" in one for one in paced.said())
    paced.train(3 * AFTER_S)
    paced.world.run(60)
    assert [i.victims for i in paced.world.incidents] == [[1], [2]]


def test_a_rank_that_is_slow_everywhere_is_moved_once() -> None:
    paced = Paced()
    paced.own[1] = 20
    paced.train(20 * AFTER_S)
    paced.world.assert_training()
    assert len(paced.world.incidents) == 1
    assert any("its work is slow and not its place" in one for one in paced.said())


def test_that_it_was_moved_is_known_after_a_restart() -> None:
    paced = Paced()
    paced.own[1] = 20
    paced.train(30)
    paced.world.run(60)
    paced.world.restart_core()
    paced.world.rejoin()
    paced.train(5 * AFTER_S)
    assert len(paced.world.incidents) == 1


def test_it_stays_if_all_spares_are_in_its_own_rack() -> None:
    paced = Paced(labels={f"n{i}": {"rack": "r1"} for i in (1, 3, 4)})
    paced.own[1] = 20
    paced.train(60)
    assert not paced.world.incidents
    assert [one for one in paced.said() if "rank 1 stays: all spares are in its own rack" in one]


def test_it_stays_if_no_spare_is_left() -> None:
    paced = Paced()
    paced.world.kill_node("n3")
    paced.world.kill_node("n4")
    paced.world.run(60)
    paced.own[1] = 20
    paced.train(60)
    assert len([one for one in paced.said() if "stays: no spare is ready" in one]) == 1
    paced.world.assert_training()


@pytest.mark.parametrize("do", ["off", "report"])
def test_nothing_is_moved_unless_it_is_asked_for(do: str) -> None:
    paced = Paced(do)
    paced.own[1] = 30
    paced.train(60)
    assert not paced.world.incidents and bool(paced.said()) == (do == "report")


@pytest.mark.parametrize("policy", [{"straggler_factor": 1.0}, {"straggler_after_ns": 0}])
def test_a_policy_without_meaning_is_refused(policy: dict[str, float]) -> None:
    spec = msgspec.structs.replace(job_spec(), policy=Policy(**policy))  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        World(spec)
