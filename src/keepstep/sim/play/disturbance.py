"""Striking with the faults of a plan: at their times, or in their phases.

A fault that waits for its phase longer than `FIRE_NS` strikes anyway, and counts as missed.
"""

from __future__ import annotations

from keepstep.core.control import Outcome
from keepstep.model.records import Committed
from keepstep.sim.faults.strikes import strike
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World

FIRE_NS = 25 * SECOND
MIGRATIONS = {
    "planned": Fault("operator", "migrate"),
    "pre-emptive": Fault("detector", "taint"),
    "unplanned": Fault("bystander", "crash"),
}


class Disturbance:
    def __init__(self, world: World) -> None:
        self.world = world
        self.missed = 0
        self._waiting: list[Fault] = []
        self._pending = 0  # faults that have not struck
        self._commits = 0
        self._calm_at = 0
        self._previous: object = None  # attempt

    def begin(self) -> None:
        world, plan = self.world, self.world.plan
        self._calm_at = world.now + SECOND
        self._pending = len(plan.faults)
        for fault in plan.faults:
            if not fault.phase:
                world.after(fault.at_ns + fault.delay_ns, self._strike, fault)
        self._waiting = [fault for fault in plan.faults if fault.phase]
        if plan.migration:
            fault = MIGRATIONS[plan.migration]
            world.after(world.random.randrange(SECOND), self._start_migration, fault)
        if self._waiting:
            world.watchers.append(self._watch)
            world.on_decided = self._watch_commit
            if any(fault.phase == "FENCE" for fault in self._waiting):
                world.on_commit = self._watch_fence
            world.after(FIRE_NS, self._strike_anyway)

    def _start_migration(self, fault: Fault) -> None:
        strike(self.world, fault)

    def _watch(self) -> None:
        job = self.world.facts()
        attempt = job.attempt if job is not None else None
        phase = attempt.phase if attempt is not None else ""
        if attempt is None and self._previous is not None:
            phase = "RETIRE"
        self._previous = attempt
        for fault in [fault for fault in self._waiting if fault.phase == phase]:
            self._waiting.remove(fault)
            self.world.after(fault.delay_ns, self._strike, fault)

    def _watch_commit(self, outcome: Outcome) -> None:
        """COMMIT lasts from the decision until its record is durable."""
        if any(isinstance(record, Committed) for record in outcome.records):
            self._commits += 1
            due = [f for f in self._waiting if f.phase == "COMMIT" and f.nth == self._commits]
            for fault in due:
                self._waiting.remove(fault)
                write_ns = self.world.orchestrator.append_ns
                self.world.after(self.world.random.randrange(write_ns), self._strike, fault)

    def _watch_fence(self) -> None:
        """FENCE: some ranks have passed it, and others still wait in it."""
        if len({process.tick for process in self.world.owners()}) > 1:
            for fault in [fault for fault in self._waiting if fault.phase == "FENCE"]:
                self._waiting.remove(fault)
                self.world.after(fault.delay_ns, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self._pending -= 1
        if self.world.over:
            return
        if not strike(self.world, fault):
            self.missed += 1
        self._calm_at = max(self._calm_at, self.world.now + fault.length_ns + SECOND)

    def _strike_anyway(self) -> None:
        for fault in self._waiting:
            self.missed += 1
            self._strike(fault)
        self._waiting = []

    def calm(self) -> bool:
        return self._pending == 0 and self.world.now >= self._calm_at
