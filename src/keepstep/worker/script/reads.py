"""Which tensors and arrays a step reads by name.

`queue = torch.cat([keys, queue])[:4096]` makes a new tensor in every step. Large tensors, and those
on a device, are carried only if they are changed in place (blocks.py): a script binds batches and
losses to its names all the time, and nobody misses the old ones. One that the next step reads is
another matter.

What a step reads is seen in its code, and in that of the script's functions and methods that it
calls: globals, closures, and attributes of those and of `self`, where the first thing that the code
does with the name is to load it; of a small container, what is in it.
"""

from __future__ import annotations

import dis
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy
import torch

from keepstep.worker.script import frames, graph

CALLS_DEPTH_MAX: Final = 3
ITEMS_MAX: Final = 64  # of a container
_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_STORES: Final = frozenset({"STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"})
_ATTRIBUTES: Final = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_TENSORS: Final = frozenset({torch.Tensor, numpy.ndarray})
_CONTAINERS: Final = frozenset({list, tuple, deque})
_APPENDING: Final = frozenset({"append", "appendleft", "extend"})  # nothing is read by it

Get = Callable[[], Any]


class ReadPlace(NamedTuple):
    label: str
    get: Get


class Reads:
    def __init__(self) -> None:
        self._functions: dict[Any, list[ReadPlace]] = {}
        self._places: dict[str, ReadPlace] = {}  # that have held tensors

    def begins(self, function: Any, deep: bool) -> None:
        """`deep`: look at all places."""
        if not isinstance(getattr(function, "__code__", None), CodeType):
            return
        known = function.__code__, id(getattr(function, "__self__", None))
        places = self._functions.get(known)
        if places is None:
            places = self._functions[known] = _all_places(function)
            deep = True
        if deep:
            self._places |= {one.label: one for one in places if [*_tensors(one.get())]}

    def containers(self) -> set[int]:
        """Ids of those that are there now, and that are not only appended to."""
        found = (place.get() for places in self._functions.values() for place in places)
        return {id(x) for x in found if isinstance(x, list | dict | set | deque)}

    def ids(self) -> set[int]:
        """Of the tensors that are there now."""
        return {id(t) for place in self._places.values() for t in _tensors(place.get())}


def _tensors(value: Any) -> Iterator[Any]:
    kind = value.__class__
    if kind in _TENSORS:
        yield value
    elif kind is dict and len(value) <= ITEMS_MAX:
        yield from (item for item in value.values() if item.__class__ in _TENSORS)
    elif kind in _CONTAINERS and len(value) <= ITEMS_MAX:
        yield from (item for item in value if item.__class__ in _TENSORS)


def _all_places(function: Any) -> list[ReadPlace]:
    inner = getattr(function, "__func__", function)
    try:
        owner: Get = weakref.ref(getattr(function, "__self__", function))
    except TypeError:  # an instance that cannot be referred to weakly
        owner = _nobody
    found = _places(inner, owner, "self", set(), 0)
    return list({place.label: place for place in found}.values())


def _places(
    function: Any, owner: Get, called: str, seen: set[CodeType], depth: int
) -> Iterator[ReadPlace]:
    """`owner`: of a method, which is called `called` where the step begins."""
    code: CodeType = function.__code__
    if code in seen or depth > CALLS_DEPTH_MAX:
        return
    seen.add(code)
    first = code.co_varnames[0] if code.co_argcount else ""
    stored: set[str] = set()
    base: tuple[str, Get] | None = None
    instructions = [x for x in dis.get_instructions(code) if x.opname != "CACHE"]
    for instruction, following in itertools.zip_longest(instructions, instructions[1:]):
        name, opname = str(instruction.argval), instruction.opname
        appended = following is not None and following.argval in _APPENDING
        if opname in _LOADS:
            get = _named(function, name)
            base = name, get
            if name not in stored and not appended:
                yield ReadPlace(name, get)
            yield from _inside(get(), _nobody, "", seen, depth)
            continue
        if opname.startswith("LOAD_FAST") and name == first:
            base = called, owner
            continue
        if base is not None and opname in _ATTRIBUTES:
            label = f"{base[0]}.{name}"
            if label not in stored and not appended:
                yield ReadPlace(label, _attribute(base[1], name))
            method = getattr(type(base[1]()), name, None)
            yield from _inside(method, base[1], base[0], seen, depth)
        elif base is not None and opname == "STORE_ATTR":
            stored.add(f"{base[0]}.{name}")
        elif opname in _STORES:
            stored.add(name)
        base = None


def _inside(
    function: Any, owner: Get, called: str, seen: set[CodeType], depth: int
) -> Iterator[ReadPlace]:
    """Of a function of the script's own that is called, or of a method of its own or a helper's."""
    if not isinstance(function, FunctionType):
        return
    whose = frames.origin(function.__code__.co_filename)
    if whose == "script" or (whose == "library" and graph.helper(type(owner()))):
        yield from _places(function, owner, called, seen, depth + 1)


def _nobody() -> None:
    return None


def _named(function: Any, name: str) -> Get:
    free = function.__code__.co_freevars
    if name not in free:
        return lambda: function.__globals__.get(name)
    cell = function.__closure__[free.index(name)]

    def contents() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return None

    return contents


def _attribute(get: Get, name: str) -> Get:
    def value() -> Any:
        try:
            return object.__getattribute__(get(), "__dict__").get(name)
        except AttributeError:
            return None

    return value
