"""Several jobs of one orchestrator, and fewer machines than they would like.

Each job has a world of its own (nodes, ranks, network, checker); they share the clock, the
orchestrator with its disk, and the machines. A machine that breaks is repaired some time later and
is free then. What is checked here is what lies between jobs: no machine is held twice, nobody is
served before somebody who comes first, no job loses a step to another one, and with enough machines
all of them train.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.capacity import CapacityView, Want
from keepstep.core.state import Job
from keepstep.model import records as r
from keepstep.model.job import CoreInput, NodeDead, PlaceReturned, SpareGranted, SpareRefused
from keepstep.sim.faults.strikes import strike
from keepstep.sim.ground.violation import Violation
from keepstep.sim.plans.stories_machines import MASS
from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.rules.check import Checker
from keepstep.sim.times import MS, SECOND
from keepstep.sim.world.world import World

TOUR_NS = SECOND
AGENT_NS = 5 * SECOND
REPAIR_NS = 120 * SECOND
DISTURBED_NS = 120 * SECOND
HEALED_NS = 400 * SECOND
END_NS = 120 * SECOND


class Machines:
    """A scheduler that gives what is free, to whoever's turn it is."""

    def __init__(self, worlds: dict[str, World], free: int) -> None:
        self._worlds = worlds
        self._first = next(iter(worlds.values()))
        self.free = [f"free-{number}" for number in range(free)]
        self._at = {
            (job, node.name): world.plan.place(node.name)
            for job, world in worlds.items()
            for node in world.plan.spec().nodes
        }
        self._asked: set[tuple[str, str]] = set()  # job and operation with an answer on its way
        self._begun: set[tuple[str, str]] = set()  # job and node whose agent was started
        self._ended: set[tuple[str, str]] = set()  # by this scheduler, in good health
        self.served: dict[str, int] = {}  # job -> machines since it last lacked none

    def tour(self) -> None:
        self._first.after(TOUR_NS, self.tour)
        if not self._first.orchestrator.alive:
            return
        for job, world in self._worlds.items():
            view = self._look(job)
            if view is not None:
                self._visit(job, world, view)

    def _look(self, job: str) -> CapacityView | None:
        orchestrator = self._first.orchestrator
        known = orchestrator.alive and orchestrator.core.knows(job)
        return orchestrator.core.capacity(job) if known else None

    def _visit(self, job: str, world: World, view: CapacityView) -> None:
        want = view.want
        if want is None and not self._needy(job):
            self.served[job] = 0
        if want is not None and not want.place and view.turn and (job, want.op) not in self._asked:
            self._asked.add((job, want.op))
            wait = 100 * MS + world.random.randrange(2 * SECOND)
            world.after(wait, self._answer, job, want.op)
        elif want is not None and want.place and (job, want.node) not in self._begun:
            self._begun.add((job, want.node))
            self._at[job, want.node] = want.place
            world.after(world.random.randrange(AGENT_NS), self._join, job, want.node)
        for node in view.leave:
            self._end(job, node)
            self._say(NodeDead(job=job, node=node))
            self._say(PlaceReturned(job=job, node=node))

    def _answer(self, job: str, op: str) -> None:
        view = self._look(job)
        self._asked.discard((job, op))
        if view is None or view.want is None or view.want.op != op or not view.turn:
            return  # the next tour hears of it, if it is still wanted
        if not self.free:
            self._say(SpareRefused(job=job, op=op, why="all machines are used"))
            return
        self._check_turn(job, view.want)
        place = self.free.pop(0)
        self._check_free(place)
        if not view.want.pool:
            self.served[job] = self.served.get(job, 0) + 1
        self._worlds[job].fired(f"scheduler gives {place} to {job}")
        self._say(SpareGranted(job=job, op=op, place=place))

    def _check_turn(self, job: str, want: Want) -> None:
        """Need before pools, then priority, then one for each before a second for anybody."""
        core = self._first.orchestrator.core
        mine = core.state(job).spec.policy.priority
        for other in self._worlds:
            theirs = core.state(other).capacity.want
            if other == job or theirs is None or theirs.place or theirs.pool or theirs.only:
                continue
            level = core.state(other).spec.policy.priority
            if want.pool or want.only or level > mine:
                raise Violation(f"{job} is served before {other}, which is in need")
            fewer = self.served.get(other, 0) < self.served.get(job, 0)
            if level == mine and fewer:
                raise Violation(f"{job} gets another machine before {other} has as many")

    def _check_free(self, place: str) -> None:
        for (job, name), held in self._at.items():
            node = self._worlds[job].nodes.get(name)
            if held == place and node is not None and node.alive:
                raise Violation(f"{place} is given away, and {name} of {job} still runs there")

    def _needy(self, job: str) -> bool:
        state = self._first.orchestrator.core.state(job)
        return bool(state.incidents) or state.attempt is not None

    def _join(self, job: str, node: str) -> None:
        self._worlds[job].add_node(node, self._worlds[job].plan.slots)

    def _end(self, job: str, name: str) -> None:
        """One in good health is free at once, another one after its repair."""
        node, place = self._worlds[job].nodes.get(name), self._at.pop((job, name), "")
        if not place:
            return
        if node is not None and node.alive:
            node.die(silently=False)
            self.free.append(place)
        else:
            wait = self._first.random.randrange(REPAIR_NS)
            self._first.after(wait, self.free.append, place)

    def _say(self, given: CoreInput) -> None:
        self._first.orchestrator.submit(given)


