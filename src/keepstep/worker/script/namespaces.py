"""Nodes for namespaces: globals of modules, attributes of objects and classes, closures.

See nodes.py for how they work together, torch_names.py for what torch and registered objects keep,
frame_names.py for the locals of running functions.
"""

from __future__ import annotations

import gc
import io
import queue
import threading
import types
import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy
import torch

from keepstep.worker.script import graph, values
from keepstep.worker.script.nodes import LEAF, MISSING, OPAQUE, Graph, VariableNode


class _Gone:
    """In the place of a value that is not held."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address


_DIRECT: Final = frozenset({float, bool, type(None)})
_LONG: Final = frozenset({str, bytes})
_SHORT: Final = values.SCALARS | {_Gone}
# Of those that are left alone, what can change in place.
_UNSEEN: Final = (array, bytearray, queue.Queue, queue.SimpleQueue, threading.local)


class Names(VariableNode):
    """A dict of names: globals of a module, attributes of an object."""

    kind = "names"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.names: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.changing_names: set[str] = set()
        self.late_names: set[str] = set()
        self.removed: set[str] = set()  # a newcomer unbinds them
        self.lost: Counter[str] = Counter()  # opaque values, by how often they were rebound
        self.opaque: dict[str, str] = {}  # types of the values that are not carried
        self.fleeting: set[str] = set()
        self.begun = False
        self._ignored = 0

    @property
    def carried(self) -> bool:
        return bool(self.changing_names or self.late_names or self.removed)

    def varies(self, key: Any) -> bool:
        return key in self.changing_names or key in self.late_names

    def about(self) -> str:
        return values.name_of(type(self.target))

    def read(self) -> dict[str, Any]:
        return self.names

    def write(self, new: dict[str, Any]) -> None:
        self.names.update(new)

    def remove(self, name: str) -> None:
        self.names.pop(name, None)

    def ignored(self, name: str) -> bool:
        return name.startswith("__")

    def scan(self, graph: Graph) -> None:
        last, names, known, scalars = self.last, self.read(), self.changing_names, values.SCALARS
        counted = False
        for name, value in tuple(names.items()):  # another thread may add to them
            old = last.get(name, MISSING)
            if value is old:
                continue
            if name in known and value.__class__ in scalars and old.__class__ in scalars:
                if graph.journal is not None:
                    graph.note(self, name, old)
                last[name] = value
                counted = True
            elif not self.ignored(name):
                self._rebound(graph, name, old, value)
        if counted:
            graph.touch(self)
        if not self.begun:
            self._ignored = len(names) - len(last)
            self.begun = True
        elif len(last) + self._ignored > len(names):
            for name in [name for name in last if name not in names]:
                graph.note(self, name, last.pop(name))
                graph.release(self, name)
                if name not in self.late_names or self.late:
                    self.removed.add(name)
                self.changing_names.discard(name)
                self.late_names.discard(name)
                graph.touch(self)

    def _rebound(self, graph: Graph, name: str, old: Any, value: Any) -> None:
        self.removed.discard(name)
        again = old.__class__ is _Gone and old.address == id(value)
        child = self.children.get(name) if again else None
        if values.same(old, value) or (child is not None and child.target is value):
            self.last[name] = value
            return
        if not again:
            graph.note(self, name, old)
        self.last[name] = value
        graph.release(self, name)
        found = graph.adopt(value, self, name)
        if found is OPAQUE:
            self._opaque(graph, name, value, rebound=old is not MISSING and not again)
            return
        if found is not LEAF and (found.moves or found.kind == "block"):
            self._fleet(graph, name)
        was_opaque = self.opaque.pop(name, None) is not None
        if again and not was_opaque:
            self.raw = self.entry = None  # it refers to a node that is gone
            return
        if old is not MISSING and not again:
            self.changing_names.add(name)
        elif self.begun or graph.settled:
            self.late_names.add(name)
        graph.touch(self)

    def _opaque(self, graph: Graph, name: str, value: Any, *, rebound: bool) -> None:
        self.opaque[name] = _kind(value)
        if rebound:
            self.lost[name] += 1
            if self.varies(name):
                graph.touch(self)
        if name in self.lost or isinstance(value, torch.Tensor) or hasattr(value, "__next__"):
            self._fleet(graph, name)

    def address(self, name: str) -> int:
        value = self.last.get(name)
        return value.address if isinstance(value, _Gone) else id(value)

    def _fleet(self, graph: Graph, name: str) -> None:
        self.fleeting.add(name)
        graph.fleeting.setdefault(self)

    def rest(self, graph: Graph) -> None:
        last = self.last
        for name in self.fleeting:
            value = last.get(name, MISSING)
            if value is not MISSING and value.__class__ not in _SHORT:
                last[name] = _Gone(id(value))
                graph.release(self, name)
        for name, child in self.children.items():
            value = last.get(name, MISSING)
            if child in graph.fleeting and value is not MISSING and value.__class__ is not _Gone:
                last[name] = _Gone(id(value))

    def wake(self, graph: Graph) -> None:
        self.scan(graph)

    def payload(self, graph: Graph) -> Any:
        changing: dict[str, Any] = {}
        late: dict[str, Any] = {}
        for names, found in ((self.changing_names, changing), (self.late_names, late)):
            for name in names:
                value = self.last.get(name, MISSING)
                if value is MISSING or (names is self.late_names and name in self.changing_names):
                    continue
                if value.__class__ in _DIRECT:
                    found[name] = value
                    continue
                if value.__class__ in _LONG and len(value) > values.BYTES_MAX:
                    graph.omit(f"{self.label}.{name}")
                    continue
                try:
                    found[name] = graph.pack(value, self)
                except values.NotPlain:
                    continue
        return [changing, late, sorted(self.removed)]

    def _carry_names(self, graph: Graph) -> None:
        more = self.last.keys() - self.changing_names - self.late_names - self.opaque.keys()
        if more:
            self.late_names |= more
            graph.touch(self)

    def put_back(self, old: dict[str, Any]) -> None:
        self.write({name: v for name, v in old.items() if v is not MISSING})
        for name, value in old.items():
            if value is MISSING:
                self.remove(name)

    def _unpacked(self, data: dict[str, Any], referred: Callable[[int], Any]) -> dict[str, Any]:
        return {name: values.unpack(value, referred) for name, value in data.items()}

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        new = self._unpacked(data[0], referred)
        mine = self.read()
        for name, value in self._unpacked(data[1], referred).items():
            if not values.belongs_to_slot(value, mine.get(name), referred.slot, values.slot_now):  # type: ignore[attr-defined]
                new[name] = value
        self.write(new)
        for name in data[2]:
            if name in mine:
                self.remove(name)
        self.changing_names.update(data[0])
        self.late_names.update(data[1])
        self.removed.update(data[2])


def _kind(value: Any) -> str:
    if isinstance(value, io.IOBase):
        return "file"
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        return "result"
    if isinstance(value, numpy.ndarray):
        plain = type(value) is numpy.ndarray and not value.dtype.hasobject
        return "ndarray" if plain or not value.flags.writeable else "unseen"
    if isinstance(value, _UNSEEN):
        return "unseen"
    return type(value).__qualname__


class DictNames(Names):
    """Attributes of an object: its dict is looked at only when the dict's version has changed."""

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.names = vars(target) if not isinstance(target, dict) else target
        self._about = values.name_of(type(target))
        self._asleep: Any = None
        graph.versions.watch(self.names, self)

    def carry_all(self, graph: Graph) -> None:
        if self.kind == "names":
            self._carry_names(graph)

    def about(self) -> str:
        return self._about

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        try:
            self._asleep = weakref.ref(self.target)
        except TypeError:
            return
        graph.nodes.pop(id(self.target), None)
        graph.versions.forget(self.names)
        self.target, self.names = None, {}

    def hold(self, graph: Graph) -> None:
        if self._asleep is None:
            return
        self.target, self._asleep = self._asleep(), None
        if self.target is None:
            graph.forget_dead(self)
            return
        self.names = vars(self.target)
        graph.nodes[id(self.target)] = self
        graph.versions.watch(self.names, self)


