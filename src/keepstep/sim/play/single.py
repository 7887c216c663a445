"""Playing one world to its end: disturb it, heal it, and see whether it trains again.

    start -> training -> the migration of the plan -> faults -> healed -> quiet -> the end

*Healed* means that links, disks and paused processes are well again and that there are enough
slots; what died stays dead and what hung stays hung. From then on the job has `QUIET_NS` to train
as if nothing had happened, with every spare back and nothing left over.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.sim.ground.violation import Violation
from keepstep.sim.plans.world_plan import Plan
from keepstep.sim.play.at_rest import Rest
from keepstep.sim.play.crowding import balanced, relieved
from keepstep.sim.play.disturbance import Disturbance
from keepstep.sim.play.healing import heal
from keepstep.sim.play.judging import check_end, check_gone, check_leaks, check_parities
from keepstep.sim.rank.shards import RENEW
from keepstep.sim.rules.check import Checker
from keepstep.sim.times import SECOND
from keepstep.sim.world.scheduler import SimScheduler
from keepstep.sim.world.world import World

QUIET_NS = 400 * SECOND
END_NS = 120 * SECOND


class Hopeless(Exception):
    """No process with any state is left, no checkpoint either, and nobody knows: the orchestrator
    waits for nodes that will never come back. There is nothing it could do."""


class Run:
    def __init__(self, plan: Plan, tracing: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.world = World(plan, Checker, tracing)
        self.worlds = {plan.job: self.world}
        self.disturbance = Disturbance(self.world)
        self.rest = Rest(self.world)

    @property
    def missed(self) -> int:
        return self.disturbance.missed

    def play(self) -> None:
        world, plan = self.world, self.plan
        for index in range(plan.rank_nodes + plan.spare_nodes):
            late = index - plan.rank_nodes
            wait = plan.late_nodes[late] if 0 <= late < len(plan.late_nodes) else 0
            if index == plan.missing:
                continue
            if wait:
                world.after(wait, world.join_node, f"n{index}", plan.slots)
            else:
                world.add_node(f"n{index}", plan.slots)
        world.submit()
        if plan.answers:
            SimScheduler(world, plan.answers).tour()
        if plan.from_start:
            self.disturbance.begin()
            world.run(self.disturbance.calm, world.now + QUIET_NS)
            heal(world)
        self._must(lambda: self._tick() >= plan.resume_tick + 3, plan.start_ns_max, "no start")
        if not plan.from_start:
            if plan.understudies:
                self._must(self.rest.understudied, QUIET_NS, "no understudy")
            self.disturbance.begin()
        world.run(self.disturbance.calm, world.now + 4 * QUIET_NS)
        if world.over:
            check_end(world)
            check_gone(world)
            return
        if not plan.from_start:
            if plan.stragglers == "move":
                self._must(lambda: relieved(world), QUIET_NS, "a straggler stays where it is")
            if plan.rebalance:
                self._must(lambda: balanced(world), QUIET_NS, "ranks share a node, another is free")
            world.rules.before_healing()
            heal(world)
        steps_ns = 5 * plan.step_ns
        self._must(self.rest.settled, QUIET_NS + steps_ns, "the healed job does not train again")
        if plan.checkpoint_ns and not world.over:
            self._must(self.rest.saved, QUIET_NS, "no checkpoint is written any more")
        if plan.parity and not world.over:
            goal = self._tick() + 2 * RENEW + 2
            steps_ns = 2 * (goal - self._tick()) * plan.step_ns
            self._must(lambda: self._tick() > goal, QUIET_NS + steps_ns, "no steps are made")
            check_parities(world)
        if (plan.checkpoint_ns or plan.parity) and not world.over:
            # Meanwhile a taint may have been cleared, or the death of a node with spares noticed:
            # what is started then is not ready yet.
            self.rest.anew()
            self._must(
                self.rest.settled, QUIET_NS + steps_ns, "the healed job does not come to rest"
            )
        if not world.over:
            check_leaks(world)
            world.target = max(process.tick for process in world.ranks.values()) + 3
            self._must(lambda: world.over, END_NS + steps_ns, "the job does not come to its end")
        check_end(world)
        check_gone(world)

    def _must(self, reached: Callable[[], bool], ns: int, what: str) -> None:
        world = self.world
        if not world.run(lambda: world.over or reached(), world.now + ns):
            owners = [world.ranks[worker] for worker in world.book.owners.values()]
            vanished = any(not process.node.alive for process in owners)
            # Some have died and the others vanished: nobody has anything, and nobody can know.
            if vanished and not world.owners() and world.book.sealed is None:
                raise Hopeless
            job = world.facts()
            view = world.orchestrator.core.job(self.plan.job) if job is not None else None
            why = f"{view.state}: {view.reason}" if view is not None else "no orchestrator"
            phase = job.attempt.phase if job is not None and job.attempt is not None else "-"
            raise Violation(f"{what} within {ns // SECOND} virtual seconds ({why}; phase {phase})")

    def _tick(self) -> int:
        best = self.world.book.best
        if len(best) < self.plan.ranks:
            return 0
        return min(best.values())
