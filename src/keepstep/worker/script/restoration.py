"""A tree of variables, set in a newcomer: see variables.py."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import GeneratorType
from typing import Any, Final

import numpy

from keepstep.errors import UsageError
from keepstep.worker.script import blocks, contents, sharing, values, weight_views
from keepstep.worker.script.blocks import Block
from keepstep.worker.script.contents import Blob, Items, IteratorNode
from keepstep.worker.script.discovery import Discovery
from keepstep.worker.script.frame_names import ENDED, FrameNames
from keepstep.worker.script.memory_files import MemoryFile
from keepstep.worker.script.namespaces import DictNames, Names, SlotNames
from keepstep.worker.script.nodes import FUNCTIONS, VariableNode, suffix
from keepstep.worker.script.stack import OPERAND
from keepstep.worker.script.torch_names import NetworkNames, ParameterNames


class Restoration:
    """Which object here stands for which node there."""

    def __init__(self, graph_: Discovery, slot: list[str], lenient: bool = False) -> None:
        self._graph = graph_
        self._lenient = lenient
        self._objects: dict[int, Any] = {}
        self._nodes: dict[int, VariableNode] = {}
        self._taken: set[int] = set()
        self._joined: list[tuple[sharing.Joined, int]] = []
        self._filled: set[int] = set()  # of what is found here
        self._functions: set[int] = set()
        self._labels: dict[int, str] = {}
        self.slot = slot

    def __call__(self, number: int) -> Any:
        if number not in self._objects:
            what = values.NoSuchFunction if number in self._functions else UsageError
            raise what(
                f"{self._label(number)} of the rank that is replaced refers to "
                "something that is not here",
                hint="register what the step needs: ks.register(name, save, load)",
            )
        return self._objects[number]

    def named(self, name: str) -> Any:
        try:
            return self._graph.names.named(name)
        except LookupError:
            raise UsageError(
                f"variables of the rank that is replaced refer to {name}, which is not here",
                hint="build the same models on every start of the script",
            ) from None

    def find(self, entries: list[Any], joined: set[int]) -> None:
        """`joined`: they share their memory with others there."""
        # Where a stable name leads is certain; what is bound anew takes what is left.
        for certain in (True, False):
            for number, kind, parent, key, bound, about, payload in entries:
                if number in self._objects or (certain and bound):
                    continue
                if kind in FUNCTIONS:
                    self._functions.add(number)
                self._labels[number] = f"{self._labels.get(parent, '')}{suffix(key)}"
                made_here = parent in self._objects and parent not in self._nodes
                if key == contents.ATTRIBUTES and made_here:
                    self._objects[number] = vars(self._objects[parent])
                    continue
                own = self._own(kind, parent, key, about)
                apart = bound and own is not None and (number in joined or _shared(own, about))
                if own is not None and not apart:
                    self._nodes[number] = own
                    self._objects[number] = own.target
                    self._taken.add(own.number)
                elif kind in FUNCTIONS and (found := values.function_described(about)) is not None:
                    self._objects[number] = found
                elif (
                    kind in FUNCTIONS or payload is None or (certain and self._comes_later(parent))
                ):
                    continue
                elif kind in _MADE and (bound or self._comes_later(parent)):
                    made = self._made(kind, about, payload)
                    if made is not None:
                        self._objects[number] = made
                    elif not self._lenient:
                        raise UsageError(
                            f"{self._labels[number]} of the rank that is replaced is a defaultdict "
                            "whose factory has no name, so it cannot be made here",
                            hint="use a class (list, int, one of your own) as default_factory",
                        )
                elif not self._lenient:
                    raise UsageError(
                        f"{self._labels[number]} of the rank that is replaced ({about or kind}) "
                        "is not here, so it cannot be set",
                        hint="build the same objects and loops on every start of the script",
                    )

    def join(self, shared: list[Any]) -> None:
        """Those that are made here lie in one memory with the others."""
        for group in shared:
            places = {number: (offset, steps) for number, offset, steps in group}
            own = [number for number in places if number in self._nodes]
            made = [n for n in places if n in self._objects and n not in self._nodes]
            own.sort(key=lambda number: -self._objects[number].nbytes)
            anchor = (self._objects[own[0]], places[own[0]][0]) if own else None
            if not made or (anchor is None and len(made) < 2):
                continue
            members = {number: (self._objects[number], *places[number]) for number in made}
            try:
                joined = sharing.Joined(anchor, members, self._label)
            except UsageError:
                if not self._lenient:
                    raise
                continue
            self._objects.update(joined.views)
            self._joined.append((joined, own[0] if own else 0))

    def fill_joined(self) -> None:
        """Behind fill: everything that is found here has its value."""
        for joined, anchor in self._joined:
            try:
                joined.fill(carried=anchor in self._filled)
            except UsageError:
                if not self._lenient:
                    raise

    def _label(self, number: int) -> str:
        return self._labels.get(number, "a variable")

    def _comes_later(self, parent: int) -> bool:
        """Its parent is bound anew: it is not found yet, or is made."""
        return parent != 0 and parent not in self._nodes

    def _own(self, kind: str, parent: int, key: Any, about: str) -> VariableNode | None:
        if parent == 0:
            own: VariableNode | None = self._graph.roots.get(key)
            if isinstance(own, FrameNames) and own.target is None:
                own = None
        else:
            above = self._nodes.get(parent)
            own = above.children.get(key_of(key)) if above is not None else None
            if own is None and kind == ParameterNames.kind and isinstance(above, NetworkNames):
                own = above.look_at(key[1], self._graph)
        if own is None or own.kind != kind or own.number in self._taken:
            return None
        ended = about == ENDED and isinstance(own.target, GeneratorType)
        return own if own.about() == about or kind == "blob" or ended else None

    def _made(self, kind: str, about: str, payload: Any) -> Any:
        return (
            weight_views.made(self.named, payload)
            if kind == "view"
            else _made(kind, about, payload)
        )

    def _end(self, number: int) -> None:
        node = self._nodes.get(number)
        if node is None or not isinstance(node.target, GeneratorType):
            return
        try:
            node.target.close()
        except Exception as error:
            raise UsageError(
                f"{self._label(number)} has come to its end in the rank that is replaced, and "
                f"cannot be ended here: {type(error).__name__}: {error}",
                hint="let the generator end without an exception when it is closed",
            ) from error

    def fill(self, entries: list[Any]) -> None:
        graph_ = self._graph
        ended = [number for number, _, _, _, _, about, _ in entries if about == ENDED]
        for number in ended:  # what they do at their end is overwritten
            self._end(number)
        # Members of sets first: a set asks for their hashes.
        ordered = sorted(entries, key=lambda entry: entry[5].startswith("builtins:set"))
        for number, kind, _, _, _, _, payload in ordered:
            if payload is None or number in ended:
                continue
            node = self._nodes.get(number)
            absent = number not in self._objects
            if absent and (self._lenient or number in self._functions):
                continue
            if node is None:
                target = self._objects[number]
                if kind in ("blob", "block", "view"):
                    continue  # made with its contents
                node = _MAKE[kind](graph_, target, self._labels[number], 1)
            try:
                node.apply(payload, self)
                self._filled.add(number)
            except UsageError:
                if not self._lenient:
                    raise

    def mark(self, entries: list[Any]) -> None:
        """What is carried there is carried here from now on."""
        for number, _, _, _, _, _, payload in entries:
            node = self._graph.nodes.get(id(self._objects.get(number)))
            if node is None or payload is None:
                continue
            if isinstance(node, Names):
                node.changing_names.update(payload[0])
                node.late_names.update(payload[1])
            else:
                node.changing = True
            self._graph.touch(node)


def _shared(own: VariableNode, about: str) -> bool:
    """Whether it must not be changed in place, because others here may refer to it that refer to
    something else there."""
    if own.kind in ("block", "view"):
        return True
    if own.kind == "blob":
        return own.about() != about or not contents.alone(own)
    if own.kind != "items":
        return False
    return sum(not str(key).startswith(OPERAND) for _, key in own.parents) > 1


_MAKE: Final[dict[str, Callable[..., VariableNode]]] = {
    "items": Items,
    "blob": Blob,
    "block": Block,
    "names": DictNames,
    "slots": SlotNames,
    "iterator": IteratorNode,
    "stream": MemoryFile,
}
_MADE: Final = frozenset({"items", "blob", "block", "view", "stream", "names", "slots"})
_CONTAINERS: Final[dict[str, Any]] = {
    "builtins:list": list,
    "builtins:dict": dict,
    "builtins:set": set,
    "collections:deque": deque,
    "collections:Counter": Counter,
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": defaultdict,
}


def _made(kind: str, about: str, payload: Any) -> Any:
    """None: it cannot be."""
    if kind == "blob":
        return contents.made(payload)
    if kind == "block":
        return blocks.made(payload)
    if kind == "stream":
        return io.StringIO() if about == "StringIO" else io.BytesIO()
    name, _, told = about.partition("|")
    found = _CONTAINERS.get(name) or values.class_named(name)
    if kind != "items":
        return object.__new__(found)
    if found is numpy.ndarray:
        return numpy.empty(int(told), dtype=object)
    container = found.__new__(found)
    if told == contents.UNNAMED:
        return None
    if told and isinstance(container, deque):
        deque.__init__(container, (), int(told))
    elif told and isinstance(container, defaultdict):
        container.default_factory = values.class_named(told)
    return container


def key_of(key: Any) -> Any:
    return tuple(map(key_of, key)) if isinstance(key, list) else key
