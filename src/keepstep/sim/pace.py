"""How long a simulated rank computes, as its page shows it, and who may be called a straggler."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from keepstep.core.stragglers import CAUSE
from keepstep.model.records import IncidentOpened, Record, SignalSeen
from keepstep.sim.plan import FOREVER_NS, STRAGGLER_NS

if TYPE_CHECKING:
    from keepstep.sim.check import Checker

KEPT = 32
SHOWN = 8


class OwnTime:
    """As worker/step/pace.py: a median of the last steps, looked at now and then."""

    def __init__(self) -> None:
        self.own_ns = self.steps = 0
        self._since_ns = 0
        self._count = 0
        self._times_ns: deque[int] = deque(maxlen=KEPT)

    def begins(self, now: int) -> None:
        self._since_ns = now

    def meets(self, now: int) -> None:
        self._times_ns.append(now - self._since_ns)
        self._count += 1
        if self._count % SHOWN == 0:
            self.own_ns = sorted(self._times_ns)[(len(self._times_ns) - 1) // 2]
            self.steps = self._count


class Stragglers:
    """Who may be called one, and moved."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._moved_ns = -FOREVER_NS

    def decided(self, record: Record) -> None:
        if isinstance(record, SignalSeen) and record.signal == CAUSE:
            self._blamed(record)
        elif isinstance(record, IncidentOpened) and record.cause == CAUSE:
            self._moved(record)

    def _blamed(self, record: SignalSeen) -> None:
        """A rank is slow because of its place, or because a fault has made it so."""
        world = self._checker.world
        process = world.ranks[record.worker]
        place = f"{process.node.name}/{process.slot}"
        just = place in world.were_dragged or process.was_slow or process.was_stopped
        just = just or " takes " not in record.detail
        self._checker.ensure(just, f"{record.worker} is no straggler: {record.detail}")

    def _moved(self, record: IncidentOpened) -> None:
        ensure, now = self._checker.ensure, self._checker.world.now
        ensure(self._checker.world.plan.stragglers == "move", "nobody asked to move stragglers")
        ensure(len(record.victims) == 1, f"{record.incident} moves two stragglers")
        soon = now < self._moved_ns + 4 * STRAGGLER_NS
        ensure(not soon, f"{record.incident} moves a straggler right after another one")
        self._moved_ns = now
