"""Periodic checkpoints, and going back to one: only if nothing else is left."""

from __future__ import annotations

from keepstep.model import records as r
from keepstep.sim.ground.violation import ensure
from keepstep.sim.rules.losses import recoverable
from keepstep.sim.rules.reader import Reader
from keepstep.sim.world.world import World


class Fallbacks(Reader):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._sealed_before: r.CheckpointSealed | None = None

    def _on_CheckpointSealed(self, record: r.CheckpointSealed) -> None:
        written = record.path in self.world.shared_disk.saved
        ensure(written, f"{record.path} is on record, not on disk")
        self._sealed_before, self.book.sealed = self.book.sealed, record

    def _on_FellBack(self, record: r.FellBack) -> None:
        """Only if nothing else is left, and to the newest one that can be read. Then everything is
        as it was."""
        differs = self.world.ills.differs_at is not None and "numbers differ" in record.reason
        if differs:
            self.world.ills.differs_at, self.book.stands = None, ""
        needless = "" if differs else recoverable(self.world, record.tick)
        ensure(not needless, f"needless fall-back ({record.reason}): {needless}")
        again = f"{record.path} cannot be read" in record.reason
        ensure(not again, f"back to {record.path}, which cannot be read")
        sealed, before = self.book.sealed, self._sealed_before
        spoiled = sealed is not None and sealed.path == self.world.shared_disk.spoiled
        if spoiled and before is not None and before.path == record.path:
            sealed, self._sealed_before = before, None
            self.book.sealed = sealed
        newest = sealed is not None and (sealed.path, sealed.tick) == (record.path, record.tick)
        ensure(newest, f"back to {record.path}, and the newest one is {sealed}")
        truth = self.world.truth.version
        most = truth[max(self.book.best.values())] - truth[record.tick]
        ensure(record.steps_lost <= most, f"{record.steps_lost} steps lost of {most}")
        self.book.resume_tick = record.tick
        self.book.best = dict.fromkeys(self.book.best, record.tick)
        self.book.owners.clear()
        self.book.gave.clear()
