"""Periodic checkpoints of a rank, as worker/checkpoint/periodic.py: on a disk that all share."""

from __future__ import annotations

from typing import NamedTuple

from keepstep.model import messages as m
from keepstep.sim.net import SECOND
from keepstep.sim.plan import SAVED
from keepstep.sim.process import Process


class Saved(NamedTuple):
    """A rank's part of a checkpoint."""

    number: int
    tick: int
    version: int
    own: int
    shared: int
    shard: int


class Saver(Process):
    def take_part(self, number: int) -> None:
        self.snapshot = number
        if self.inbox.snapshot == number:
            self.inbox.snapshot = -1
        if self.saving:
            self.say(m.SaveFailed(number=number, error="still writing"))
            return
        self.saving = True
        part = Saved(number, self.tick, self.version, self.own, self.shared, self.shard)
        wait = SECOND // 5 + self.world.random.randrange(2 * SECOND)
        self.world.after(wait, self.thread, self._saved, part)

    def _saved(self, part: Saved) -> None:
        if self.node.disk == "stuck":
            self.world.after(SECOND, self.thread, self._saved, part)
            return
        self.saving = False
        if self.node.disk == "full":
            self.say(m.SaveFailed(number=part.number, error="No space left on device"))
            return
        self.world.parts.setdefault(part.tick, {})[self.rank] = part
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

    def seal(self, command: m.Seal) -> None:
        self.world.after(SECOND // 10, self.thread, self._seal, command)

    def _seal(self, command: m.Seal) -> None:
        world, path = self.world, f"{SAVED}/checkpoint-{command.tick}"
        parts = world.parts.get(command.tick, {})
        right = [rank for rank, part in parts.items() if part.number == command.number]
        if len(right) < command.world:
            self.say(m.SaveFailed(number=command.number, error="a part is missing"))
            return
        world.saved = {kept: world.saved[kept] for kept in command.keep if kept in world.saved}
        world.saved[path] = dict(parts)
        if world.spoiled == path:
            world.spoiled = ""  # written anew
        self.say(m.Sealed(number=command.number, path=path))
