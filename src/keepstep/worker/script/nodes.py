"""What the script's variables hold, as a graph of things that can change.

Theory of operation
-------------------
A node stands for one thing that can change in place: a namespace (locals of a frame, globals of a
module, attributes of an object, cells of a function), a container, a small tensor or array, or an
iterator. Its parents are the places that refer to it; a thing that two names share is one node
with two parents. Nodes are found from the roots (frames, modules, step functions) by looking at
what is bound where, and again wherever a binding has changed.

    scan      compares a node with what it held last. What differs is marked as *changing*, for
              ever: from then on it is carried. What appears after the script's first transaction
              is carried too (*late*), since a newcomer's walk may make it from other values.
    journal   between begin and the fence, the first old value of everything that changes, so that
              a retry finds it again
    payload   what travels: of a namespace its changing names, of the rest everything

A value of a type that cannot be carried (an open file, a thread, a large tensor) is left alone
and remembered by name if its binding changes (`lost`, for the witness).

Between two transactions the graph must keep nothing alive that the script has let go: a loop that
the script leaves is over when its iterator dies, and an old batch needs its memory back. Tensors,
iterators and whatever else comes and goes (*fleeting*) are held only while a transaction runs;
objects that hold such things are held weakly.
"""

from __future__ import annotations

import argparse
import collections
import gc
import operator
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar, Final

import torch

from keepstep.worker.script import frames, graph, iterators, stack, values
from keepstep.worker.script.versions import Versions

DEPTH_MAX: Final = 12
NODES_MAX: Final = 20_000


class _Missing:
    def __repr__(self) -> str:
        return "(not there)"


MISSING: Final = _Missing()
OPAQUE: Final = _Missing()
LEAF: Final = _Missing()

_MODULE_OWN: Final = frozenset(vars(torch.nn.Module()))
_BAGS: Final = (types.SimpleNamespace, argparse.Namespace)
_LISTS: Final = (list, deque)
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)


class Node:
    kind: ClassVar[str] = ""

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        self.number = graph.next_number()
        self.target = target
        self.label = label
        self.depth = depth
        self.parents: dict[tuple[int, Any], Node] = {}
        self.children: dict[Any, Node] = {}
        self.changing = False
        self.late = graph.settled
        self.raw: Any = None  # encoded payload, while it is good
        self.refers: list[Node] = []

    @property
    def carried(self) -> bool:
        return self.changing or self.late

    def varies(self, key: Any) -> bool:
        """Whether the binding under this key is carried."""
        return self.carried

    def about(self) -> str:
        """What the newcomer's must be like."""
        return ""

    def scan(self, graph: Graph) -> None:
        raise NotImplementedError

    def wake(self, graph: Graph) -> None:
        """A transaction begins: hold again what is fleeting."""

    def rest(self, graph: Graph) -> None:
        """The transaction is over: hold nothing that the script may want to be freed."""

    def payload(self, graph: Graph) -> Any:
        raise NotImplementedError

    def put_back(self, old: Any) -> None:
        raise NotImplementedError

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        raise NotImplementedError


# ------------------------------------------------------------------------------------ namespaces


class _Gone:
    """In the place of a value that is not held."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address


_SHORT: Final = values.SCALARS | {_Gone}


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
        last, names = self.last, self.read()
        for name, value in names.items():
            old = last.get(name, MISSING)
            if value is not old and not self.ignored(name):
                self._rebound(graph, name, old, value)
        if not self.begun:
            self._ignored = len(names) - len(last)
            self.begun = True
        elif len(last) + self._ignored > len(names):
            for name in [name for name in last if name not in names]:
                graph.note(self, name, last.pop(name))
                graph.release(self, name)
                self.raw = None

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
        if found is not LEAF and isinstance(found, Position | FrameNames):
            self._fleet(graph, name)
        if again:
            return
        if old is not MISSING:
            self.changing_names.add(name)
        elif self.begun or graph.settled:
            self.late_names.add(name)
        self.raw = None

    def _opaque(self, graph: Graph, name: str, value: Any, *, rebound: bool) -> None:
        if rebound:
            self.lost[name] += 1
            self.raw = None
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
                try:
                    found[name] = graph.pack(value, self)
                except values.NotPlain:
                    continue
        return [changing, late]

    def put_back(self, old: dict[str, Any]) -> None:
        self.write({name: v for name, v in old.items() if v is not MISSING})
        for name, value in old.items():
            if value is MISSING:
                self.remove(name)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        new = {name: values.unpack(value, referred) for name, value in data[0].items()}
        mine = self.read()
        for name, packed in data[1].items():
            value = values.unpack(packed, referred)
            if not values.belongs_to_slot(value, mine.get(name), referred.slot, values.slot_now):  # type: ignore[attr-defined]
                new[name] = value
        self.write(new)
        self.changing_names.update(data[0])
        self.late_names.update(data[1])


class DictNames(Names):
    """Attributes of an object: its dict is looked at only when the dict's version has changed."""

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.names = vars(target) if not isinstance(target, dict) else target
        self._asleep: Any = None
        graph.versions.watch(self.names, self)

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
                return
            self.names = vars(self.target)
            graph.nodes[id(self.target)] = self
            graph.versions.watch(self.names, self)
        self.scan(graph)


