"""What a rank does alone in a step, for whoever looks for the rank that holds the others up.

All ranks have the same step time, because they meet in each step. What tells them apart is the
time from one meeting to the next: from the fence that was passed to the first backward pass of the
next step, in which gradients begin to be summed up. Loading data, the update and the forward pass
lie in it. If the forward pass meets other ranks, too (FSDP, tensor parallelism), their time is in
the measure of all, and nobody stands out: a straggler is missed there, never invented.

On a GPU the host is ahead of its device: there the forward pass is timed by the device, with two
events that are read when the next fence has waited for both.

It costs two readings of a clock in a step, and a sort of a few numbers in every eighth.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

from keepstep.worker.device import cuda
from keepstep.worker.line.page import Page

KEPT = 32  # steps
SHOWN = 8  # every so many


class OwnTime:
    """The main thread's."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._times_ns: deque[int] = deque(maxlen=KEPT)
        self._steps = 0
        self._since_ns = 0  # the last meeting; 0: something else has happened since
        self._waited_ns = 0  # until the device was given something to do
        self._events: tuple[Any, Any] | None = None
        self._timing = False  # both events are recorded, and not read yet

    def begins(self) -> None:
        """A step does, and the device is about to get work."""
        self._timing = False
        if cuda.home is None or not self._since_ns:
            return
        if self._events is None:
            self._events = (cuda.new_event(timing=True), cuda.new_event(timing=True))
        self._waited_ns = time.monotonic_ns() - self._since_ns
        cuda.record(self._events[0])

    def meets(self) -> None:
        """The others, from now on."""
        if not self._since_ns:
            return
        if self._events is not None:
            cuda.record(self._events[1])
            self._timing = True
        else:
            self._note(time.monotonic_ns() - self._since_ns)

    def passed(self) -> None:
        """A fence: all ranks leave it together, and what was queued before it is done."""
        if self._timing and self._events is not None:
            first, last = self._events
            self._timing = False
            if first.query() and last.query():
                self._note(self._waited_ns + max(0, int(first.elapsed_time(last) * 1e6)))
        self._since_ns = time.monotonic_ns()

    def disturbed(self) -> None:
        """A hold, a retry or a checkpoint: this step says nothing."""
        self._since_ns, self._timing = 0, False

    def _note(self, own_ns: int) -> None:
        self._times_ns.append(own_ns)
        self._steps += 1
        if self._steps % SHOWN == 0:
            self._page.set("own_ns", int(statistics.median_low(self._times_ns)))
            self._page.set("own_steps", self._steps)
