"""Nodes for what variables hold: containers, small tensors and arrays, iterators. See nodes.py."""

from __future__ import annotations

import operator
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import iterators, object_keys, set_tables, values
from keepstep.worker.script.nodes import MISSING, OPAQUE, Graph, VariableNode
from keepstep.worker.state import codec

_PLACE: Final = "<place>"
ATTRIBUTES: Final = "<attributes>"  # key of what a container of the script's own class has besides
UNNAMED: Final = "?"
_OBJECTS: Final = "objects"  # among the keys


def _told(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_told, key))
    return key.__class__ in values.SCALARS


class Items(VariableNode):
    """A list, deque, set, dict or array of objects. Carried whole if all of it is plain; of a dict
    with other things in it, the plain values."""

    kind = "items"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: Any = MISSING
        self.opaque = False
        self.too_large = False
        self.flat = True  # nothing but scalars
        self._keyed = False  # has keys of other kinds
        self.rekeyed = False  # and has got others
        self._about = container_about(target)
        usual = type(target).__module__ in ("builtins", "collections")
        self._attributes: Any = None if usual else getattr(target, "__dict__", None)
        if self._attributes is target:  # its attributes are its items
            self._attributes = None
        if isinstance(target, dict):
            graph.versions.watch(target, self)

    def about(self) -> str:
        return self._about

    def carry_all(self, graph: Graph) -> None:
        if not self.carried:
            self.late = True
            graph.touch(self)

    @property
    def not_plain(self) -> bool:
        return self.too_large or (self.opaque and not isinstance(self.target, dict))

    def scan(self, graph: Graph) -> None:
        target, last = self.target, self.last
        size = len(target) if not isinstance(target, set) else set.__len__(target)
        if self.too_large or size > values.ITEMS_MAX:
            self._scan_large(graph, size)
            return
        if last is not MISSING and last is not None:
            if len(last) == size and _same(target, last):
                return
            graph.note(self, None, last)
            self.changing = True
            if self._keyed:
                kept = size == len(last) and all(map(operator.is_, target, last))
                self.rekeyed = self.rekeyed or not kept
        graph.touch(self)
        self._look_inside(graph, last)
        self.last = _copied(target)
        if self.not_plain and self.changing:
            graph.left.setdefault(self)
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
            self.changing = self.changing or self.last is not MISSING
        elif self.last != size:
            graph.omit(self.label)
            self.changing = True
        self.last = size
        if self.changing:
            graph.left.setdefault(self)
        graph.touch(self)

    def _look_inside(self, graph: Graph, last: Any) -> None:
        target = self.target
        done = 0
        grown = isinstance(target, list) and isinstance(last, list) and len(target) > len(last)
        if grown and not self.opaque and _same(target[: len(last)], last):
            done = len(last)
        before: dict[Any, VariableNode] = {}
        if not done:
            self.opaque, self.flat = False, True
            before, self.children = self.children, {}
        scalars = values.SCALARS
        if isinstance(target, dict):
            pairs: Iterable[tuple[Any, Any]] = target.items()
            kinds = {*map(type, target), *map(type, target.values())}
        else:
            items = _items(target)
            pairs = enumerate(items) if not done else enumerate(target[done:], done)
            kinds = set(map(type, target[done:] if done else items))
        if not kinds <= scalars:
            self.flat = False
            for place, (key, value) in enumerate(pairs):
                if not _told(key):  # a parameter, say: known by where it stands
                    key = _PLACE, place
                    self._keyed = True
                if value.__class__ not in scalars and graph.adopt(value, self, key) is OPAQUE:
                    self.opaque = True
        if self._attributes is not None and ATTRIBUTES not in self.children:
            graph.adopt(self._attributes, self, ATTRIBUTES)
        for key, node in before.items():
            if self.children.get(key) is not node:
                graph.unlink(node, self, key)

    def payload(self, graph: Graph) -> Any:
        target = self.target
        if self.too_large:
            return None
        if self.flat and not isinstance(target, dict | set):
            return target if type(target) is list else list(target)
        try:
            if isinstance(target, dict):
                packed: Any = self._pack_dict(graph)
            else:
                packed = [graph.pack(value, self) for value in _items(target)]
        except values.NotPlain:
            return None
        return [set_tables.SetCopy(target).table(), packed] if isinstance(target, set) else packed

    def _pack_dict(self, graph: Graph) -> list[Any]:
        named = object_keys.names(graph, self.target)
        try:
            if not named:
                return self._pack_pairs(graph)
        except values.NotPlain:
            pass
        return [_OBJECTS, object_keys.packed(self, graph, named, self.rekeyed)]

    def _pack_pairs(self, graph: Graph) -> list[Any]:
        packed: list[Any] = [not self.opaque]
        if self.flat:
            return packed + [part for pair in self.target.items() for part in pair]
        for key, value in self.target.items():
            told = graph.pack(key, self)
            try:
                packed += [told, graph.pack(value, self)]
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
        elif isinstance(target, set):
            old.put_back(target)
        elif isinstance(target, numpy.ndarray):
            for place, value in enumerate(old):
                target[place] = value
        else:
            target.clear()
            target.update(old)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        if data is None:
            return
        target = self.target
        if isinstance(target, dict) and data[0] == _OBJECTS:
            object_keys.put(target, data[1], self.label, referred)
        elif isinstance(target, dict):
            pairs = iter([values.unpack(x, referred) for x in data[1:]])
            new = dict(zip(pairs, pairs))
            if data[0]:
                self.put_back(new)
            else:
                target.update(new)
        elif isinstance(target, set):
            table, packed = data
            set_tables.write(target, table, [values.unpack(x, referred) for x in packed])
        else:
            self.put_back([values.unpack(x, referred) for x in data])


