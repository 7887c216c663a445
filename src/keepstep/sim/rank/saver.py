"""Periodic checkpoints of a rank, as worker/checkpoint/periodic.py: on a disk that all share."""

from __future__ import annotations

from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.sim.ground.disk import SavedState
from keepstep.sim.rank.grouped import Grouped
from keepstep.sim.times import SECOND


class Saver(Grouped):
    snapshot = -1  # number of the last one taken
    saving = False

    def take_part(self, number: int) -> None:
        self.snapshot = number
        if self.inbox.snapshot == number:
            self.inbox.snapshot = -1
        if self.saving:
            self.say(m.SaveFailed(number=number, error="still writing"))
            return
        self.saving = True
        part = SavedState(number, self.tick, self.version, self.own, self.shared, self.shard)
        wait = SECOND // 5 + self.world.random.randrange(2 * SECOND)
        self.world.after(wait, self.thread, self._saved, part)

    def _saved(self, part: SavedState) -> None:
        if self.node.disk == "stuck":
            self.world.after(SECOND, self.thread, self._saved, part)
            return
        self.saving = False
        if self.node.disk == "full":
            self.say(m.SaveFailed(number=part.number, error="No space left on device"))
            return
        self.world.shared_disk.keep(self.rank, part)
        self.say(
            m.Saved(
                number=part.number,
                tick=part.tick,
                version=part.version,
                snapshot_ns=1,
                write_ns=1,
                bytes_written=1,
            )
        )

    def seal(self, command: commands.Seal) -> None:
        self.world.after(SECOND // 10, self.thread, self._seal, command)

    def _seal(self, command: commands.Seal) -> None:
        path = self.world.shared_disk.seal(
            command.number, command.tick, command.world, command.keep
        )
        if path:
            self.say(m.Sealed(number=command.number, path=path))
        else:
            self.say(m.SaveFailed(number=command.number, error="a part is missing"))
