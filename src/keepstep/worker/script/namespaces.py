"""Nodes for namespaces: locals of frames and generators, globals of modules, attributes of objects
and classes, closures of functions. See nodes.py for how they work together.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import queue
import threading
import types
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import numpy
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import attributes, frames, graph, iterators, stack, values
from keepstep.worker.script.nodes import LEAF, MISSING, OPAQUE, Node
from keepstep.worker.state import codec

if TYPE_CHECKING:
    from keepstep.worker.script.discovery import Graph

_MODULE_OWN: Final = frozenset(vars(torch.nn.Module()))
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
HOOKS: Final = "<hooks>"


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


class Names(Node):
    """A dict of names: globals of a module, attributes of an object."""

    kind = "names"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.names: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.changing_names: set[str] = set()
        self.late_names: set[str] = set()
        self.lost: Counter[str] = Counter()  # opaque values, by how often they were rebound
        self.opaque: dict[str, str] = {}  # types of the values that are not carried
        self.fleeting: set[str] = set()
        self.begun = False
        self._ignored = 0

    @property
    def carried(self) -> bool:
        return bool(self.changing_names or self.late_names)

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
                graph.touch(self)

    def _rebound(self, graph: Graph, name: str, old: Any, value: Any) -> None:
        again = old.__class__ is _Gone and old.address == id(value)
        if values.same(old, value):
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
            if child in graph.fleeting and name in last:
                last[name] = _Gone(id(last[name]))

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
        return [changing, late]

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
        self.changing_names.update(data[0])
        self.late_names.update(data[1])


def _cells(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_cellvars + code.co_freevars


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

    def wake(self, graph: Graph) -> None:
        if self._asleep is not None:
            self.target, self._asleep = self._asleep(), None
            if self.target is None:
                graph.forget_dead(self)
                return
            self.names = vars(self.target)
            graph.nodes[id(self.target)] = self
            graph.versions.watch(self.names, self)
        self.scan(graph)


class _Unbound:
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


class ModuleGlobals(_Unbound, DictNames):
    kind = "module"

    def rest(self, graph: Graph) -> None:
        Names.rest(self, graph)

    def about(self) -> str:
        return ""


def _users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return graph.origin(hook) != "library"


def _told(hooked: list[dict[Any, Any]]) -> tuple[tuple[str, ...], ...]:
    """Hooks without torch's own, which come and go as models are wrapped; classes of modules."""
    *hooks, modules = hooked
    users = [[x for x in each.values() if _users(x)] for each in hooks]
    inside = [f"{name}: {values.name_of(kind)}" for name, kind in modules.items()]
    return (*(tuple(map(values.described, each)) for each in users), tuple(inside))


class NetworkNames(DictNames):
    """An nn.Module: plain attributes; what torch keeps in it is state and carried as such."""

    kind = "network"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        origin = type(target).__module__
        self._plain = not origin.startswith("torch.") or origin.startswith("torch.nn.modules")
        self._hooks: list[dict[Any, Any]] | None = None
        self._watched: list[dict[Any, Any]] = []
        self._watch(graph)

    def _watch(self, graph: Graph) -> None:
        self._watched = [vars(self.target)[name] for name in ("_modules", *_HOOKS)]
        for inside in self._watched:
            graph.versions.watch(inside, self)

    def unwatch(self, graph: Graph) -> None:
        for inside in self._watched:
            graph.versions.forget(inside)
        self._watched = []

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        if self.target is None:
            self.unwatch(graph)

    def wake(self, graph: Graph) -> None:
        super().wake(graph)
        if self.target is not None and not self._watched:
            self._watch(graph)

    def ignored(self, name: str) -> bool:
        return not self._plain or name in _MODULE_OWN or name.startswith("__")

    def scan(self, graph: Graph) -> None:
        super().scan(graph)
        self._scan_hooks(graph)
        for name, module in self.target._modules.items():
            child = self.children.get(("module", name))
            if child is not None and child.target is not None and child.target is not module:
                graph.release(self, ("module", name))  # another one has taken its place
                child = None
            if module is not None and child is None:
                graph.adopt(module, self, ("module", name))

    def _scan_hooks(self, graph: Graph) -> None:
        now = self._hooked()
        if self._hooks is not None and now != self._hooks:
            graph.note(self, HOOKS, self._hooks)
            self.changing_names.add(HOOKS)
            graph.touch(self)
        self._hooks = now

    def payload(self, graph: Graph) -> Any:
        changing, late = super().payload(graph)
        if HOOKS in self.changing_names and self._hooks is not None:
            changing[HOOKS] = graph.pack(_told(self._hooks), self)
        return [changing, late]

    def _hooked(self) -> list[dict[Any, Any]]:
        modules = {name: type(module) for name, module in self.target._modules.items()}
        return [*(dict(vars(self.target)[name]) for name in _HOOKS), modules]

    def put_back(self, old: dict[str, Any]) -> None:
        hooks = old.pop(HOOKS, None)
        for name, there in zip(_HOOKS, hooks or ()):  # modules inside stay
            mine = vars(self.target)[name]
            mine.clear()
            mine.update(there)
        super().put_back(old)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        theirs = data[0].pop(HOOKS, None)
        super().apply(data, referred)
        if theirs is None:
            return
        if values.unpack(theirs, referred) != _told(self._hooked()):
            raise UsageError(
                f"{self.label} of the rank that is replaced has other hooks or modules inside, "
                "which it got while it trained",
                hint="build them before the first step, and let a variable turn them on",
            )
        self.changing_names.add(HOOKS)


