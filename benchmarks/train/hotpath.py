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
    ("step", "api.session", "Session._run"),
    ("function", "api.session", "_Call.__call__"),
    ("batch", "script.batches", "Loop.next"),
    ("begin", "step.transaction", "Transactions._begin"),
    ("fence", "step.transaction", "Transactions._fence_update"),
    ("backward", "step.transaction", "Transactions._backward_begins"),
    ("commit", "step.transaction", "Transactions._commit"),
    ("end", "step.transaction", "Transactions._end"),
    ("undo", "state.objects", "Undo.__init__"),
    ("flags", "state.flags", "Flags.save"),
    ("buffers", "state.cells", "Cells.enter"),
    ("buffers", "state.cells", "Cells.fence"),
    ("gradients", "state.gradients", "Gradients.enter"),
    ("streams", "script.streams", "Streams.capture"),
    ("streams", "script.streams", "Streams.entering"),
    ("rng", "state.rng", "capture"),
    ("variables", "script.variables", "Variables.begin"),
    ("variables", "script.variables", "Variables.capture"),
    ("variables", "script.variables", "Variables.late"),
    ("variables", "script.variables", "Variables.end"),
    ("locals", "step.finish", "Behind.locals_of"),
    ("foresight", "script.results", "Foresight.at_fence"),
    ("side_state", "step.side_state", "SideState.make"),
    ("position", "script.position", "Tracker.position"),
    ("encode", "state.codec", "dumps_inline"),
    ("sent_ahead", "line.ahead", "Ahead.wait"),
    ("publish", "step.publishing", "Publisher.publish"),
    ("publish_late", "step.side_state", "SideState.publish_late"),
    ("page", "line.page", "Page.publish"),
    ("buddy", "line.blobs", "BuddyLine.put"),
    ("meet", "groups.groups", "fence"),
    ("witness inputs", "step.side_state", "SideState.note_inputs"),
    ("witness inputs", "script.batches", "Loop._note_batch"),
    ("witness agreement", "state.witness", "Agreement.words"),
    ("witness agreement", "state.witness", "Agreement.judge"),
    ("witness replicas", "state.witness", "Replicated.enter"),
    ("witness replicas", "step.transaction", "Transactions._compare_replicas"),
    ("witness changes", "state.parameters", "Parameters.between"),
    ("witness changes", "state.parameters", "Parameters.enter"),
    ("witness changes", "state.parameters", "Parameters.fence"),
    ("witness changes", "state.parameters", "Parameters.midway"),
    ("witness changes", "state.parameters", "Parameters.updated"),
    ("witness changes", "state.parameters", "Parameters.exit"),
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
