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

import keepstep

# label, module below keepstep.worker, attribute path. Labels that begin with "witness" are what
# compares, and what looks for state that nobody has named; the rest is what is kept and carried.
PROBES = (
    ("step", "session", "Session._run"),
    ("function", "session", "_Call.__call__"),
    ("batch", "batches", "Loop.next"),
    ("begin", "transaction", "Transactions._begin"),
    ("fence", "transaction", "Transactions._fence_update"),
    ("backward", "transaction", "Transactions._backward_begins"),
    ("commit", "transaction", "Transactions._commit"),
    ("end", "transaction", "Transactions._end"),
    ("undo", "objects", "Undo.__init__"),
    ("flags", "flags", "Flags.save"),
    ("buffers", "cells", "Cells.enter"),
    ("buffers", "cells", "Cells.fence"),
    ("gradients", "gradients", "Gradients.enter"),
    ("streams", "script.streams", "Streams.capture"),
    ("streams", "script.streams", "Streams.entering"),
    ("rng", "rng", "capture"),
    ("variables", "script.variables", "Variables.begin"),
    ("variables", "script.variables", "Variables.capture"),
    ("variables", "script.variables", "Variables.late"),
    ("variables", "script.variables", "Variables.end"),
    ("locals", "finish", "Behind.locals_of"),
    ("foresight", "results", "Foresight.at_fence"),
    ("side_state", "seat", "Seat.side_state"),
    ("position", "position", "Tracker.position"),
    ("encode", "codec", "dumps_inline"),
    ("sent_ahead", "ahead", "Ahead.wait"),
    ("publish", "seat", "Seat.publish"),
    ("publish_late", "seat", "Seat.publish_late"),
    ("page", "page", "Page.publish"),
    ("buddy", "blobs", "BuddyLine.put"),
    ("meet", "groups", "fence"),
    ("witness inputs", "seat", "Seat.note_inputs"),
    ("witness inputs", "batches", "Loop._note_batch"),
    ("witness agreement", "witness", "Agreement.words"),
    ("witness agreement", "witness", "Agreement.judge"),
    ("witness replicas", "witness", "Replicated.enter"),
    ("witness replicas", "transaction", "Transactions._compare_replicas"),
    ("witness changes", "parameters", "Parameters.between"),
    ("witness changes", "parameters", "Parameters.enter"),
    ("witness changes", "parameters", "Parameters.fence"),
    ("witness changes", "parameters", "Parameters.midway"),
    ("witness changes", "parameters", "Parameters.updated"),
    ("witness changes", "parameters", "Parameters.exit"),
    ("witness unasked", "script.unasked", "Unasked.look"),
    ("witness variables", "script.witness", "Witness.begins"),
)
WITNESS = "witness "


class Profile:
    __module__ = "keepstep.benchmarks"  # its own figures are none of the script's variables

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

        # Keepstep carries the variables of the script's frames: this one must count as its own.
        probed.__code__ = probed.__code__.replace(co_filename=keepstep.__file__)
        return probed

    def close_step(self) -> None:
        self.steps.append(self._current)
        self._current = {}


def witnesses(step: dict[str, int]) -> int:
    """Nanoseconds of a profiled step in witnesses, each once."""
    found = 0
    for path, took in step.items():
        *around, label = path.split("/")
        if label.startswith(WITNESS) and not any(x.startswith(WITNESS) for x in around):
            found += took
    return found


def fence_round_trips(count: int) -> list[int]:
    """The bare meeting in the fence, all ranks at it: without waiting for a slower rank."""
    from keepstep.worker.groups import groups

    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        groups.fence((1, 2, 3, 4, 5, 6, 7, 8))
        times.append(time.perf_counter_ns() - began)
    return times