class OptimizerNames(DictNames):
    """An optimizer: objects that it keeps. Plain data is carried by attributes.py."""

    kind = "optimizer"

    def ignored(self, name: str) -> bool:
        if name in attributes.TORCHS or name.startswith("__"):
            return True
        value = self.names[name]
        if name in self.last or not isinstance(value, (*attributes.PLAIN, torch.optim.Optimizer)):
            return False
        return isinstance(value, torch.optim.Optimizer) or attributes.is_data(value)


class RegisteredNames(DictNames):
    """A registered object: numbers and the like, which its state_dict may have left out."""

    kind = "registered"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        save = getattr(target, "state_dict", None)
        saved = save() if callable(save) else {}
        saved = saved if isinstance(saved, dict) else {}
        names = [key for key in saved if isinstance(key, str)]
        self._saved = frozenset(way for key in names for way in (key, f"_{key}", key.lstrip("_")))
        self._marks = self._marked()
        if self._marks:  # under another name
            there = {_encoded(value) for value in saved.values()}
            self._saved |= {name for name in self._marks if _encoded(self.names[name]) in there}

    def ignored(self, name: str) -> bool:
        if name in self._saved or name.startswith("__"):
            return True
        if values.is_leaf_type(type(self.names[name])):
            return False
        self.last.pop(name, None)  # it was a number before
        self.changing_names.discard(name)
        self.late_names.discard(name)
        return True

    def left_out(self) -> list[str]:
        """Containers, tensors and arrays that its state_dict does not have, and that have changed
        since the last call."""
        before, self._marks = self._marks, self._marked()
        return [name for name, mark in self._marks.items() if before.get(name) != mark]

    def _marked(self) -> dict[str, Any]:
        if self.target is None or not graph.user_code(type(self.target)):
            return {}
        return {
            name: _mark(value)
            for name, value in list(self.names.items())
            if name not in self._saved and isinstance(value, _INSIDE)
        }


_INSIDE: Final = (list, dict, set, deque, torch.Tensor, numpy.ndarray)
_MARKED_MAX: Final = 64  # items of a container