class ModuleGlobals(DictNames):
    kind = "module"

    def rest(self, graph: Graph) -> None:
        Names.rest(self, graph)

    def about(self) -> str:
        return ""


class NetworkNames(DictNames):
    """An nn.Module: plain attributes; what torch keeps in it is state and carried as such."""

    kind = "network"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        origin = type(target).__module__
        self._plain = not origin.startswith("torch.") or origin.startswith("torch.nn.modules")

    def ignored(self, name: str) -> bool:
        return not self._plain or name in _MODULE_OWN or name.startswith("__")

    def scan(self, graph: Graph) -> None:
        super().scan(graph)
        for name, module in self.target._modules.items():
            if module is not None and (("module", name) not in self.children):
                graph.adopt(module, self, ("module", name))


class SlotNames(Names):
    """An object with __slots__."""

    kind = "slots"

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
        return f"{self.target.__module__}:{self.target.__qualname__}"


class FrameNames(Names):
    """Locals of a running function, or of a suspended generator, and the iterators of its loops.
    The node outlives the frame: the next call of the function is compared with this one."""

    kind = "frame"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.key = label

    def frame(self) -> FrameType | None:
        target = self.target
        if isinstance(target, types.GeneratorType):
            return target.gi_frame
        return target  # type: ignore[no-any-return]

    def read(self) -> dict[str, Any]:
        frame = self.frame()
        if frame is None or not frames.is_function(frame.f_code):
            return {}
        return frames.read(frame)

    def write(self, new: dict[str, Any]) -> None:
        frame = self.frame()
        if frame is not None and new:
            frames.write(frame, new)

    def remove(self, name: str) -> None:
        """A function's local cannot be unbound from outside; the retry binds it again."""

    def about(self) -> str:
        frame = self.frame()
        if frame is None:
            return "ended"
        at = f"@{frame.f_lasti}" if isinstance(self.target, types.GeneratorType) else ""
        return f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}{at}"

    def scan(self, graph: Graph) -> None:
        super().scan(graph)
        frame = self.frame()
        if frame is None:
            return
        loops = stack.loop_iterators(frame)
        for i, (iterator, line) in enumerate(loops):
            key = ("for", i)
            child = self.children.get(key)
            if child is None or child.target is not iterator:
                graph.release(self, key)
                if iterators.is_iterator(iterator):
                    graph.adopt(iterator, self, key, f"{self.label} line {line}")

    def varies(self, key: Any) -> bool:
        return isinstance(key, tuple) or super().varies(key)

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        for key in [key for key in self.children if isinstance(key, tuple)]:
            graph.release(self, key)
        self.target = None

    def leave(self, graph: Graph) -> None:
        """The function has returned."""
        for key in list(self.children):
            graph.release(self, key)
        self.last = {n: v for n, v in self.last.items() if v.__class__ in values.SCALARS}


# ------------------------------------------------------------------------ containers and tensors


