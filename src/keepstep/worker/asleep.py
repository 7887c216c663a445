"""Threads that nothing wakes any more.

When a connection is lost, gloo tells all who wait for it, but for whoever waits for a message that
is half sent or half received (its Pair forgets the operation that it is working on). That thread
sleeps until the timeout of the group, half an hour by default, and whoever waits for it sleeps
too. There is no way to wake it: but once its connections are gone it can do no harm either.

Whether a thread sleeps is the kernel's to say: it is asleep, and has not been awake since it was
looked at before. A thread that is only kept waiting for a processor is not asleep.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from keepstep.worker import gloo

WORKERS = "pt_gloo_runloop"  # as PyTorch names the threads that run operations of gloo
TASKS = Path("/proc/self/task")
LOOK_S = 0.02
STUCK_S = 10.0

Seen = dict[str, tuple[str, ...]]  # thread -> how often it was switched


def _look(wanted: Callable[[str, str], bool]) -> Seen | None:
    """None: one of them is awake, or there are none."""
    found: Seen = {}
    for task in os.listdir(TASKS):
        try:
            if not wanted(task, (TASKS / task / "comm").read_text().strip()):
                continue
            lines = (TASKS / task / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        about = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if not about.get("State", "").startswith("S"):
            return None
        switches = (about["voluntary_ctxt_switches"], about["nonvoluntary_ctxt_switches"])
        found[task] = switches
    return found or None


class Sleepers:
    """Has been asked now and then: for how long have they all slept?"""

    def __init__(self, wanted: Callable[[str, str], bool], step_s: float) -> None:
        """`wanted`: by number and name. `step_s`: no more than that counts between two looks, for
        the whole process may have been stopped."""
        self._wanted, self._step_s = wanted, step_s
        self._before: Seen | None = None
        self._at = time.monotonic()
        self._slept_s = 0.0

    def slept_s(self) -> float:
        now, seen = time.monotonic(), _look(self._wanted)
        same = seen is not None and seen == self._before
        self._slept_s = self._slept_s + min(now - self._at, self._step_s) if same else 0.0
        self._before, self._at = seen, now
        return self._slept_s


def operations() -> Sleepers:
    """Threads in which operations of gloo run."""
    return Sleepers(lambda _, name: name == WORKERS, 2 * LOOK_S)


class Watch:
    """Of the main thread, after it was told to come back; asked about every second."""

    def __init__(self) -> None:
        self._generation = -1
        self._sleepers = operations()

    def look(self, generation: int) -> None:
        """If it waits for an operation that gloo has forgotten, nothing can be done about it here;
        another process can take the seat."""
        if generation != self._generation:
            main = str(threading.main_thread().native_id)
            self._generation = generation
            self._sleepers = Sleepers(lambda task, name: task == main or name == WORKERS, 2.0)
        if self._sleepers.slept_s() < STUCK_S or _on_gpu() or not _in_torch():
            return
        if not gloo.connected(gloo.watched()):
            why = "this process waits for an operation of gloo that never ends: it is replaced"
            os.write(2, f"keepstep: {why}\n".encode())
            os._exit(1)


def _on_gpu() -> bool:
    cuda: Any = torch.cuda  # untyped
    return bool(cuda.is_initialized())


def _in_torch() -> bool:
    """The main thread is inside of PyTorch, and not in a loader that waits for its data."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    within = os.path.dirname(torch.__file__) + os.sep
    return frame is not None and frame.f_code.co_filename.startswith(within)