class Unbound:
    """Functions that a newcomer has not come to define: it does, or has a NameError."""

    def _unpacked(self, data: dict[str, Any], referred: Callable[[int], Any]) -> dict[str, Any]:
        new, mine = {}, self.read()  # type: ignore[attr-defined]
        for name, value in data.items():
            try:
                new[name] = values.unpack(value, referred)
            except values.NoSuchFunction:
                if name in mine:
                    raise
        return new


class ModuleGlobals(Unbound, DictNames):
    kind = "module"

    def rest(self, graph: Graph) -> None:
        Names.rest(self, graph)

    def about(self) -> str:
        return ""


class SlotNames(Names):
    """An object with __slots__."""

    kind = "slots"

    def carry_all(self, graph: Graph) -> None:
        self._carry_names(graph)

    def read(self) -> dict[str, Any]:
        target = self.target
        found: dict[str, Any] = {}
        for base in type(target).__mro__:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    try:
                        found[name] = member.__get__(target)
                    except AttributeError:
                        continue
        found.update(getattr(target, "__dict__", {}))
        return found

    def write(self, new: dict[str, Any]) -> None:
        for name, value in new.items():
            object.__setattr__(self.target, name, value)

    def remove(self, name: str) -> None:
        object.__delattr__(self.target, name)


