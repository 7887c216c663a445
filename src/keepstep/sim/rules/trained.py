"""Ranks and their processes: where they start, what they train, when they are fenced.

Every commit of every rank is compared with the undisturbed run. A process whose end is on record
never trains again, and no two processes share a slot.
"""

from __future__ import annotations

from keepstep.core.placement import CRASHES_MAX
from keepstep.sim.ground.violation import ensure, violated
from keepstep.sim.rank.rank import Rank
from keepstep.sim.world.node import SimNode
from keepstep.sim.world.world import World


class Trained:
    def __init__(self, world: World) -> None:
        self.world = world
        self.book = world.book

    def spawned(self, process: Rank) -> None:
        """One process in a slot; only understudies share that of their spare."""
        workers = self.world.orchestrator.core.state(self.world.plan.job).workers
        place, mine = process.place, workers.get(process.id)
        if place in self.world.ills.bad_slots and mine is not None and mine.presumed < 0:
            self.world.ills.bad_slots[place] += 1
            often = self.world.ills.bad_slots[place] > CRASHES_MAX
            ensure(not often, f"{process.id} is started in {place}, where all have failed")
        for other in self.world.nodes[process.node.name].processes.values():
            if other is process or not other.alive or other.slot != process.slot:
                continue
            pair = [workers[one.id] for one in (other, process) if one.id in workers]
            shared = any(w.presumed >= 0 and w.role in ("understudy", "unwanted") for w in pair)
            ensure(shared, f"{process.id} started in the slot of {other.id}")

    def fenced(self, node: SimNode) -> None:
        """An agent ends its ranks by itself only when they stand still."""
        since = self.world.now - self.world.plan.stall_ns
        for process in node.processes.values():
            ensure(
                not process.alive or process.rank < 0 or process.page.commit_ns < since,
                f"{node.name} fences itself while {process.id} trains",
            )
            waits = process.mode in ("deciding", "held") and not (process.hung or process.stopped)
            ensure(
                not (process.alive and waits),
                f"{node.name} fences itself, and {process.id} held its state for the job",
            )

    def swapped(self, process: Rank) -> None:
        """Content at resume: whoever takes part in a new generation is right from the start."""
        ensure(
            process.generation in self.book.commits,
            f"{process.id} swapped to {process.generation}, not on record",
        )
        self._check_content(process)

    def committed(self, process: Rank) -> None:
        rank, tick = process.rank, process.tick
        if process.id in self.book.ended:
            violated(f"{process.id} (rank {rank}) trains after its end is on record")
        owner = self.book.owners.get(rank)
        newer = self.book.generation > process.generation and owner != process.id
        if newer and not process.recovering.owes:
            violated(
                f"{process.id} trains as rank {rank} in {process.generation}, but {owner} owns it"
            )
        self._check_content(process)
        if tick > self.book.best.get(rank, -1):
            self.book.best[rank] = tick

    def _check_content(self, process: Rank) -> None:
        truth, tick = self.world.truth, process.tick
        truth.upto(tick)
        right = (
            process.shared == truth.shared[tick]
            and process.own == truth.own[tick][process.rank]
            and process.version == truth.version[tick]
            and (not self.world.plan.parity or process.shard == truth.shard[tick][process.rank])
        )
        if not right:
            what = "shared" if process.shared != truth.shared[tick] else "own"
            violated(
                f"rank {process.rank} ({process.id}) has other {what} state at tick {tick} than "
                "the undisturbed run"
            )

    def acknowledged(self, node: str, rank: int, tick: int) -> None:
        """A buddy has taken a side state: it must have it until two later ones are acknowledged."""
        before = [one for one in self.book.gave.get((node, rank), ()) if one != tick]
        self.book.gave[node, rank] = [max(before), tick] if before else [tick]