def container_about(target: Any) -> str:
    """Its class, and what its constructor is told."""
    name = values.name_of(type(target))
    if isinstance(target, numpy.ndarray):
        return f"{name}|{len(target)}"
    if isinstance(target, deque):
        return name if target.maxlen is None else f"{name}|{target.maxlen}"
    if isinstance(target, defaultdict) and target.default_factory is not None:
        factory = target.default_factory
        return f"{name}|{values.name_of(factory) if isinstance(factory, type) else UNNAMED}"
    return name


def _items(target: Any) -> Any:
    """Of a set in the order of its table, whatever the script's own class makes of it."""
    return list(set.__iter__(target)) if isinstance(target, set) else target


def _copied(target: Any) -> Any:
    """Without asking the script's own class, whose constructor or `copy` may be anything."""
    for kind in (list, deque, dict):
        if isinstance(target, kind):
            return kind(target)
    return set_tables.SetCopy(target) if isinstance(target, set) else list(target)


def _same(target: Any, last: Any) -> bool:
    """Of two containers of one size. What can change in place is compared by identity: an equal
    tensor is another one, and to compare it may wait for a device."""
    if isinstance(target, dict):
        pairs = zip(target.items(), last.items())
        return all(k is a and v is b for (k, v), (a, b) in pairs)
    if isinstance(target, set):
        return bool(last.fits(target))
    return all(map(operator.is_, target, last))


class Blob(VariableNode):
    """A small tensor on the CPU, an array of numpy or of Python, or a bytearray: its bytes."""

    kind = "blob"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: bytes | None = None
        self.plain = target
        self._pointer = 0
        if isinstance(target, torch.Tensor):
            self._look_at(target)

    def _look_at(self, target: torch.Tensor) -> None:
        self._pointer = target.data_ptr()
        self.plain = target.detach().numpy()  # the same memory

    def carry_all(self, graph: Graph) -> None:
        if not self.carried:
            self.late = True
            graph.touch(self)

    def about(self) -> str:
        target = self.target
        if isinstance(target, bytearray):
            return "bytearray"
        if isinstance(target, array):
            return f"array {target.typecode}"
        return f"{type(target).__name__} {target.dtype} {list(target.shape)}"

    def scan(self, graph: Graph) -> None:
        if self._pointer and self._pointer != self.target.data_ptr():  # .data is another one
            self._look_at(self.target)
            graph.memory.lay(self)
        plain = self.plain
        now = bytes(plain) if plain.__class__ is bytearray else plain.tobytes()
        if now == self.last:
            return
        if self.last is not None:
            graph.note(self, None, self.last)
            self.changing = True
        self.last = now
        graph.touch(self)

    def payload(self, graph: Graph) -> Any:
        target = self.target
        if isinstance(target, array):
            return [codec.dumps_inline(target.tobytes()), target.typecode]
        grad = isinstance(target, torch.Tensor) and target.requires_grad
        return [graph.pack_blob(self.plain, isinstance(target, torch.Tensor)), grad]

    def put_back(self, old: bytes) -> None:
        if isinstance(self.target, bytearray):
            self.target[:] = old
        elif isinstance(self.target, array):
            self.target[:] = array(self.target.typecode, old)
        elif len(old):
            flat = numpy.frombuffer(old, dtype=self.plain.dtype)
            self.plain[...] = flat.reshape(self.plain.shape)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        value = made(data)
        self.put_back(bytes(value) if isinstance(value, bytearray) else _array(value).tobytes())


