"""What must happen soon. A forgotten answer is often made good by a timer a minute later, so that
the job comes to a good end all the same; whoever only looks at the end would never miss it.

Each rule holds in worlds that give no excuse: `Plan.streams_well` says that nobody's stream and not
the orchestrator are hurt, `Plan.pause_ns_max` how long training may stand still.
"""

from __future__ import annotations

from keepstep.core.breaker import WINDOW_NS
from keepstep.core.phases import all_held, members
from keepstep.core.state import Job
from keepstep.model import records as r
from keepstep.sim.ground.violation import ensure, violated
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import SECOND
from keepstep.sim.world.node import SimNode
from keepstep.sim.world.world import World

# Modes in which a process looks for the end of the job.
LISTENS = ("parked", "arrived", "joining", "swapping", "deciding", "held", "done")
BUILD_NS = 60 * SECOND
SLACK_NS = 5 * SECOND
ATTEMPTS_MAX = 100  # of a world; nobody deserves so many


class Prompt:
    def __init__(self, world: World) -> None:
        self.world = world
        self.book = world.book
        self.streams_well = world.plan.streams_well
        self.pause_ns_max = world.plan.pause_ns_max
        self.started = False
        self.retired_ns = -1
        self.ended_ns: dict[str, int] = {}
        self.deferred_ns: dict[str, int] = {}
        self.commit_ns = -1
        self.begun_ns = 0
        self.held_ns: int | None = None  # since when some hold for a move and others do not
        self.slow_start = False  # operators were told of it
        self.unsaved_ns: int | None = None  # since when ranks hold without a checkpoint

    # ------------------------------------------------------------------ the ledger

    def durable(self, record: r.Record) -> None:
        if isinstance(record, r.JobStarted):
            again, self.started = self.started, True
            late = not again and self.world.now - self.begun_ns > BUILD_NS + SLACK_NS
            ensure(
                self.slow_start or not late or self.world.plan.from_start,
                "nobody was told that the start takes long",
            )
        elif isinstance(record, r.StartBegun):
            self.begun_ns = self.world.now
        elif isinstance(record, r.AttemptStarted):
            count = len(self.book.attempts)
            ensure(count <= ATTEMPTS_MAX, f"{count} attempts, and no end")
        elif isinstance(record, r.Warned):
            self.slow_start |= "did not call keepstep.attach yet" in record.message
        elif isinstance(record, r.WorkerEnded):
            self.ended_ns[record.worker] = self.world.now
        elif isinstance(record, r.Deferred):
            self.deferred_ns[record.target] = self.world.now
        elif isinstance(record, r.Untainted | r.IncidentOpened):
            self.deferred_ns.pop(record.target, None)

    def deferred(self) -> None:
        """Before anybody untaints: what the breaker put off is done when its minute is over."""
        ranks = self.world.ranks
        for target, since in self.deferred_ns.items():
            here = [w for w in self.book.owners.values() if _is_at(ranks[w], target)]
            late = self.world.now - since > WINDOW_NS + 4 * SLACK_NS
            ensure(not (late and here), f"{here} were to leave {target} a minute ago, and stay")

    # ------------------------------------------------------------------ the core

    def acted(self, job: Job) -> None:
        for worker in job.watched.values():
            fenced = worker.killed_at is not None and worker.alive and job.ended is None
            if fenced and job.nodes[worker.node].state == "connected":
                told = worker.id in self.book.killed
                ensure(told, f"{worker.id} is fenced and was never told to die")
        self._saved(job)
        self._waits(job)

    def _waits(self, job: Job) -> None:
        """Neither a restart nor a planned move waits for ever for what does not come."""
        now, plan, attempt = self.world.now, self.world.plan, job.attempt
        orchestrator = self.world.orchestrator
        # One that was stopped itself, or whose disk is slow, cannot help it.
        slow = any(f.actor == "orchestrator" and f.kind == "slow-down" for f in plan.faults)
        awake = now - orchestrator.resumed_ns > SLACK_NS and not slow
        # It may have been stopped before its first look: it waits from then on.
        looked_ns = max(orchestrator.restarted_ns, orchestrator.resumed_ns)
        long = job.replayed and now - looked_ns > plan.stall_ns + SLACK_NS
        ensure(not (long and awake), "a restart still waits for agents")
        since = self.held_ns if self.held_ns is not None else now
        late = self.streams_well and now - since > plan.stall_ns + SLACK_NS
        ensure(not late, "ranks were kept waiting for one that does not hold")
        if attempt is None or not attempt.holding or attempt.tick is not None:
            self.held_ns = None
            return
        if attempt.held_ticks and self.held_ns is None:
            self.held_ns = now
        waited_ns = now - orchestrator.virtual(attempt.hold_at)
        long = waited_ns > BUILD_NS + SLACK_NS
        ensure(not (long and awake), f"{attempt.generation} still waits for ranks to hold")

    def _saved(self, job: Job) -> None:
        """Ranks that hold because there is no spare put their state on disk as soon as they can."""
        attempt = job.attempt
        waits = attempt is not None and attempt.no_spare and all_held(job, attempt)
        ill = any(node.disk for node in self.world.nodes.values())
        holding = members(job, attempt) if attempt is not None else []
        if any(job.nodes[worker.node].state != "connected" for worker in holding):
            self.unsaved_ns = None  # whoever is out of reach cannot be asked
        saved = attempt is not None and job.checkpoint_tick == attempt.tick
        since = self.unsaved_ns if self.unsaved_ns is not None else self.world.now
        late = self.world.now - since > BUILD_NS + SLACK_NS
        ensure(not late, "ranks hold, and their state is in memory only")
        if not waits or ill or saved:
            self.unsaved_ns = None
        elif self.unsaved_ns is None:
            self.unsaved_ns = self.world.now

    def killed(self, worker: str) -> None:
        """A leaver leaves by itself: it was told to when the ranks had resumed."""
        orchestrator = self.world.orchestrator
        facts = orchestrator.core.state(self.world.plan.job).workers.get(worker)
        process = self.world.ranks.get(worker)
        if facts is None or process is None or facts.role != "leaver":
            return
        left_ns = orchestrator.virtual(facts.leave_at)
        told = left_ns < self.retired_ns < self.world.now - SECOND
        well = process.alive and not (process.hung or process.was_stopped)
        ensure(
            not (told and well and self.streams_well),
            f"{worker} was to leave, and had to be killed",
        )

    # ------------------------------------------------------------------ training

    def committed(self, process: Rank) -> None:
        world, plan = self.world, self.world.plan
        waited = world.now - self.commit_ns if self.commit_ns >= 0 else 0
        self.commit_ns = world.now
        if waited > self.pause_ns_max:
            violated(f"training stood still for {waited / SECOND:.1f} s")
        if not self.streams_well:
            return
        early = plan.from_start or plan.resume_tick or process.tick < 2
        if not self.started and not early:
            violated(f"{process.id} has made {process.tick} steps and the job counts as starting")
        self._resumed(process)

    def _resumed(self, process: Rank) -> None:
        job = self.world.orchestrator.core.state(self.world.plan.job)
        commit = self.book.commits.get(process.generation)
        attempt = job.attempt
        if attempt is None or commit is None or attempt.generation != commit.generation:
            return
        owners = [self.world.ranks[worker] for worker in self.book.owners.values()]
        steps = min(p.tick for p in owners) - max(commit.tick, self.book.resume_tick)
        ensure(steps < 3, f"{steps} steps in {commit.generation} and it is not over")

    # ------------------------------------------------------------------ nodes

    def refused(self, node: SimNode, worker: str) -> None:
        self.world.after(SLACK_NS, self._is_known, node, worker)

    def _is_known(self, node: SimNode, worker: str) -> None:
        known = worker in self.ended_ns or not node.alive or self.world.over
        ensure(known or not self.streams_well, f"{worker} could not be started: nobody was told")

    def forgotten(self) -> None:
        """At rest: whoever was dead when the last attempt was over has left nothing behind."""
        for node in self.world.nodes.values():
            for worker in node.memory.pages if node.alive else ():
                old = self.ended_ns.get(worker, self.world.now) < self.retired_ns
                needed = worker in self.book.owners.values()
                ensure(needed or not old, f"{node.name} still keeps the side state of {worker}")

    def forced(self, process: Rank) -> None:
        """The job is done, and a process had to be killed because it did not end by itself."""
        well = not (process.hung or process.stopped) and process.mode in LISTENS
        ensure(not well, f"{process.id} was not told that the job is done")


def _is_at(process: Rank, target: str) -> bool:
    return process.alive and target in (process.node.name, process.place)
