"""Where an iterator stands, as plain data, and how another one of its kind is put there.

A newcomer's loops are fresh: its `enumerate` counts from 0 and its `range` hands out the first
number next. When it stands inside the same loop bodies as the dead rank did, each iterator has
been advanced for the current iteration already, so setting it to the dead rank's position makes
the loop go on where that one would have.

    sequences   list, tuple, str, array, reversed: the index, by __reduce__ and __setstate__
    product     the index into each of its parts, likewise
    range       what is left of it; the newcomer's must be the same range or a part of it
    dict        how many are left; a newcomer behind that is advanced
    counters    enumerate, count, islice keep numbers in C: written in memory, where a self-test
                at import found them
    compound    zip, map, filter, enumerate, islice, chain: also the iterators inside
    generators  must be suspended at the same `yield`; their frames are carried like any other

Of a DataLoader's iterator, and of others of Python's own, it can be told where they stand, and not
be set: a newcomer's must stand there by itself (`unset`). What cannot be set is refused by name.
Iterators of Keepstep's own are led by the walk.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Final, NamedTuple

import numpy

from keepstep.errors import UsageError

# From Python 3.12 on they are said to go; where they are gone, such an iterator is refused by name.
warnings.filterwarnings(
    "ignore", "Pickle, copy, and deepcopy support will be removed from itertools"
)

_HEAD: Final = object.__basicsize__
_WORD: Final = ctypes.sizeof(ctypes.c_ssize_t)
_COUNT_MAX: Final = 1 << 62
_TOLD_MAX: Final = 32

Position = list[Any]


class _Kind(NamedTuple):
    read: Callable[[Any], Position]  # without the type's name
    set: Callable[[Any, Position], bool]  # False: it cannot be done
    parts: Callable[[Any], tuple[Any, ...]]


def is_iterator(value: Any) -> bool:
    return type(value) in KINDS or type(value) is GeneratorType or is_unset(type(value))


def is_unset(kind: type) -> bool:
    """One that nobody can put to a place, but that says where it is."""
    if kind in KINDS or kind is GeneratorType:
        return False
    own = kind.__module__ in ("itertools", "builtins", "_collections", "collections")
    return of_loader(kind) or (own and hasattr(kind, "__next__"))


def of_loader(kind: type) -> bool:
    """The iterator of a DataLoader, torch's or torchdata's."""
    return any(base.__name__ == "_BaseDataLoaderIter" for base in kind.__mro__)


def position(iterator: Any) -> Position:
    """Plain data that says where it stands, with the iterators inside."""
    kind = KINDS.get(type(iterator))
    if kind is None:
        name = type(iterator).__name__
        return [name, _unset(iterator)] if is_unset(type(iterator)) else [name]
    inner = [position(part) for part in kind.parts(iterator)]
    return [type(iterator).__name__, kind.read(iterator), inner]


def set_position(iterator: Any, wanted: Position, place: str) -> None:
    """Put it there, or refuse by name."""
    name = type(iterator).__name__
    if name != wanted[0]:
        raise UsageError(
            f"the loop in {place} runs over a {name} here and ran over a {wanted[0]} in the rank "
            "that is replaced",
            hint="build loops from the same arguments on every start of the script",
        )
    kind = KINDS.get(type(iterator))
    if kind is None and len(wanted) > 1 and position(iterator) != wanted:
        raise UsageError(
            f"the {name} {place} stands elsewhere here than it did in the rank that is replaced, "
            "and cannot be put there",
            hint="iterate with ks.batches, or keep the items in a list and the place in a variable",
        )
    if kind is None or len(wanted) == 1:
        return
    state, inner = wanted[1], wanted[2]
    if kind.read(iterator) != state and not kind.set(iterator, state):
        raise UsageError(
            f"the {name} of the loop in {place} stands at {kind.read(iterator)} here, and cannot "
            f"be put to {state}, where it stood in the rank that is replaced",
            hint="iterate with ks.epochs and ks.batches, or keep the position in a variable",
        )
    parts = kind.parts(iterator)
    if len(parts) != len(inner):
        raise UsageError(f"the {name} of the loop in {place} has another number of iterators")
    for part, there in zip(parts, inner, strict=True):
        set_position(part, there, place)


def sequence(iterator: Any) -> Any:
    """The list, tuple or array that it runs over."""
    if type(iterator) not in _SEQUENCES:
        return None
    found = iterator.__reduce__()[1]
    known = found and type(found[0]) in (list, tuple, numpy.ndarray)
    return found[0] if known and len(found[0]) else None


def remade(iterator: Any, wanted: Position) -> Any:
    """Another iterator in its place; None: that is not possible. A script that resumes by itself,
    `range(start, 10)`, starts later in a process that is started later."""
    if type(iterator) is type(iter(range(0))) and wanted[0] == type(iterator).__name__:
        return iter(range(*wanted[1])) if wanted[1] else iter(range(0))
    return None


def generators(iterator: Any) -> Iterator[GeneratorType[Any, Any, Any]]:
    """Generators that it is, or draws from."""
    if type(iterator) is GeneratorType:
        yield iterator
        return
    kind = KINDS.get(type(iterator))
    for part in kind.parts(iterator) if kind is not None else ():
        yield from generators(part)


def sources(iterator: Any) -> Iterator[Any]:
    """The iterators at the bottom, whose position is not carried here."""
    kind = KINDS.get(type(iterator))
    if kind is None:
        if type(iterator) is not GeneratorType:
            yield iterator
        return
    for part in kind.parts(iterator):
        yield from sources(part)


def _unset(iterator: Any) -> Any:
    if of_loader(type(iterator)):
        return iterator._num_yielded
    try:
        return _told(iterator.__reduce__()[1:], 3)
    except Exception:  # it says nothing
        return None


def _told(value: Any, depth: int) -> Any:
    """Small, and another one when an iterator has moved."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_iterator(value):
        return position(value) if type(value) is not GeneratorType else "generator"
    if isinstance(value, tuple) and len(value) <= _TOLD_MAX and depth:
        return [_told(item, depth - 1) for item in value]
    return [type(value).__name__, len(value)] if hasattr(value, "__len__") else type(value).__name__


