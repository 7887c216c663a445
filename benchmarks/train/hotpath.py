"""Where a protected step spends its time: probes around the functions of the hot path.

The probes replace attributes of Keepstep's modules and classes for some steps after the real
comparison, so that they cost the comparison nothing. Times are inclusive and filed under the path
of probes around them ("step/function/fence/side_state/rng"), summed per step. A probe costs about
a microsecond, which is charged to its parent. A name that no longer exists is reported as missing.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

# label, module below keepstep.worker, attribute path
PROBES = (
    ("begin", "transaction", "Transactions._begin"),
    ("fence", "transaction", "Transactions._fence"),
    ("commit", "transaction", "Transactions._commit"),
    ("undo", "objects", "Undo.__init__"),
    ("rng", "rng", "capture"),
    ("buffer_copies", "seat", "Seat.snapshot_buffers"),
    ("side_state", "seat", "Seat.side_state"),
    ("buffer_check", "seat", "Seat.note_mutations"),
    ("position", "position", "Tracker.position"),
    ("encode", "codec", "dumps_inline"),
    ("sent_ahead", "ahead", "Ahead.wait"),
    ("publish", "seat", "Seat.publish"),
    ("page", "page", "Page.publish"),
    ("buddy", "blobs", "BuddyLine.put"),
    ("meet", "groups", "fence"),
)


class Profile:
    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.missing: list[str] = []
        self._current: dict[str, int] = {}
        self._path: list[str] = []
        self._undo: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        for label, module_name, path in PROBES:
            owner: Any = importlib.import_module(f"keepstep.worker.{module_name}")
            *parents, name = path.split(".")
            try:
                for parent in parents:
                    owner = getattr(owner, parent)
                original = getattr(owner, name)
            except AttributeError:
                self.missing.append(f"{module_name}.{path}")
                continue
            self._undo.append((owner, name, original))
            setattr(owner, name, self.probe(label, original))

    def remove(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    def probe(self, label: str, original: Callable[..., Any]) -> Callable[..., Any]:
        path = self._path

        def probed(*args: Any, **kwargs: Any) -> Any:
            # Recursion: the outermost call counts. Other threads: no step waits for them here.
            if label in path or threading.current_thread() is not threading.main_thread():
                return original(*args, **kwargs)
            path.append(label)
            began = time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter_ns() - began
                key = "/".join(path)
                path.pop()
                self._current[key] = self._current.get(key, 0) + took

        return probed

    def close_step(self) -> None:
        self.steps.append(self._current)
        self._current = {}


def fence_round_trips(count: int) -> list[int]:
    """The bare meeting in the fence, all ranks at it: without waiting for a slower rank."""
    from keepstep.worker import groups

    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        groups.fence((1, 2, 3, 4))
        times.append(time.perf_counter_ns() - began)
    return times
