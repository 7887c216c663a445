"""What else the order of batches hangs on: numbers that samplers and datasets count by themselves.

A sampler that shuffles by an epoch it counts itself (`self.epoch += 1` in `__iter__`) has state
that no generator shows. Numbers (int, float) among the attributes of the objects of a data
pipeline are compared with what they were when they were first seen, and travel once they have
changed. Those that never change stay as the script made them: they may belong to the process (a
local rank, a file descriptor). Flags and strings do not travel: they tend to say that something
was opened in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from keepstep.worker.script import graph
from keepstep.worker.script.sources import is_stream

HOLDERS_MAX: Final = 64
ATTRIBUTES_MAX: Final = 256  # of one object
_NUMBERS: Final = (int, float)


def is_data(thing: Any) -> bool:
    return isinstance(thing, DataLoader | Sampler | Dataset)


def holders(roots: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], graph.Found]:
    """Of these pipelines: attributes of the objects that count, by path; and random streams."""
    found: dict[str, dict[str, Any]] = {}

    def visit(path: str, node: Any) -> None:
        if len(found) < HOLDERS_MAX and not isinstance(node, type) and _counts(node):
            own = _attributes(node)
            if own is not None and len(own) <= ATTRIBUTES_MAX:
                found[path] = own

    return found, graph.find(roots, is_stream, third_party=True, visit=visit)


def _counts(node: Any) -> bool:
    if isinstance(node, DistributedSampler):
        return True
    return graph.origin(type(node)) in ("user", "installed")


def _attributes(node: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


class Counters:
    """The numbers of all pipelines that are known, and which of them have changed."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, Any]] = {}
        self._first: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id of a holder
        self._changed: set[tuple[str, str]] = set()

    def refresh(self, found: dict[str, dict[str, Any]]) -> None:
        self._holders = found
        first = {}
        for own in found.values():
            # The holder too, so that its id is not another's.
            first[id(own)] = self._first.get(id(own)) or (own, dict(_numbers(own)))
        self._first = first
        self._changed = {key for key in self._changed if key[0] in found}

    def capture(self) -> dict[str, dict[str, Any]]:
        state: dict[str, dict[str, Any]] = {}
        for path, own in self._holders.items():
            first = self._first[id(own)][1]
            for name, value in own.items():
                if type(value) not in _NUMBERS:
                    continue
                if (path, name) not in self._changed:
                    if name in first and first[name] == value:
                        continue
                    self._changed.add((path, name))
                state.setdefault(path, {})[name] = value
        return state

    def missing(self, state: dict[str, dict[str, Any]]) -> list[str]:
        return [path for path in state if path not in self._holders]

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """Numbers that have changed here but not there go back to what they were first."""
        now = self.capture()
        for path, values in state.items():
            self._holders[path].update(values)
            self._changed |= {(path, name) for name in values}
        for path, values in now.items():
            first = self._first[id(self._holders[path])][1]
            for name in values:
                if name not in state.get(path, {}) and name in first:
                    self._holders[path][name] = first[name]


def _numbers(own: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in own.items() if type(value) in _NUMBERS]