# ------------------------------------------------------------------------------------ the kinds


def _no_parts(_: Any) -> tuple[Any, ...]:
    return ()


def _read_sequence(iterator: Any) -> Position:
    state = iterator.__reduce__()
    return [state[2] if len(state) > 2 else -1]


def _set_sequence(iterator: Any, state: Position) -> bool:
    if state[0] < 0:
        for _ in iterator:
            pass
        return True
    iterator.__setstate__(state[0])
    return _read_sequence(iterator) == state


def _range_left(iterator: Any) -> range:
    state = iterator.__reduce__()
    whole: range = state[1][0]
    return whole[state[2] or 0 :] if len(state) > 2 else whole


def _read_range(iterator: Any) -> Position:
    left = _range_left(iterator)
    return [left.start, left.stop, left.step] if left else []


def _set_range(iterator: Any, state: Position) -> bool:
    whole: range = iterator.__reduce__()[1][0]
    if not state:
        iterator.__setstate__(len(whole))
        return True
    wanted = range(*state)
    if wanted.start not in whole:
        return False
    index = whole.index(wanted.start)
    if whole[index:] != wanted:
        return False
    iterator.__setstate__(index)
    return True


def _read_product(iterator: Any) -> Position:
    state = iterator.__reduce__()
    return list(state[2]) if len(state) > 2 else []


def _set_product(iterator: Any, state: Position) -> bool:
    if state:
        iterator.__setstate__(tuple(state))
    return _read_product(iterator) == state


def _read_left(iterator: Any) -> Position:
    return [iterator.__length_hint__()]


def _advance(iterator: Any, state: Position) -> bool:
    behind = iterator.__length_hint__() - state[0]
    if behind < 0:
        return False
    for _ in itertools.islice(iterator, behind):
        pass
    return True


def _never(_: Any, __: Position) -> bool:
    return False


def _read_enumerate(iterator: Any) -> Position:
    return [iterator.__reduce__()[1][1]]


def _set_enumerate(iterator: Any, state: Position) -> bool:
    if not _enumerate_known or not 0 <= state[0] < _COUNT_MAX:
        return False
    ctypes.c_ssize_t.from_address(id(iterator) + _HEAD).value = state[0]
    return True


def _enumerate_parts(iterator: Any) -> tuple[Any, ...]:
    return (iterator.__reduce__()[1][0],)


def _read_count(iterator: Any) -> Position:
    return list(iterator.__reduce__()[1])


def _set_count(iterator: Any, state: Position) -> bool:
    own = _read_count(iterator)
    if own[1:] != state[1:]:
        return False
    if len(state) == 1 and _count_known and type(state[0]) is int and abs(state[0]) < _COUNT_MAX:
        ctypes.c_ssize_t.from_address(id(iterator) + _HEAD).value = state[0]
        return True
    return False


