"""Whether a job is at rest: nothing is going on, all spares are back, checkpoints are written."""

from __future__ import annotations

from keepstep.core.state import Job
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World

CALM_NS = 3 * SECOND
LOOK_NS = SECOND // 4
KEPT = ("rank", "spare", "understudy")


class Rest:
    def __init__(self, world: World) -> None:
        self.world = world
        self.plan = world.plan
        self._quiet_since: int | None = None
        self._look_at = 0

    def anew(self) -> None:
        """It has to be quiet from now on."""
        self._quiet_since = None

    def understudied(self) -> bool:
        """Some are ready, or there is no place for any."""
        job = self.world.facts()
        if job is None or not min(self.plan.spares, self._room(job)):
            return job is not None
        return sum(worker.ready is not None for worker in job.understudies()) >= 2

    def _quiet(self) -> bool:
        """Nothing is going on, and all spares are back."""
        job = self.world.facts()
        if job is None or job.replayed or job.attempt is not None or job.incidents:
            return False
        if job.mode != "running" or job.dead():
            return False
        parked = sum(1 for worker in job.spares() if worker.parked)
        if parked < min(self.plan.spares, self._room(job)):
            return False
        if any(w.alive and w.role not in KEPT for w in job.workers.values()):
            return False
        if any(worker.ready is None for worker in job.understudies()):
            return False
        owners = [self.world.ranks[job.owners[rank]] for rank in job.owners]
        return all(p.alive and p.generation == job.generation and not p.hung for p in owners)

    def settled(self) -> bool:
        """Quiet for some seconds: what was sent last has arrived."""
        if self.world.now < self._look_at:
            return False
        self._look_at = self.world.now + LOOK_NS
        if not self._quiet():
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = self.world.now
        return self._quiet_since is not None and self.world.now > self._quiet_since + CALM_NS

    def saved(self) -> bool:
        """Since the job is quiet."""
        job = self.world.facts()
        newest = job.saves.newest if job is not None else None
        since = self._quiet_since if self._quiet_since is not None else self.world.now
        return newest is not None and self.world.orchestrator.virtual(newest.at) > since

    def _room(self, job: Job) -> int:
        slots = sum(n.slots for n in job.nodes.values() if n.state == "connected" and not n.taints)
        return slots - self.plan.ranks
