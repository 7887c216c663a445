"""Running one world to its end: disturb it, heal it, and see whether it trains again.

    start -> training -> the migration of the plan -> faults -> healed -> quiet -> the end

*Healed* means that links, disks and paused processes are well again and that there are enough
slots; what died stays dead and what hung stays hung. From then on the job has `QUIET_NS` to train
as if nothing had happened, with every spare back and nothing left over.
"""

from __future__ import annotations

import functools
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.core import parities, understudies
from keepstep.core.orchestrator import Outcome
from keepstep.core.placement import buddy_node
from keepstep.core.state import Job
from keepstep.model.job import Untaint
from keepstep.model.records import Committed
from keepstep.sim import faults
from keepstep.sim.check import Violation
from keepstep.sim.losses import covered, recoverable
from keepstep.sim.net import SECOND
from keepstep.sim.plan import Fault, Plan
from keepstep.sim.reasons import heard
from keepstep.sim.seats import balanced, relieved
from keepstep.sim.several import Several
from keepstep.sim.shards import RENEW
from keepstep.sim.world import World

FIRE_NS = 25 * SECOND  # a fault that waits for its phase longer than this strikes anyway
QUIET_NS = 400 * SECOND
END_NS = 120 * SECOND
GONE_NS = 40 * SECOND
CALM_NS = 3 * SECOND
LOOK_NS = SECOND // 4
KEPT = ("rank", "standby", "understudy")


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    scenario: str
    scenario_given: str  # as it was asked for; empty: drawn from the seed
    events: int
    inputs: int
    virtual_s: float
    digest: str
    fired: tuple[str, ...]
    in_phase: bool  # every fault struck in the phase it was meant for
    outcome: str
    reasons: frozenset[str]
    violation: str = ""


class Hopeless(Exception):
    """No process with any state is left, no checkpoint either, and nobody knows: the orchestrator
    waits for nodes that will never come back. There is nothing it could do."""


