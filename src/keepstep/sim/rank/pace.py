"""How long a simulated rank computes, as its page shows it."""

from __future__ import annotations

from collections import deque

KEPT = 32
SHOWN = 8


class SimOwnTime:
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
