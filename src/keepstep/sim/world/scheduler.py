"""A scheduler that gives nodes, refuses, is late or says nothing; what the broker does with it.

It looks at the core's list again and again, as orchestrator/broker.py does: an answer that reaches
nobody, because the orchestrator is away, is given once more. What belongs to no operation on
record is taken back, and so is a node that was left. A place that was lost is well again later.
"""

from __future__ import annotations

from keepstep.core.capacity import CapacityView
from keepstep.model.job import (
    CoreInput,
    NodeDead,
    PlaceHealthy,
    PlaceReturned,
    SpareGranted,
    SpareRefused,
)
from keepstep.sim.times import MS, SECOND
from keepstep.sim.world.world import World

TOUR_NS = SECOND
AGENT_NS = 5 * SECOND  # at most, from a place to its agent
BACK_NS = 60 * SECOND
LATE_NS = 200 * SECOND  # nobody waits for one that long


class SimScheduler:
    def __init__(self, world: World, answers: tuple[str, ...]) -> None:
        self._world = world
        self._answers = list(answers)  # the first ones; from then on it gives
        self._asked: set[str] = set()  # operations with an answer on its way
        self._begun: dict[str, tuple[str, int]] = {}  # node -> its operation, when it joins
        self._late: set[str] = set()  # operations
        self._back: set[str] = set()  # places that were said to be well again

    def tour(self) -> None:
        self._world.after(TOUR_NS, self.tour)
        view = self._look()
        if view is None:
            return
        want = view.want
        if want is not None and not want.place and want.op not in self._asked:
            self._asked.add(want.op)
            answer = self._answers.pop(0) if self._answers else "give"
            self._world.fired(f"scheduler: {answer}")
            wait = 100 * MS + self._world.random.randrange(2 * SECOND)
            if answer != "silent":
                self._world.after(wait, self._answer, want.op, answer)
        elif want is not None and want.place and want.node not in self._begun:
            wait = self._world.random.randrange(AGENT_NS)
            wait += LATE_NS if want.op in self._late else 0
            self._begun[want.node] = (want.op, self._world.now + wait)
            self._world.after(wait, self._join, want.node, want.near)
        for node, (op, _) in self._begun.items():
            if op not in view.ops and node in self._world.nodes:
                self._end(node)
        for place in sorted(view.origins - self._back):
            self._back.add(place)
            wait = self._world.random.randrange(BACK_NS)
            self._world.after(wait, self._say, PlaceHealthy(job=self._world.plan.job, place=place))
        for node in view.leave:
            self._end(node)
            self._say(NodeDead(job=self._world.plan.job, node=node))
            self._say(PlaceReturned(job=self._world.plan.job, node=node))

    def _look(self) -> CapacityView | None:
        orchestrator = self._world.orchestrator
        if not orchestrator.alive or self._world.over:
            return None
        return orchestrator.core.capacity(self._world.plan.job)

    def _answer(self, op: str, answer: str) -> None:
        view = self._look()
        if view is None or view.want is None or view.want.op != op:
            self._asked.discard(op)  # if it is still wanted, the next tour hears of it
            return
        job = self._world.plan.job
        if answer == "refuse":
            self._say(SpareRefused(job=job, op=op, why="all places are used"))
            return
        if answer == "late":
            self._late.add(op)
        self._say(SpareGranted(job=job, op=op, place=view.want.only or f"p-{op}"))
        self._asked.discard(op)  # it may be lost in a crash

    def _join(self, node: str, labels: dict[str, str]) -> None:
        self._world.add_node(node, self._world.plan.per_node, labels)

    def _end(self, name: str) -> None:
        node = self._world.nodes.get(name)
        if node is not None and node.alive:
            node.die(silently=False)

    def _say(self, given: CoreInput) -> None:
        self._world.orchestrator.submit(given)