class Run:
    def __init__(self, plan: Plan, tracing: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.world = World(plan, tracing)
        self.worlds = {plan.job: self.world}
        self.waiting: list[Fault] = []
        self.pending = 0  # faults that have not struck
        self.missed = 0
        self.commits = 0
        self.calm_at = 0
        self._previous: object = None
        self._quiet_since: int | None = None
        self._look_at = 0

    # ------------------------------------------------------------------ the story

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
        if plan.from_start:
            self._disturb()
            world.run(self._calm, world.now + QUIET_NS)
            self._heal()
        self._must(lambda: self._tick() >= plan.resume_tick + 3, plan.start_ns_max, "no start")
        if not plan.from_start:
            if plan.understudies:
                self._must(self._understudied, QUIET_NS, "no understudy")
            self._disturb()
        world.run(self._calm, world.now + 4 * QUIET_NS)
        if world.over:
            self._check_end()
            self._check_gone()
            return
        if not plan.from_start:
            if plan.stragglers == "move":
                self._must(lambda: relieved(world), QUIET_NS, "a straggler stays where it is")
            if plan.rebalance:
                self._must(lambda: balanced(world), QUIET_NS, "ranks share a node, another is free")
            world.checker.prompt.deferred()
            self._heal()
        steps_ns = 5 * plan.step_ns
        self._must(self._settled, QUIET_NS + steps_ns, "the healed job does not train again")
        if plan.checkpoint_ns and not world.over:
            self._must(self._saved, QUIET_NS, "no checkpoint is written any more")
        if plan.parity and not world.over:
            goal = self._tick() + 2 * RENEW + 2
            steps_ns = 2 * (goal - self._tick()) * plan.step_ns
            self._must(lambda: self._tick() > goal, QUIET_NS + steps_ns, "no steps are made")
            self._check_parities()
        if (plan.checkpoint_ns or plan.parity) and not world.over:
            # Meanwhile a taint may have been cleared, or the death of a node with spares noticed:
            # what is started then is not ready yet.
            self._quiet_since = None
            self._must(self._settled, QUIET_NS + steps_ns, "the healed job does not come to rest")
        if not world.over:
            self._check_leaks()
            world.target = max(process.tick for process in world.ranks.values()) + 3
            self._must(lambda: world.over, END_NS + steps_ns, "the job does not come to its end")
        self._check_end()
        self._check_gone()

    def _must(self, reached: Callable[[], bool], ns: int, what: str) -> None:
        world = self.world
        if not world.run(lambda: world.over or reached(), world.now + ns):
            owners = [world.ranks[worker] for worker in world.checker.owners.values()]
            vanished = any(not process.node.alive for process in owners)
            # Some have died and the others vanished: nobody has anything, and nobody can know.
            if vanished and not faults.owners(world) and world.checker.sealed is None:
                raise Hopeless
            job = faults.facts(world)
            view = world.orchestrator.core.job(self.plan.job) if job is not None else None
            why = f"{view.state}: {view.reason}" if view is not None else "no orchestrator"
            phase = job.attempt.phase if job is not None and job.attempt is not None else "-"
            raise Violation(f"{what} within {ns // SECOND} virtual seconds ({why}; phase {phase})")

    def _understudied(self) -> bool:
        """Some are ready, or there is no place for any."""
        job = faults.facts(self.world)
        if job is None or not min(self.plan.spares, self._room(job)):
            return job is not None
        return sum(worker.ready is not None for worker in job.understudies()) >= 2

    def _tick(self) -> int:
        best = self.world.checker.best
        if len(best) < self.plan.ranks:
            return 0
        return min(best.values())

    # ------------------------------------------------------------------ faults

    def _disturb(self) -> None:
        world, plan = self.world, self.plan
        self.calm_at = world.now + SECOND
        self.pending = len(plan.faults)
        for fault in plan.faults:
            if not fault.phase:
                world.after(fault.at_ns + fault.delay_ns, self._strike, fault)
        self.waiting = [fault for fault in plan.faults if fault.phase]
        if plan.migration:
            fault = MIGRATIONS[plan.migration]
            world.after(world.random.randrange(SECOND), self._start_migration, fault)
        if self.waiting:
            world.watchers.append(self._watch)
            world.on_decided = self._watch_commit
            if any(fault.phase == "FENCE" for fault in self.waiting):
                world.on_commit = self._watch_fence
            world.after(FIRE_NS, self._strike_anyway)

    def _start_migration(self, fault: Fault) -> None:
        faults.strike(self.world, fault)

    def _watch(self) -> None:
        job = faults.facts(self.world)
        attempt = job.attempt if job is not None else None
        phase = attempt.phase if attempt is not None else ""
        if attempt is None and self._previous is not None:
            phase = "RETIRE"
        self._previous = attempt
        for fault in [fault for fault in self.waiting if fault.phase == phase]:
            self.waiting.remove(fault)
            self.world.after(fault.delay_ns, self._strike, fault)

    def _watch_commit(self, outcome: Outcome) -> None:
        """COMMIT lasts from the decision until its record is durable."""
        if any(isinstance(record, Committed) for record in outcome.records):
            self.commits += 1
            due = [f for f in self.waiting if f.phase == "COMMIT" and f.nth == self.commits]
            for fault in due:
                self.waiting.remove(fault)
                write_ns = self.world.orchestrator.append_ns
                self.world.after(self.world.random.randrange(write_ns), self._strike, fault)

    def _watch_fence(self) -> None:
        """FENCE: some ranks have passed it, and others still wait in it."""
        if len({process.tick for process in faults.owners(self.world)}) > 1:
            for fault in [fault for fault in self.waiting if fault.phase == "FENCE"]:
                self.waiting.remove(fault)
                self.world.after(fault.delay_ns, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self.pending -= 1
        if self.world.over:
            return
        if not faults.strike(self.world, fault):
            self.missed += 1
        self.calm_at = max(self.calm_at, self.world.now + fault.length_ns + SECOND)

    def _strike_anyway(self) -> None:
        for fault in self.waiting:
            self.missed += 1
            self._strike(fault)
        self.waiting = []

    def _calm(self) -> bool:
        return self.pending == 0 and self.world.now >= self.calm_at

    # ------------------------------------------------------------------ healing

    def _heal(self) -> None:
        self.world.trace("healed")
        self._mend()
        self._give_slots()
        self._untaint()

    def _mend(self) -> None:
        world = self.world
        world.net.heal_all()
        world.spawn_failures = 0
        orchestrator = world.orchestrator
        orchestrator.disk_full = False
        orchestrator.crash_at = ""
        orchestrator.resume()
        orchestrator.restart()
        for node in list(world.nodes.values()):
            node.resume()
            node.disk = ""
        world.bad_slots.clear()
        world.dragged.clear()
        for process in list(world.ranks.values()):
            process.resume()
            process.slow = 1

    def _give_slots(self) -> None:
        """A provider that delivers at last: room for all ranks and spares."""
        world, plan = self.world, self.plan
        slots = sum(node.slots for node in world.nodes.values() if node.alive)
        number = 0
        while slots < plan.ranks + plan.spares + 1:
            number += 1
            world.add_node(f"m{number}", plan.per_node + 1)
            slots += plan.per_node + 1

    def _untaint(self) -> None:
        """Operators look again and again at what is tainted, and clear it."""
        world = self.world
        job = faults.facts(world)
        if job is not None and not world.over and not job.replayed:
            for name in sorted(job.nodes):
                node = job.nodes[name]
                targets = [name] if node.taints else []
                targets += [f"{name}/{slot}" for slot in sorted(node.slot_taints)]
                for target in targets:
                    world.orchestrator.submit(Untaint(job=self.plan.job, target=target))
        world.after(20 * SECOND, self._untaint)

    def _quiet(self) -> bool:
        """Nothing is going on, and all spares are back."""
        job = faults.facts(self.world)
        if job is None or job.replayed or job.attempt is not None or job.incidents:
            return False
        if job.mode != "running" or job.dead():
            return False
        parked = sum(1 for worker in job.standbys() if worker.parked)
        if parked < min(self.plan.spares, self._room(job)):
            return False
        if any(w.alive and w.role not in KEPT for w in job.workers.values()):
            return False
        if any(worker.ready is None for worker in job.understudies()):
            return False
        owners = [self.world.ranks[job.owners[rank]] for rank in job.owners]
        return all(p.alive and p.generation == job.generation and not p.hung for p in owners)

    def _settled(self) -> bool:
        """Quiet for some seconds: what was sent last has arrived."""
        if self.world.now < self._look_at:
            return False
        self._look_at = self.world.now + LOOK_NS
        if not self._quiet():
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = self.world.now
        return self._quiet_since is not None and self.world.now > self._quiet_since + CALM_NS

    def _saved(self) -> bool:
        """Since the job is quiet."""
        job = faults.facts(self.world)
        newest = job.saves.newest if job is not None else None
        since = self._quiet_since if self._quiet_since is not None else self.world.now
        return newest is not None and self.world.orchestrator.virtual(newest.at) > since

    def _room(self, job: Job) -> int:
        slots = sum(n.slots for n in job.nodes.values() if n.state == "connected" and not n.taints)
        return slots - self.plan.ranks

    # ------------------------------------------------------------------ judging

    def _check_leaks(self) -> None:
        world, job = self.world, faults.facts(self.world)
        assert job is not None
        for process in world.ranks.values():
            if not process.alive:
                continue
            worker = job.workers.get(process.id)
            known = worker is not None and worker.usable and worker.role in KEPT
            if not known:
                raise Violation(f"{process.id} runs and nobody knows why")
        for node in world.nodes.values():
            left = [g for g in node.stores if g != job.generation] if node.alive else []
            if left and node.stream is not None:
                raise Violation(f"{node.name} still hosts the stores of {left}")
        standbys = len(job.standbys())
        if standbys > max(self.plan.spares, 0):
            raise Violation(f"{standbys} standbys, {self.plan.spares} are wanted")
        self._check_understudies(job)
        self._check_buddies(job)
        world.checker.prompt.forgotten()

    def _check_parities(self) -> None:
        """Whichever node is lost now, what its ranks alone had can be rebuilt, or the core knows
        that it cannot."""
        world, job = self.world, faults.facts(self.world)
        if job is None or world.over or parities.uncovered(job):
            return
        for lost in sorted({worker.node for worker in job.seated()}):
            nodes = [node for node in world.nodes.values() if node.alive and node.name != lost]
            ranks = [world.ranks[worker.id] for worker in job.seated()]
            tick = max((p.tick for p in ranks if p.node.name != lost), default=0)
            for process in ranks:
                if process.node.name == lost and not covered(world, nodes, process.rank, tick):
                    raise Violation(f"the shard of rank {process.rank} would be lost with {lost}")

    def _check_buddies(self, job: Job) -> None:
        """Everybody publishes where the core believes it does, if there is another node at all."""
        for rank, worker in job.owning():
            process = self.world.ranks[worker.id]
            if worker.done or process.hold:
                continue
            parity = process.parity.holder if process.parity is not None else None
            for kept, name in ((process.buddy, worker.buddy), (parity, worker.parity)):
                node = job.nodes.get(name)
                believed = node.blobs if node is not None else None
                if kept != believed:
                    raise Violation(
                        f"rank {rank} ({worker.id}) has buddy or parity {kept}, "
                        f"the core believes {name!r} at {believed}"
                    )
            if not worker.buddy and buddy_node(job.order, job.nodes[worker.node]) is not None:
                raise Violation(f"rank {rank} ({worker.id}) has no buddy")

    def _check_understudies(self, job: Job) -> None:
        """As many as are wanted in every place that has a standby, each for another rank."""
        wanted = min(self.plan.understudies, self.plan.ranks)
        there = Counter(worker.place for worker in job.understudies())
        ranks = {(worker.place, worker.presumed) for worker in job.understudies()}
        failing = job.understudies_failed >= understudies.FAILURES_MAX
        for worker in job.standbys():
            if there.pop(worker.place, 0) != wanted and not failing:
                raise Violation(f"not {wanted} understudies beside {worker.id}")
        if there or len(ranks) != len(job.understudies()):
            raise Violation(f"understudies without a standby, or twice: {sorted(ranks)}")

    def _check_end(self) -> None:
        ended = self.world.checker.job_ended
        assert ended is not None
        view = ended.view
        if view.state == "done":
            if any(fault.startswith("groups of ") for fault in self.world.fired_faults):
                raise Violation("ranks with different groups have trained")
            for rank, worker in sorted(self.world.checker.owners.items()):
                process = self.world.ranks[worker]
                if process.tick != self.world.target:
                    raise Violation(f"done, but rank {rank} stands at tick {process.tick}")
        elif view.state == "diverged":
            if not self.world.checker.stands:
                raise Violation(f"nothing differed: {view.reason}")
        elif view.state == "cancelled":
            if "stop" not in [fault.kind for fault in self.plan.faults]:
                raise Violation(f"nobody asked for an end: {view.reason}")
        elif view.state == "fell_back":
            needless = recoverable(self.world)
            if needless:
                raise Violation(f"needless fall-back ({view.reason}): {needless}")
        elif "newcomers failed" in view.reason and not view.checkpoint:
            self._check_given_up(view.reason)
        elif not self._deserved(view.reason):
            raise Violation(f"the job ended {view.state}: {view.reason}")

    def _check_given_up(self, reason: str) -> None:
        """Without a checkpoint only if a disk did not let it; one that is full says so."""
        disks = [fault.kind for fault in self.plan.faults if fault.actor == "disk"]
        if not disks or ("full" in disks and "could not write its part" not in reason):
            raise Violation(f"given up without a checkpoint: {reason}")

    def _check_gone(self) -> None:
        """A job that has ended leaves no agent and no process behind."""
        world = self.world
        self._mend()
        limit_ns = world.now + GONE_NS
        world.run(lambda: not any(n.alive for n in world.nodes.values()), limit_ns, ended=True)
        for node in world.nodes.values():
            if node.alive:
                raise Violation(f"{node.name} is still there {GONE_NS // SECOND} s after the end")

    def _deserved(self, reason: str) -> bool:
        if self.world.checker.owners and not faults.owners(self.world):
            return True  # nothing was left to save
        kinds = [fault.kind for fault in self.plan.faults]
        if ("user" in kinds or "quit" in kinds) and "raised" in reason:
            return True
        if "newcomers failed" in reason:
            return kinds.count("crash") + kinds.count("user") + kinds.count("device") >= 5
        if "lost their connections" in reason:
            return kinds.count("reset") >= 6
        if "process group" in reason:
            return "groups" in kinds
        if "did not come to keepstep.attach" in reason:
            return kinds.count("hang") >= 2
        if "never all attached" in reason or "no node is left" in reason:
            return self.plan.from_start and len(self.world.fired_faults) >= 3
        if "exited with code" in reason or "before the first step" in reason:
            return self.plan.from_start  # a rank whose peers are gone cannot tell why
        # The same rank was really hit again and again.
        hits = [fault for fault in self.world.fired_faults if "(rank " in fault]
        return "died 3 times" in reason and len(hits) >= 3


MIGRATIONS = {
    "planned": Fault("operator", "migrate"),
    "pre-emptive": Fault("detector", "taint"),
    "unplanned": Fault("bystander", "crash"),
}


def run_plan(
    plan: Plan,
    scenario: str = "",
    tracing: Callable[[str], None] | None = None,
    given: str = "",
) -> Result:
    run = Several(plan, tracing) if plan.beside else Run(plan, tracing)
    violation = ""
    try:
        run.play()
    except Hopeless:
        run.world.trace("all state is gone")
    except AssertionError as error:  # a checker's, or the core's own
        violation = f"{type(error).__name__}: {error}"
        run.world.trace(violation)
    world = run.world
    ended = world.checker.job_ended
    return Result(
        seed=plan.seed,
        scenario=scenario,
        scenario_given=given,
        events=world.events,
        inputs=world.orchestrator.inputs,
        virtual_s=world.now / SECOND,
        digest=world.digest(),
        fired=tuple(fault for one in run.worlds.values() for fault in one.fired_faults),
        in_phase=run.missed == 0,
        outcome=ended.view.state if ended is not None else "running",
        reasons=heard(world.said),
        violation=violation,
    )


@functools.cache
def commit() -> str:
    """Which code this is, for the line that says how to replay."""
    here = Path(__file__).parent
    try:
        out = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return out.stdout.strip() or "unknown"
