"""Who may be called a straggler."""

from __future__ import annotations

from keepstep.core.stragglers import CAUSE
from keepstep.model.records import IncidentOpened, Record, SignalSeen
from keepstep.sim.ground.violation import ensure
from keepstep.sim.plans.world_plan import FOREVER_NS, STRAGGLER_NS
from keepstep.sim.world.world import World


class Stragglers:
    """Who may be called one, and moved."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._moved_ns = -FOREVER_NS

    def decided(self, record: Record) -> None:
        if isinstance(record, SignalSeen) and record.signal == CAUSE:
            self._blamed(record)
        elif isinstance(record, IncidentOpened) and record.cause == CAUSE:
            self._moved(record)

    def _blamed(self, record: SignalSeen) -> None:
        """A rank is slow because of its place, or because a fault has made it so."""
        world = self._world
        process = world.ranks[record.worker]
        place = f"{process.node.name}/{process.slot}"
        just = place in world.ills.were_dragged or process.was_slow or process.was_stopped
        just = just or " takes " not in record.detail
        ensure(just, f"{record.worker} is no straggler: {record.detail}")

    def _moved(self, record: IncidentOpened) -> None:
        now = self._world.now
        ensure(self._world.plan.stragglers == "move", "nobody asked to move stragglers")
        ensure(len(record.victims) == 1, f"{record.incident} moves two stragglers")
        soon = now < self._moved_ns + 4 * STRAGGLER_NS
        ensure(not soon, f"{record.incident} moves a straggler right after another one")
        self._moved_ns = now