class Items(Node):
    """A list, deque, set or dict. Carried whole if all of it is plain; of a dict with other things
    in it, the plain values."""

    kind = "items"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: Any = MISSING
        self.opaque = False
        self.too_large = False
        if isinstance(target, dict):
            graph.versions.watch(target, self)

    def about(self) -> str:
        return values.name_of(type(self.target))

    @property
    def not_plain(self) -> bool:
        return self.too_large or (self.opaque and not isinstance(self.target, dict))

    def scan(self, graph: Graph) -> None:
        target, last = self.target, self.last
        size = len(target)
        if self.too_large or size > values.ITEMS_MAX:
            self._scan_large(graph, size)
            return
        if last is not MISSING and last is not None and not isinstance(target, dict):
            if len(last) == size and _same_list(target, last, self.opaque):
                return
        if last is not MISSING:
            if last is not None:
                if isinstance(target, dict) and _same_items(target, last):
                    return
                graph.note(self, None, last)
            self.changing = True
        self.raw = None
        self._look_inside(graph, last)
        self.last = target.copy()
        if self.opaque and self.carried:
            graph.fleeting.setdefault(self)

    def wake(self, graph: Graph) -> None:
        self.scan(graph)

    def rest(self, graph: Graph) -> None:
        if not self.too_large:
            self.last = None  # looked at afresh when the next transaction begins

    def _scan_large(self, graph: Graph, size: int) -> None:
        if not self.too_large:
            self.too_large = True
            for key in list(self.children):
                graph.release(self, key)
            if self.last is not MISSING:
                graph.omit(self.label)
        elif self.last != size:
            graph.omit(self.label)
        self.last, self.raw = size, None

    def _look_inside(self, graph: Graph, last: Any) -> None:
        target = self.target
        done = 0
        if isinstance(target, list) and isinstance(last, list) and not self.opaque:
            if len(target) > len(last) and target[: len(last)] == last:
                done = len(last)
        if not done:
            self.opaque = False
            for key in list(self.children):
                graph.release(self, key)
        if isinstance(target, dict):
            pairs: Iterable[tuple[Any, Any]] = target.items()
        else:
            pairs = enumerate(target) if not done else enumerate(target[done:], done)
        scalars = values.SCALARS
        for key, value in pairs:
            if value.__class__ not in scalars and graph.adopt(value, self, key) is OPAQUE:
                self.opaque = True

    def payload(self, graph: Graph) -> Any:
        target = self.target
        if self.too_large:
            return None
        try:
            if isinstance(target, dict):
                packed: Any = self._pack_dict(graph)
            else:
                packed = [graph.pack(value, self) for value in target]
        except values.NotPlain:
            return None
        return packed

    def _pack_dict(self, graph: Graph) -> list[Any]:
        packed = [not self.opaque]
        for key, value in self.target.items():
            try:
                packed += [graph.pack(key, self), graph.pack(value, self)]
            except values.NotPlain:
                if not self.opaque:
                    raise
        return packed

    def put_back(self, old: Any) -> None:
        target = self.target
        if isinstance(target, list):
            target[:] = old
        elif isinstance(target, deque):
            target.clear()
            target.extend(old)
        else:
            target.clear()
            target.update(old)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        if data is None:
            return
        target = self.target
        if isinstance(target, dict):
            pairs = iter([values.unpack(x, referred) for x in data[1:]])
            new = dict(zip(pairs, pairs))
            if data[0]:
                self.put_back(new)
            else:
                target.update(new)
        else:
            self.put_back([values.unpack(x, referred) for x in data])


def _same_list(target: Any, last: Any, opaque: bool) -> bool:
    if opaque:  # comparing tensors is dear, and asks the device
        return all(map(operator.is_, target, last))
    try:
        return bool(target == last)
    except Exception:  # a comparison of the user's
        return False


def _same_items(target: dict[Any, Any], last: dict[Any, Any]) -> bool:
    if len(target) != len(last):
        return False
    pairs = zip(target.items(), last.items())
    return all(k is a and v is b for (k, v), (a, b) in pairs)


class Blob(Node):
    """A small tensor on the CPU, a numpy array or a bytearray: its bytes."""

    kind = "blob"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: bytes | None = None
        self.plain = target
        if isinstance(target, torch.Tensor):
            self.plain = target.detach().numpy()  # the same memory

    def about(self) -> str:
        target = self.target
        if isinstance(target, bytearray):
            return "bytearray"
        return f"{type(target).__name__} {target.dtype} {list(target.shape)}"

    def scan(self, graph: Graph) -> None:
        plain = self.plain
        now = bytes(plain) if plain.__class__ is bytearray else plain.tobytes()
        if now == self.last:
            return
        if self.last is not None:
            graph.note(self, None, self.last)
            self.changing = True
        self.last, self.raw = now, None

    def payload(self, graph: Graph) -> Any:
        target = self.target
        grad = isinstance(target, torch.Tensor) and target.requires_grad
        return [graph.pack_blob(self.plain, isinstance(target, torch.Tensor)), grad]

    def put_back(self, old: bytes) -> None:
        if isinstance(self.target, bytearray):
            self.target[:] = old
        elif len(old):
            import numpy

            flat = numpy.frombuffer(old, dtype=self.plain.dtype)
            self.plain[...] = flat.reshape(self.plain.shape)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        value = made(data)
        self.put_back(bytes(value) if isinstance(value, bytearray) else _array(value).tobytes())


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def made(data: Any) -> Any:
    from keepstep.worker import codec

    value = codec.loads_inline(data[0])
    return value.requires_grad_() if data[1] else value