class Several:
    """As Run, for all jobs of a plan."""

    def __init__(self, plan: Plan, tracing: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.world = World(plan, Checker, tracing)
        self.missed = 0
        self.worlds = {plan.job: self.world}
        for other in plan.beside:
            self.worlds[other.job] = World(other, Checker, tracing, beside=self.world)
        self.machines = Machines(self.worlds, plan.free)

    def play(self) -> None:
        for world in self.worlds.values():
            for index in range(world.plan.rank_nodes + world.plan.spare_nodes):
                world.add_node(f"n{index}", world.plan.slots)
            world.submit()
        self.machines.tour()
        self._must(lambda: self._all_at(3), HEALED_NS, "no start")
        self._disturb()
        self.world.run(lambda: False, self.world.now + DISTURBED_NS, ended=True)
        self._heal()
        goal = max(max(world.book.best.values()) for world in self.worlds.values()) + 5
        self._must(lambda: self._all_at(goal), HEALED_NS, "a job does not go on")
        self._check_losses()
        for world in self.worlds.values():
            world.target = max(process.tick for process in world.ranks.values()) + 3
        over = [world for world in self.worlds.values() if not world.over]
        self._must(lambda: all(world.over for world in over), END_NS, "a job does not end")
        for job, world in self.worlds.items():
            ended = world.book.job_ended
            if ended is None or ended.view.state != "done":
                raise Violation(f"{job} ended {ended.view.state if ended else 'never'}")

    def _all_at(self, tick: int) -> bool:
        return all(
            len(world.book.best) == world.plan.ranks and min(world.book.best.values()) >= tick
            for world in self.worlds.values()
        )

    def _must(self, reached: Callable[[], bool], ns: int, what: str) -> None:
        if self.world.run(reached, self.world.now + ns, ended=True):
            return
        core = self.world.orchestrator.core
        views = [core.job(job) for job in self.worlds]
        why = "; ".join(f"{view.job} {view.state} ({view.reason})" for view in views)
        raise Violation(f"{what} within {ns // SECOND} virtual seconds: {why}")

    def _disturb(self) -> None:
        for world in self.worlds.values():
            for fault in world.plan.faults:
                world.after(fault.at_ns, self._strike, world, fault)

    def _strike(self, world: World, fault: Fault) -> None:
        """What is left of a job that has lost a node may be the only one that has its state."""
        job = world.facts()
        busy = job is None or job.attempt is not None or bool(job.incidents or job.dead())
        if busy and fault.actor in ("agent", MASS):
            world.after(SECOND, self._strike, world, fault)
        elif job is not None and fault.actor == MASS:
            self._lose_two(world, job)
        elif not strike(world, fault):
            self.missed += 1

    def _lose_two(self, world: World, job: Job) -> None:
        """Two nodes at once that do not keep each other's copies."""
        homes = sorted({job.nodes[worker.node].index for worker in job.rank_owners()})
        lost = [job.order[index].name for index in homes[:3:2]]
        world.fired(f"{' and '.join(lost)} of {job.id} are lost")
        for name in lost:
            world.nodes[name].die(silently=False)

    def _heal(self) -> None:
        """Machines for everybody."""
        self.world.orchestrator.restart()
        wanted = sum(world.plan.rank_nodes for world in self.worlds.values())
        self.machines.free += [f"new-{number}" for number in range(wanted)]

    def _check_losses(self) -> None:
        for record in self.world.orchestrator.disk:
            if isinstance(record, r.IncidentClosed) and record.view.steps_lost:
                raise Violation(f"{record.view.id} has lost {record.view.steps_lost} steps")
