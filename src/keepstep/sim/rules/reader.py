"""Rules that are told of every record when it is on the disk."""

from __future__ import annotations

from keepstep.model.records import Record
from keepstep.sim.world.world import World


class Reader:
    """`_on_Placed` is told of each Placed, and so on; there need not be one for every record."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.book = world.book

    def durable(self, record: Record) -> None:
        check = getattr(self, f"_on_{type(record).__name__}", None)
        if check is not None:
            check(record)
