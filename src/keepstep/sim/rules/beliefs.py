"""What the core believes, compared with the world: the phase it shows, and what a replay gives.

A phase is shown to operators and must be true: whoever is said to hold holds, whoever is said to
train again has made a step. And a restart forgets nothing that is on record.
"""

from __future__ import annotations

from keepstep.core.facts import Attempt, Worker
from keepstep.core.phases import members, newcomers
from keepstep.core.state import Job
from keepstep.model import records as r
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rank.rank import Rank
from keepstep.sim.rules.prompt import Prompt
from keepstep.sim.world.world import World

READY = ("joining", "copying", "swapping")


def group_of(job: Job, attempt: Attempt) -> list[Worker]:
    """Whoever is in the new generation's process groups."""
    moved = {*attempt.newcomers, *attempt.moving}
    return [w for w in members(job, attempt) if w.rank not in moved] + newcomers(job, attempt)


class Beliefs:
    def __init__(self, world: World, prompt: Prompt) -> None:
        self.world = world
        self.book = world.book
        self.prompt = prompt
        self._seen: tuple[int, str] = (-1, "")
        self._committed: Attempt | None = None

    def look(self, job: Job) -> None:
        attempt = job.attempt
        before, self._committed = self._committed, None
        if attempt is None:
            if before is not None and job.ended is None:
                self._retired(job, before)
            return
        if attempt.committed:
            self._committed = attempt
        if self._seen != (attempt.generation, attempt.phase):
            self._seen = attempt.generation, attempt.phase
            self._entered(job, attempt)

    def _living(self, workers: list[Worker]) -> list[Rank]:
        found = [self.world.ranks.get(worker.id) for worker in workers if worker.usable]
        return [process for process in found if process is not None and process.alive]

    def _entered(self, job: Job, attempt: Attempt) -> None:
        phase, generation = attempt.phase, attempt.generation
        if attempt.committed:
            for process in self._living(list(job.rank_owners())) if phase == "RESUME" else ():
                swapped = process.done or process.generation >= generation
                ensure(swapped, f"RESUME of {generation}, but {process.id} has not swapped")
            return
        if phase not in ("HOLD", "COPY", "COMMIT"):
            return
        filled = set(attempt.moving) <= set(attempt.newcomers)
        ensure(filled, f"{phase} of {generation}, but not every rank has a newcomer")
        if phase != "HOLD" or attempt.kind == "planned":
            for process in self._living(newcomers(job, attempt)):
                ready = process.mode in READY
                ensure(ready, f"{phase} of {generation}, but {process.id} is {process.mode}")
        for process in self._living(group_of(job, attempt)) if attempt.kind == "planned" else ():
            staged = process.staged is not None and process.staged.generation == generation
            ensure(staged, f"{phase} of {generation}, but {process.id} has no groups for it")
        if phase == "HOLD":
            return
        for process in self._living(members(job, attempt)):
            held = process.held_generation == generation
            ensure(held, f"{phase} of {generation}, but {process.id} does not hold")

    def _retired(self, job: Job, attempt: Attempt) -> None:
        self.prompt.retired_ns = self.world.now
        commit = self.book.commits.get(attempt.generation)
        for process in self._living(list(job.rank_owners())) if commit is not None else ():
            tick = max(commit.tick, 0) if commit is not None else 0
            went_on = process.done or process.generation != attempt.generation
            ensure(
                went_on or process.tick > tick,
                f"{attempt.generation} is over, but {process.id} has not made a step in it",
            )

    def replayed(self, job: Job, disk: list[r.Record]) -> None:
        """Facts that a later decision needs, read from the ledger in another way."""
        self._committed = None
        if job.ended is not None:
            return
        tainted: set[str] = set()
        deferred: set[str] = set()
        dead: set[str] = set()
        known: set[str] = set()
        victims: dict[str, set[int]] = {}
        sticky: dict[str, int | None] = {}
        checkpoint: int | None = None
        sealed, resume = "", job.spec.resume
        for record in disk:
            if isinstance(record, r.Tainted):
                tainted.add(record.target)
            elif isinstance(record, r.Untainted):
                tainted.discard(record.target)
                deferred.discard(record.target)
            elif isinstance(record, r.Deferred):
                deferred.add(record.target)
            elif isinstance(record, r.NodeLost):
                dead.add(record.node)
            elif isinstance(record, r.NodeJoined):
                dead.discard(record.node)
                known.add(record.node)
            elif isinstance(record, r.IncidentOpened):
                victims[record.incident] = set(record.victims)
                if record.trigger == "pre-emptive":
                    deferred.discard(record.target)
            elif isinstance(record, r.IncidentWidened):
                victims[record.incident] |= set(record.victims)
            elif isinstance(record, r.IncidentClosed):
                victims.pop(record.view.id, None)
            elif isinstance(record, r.Decided | r.Committed):
                decided = isinstance(record, r.Decided)
                sticky[record.incident] = record.tick if decided else None
            elif isinstance(record, r.CheckpointWritten):
                checkpoint = record.tick
            elif isinstance(record, r.CheckpointSealed):
                sealed = record.path
            elif isinstance(record, r.FellBack):
                sticky[record.incident], checkpoint, resume = None, None, record.path
                sealed = record.path
        slots = {f"{n.name}/{s}" for n in job.nodes.values() for s in n.slot_taints}
        pairs: tuple[tuple[str, object, object], ...] = (
            ("taints", tainted, {n.name for n in job.nodes.values() if n.taints} | slots),
            ("deferred moves", deferred, set(job.deferred)),
            ("dead nodes", dead, {n.name for n in job.nodes.values() if n.state == "dead"}),
            ("nodes", known - set(job.nodes), set()),
            ("incidents", victims, {i.id: set(i.victims) for i in job.incidents}),
            (
                "decisions",
                {i: sticky.get(i) for i in victims},
                {i.id: i.sticky_tick for i in job.incidents},
            ),
            ("checkpoint", checkpoint, job.checkpoint_tick),
            ("periodic checkpoint", sealed, job.saves.newest.path if job.saves.newest else ""),
            ("checkpoint to start from", resume, job.resume),
            ("owners", self.book.owners, job.owners),
            (
                "ended processes",
                self.book.ended,
                {w.id for w in job.workers.values() if not w.alive},
            ),
        )
        for what, written, found in pairs:
            ensure(written == found, f"a restart has other {what}: {found}, on record: {written}")