class Position(Node):
    """An iterator; generators that it draws from are frames below it."""

    kind = "iterator"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: Any = None

    @property
    def carried(self) -> bool:
        return True

    def about(self) -> str:
        return type(self.target).__name__

    def scan(self, graph: Graph) -> None:
        now = iterators.position(self.target)
        if now != self.last:
            if self.last is not None:
                graph.note(self, None, self.last)
                self.changing = True
            self.last, self.raw = now, None
        for i, generator in enumerate(iterators.generators(self.target)):
            key = ("generator", i)
            child = self.children.get(key)
            if child is None or child.target is not generator:
                graph.release(self, key)
                graph.adopt(generator, self, key)

    def payload(self, graph: Graph) -> Any:
        return self.last

    def put_back(self, old: Any) -> None:
        iterators.set_position(self.target, old, self.label)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        iterators.set_position(self.target, data, self.label)


class Holder(Names):
    """An object that is entered but carries nothing itself: a loader, a partial, a method."""

    kind = "holder"

    def read(self) -> dict[str, Any]:
        return {label: value for label, _, _, value in graph.members(self.target)}

    def scan(self, graph: Graph) -> None:
        if self.begun:
            return
        self.begun = True
        for name, value in self.read().items():
            if name not in self.children:
                graph.adopt(value, self, name)


# --------------------------------------------------------------------------------------- graph


class Graph:
    def __init__(self, known: Callable[[Any], bool]) -> None:
        self.known = known
        self.settled = False  # the script's first transaction has begun
        self.versions = Versions()
        self.nodes: dict[int, Node] = {}  # by the id of their target
        self.roots: dict[str, Names] = {}
        self.journal: dict[Node, Any] | None = None
        self.excluded: frozenset[int] = frozenset()  # arguments of the call: the walk has them
        self.omitted: dict[str, None] = {}
        self.fleeting: dict[Node, None] = {}
        self._number = 0
        self._looked_at: list[Node] = []  # without a version: scanned every time
        self._makers: dict[type, Callable[..., Node] | _Missing] = {}
        self._packing: Node | None = None

    def next_number(self) -> int:
        self._number += 1
        return self._number

    # -------------------------------------------------------------- finding

    def root(self, name: str, make: Callable[..., Names], target: Any) -> Names:
        found = self.roots.get(name)
        if found is None:
            found = self.roots[name] = make(self, target, name, 0)
            if not isinstance(found, FrameNames):
                self._register(found)
        return found

    def adopt(self, value: Any, parent: Node, key: Any, label: str = "") -> Any:
        """A node below `parent`, LEAF, or OPAQUE."""
        kind = value.__class__
        if kind in values.SCALARS:
            return LEAF
        node = self.nodes.get(id(value))
        if node is None:
            maker = self._makers.get(kind)
            if maker is None:
                maker = self._makers[kind] = _maker(kind)
            if maker is LEAF:
                return LEAF
            if kind is tuple or maker is tuple:
                return self._adopt_tuple(value, parent, key)
            if maker is OPAQUE or not self._suits(value, maker):
                return OPAQUE
            if parent.depth >= DEPTH_MAX or len(self.nodes) >= NODES_MAX:
                return OPAQUE
            label = label or f"{parent.label}{_suffix(key)}"
            node = maker(self, value, label, parent.depth + 1)  # type: ignore[operator]
            self._register(node)
            node.scan(self)
        node.parents[parent.number, key] = parent
        parent.children[key] = node
        if isinstance(node, Holder) or (isinstance(node, Items) and node.not_plain):
            return OPAQUE
        return node

    def _suits(self, value: Any, maker: Any) -> bool:
        if maker is Blob:
            return self._small(value)
        if maker is FrameNames:
            code = value.gi_code
            return value.gi_frame is not None and frames.origin(code.co_filename) != "skipped"
        if maker is NetworkNames:
            return True
        return id(value) not in self.excluded and not self.known(value)

    def _small(self, value: Any) -> bool:
        if isinstance(value, bytearray):
            return len(value) <= values.BYTES_MAX
        if value.nbytes > values.BYTES_MAX or id(value) in self.excluded:
            return False
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.grad_fn is not None or self.known(value):
                return False
            return value.layout is torch.strided and value.dtype is not torch.bfloat16
        return value.dtype.kind in "?biufc"

    def _adopt_tuple(self, value: Any, parent: Node, key: Any) -> Any:
        result: Any = LEAF
        for i, item in enumerate(value):
            if item.__class__ in values.SCALARS:
                continue
            if self.adopt(item, parent, (key, i)) is OPAQUE:
                result = OPAQUE
        return result

    def _register(self, node: Node) -> None:
        self.nodes[id(node.target)] = node
        if not isinstance(node, DictNames | Holder):
            if not (isinstance(node, Items) and isinstance(node.target, dict)):
                self._looked_at.append(node)

    def release(self, parent: Node, key: Any) -> None:
        """The binding is gone; so is the node, if it was the last."""
        child = parent.children.pop(key, None)
        if child is None:
            if parent.children:
                for inner in [k for k in parent.children if k.__class__ is tuple and k[0] == key]:
                    self.release(parent, inner)
            return
        child.parents.pop((parent.number, key), None)
        if not child.parents and self.nodes.get(id(child.target)) is child:
            self._drop(child)

    def _drop(self, node: Node) -> None:
        self.nodes.pop(id(node.target), None)
        self.fleeting.pop(node, None)
        if isinstance(node, DictNames):
            self.versions.forget(node.names)
        elif isinstance(node, Items) and isinstance(node.target, dict):
            self.versions.forget(node.target)
        elif node in self._looked_at:
            self._looked_at.remove(node)
        for key in list(node.children):
            self.release(node, key)

    def sweep(self) -> None:
        """Drop what only refers to itself."""
        reached: set[int] = set()
        todo: list[Node] = list(self.roots.values())
        while todo:
            node = todo.pop()
            if node.number not in reached:
                reached.add(node.number)
                todo.extend(node.children.values())
        for node in [n for n in self.nodes.values() if n.number not in reached]:
            self._drop(node)

    # -------------------------------------------------------------- looking

    def scan(self) -> None:
        for node in self.versions.changed():
            node.scan(self)
        for node in tuple(self._looked_at):
            node.scan(self)
        for root in self.roots.values():
            if isinstance(root, FrameNames) and root.target is not None:
                root.scan(self)

    def note(self, node: Node, name: str | None, old: Any) -> None:
        if self.journal is None:
            return
        if name is None:
            self.journal.setdefault(node, old)
        else:
            self.journal.setdefault(node, {}).setdefault(name, old)

    def omit(self, label: str) -> None:
        self.omitted.setdefault(label)

    # -------------------------------------------------------------- packing

    def pack(self, value: Any, node: Node) -> Any:
        self._packing = node
        return values.pack(value, self._refer)

    def pack_blob(self, plain: Any, tensor: bool) -> bytes:
        from keepstep.worker import codec

        return codec.dumps_inline(torch.from_numpy(plain) if tensor else plain)

    def _refer(self, value: Any) -> int | None:
        found = self.nodes.get(id(value))
        if found is None:
            return None
        if isinstance(found, Holder) or (isinstance(found, Items) and found.not_plain):
            raise values.NotPlain
        assert self._packing is not None
        self._packing.refers.append(found)
        return found.number


