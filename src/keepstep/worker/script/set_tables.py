"""The hash table of a set, which says in which order the set is walked and what `pop` returns.

Two sets with the same members may have different orders: the order depends on what was added and
removed before. So a set that must be as it was gets its table back, slot by slot. CPython has no
call for that; the memory is read and written in place, like that of iterators (iterators.py).

Numbers and text have the same hashes in every worker of a job (PYTHONHASHSEED). Where a member has
another one, as an object that is known by its address has, the set gets its members only.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

_HEAD: Final = object.__basicsize__
_FILL, _USED, _MASK, _TABLE, _FINGER = 0, 1, 2, 3, 5  # words behind the head
_WORDS: Final = 6
_SMALL: Final = 8  # slots inside the object
_EMPTY, _REMOVED = 0, -1


class SetCopy:
    """Of a set: its members and its table."""

    __slots__ = ("_raw", "members")

    def __init__(self, target: set[Any]) -> None:
        self._raw = _raw(target)
        self.members = list(set.__iter__(target))

    def __len__(self) -> int:
        return len(self.members)

    def fits(self, target: set[Any]) -> bool:
        """Nothing has changed since, not even the order."""
        return self._raw == _raw(target)

    def table(self) -> list[Any]:
        """Plain data: the number of slots, where `pop` begins, which slots hold the members in
        their order, and which held a removed one; and a digest of the members' hashes."""
        words = np.frombuffer(self._raw, np.intp)
        keys = words[_WORDS::2]
        removed = keys == _dummy
        members = (keys != _EMPTY) & ~removed
        places = [members.nonzero()[0].tolist(), removed.nonzero()[0].tolist()]
        hashes = hash(tuple(words[_WORDS + 1 :: 2][members].tolist()))
        return [len(keys), int(words[_FINGER]), *places, hashes]

    def put_back(self, target: set[Any]) -> None:
        write(target, self.table(), self.members)


def write(target: set[Any], table: list[Any], members: list[Any]) -> None:
    """Make it have these members, in these slots."""
    size, finger, filled, removed, digest = table
    hashes = [hash(member) for member in members]
    set.clear(target)
    if hash(tuple(hashes)) != digest:
        set.update(target, members)
        return
    _grow(target, size)
    slots = _slots(target)
    for slot in removed:
        slots[slot] = _dummy, _REMOVED
    for slot, member, code in zip(filled, members, hashes, strict=True):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(member))
        slots[slot] = id(member), code
    words = _words(id(target) + _HEAD, _WORDS)
    words[_FILL], words[_USED], words[_FINGER] = len(filled) + len(removed), len(filled), finger


def _grow(target: set[Any], size: int) -> None:
    """Give an empty set a table of so many empty slots."""
    if size > _SMALL:
        fillers = set(range(max(5, size // 4)))  # a set grows to the power of 2 above twice that
        set.update(target, fillers)
        slots = _slots(target)
        slots[:] = _EMPTY
        for filler in fillers:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(filler))
    if len(_slots(target)) != size:
        raise RuntimeError(f"a set of this Python has no table of {size} slots")


def _raw(target: set[Any]) -> bytes:
    words = _words(id(target) + _HEAD, _WORDS)
    return bytes(words) + bytes(_words(words[_TABLE], 2 * (words[_MASK] + 1)))


def _slots(target: set[Any]) -> Any:
    """Its table: of each slot the address of the member, and its hash."""
    words = _words(id(target) + _HEAD, _WORDS)
    return _words(words[_TABLE], 2 * (words[_MASK] + 1)).reshape(-1, 2)


def _words(address: Any, count: Any) -> Any:
    """The memory itself, not a copy."""
    memory: Any = (ctypes.c_ssize_t * int(count)).from_address(int(address))
    return np.frombuffer(memory, np.intp)


def _find_dummy() -> int:
    """What stands in the slot of a member that was removed."""
    probe = {0}
    probe.discard(0)
    return int(_slots(probe)[0, 0])


_dummy: Final = _find_dummy()
