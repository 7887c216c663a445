"""Generations: who starts, who takes part, what is decided and committed.

One owner per rank; generations only grow; one decision per attempt, when every living process has
stopped for it; nothing of an old attempt is committed, and nobody is replaced who still trains.
"""

from __future__ import annotations

import re

import msgspec

from keepstep.model import messages as m
from keepstep.model import records as r
from keepstep.sim.ground.violation import ensure, violated
from keepstep.sim.rules.reader import Reader
from keepstep.sim.world.world import World


class Generations(Reader):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._newest = -1  # of the attempts that have begun, too
        self._begun: set[int] = set()
        self._stage_failures: set[tuple[int, str]] = set()  # (generation, worker)

    def opened(self, generation: int) -> bool:
        """A start or an attempt of that generation is on record."""
        return generation in self.book.attempts or generation in self._begun

    def is_newest(self, generation: int) -> bool:
        return generation == self._newest

    def said(self, worker: str, message: m.WorkerMessage) -> None:
        ensure(self.world.ranks[worker].alive, f"{worker} speaks after its end")
        if isinstance(message, m.StageFailed):
            self._stage_failures.add((message.generation, worker))

    def _new_generation(self, generation: int) -> None:
        grows = generation > self._newest
        ensure(grows, f"generation {generation} after {self._newest}: generations only grow")
        self._newest = generation

    def _on_StartBegun(self, record: r.StartBegun) -> None:
        self._new_generation(record.generation)
        self._begun.add(record.generation)
        self.book.generation = record.generation
        self.book.owners.clear()

    def _on_StopBegun(self, record: r.StopBegun) -> None:
        self._new_generation(record.generation)
        self.book.stops.add(record.generation)

    def _on_Placed(self, record: r.Placed) -> None:
        ensure(record.worker not in self.book.placed, f"{record.worker} is used twice")
        self.book.placed.add(record.worker)
        if record.rank >= 0:
            self.book.owners[record.rank] = record.worker

    def _on_WorkerEnded(self, record: r.WorkerEnded) -> None:
        self.book.ended.add(record.worker)

    def _check_repeated(self, record: r.AttemptStarted) -> None:
        """An attempt fails only by what was said in it."""
        last = max(self.book.attempts, default=-1)
        blamed = re.match(r"process groups could not be built: (\S+\.w\d+): ", record.reason)
        said = blamed is None or (last, blamed[1]) in self._stage_failures
        ensure(said, f"{last} is repeated, but nobody failed in it: {record.reason}")

    def _on_AttemptStarted(self, record: r.AttemptStarted) -> None:
        self._new_generation(record.generation)
        self._check_repeated(record)
        ensure(not self.book.stands, f"an attempt, and the job stands: {self.book.stands}")
        self.book.attempts[record.generation] = record

    def _on_Decided(self, record: r.Decided) -> None:
        ensure(record.generation == self._newest, "decided for an old attempt")
        ensure(record.generation not in self.book.decided, "two decisions in one attempt")
        attempt = self.book.attempts.get(record.generation)
        moving = attempt.ranks if attempt is not None else []
        for rank, worker in sorted(self.book.owners.items()):
            process = self.world.ranks.get(worker)
            if process is not None and process.alive and rank not in moving:
                stopped = process.report_generation >= record.generation
                ensure(stopped, f"decided, but {worker} (rank {rank}) has not stopped for it")
        self.book.decided[record.generation] = record.tick

    def _on_Committed(self, record: r.Committed) -> None:
        generation = record.generation
        ensure(generation == self._newest, f"committed old generation {generation}")
        ensure(generation in self.book.attempts, f"commit {generation} without an attempt")
        kind = self.book.attempts[generation].kind
        workers = list({**self.book.owners, **record.placement}.values())
        ensure(len(set(workers)) == len(workers), "one process owns two ranks")
        known = self.world.orchestrator.core.state(self.world.plan.job).workers
        places = {known[worker].place for worker in workers}
        ensure(len(places) == len(workers), "one slot makes two ranks")
        tick = record.tick if kind != "resume" else self.book.resume_tick
        best = self.book.best
        whole = min((best.get(rank, 0) for rank in range(self.world.plan.ranks)), default=0)
        ensure(tick >= whole, f"committed tick {tick}, but all ranks had finished {whole}")
        if kind == "unplanned":
            ensure(self.book.decided.get(generation) == tick, "committed without its decision")
        for rank, worker in sorted({**self.book.owners, **record.placement}.items()):
            old = self.book.owners.get(rank)
            if old is not None and old != worker:
                self._check_replaced(rank, old, kind)
            self._check_new(rank, worker, tick, generation)
        moved = {rank for rank, w in record.placement.items() if self.book.owners.get(rank) != w}
        blamed = self.book.victims[record.incident]
        ensure(moved <= blamed, f"{record.incident} is about {blamed}, and moves {moved}")
        for name, incident in self.book.open_incidents.items():
            left = [rank for rank in incident.victims if rank not in moved]
            self.book.open_incidents[name] = msgspec.structs.replace(incident, victims=left)
        self.book.owners.update(record.placement)
        self.book.commits[generation] = record
        self.book.generation = generation

    def _check_replaced(self, rank: int, old: str, kind: str) -> None:
        process = self.world.ranks[old]
        on_record = kind == "planned" or old in self.book.ended
        ensure(on_record, f"rank {rank} is replaced, and the end of {old} is not on record")
        if not process.alive:
            return
        if kind == "planned":
            ensure(process.mode == "held", f"{old} leaves rank {rank} but is {process.mode}")
            return
        if process.page.hold or process.mode in ("joining", "swapping") or process.node.paused:
            # It has left its groups and does nothing without a command: it may outlive its loss,
            # as its agent cannot tell whether its state is the only one left.
            return
        violated(f"rank {rank} has two owners: {old} is alive ({process.mode}) and was replaced")

    def _check_new(self, rank: int, worker: str, tick: int, generation: int) -> None:
        process = self.world.ranks.get(worker)
        if process is None or not process.alive or process.done:
            return
        ensure(process.rank == rank, f"{worker} is rank {process.rank}, not {rank}")
        ensure(
            process.tick == tick,
            f"committed tick {tick}, but {worker} (rank {rank}) stands at {process.tick}",
        )
        copied = process.copy is not None and process.copy.generation == generation
        there = process.held_generation == generation or (process.mode == "swapping" and copied)
        ensure(there, f"committed {generation}, but {worker} (rank {rank}) is {process.mode}")
        owners = map(self.world.ranks.get, self.book.owners.values())
        alone = any(owner is not None and owner.done for owner in owners)
        staged = process.staged is not None and process.staged.generation == generation
        ensure(alone or staged, f"committed {generation}, but {worker} has no groups for it")

    def _on_JobEnded(self, record: r.JobEnded) -> None:
        self.book.job_ended = record
        self.world.over = True