def _suffix(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else key
    if isinstance(key, tuple) and key and key[0] == "module":
        return f".{key[1]}"
    return f"[{key!r}]"


def _maker(kind: type) -> Any:
    numpy: Any = __import__("numpy")
    if kind in _DICTS or kind in _LISTS or kind is set:
        return Items
    if kind is torch.Tensor or kind is numpy.ndarray or kind is bytearray:
        return Blob
    if kind is types.GeneratorType:
        return FrameNames
    if kind in iterators._KINDS:
        return Position
    if issubclass(kind, tuple):
        return tuple
    if values.is_leaf_type(kind) or kind is frozenset:
        return LEAF
    if issubclass(kind, torch.nn.Module):
        return NetworkNames
    if kind is types.FunctionType:
        return _function_maker
    if issubclass(kind, type):
        return _class_maker
    if kind in _BAGS or graph.user_code(kind):
        if issubclass(kind, dict | list | set | collections.deque):
            return Items
        return DictNames if kind.__dictoffset__ and not _slotted(kind) else SlotNames
    if kind is types.MethodType or graph._entered(kind, False) or kind.__name__ == "partial":
        return Holder
    return OPAQUE


def _slotted(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _function_maker(graph_: Graph, value: Any, label: str, depth: int) -> Node:
    own = frames.origin(value.__code__.co_filename) != "skipped"
    if value.__dict__ or (own and (value.__closure__ or value.__defaults__)):
        return FunctionNames(graph_, value, label, depth)
    return _Nothing(graph_, value, label, depth)


def _class_maker(graph_: Graph, value: Any, label: str, depth: int) -> Node:
    kind = ClassNames if graph.user_code(value) else _Nothing
    return kind(graph_, value, label, depth)


class _Nothing(Holder):
    def read(self) -> dict[str, Any]:
        return {}