def _mark(value: Any, depth: int = 2) -> Any:
    """Cheap, and another one when the value has changed; of a large container, often."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, numpy.ndarray):
        small = value.nbytes <= values.BYTES_MAX and not value.dtype.hasobject
        return id(value), value.tobytes() if small else b""
    if not isinstance(value, _INSIDE) or not depth:
        return value if value.__class__ in values.SCALARS else id(value)
    items = value.values() if isinstance(value, dict) else value
    return len(value), [_mark(item, depth - 1) for item in itertools.islice(items, _MARKED_MAX)]


def _encoded(value: Any) -> bytes | None:
    plain = list(value) if isinstance(value, set | deque | tuple) else value
    try:
        return codec.dumps_inline(plain)
    except UsageError:
        return None


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
        return name.startswith("__") or hasattr(type(self.names[name]), "__get__")

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

    def about(self) -> str:
        return values.described(self.target)


class FrameNames(_Unbound, Names):
    """Locals of a running function, or of a suspended generator, and the iterators of its loops.
    The node outlives the frame: the next call of the function is compared with this one."""

    kind = "frame"
    moves = True

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self._at = -1
        self._stood = -1

    def frame(self) -> FrameType | None:
        target = self.target
        if isinstance(target, types.GeneratorType):
            return target.gi_frame
        return target  # type: ignore[no-any-return]

    def foreign(self) -> bool:
        """A function of an installed package, which is not the user's."""
        frame = self.frame()
        return frame is not None and frames.origin(frame.f_code.co_filename) == "library"

    def read(self) -> dict[str, Any]:
        frame = self.frame()
        if frame is None:
            return {}
        names = frames.read(frame) if frames.is_function(frame.f_code) else {}
        if frame is self.target:
            names.update(stack.operands(frame))
        return names

    def write(self, new: dict[str, Any]) -> None:
        frame = self.frame()
        if frame is None:
            return
        names = {name: new[name] for name in new if not name.startswith(stack.OPERAND)}
        if names:
            frames.write(frame, names)
        for name in new.keys() - names.keys():
            stack.set_operand(frame, name, new[name])

    def remove(self, name: str) -> None:
        """A function's local cannot be unbound from outside; the retry binds it again."""

    def about(self) -> str:
        frame = self.frame()
        if frame is None:
            return "ended"
        at = f"@{frame.f_lasti}" if isinstance(self.target, types.GeneratorType) else ""
        return f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}{at}"

    def scan(self, graph: Graph) -> None:
        frame = self.frame()
        if self.still and graph.journal is not None:
            return
        if self.depth > 0 and frame is not None and frame.f_lasti != self._stood:
            self._stood = frame.f_lasti  # it is part of what is said about a generator
            graph.touch(self)
        if self.depth == 0 and graph.journal is not None:
            # A step that runs inside reaches the locals of its callers through cells only.
            if frame is not None and _cells(frame):
                self._scan_cells(graph, frame)
            return
        super().scan(graph)
        if frame is None or graph.journal is not None:
            return
        self._at = frame.f_lasti
        for i, (iterator, line) in enumerate(self._loops(frame)):
            key = ("for", i)
            child = self.children.get(key)
            if child is None or child.target is not iterator:
                graph.release(self, key)
                if iterators.is_iterator(iterator):
                    graph.adopt(iterator, self, key, f"{self.label} line {line}")

    def refuse_moved(self) -> None:
        """Before a retry: a generator that stands at another `yield` cannot go back."""
        frame = self.frame()
        if frame is None or frame.f_lasti != self._at:
            raise UsageError(
                f"the generator {self.label} was advanced to another yield inside a step that must "
                "be repeated",
                hint="draw from it before the step and pass the value, or use ks.batches",
            )

    def _scan_cells(self, graph: Graph, frame: FrameType) -> None:
        names, last = frames.read(frame), self.last
        for name in _cells(frame):
            value = names.get(name, MISSING)
            if value is not MISSING and value is not last.get(name, MISSING):
                self._rebound(graph, name, last.get(name, MISSING), value)

    def set_loop(self, key: Any, iterator: Any) -> bool:
        frame = self.frame()
        if frame is None or key.__class__ is not tuple or key[0] != "for":
            return False
        stack.set_loop(frame, key[1], iterator)
        return True

    def _loops(self, frame: FrameType) -> list[tuple[Any, int]]:
        loops = stack.loop_iterators(frame)
        inner = getattr(self.target, "gi_yieldfrom", None)
        return loops if inner is None else [*loops, (inner, frame.f_lineno)]

    @property
    def carried(self) -> bool:
        return self.depth > 0 or super().carried

    def wake(self, graph: Graph) -> None:
        """It is scanned with the others."""

    def varies(self, key: Any) -> bool:
        return isinstance(key, tuple) or super().varies(key)

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        for key in [key for key in self.children if isinstance(key, tuple)]:
            graph.release(self, key)
        if self.depth == 0:
            self.target = None

    def leave(self, graph: Graph) -> None:
        """The function has returned."""
        for key in list(self.children):
            graph.release(self, key)
        self.last = {n: v for n, v in self.last.items() if v.__class__ in values.SCALARS}


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