class ClassNames(DictNames):
    """Attributes of a class: reads come from the dict behind the proxy that Python shows."""

    kind = "class"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        Names.__init__(self, graph, target, label, depth)
        self.names = gc.get_referents(vars(target))[0]
        graph.versions.watch(self.names, self)

    def ignored(self, name: str) -> bool:
        value = self.names[name]
        if name.startswith("__") or not hasattr(type(value), "__get__"):
            return name.startswith("__")
        return not isinstance(value, types.FunctionType) or not inside_function(value)

    def write(self, new: dict[str, Any]) -> None:
        for name, value in new.items():
            setattr(self.target, name, value)

    def remove(self, name: str) -> None:
        delattr(self.target, name)

    def rest(self, graph: Graph) -> None:
        Names.rest(self, graph)

    def wake(self, graph: Graph) -> None:
        self.scan(graph)

    def about(self) -> str:
        return values.name_of(self.target)


def inside_function(function: types.FunctionType) -> bool:
    """It has cells or defaults, in which it may keep something."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    cells = any(name != "__class__" for name in function.__code__.co_freevars)
    return cells or not all(values.is_leaf_type(type(value)) for value in defaults)


class FunctionNames(Names):
    """Cells of a closure, defaults, and attributes of a function."""

    kind = "function"

    def read(self) -> dict[str, Any]:
        function = self.target
        found: dict[str, Any] = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                found[name] = cell.cell_contents
            except ValueError:
                continue
        for i, value in enumerate(function.__defaults__ or ()):
            found[f"<default {i}>"] = value
        for name, value in (function.__kwdefaults__ or {}).items():
            found[f"<default {name}>"] = value
        for name, value in function.__dict__.items():
            found[f".{name}"] = value
        return found

    def write(self, new: dict[str, Any]) -> None:
        function = self.target
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for name, value in new.items():
            if name in cells:
                cells[name].cell_contents = value
            elif name.startswith("."):
                setattr(function, name[1:], value)

    def remove(self, name: str) -> None:
        self.target.__dict__.pop(name[1:], None)

    def about(self) -> str:
        return values.described(self.target)


class Holder(Names):
    """An object that is entered but carries nothing itself: a loader, a partial, a method."""

    kind = "holder"

    def about(self) -> str:
        return values.described(self.target)

    def read(self) -> dict[str, Any]:
        return {label: value for label, _, _, value in graph.members(self.target)}

    def scan(self, graph: Graph) -> None:
        if self.begun:
            return
        self.begun = True
        for name, value in self.read().items():
            if name not in self.children:
                graph.adopt(value, self, name)


class Nothing(Holder):
    """Looked at once and found to hold nothing that can change."""

    def read(self) -> dict[str, Any]:
        return {}
