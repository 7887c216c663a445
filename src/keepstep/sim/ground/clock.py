"""Virtual time: what happens when, and the only source of chance.

Events of the same time happen in the order in which they were asked for, so that one seed and one
version of the code give one history. The worlds of several jobs share one clock.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from keepstep.sim.ground.violation import Violation

EVENTS_MAX = 150_000  # a spare that hangs is given up after 300 virtual seconds
Event = tuple[int, int, Callable[..., None], tuple[Any, ...]]


class Clock:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.events = 0
        self._heap: list[Event] = []
        self._sequence = 0

    def at(self, time: int, work: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, work, args))

    def after(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + ns, self._sequence, work, args))

    def run(self, until: Callable[[], bool], limit_ns: int) -> bool:
        """True when `until` came true before the virtual time was over."""
        heap = self._heap
        while heap:
            if until():
                return True
            time, _, work, args = heapq.heappop(heap)
            if time > limit_ns:
                heapq.heappush(heap, (time, 0, work, args))
                self.now = limit_ns
                return False
            self.now = time
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Violation(f"{EVENTS_MAX} events and no end")
            work(*args)
        return until()
