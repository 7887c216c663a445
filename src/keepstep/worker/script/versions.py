"""Which of many dicts have changed since they were last looked at, in a few microseconds.

CPython up to 3.12 gives every dict a number that grows with each change (PEP 509). A script with a
large model has a thousand namespaces that hardly ever change; reading their numbers with one numpy
gather costs less than looking into one of them. Where there are no such numbers, every dict is
reported every time.

The gather is prepared for all dicts at once, which takes long. Many come and go with every step, so
a new one is reported every time until it has stayed for a while.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import numpy as np

_AT: Final = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)  # behind the number of items

PATIENCE: Final = 16  # calls until a dict is no longer new
YOUNG_MAX: Final = 64


class Versions:
    def __init__(self) -> None:
        self._young: dict[int, tuple[dict[Any, Any], Any, int]] = {}  # and since which call
        self._calls = 0
        self._dicts: dict[int, tuple[dict[Any, Any], Any]] = {}  # held: an address must stay good
        self._stale = True
        self._owners: list[Any] = []
        self._where: Any = None
        self._memory: Any = None
        self._seen: Any = None

    def watch(self, names: dict[Any, Any], owner: Any) -> None:
        self.forget(names)
        self._young[id(names)] = names, owner, self._calls

    def forget(self, names: dict[Any, Any]) -> None:
        young = self._young.pop(id(names), None)
        if young is None and self._dicts.pop(id(names), None) is not None:
            self._stale = True

    def changed(self) -> list[Any]:
        """Owners of dicts that may have changed since the last call."""
        if not available:
            return [owner for _, owner, *_ in (*self._dicts.values(), *self._young.values())]
        self._calls += 1
        if self._young:
            self._grow_up()
        return self._changed() + [owner for _, owner, _ in self._young.values()]

    def _grow_up(self) -> None:
        all_of_them = len(self._young) > YOUNG_MAX
        for key, (names, owner, since) in list(self._young.items()):
            if not all_of_them and self._calls - since <= PATIENCE:
                return  # they are in the order in which they came
            del self._young[key]
            self._dicts[key] = names, owner
            self._stale = True

    def _changed(self) -> list[Any]:
        known = None
        if self._stale:
            known = dict(zip(map(id, self._owners), self._seen)) if self._owners else {}
            self._settle()
        if not self._owners:
            return []
        now = self._memory.take(self._where, mode="clip")
        if known is not None:
            seen, self._seen = known, now
            pairs = zip(self._owners, now.tolist())
            return [o for o, version in pairs if seen.get(id(o)) != version]
        if now.tobytes() == self._seen.tobytes():
            return []
        where = (now != self._seen).nonzero()[0]
        self._seen = now
        return [self._owners[i] for i in where]

    def _settle(self) -> None:
        self._owners = [owner for _, owner in self._dicts.values()]
        self._stale = False
        if not self._owners:
            return
        addresses = np.fromiter(self._dicts, dtype=np.uint64, count=len(self._dicts)) + _AT
        start, end = int(addresses.min()), int(addresses.max())
        words = (end - start) // 8 + 1
        buffer: Any = (ctypes.c_uint64 * words).from_address(start)
        self._memory = np.frombuffer(buffer, dtype=np.uint64)
        self._where = ((addresses - start) // 8).astype(np.int64)


def _self_test() -> bool:
    first, second = {"a": 1}, {"b": 1}
    watched = Versions()
    watched.watch(first, "first")
    watched.watch(second, "second")
    for _ in range(PATIENCE + 1):
        watched.changed()
    quiet = watched.changed()
    second["b"] = 2
    told = watched.changed()

    class Thing:
        count = 0

    thing = Thing()
    thing.count = 1
    watched.watch(vars(thing), "thing")
    for _ in range(PATIENCE + 1):
        watched.changed()
    told_of_thing = []
    for _ in range(50):  # long enough for the interpreter to specialise the assignment
        thing.count += 1
        told_of_thing.append(watched.changed())
    return quiet == [] and told == ["second"] and all(t == ["thing"] for t in told_of_thing)


def _probe() -> bool:
    global available
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False
    available = True
    try:
        return _self_test()
    except Exception:
        return False


available = False
available = _probe()