def _array(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


def alone(blob: VariableNode) -> bool:
    """Whether no other tensor or array shares its memory."""
    target = blob.target
    if isinstance(target, torch.Tensor):
        return _users(target) <= _USERS_ALONE and not target._is_view()
    return isinstance(target, bytearray | array) or target.base is None


def _users(tensor: torch.Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _users_alone() -> int:
    tensor = torch.zeros(1, device="cpu")
    plain = tensor.detach().numpy()  # as a node has it
    return _users(tensor) if plain is not None else 0


_USERS_ALONE = _users_alone()


def made(data: Any) -> Any:
    value = codec.loads_inline(data[0])
    if isinstance(data[1], str):
        return array(data[1], value)
    return value.requires_grad_() if data[1] else value


class IteratorNode(VariableNode):
    """An iterator; generators that it draws from are frames below it."""

    kind = "iterator"
    moves = True

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: Any = None
        self._sequence: Any = None
        self._encoded: bytes | None = None

    @property
    def carried(self) -> bool:
        return True

    def about(self) -> str:
        return type(self.target).__name__

    def scan(self, graph: Graph) -> None:
        if self.still and graph.journal is not None:
            return
        now = iterators.position(self.target)
        if now != self.last:
            if self.last is not None:
                graph.note(self, None, self.last)
                self.changing = True
            self.last = now
            graph.touch(self)
        for i, generator in enumerate(iterators.generators(self.target)):
            key = ("generator", i)
            child = self.children.get(key)
            if child is None or child.target is not generator:
                graph.release(self, key)
                graph.adopt(generator, self, key)

    def payload(self, graph: Graph) -> Any:
        return [self.last, self._unnamed(graph)]

    def _unnamed(self, graph: Graph) -> bytes | None:
        """What a loop runs over that has no name: `for index in torch.randperm(8).split(2)`."""
        sequence = iterators.sequence(self.target)
        if sequence is None or id(sequence) in graph.nodes:
            return None
        if sequence is not self._sequence:
            self._sequence, self._encoded = sequence, _encoded(sequence)
            if self._encoded is None and any(isinstance(x, torch.Tensor) for x in sequence):
                graph.omit(self.label)
        return self._encoded

    def put_back(self, old: Any) -> None:
        iterators.set_position(self.target, old, self.label)

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        position, unnamed = data
        try:
            other = None
            mine = iterators.sequence(self.target)
            if unnamed is not None and mine is not None and _encoded(mine) != unnamed:
                other = iter(_decoded(unnamed, mine))
                iterators.set_position(other, position, self.label)
            else:
                iterators.set_position(self.target, position, self.label)
        except UsageError:
            other = iterators.remade(self.target, position)
            if other is None:
                raise
        ways = [(way[1], parent) for way, parent in self.parents.items()]
        if other is not None and not any(parent.set_loop(key, other) for key, parent in ways):
            raise UsageError(
                f"the {type(self.target).__name__} {self.label} runs over other items here than in "
                "the rank that is replaced",
                hint="give what it runs over a name, or use ks.batches",
            )


def _encoded(sequence: Any) -> bytes | None:
    """If it is plain and not large."""
    if isinstance(sequence, numpy.ndarray):
        if sequence.dtype.kind not in "biufc" or sequence.nbytes > values.BYTES_MAX:
            return None
        return codec.dumps_inline(torch.from_numpy(numpy.ascontiguousarray(sequence)))
    tensors = [item for item in sequence if isinstance(item, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors)
    if len(sequence) > values.ITEMS_MAX or size > values.BYTES_MAX:
        return None
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    try:
        data = codec.dumps_inline(sequence)
    except UsageError:
        return None
    return data if len(data) <= values.BYTES_MAX else None


def _decoded(data: bytes, like: Any) -> Any:
    value = codec.loads_inline(data)
    return value.numpy() if isinstance(like, numpy.ndarray) else value