def _read_islice(iterator: Any) -> Position:
    state = iterator.__reduce__()
    if len(state[1]) < 4:
        return []  # exhausted
    return [*state[1][1:], state[2]]  # next, stop, step, how many it has drawn


def _set_islice(iterator: Any, state: Position) -> bool:
    own = _read_islice(iterator)
    if not _islice_known or not own or not state or own[1:3] != state[1:3]:
        return False
    ctypes.c_ssize_t.from_address(id(iterator) + _HEAD + _WORD).value = state[0]
    ctypes.c_ssize_t.from_address(id(iterator) + _HEAD + 4 * _WORD).value = state[3]
    return True


def _islice_parts(iterator: Any) -> tuple[Any, ...]:
    state = iterator.__reduce__()
    return (state[1][0],) if len(state[1]) == 4 else ()


def _chain_state(iterator: Any) -> tuple[Any, ...]:
    state = iterator.__reduce__()
    return state[2] if len(state) > 2 else ()


def _read_chain(iterator: Any) -> Position:
    state = _chain_state(iterator)
    return [len(state), *(position(state[0]) if state else [])]


def _set_chain(iterator: Any, wanted: Position) -> bool:
    """Which of its iterables it is in: earlier ones are left behind."""
    state = _chain_state(iterator)
    while state and _read_chain(iterator) != wanted:
        following = next(state[0], None)
        if following is None:
            return False
        iterator.__setstate__((state[0], iter(following)))
        state = _chain_state(iterator)
    return bool(state)


_INDEXED: Final = type(iter(numpy.zeros(1)))  # over whatever has only __getitem__
_SEQUENCES: Final[tuple[type, ...]] = (type(iter([])), type(iter(())), _INDEXED)
_SEQUENCE = _Kind(_read_sequence, _set_sequence, _no_parts)
_COMPOUND = _Kind(lambda _: [], _never, lambda it: it.__reduce__()[1])
_FUNCTIONAL = _Kind(lambda _: [], _never, lambda it: it.__reduce__()[1][1:])
_DICT = _Kind(_read_left, _advance, _no_parts)

KINDS: Final[dict[type, _Kind]] = {
    type(iter([])): _SEQUENCE,
    type(iter(())): _SEQUENCE,
    type(iter("")): _SEQUENCE,
    type(iter("\u00e9")): _SEQUENCE,
    type(reversed([])): _SEQUENCE,
    _INDEXED: _SEQUENCE,
    reversed: _SEQUENCE,
    type(iter(range(0))): _Kind(_read_range, _set_range, _no_parts),
    type(iter({})): _DICT,
    type(iter({}.values())): _DICT,
    type(iter({}.items())): _DICT,
    type(iter(set())): _Kind(_read_left, _never, _no_parts),  # no order that others repeat
    enumerate: _Kind(_read_enumerate, _set_enumerate, _enumerate_parts),
    zip: _COMPOUND,
    map: _FUNCTIONAL,
    filter: _FUNCTIONAL,
    itertools.count: _Kind(_read_count, _set_count, _no_parts),
    itertools.product: _Kind(_read_product, _set_product, _no_parts),
    itertools.islice: _Kind(_read_islice, _set_islice, _islice_parts),
    itertools.chain: _Kind(_read_chain, _set_chain, lambda it: _chain_state(it)[1:]),
}


# ---------------------------------------------------------------------------------- self-tests


def _holds(item: Any, word: int, value: int) -> bool:
    return ctypes.c_ssize_t.from_address(id(item) + _HEAD + word * _WORD).value == value


def _test_enumerate() -> bool:
    global _enumerate_known
    counted = enumerate("ab", 12_345)
    _enumerate_known = _holds(counted, 0, 12_345)
    return _set_enumerate(counted, [77]) and next(counted) == (77, "a")


def _test_count() -> bool:
    global _count_known
    counted = itertools.count(12_345)
    _count_known = _holds(counted, 0, 12_345)
    return _set_count(counted, [77]) and [next(counted), next(counted)] == [77, 78]


def _test_islice() -> bool:
    global _islice_known
    sliced = itertools.islice(itertools.count(), 0, 10, 1)
    list(zip(range(3), sliced, strict=False))
    drawn = _read_islice(sliced)
    _islice_known = _holds(sliced, 1, drawn[0]) and _holds(sliced, 4, drawn[3])
    return _set_islice(sliced, [9, 10, 1, 9]) and len(list(sliced)) == 1


def _passes(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except Exception:
        return False


_enumerate_known = _count_known = _islice_known = False
_enumerate_known = _passes(_test_enumerate)
_count_known = _passes(_test_count)
_islice_known = _passes(_test_islice)
