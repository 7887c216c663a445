"""The script's own variables: exact on a newcomer, and put back before a retry.

Theory of operation
-------------------
    begin     at the entry of a step or section: the frames are looked at, and from here on the
              first old value of everything that changes is kept
    undo      the call is retried: everything is put back, containers in place
    capture   at the fence: what the script's variables hold, as bytes for the side state
    late      at the call's end: the same again if the rest of the call has changed something
    end       the call is over; nothing of the script's is held any longer
    restore   on a newcomer, when its own walk returns from the same call: it stands in the same
              frames, and its variables are set

Only what has changed since it was first seen travels, and what came into being after the first
transaction. A rank's device, its host's name and its paths never change and stay the slot's own;
a late value that differs only by what belongs to the slot is left alone (values.belongs_to_slot).

The tree lists nodes, parents first: [number, kind, parent, key, bound, about, payload]. `bound`
says that the parent's binding itself is carried: then a container is made anew, so that a name
which the dead rank had bound to a new list does not change the old one. Otherwise the newcomer's
own object under the same path is changed in place, and whoever else refers to it sees that.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker.script import blocks, contents, frames, graph, sharing, values, witness
from keepstep.worker.script.blocks import Block
from keepstep.worker.script.contents import Blob, Items, Position
from keepstep.worker.script.discovery import DEPTH_MAX, Graph
from keepstep.worker.script.encoding import FORMAT, encoded
from keepstep.worker.script.namespaces import (
    DictNames,
    FrameNames,
    FunctionNames,
    ModuleGlobals,
    Names,
    OptimizerNames,
    SlotNames,
)
from keepstep.worker.script.nodes import Node, suffix
from keepstep.worker.script.stack import OPERAND, collector

SWEEP_EVERY: Final = 256
_EMPTY: Final = b""


class Variables:
    """`known(thing)`: it belongs to the attached state (models, optimizers, their tensors,
    registered objects) and is carried by others; `attached(tensor)`: its memory does."""

    def __init__(
        self,
        known: Callable[[Any], bool] = lambda _: False,
        attached: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        frames.refuse_unless_available()
        self._graph = Graph(known, attached)
        self._live: list[FrameNames] = []
        self._modules = 0, 0
        self._calls = 0
        self._captured = _EMPTY
        self._as_of = -1, -1  # call and changes that it was captured in
        self._witness = witness.Witness()
        self._watched: list[Any] = []
        self._warned: set[str] = set()
        self._handed_out: set[type] = set()  # classes

    # ------------------------------------------------------------------ the transaction

    def handed_out(self, batch: Any) -> None:
        """By ks.batches."""
        for part in (batch, *batch) if type(batch) in (tuple, list) else (batch,):
            if type(part) not in self._handed_out:
                self._handed_out.add(type(part))
                self._graph.leave_alone(type(part))

    def watch(self, function: Any) -> None:
        """A step or section function, when it is decorated: its closure is the script's too."""
        self._watched.append(function)

    def begin(
        self, stack: list[FrameType], function: Any = None, arguments: tuple[Any, ...] = ()
    ) -> None:
        graph_ = self._graph
        graph_.journal = None
        if function is not None:
            _refuse_collected(stack, function)
        graph_.excluded = _inside(arguments)
        graph_.deep = self._calls < blocks.FIRST or self._calls % blocks.EVERY == 0
        if function is not None:
            graph_.reads.begins(function, graph_.deep)
        graph_.read = graph_.reads.ids()
        self._enter(stack)
        for node in tuple(graph_.fleeting):
            node.wake(graph_)
        graph_.scan()
        graph_.settled = True
        graph_.journal = {}
        self._calls += 1
        if self._calls % SWEEP_EVERY == 0:
            graph_.sweep()
        self._witness.begins(function)

    def _enter(self, stack: list[FrameType]) -> None:
        graph_ = self._graph
        while self._watched:
            function = self._watched.pop()
            function = getattr(function, "__func__", function)
            if hasattr(function, "__code__"):
                name = f"function {function.__module__}:{function.__qualname__}"
                graph_.root(name, FunctionNames, function).scan(graph_)
        live: list[FrameNames] = []
        for depth, frame in enumerate(stack):
            if not frames.is_function(frame.f_code):
                module = str(frame.f_globals.get("__name__"))
                values.script_globals[module] = frame.f_globals
                graph_.root(f"module {module}", ModuleGlobals, frame.f_globals)
            root = graph_.root(frames.key(frame, depth), FrameNames, None)
            assert isinstance(root, FrameNames)
            root.target = frame
            live.append(root)
        for root in self._live:
            if root not in live:
                root.leave(graph_)
        self._live = live
        if self._modules != (len(sys.modules), frames.claims()):
            self._modules = len(sys.modules), frames.claims()
            for name, namespace in graph.user_modules().items():
                if id(namespace) not in graph_.nodes:  # the script itself goes by two names
                    graph_.root(f"module {name}", ModuleGlobals, namespace)

    def capture(self) -> bytes:
        """What a newcomer needs after this call. Empty: nothing has changed since the start."""
        self._graph.scan()
        if (self._calls, self._graph.changes) != self._as_of:
            self._captured = encoded(self._graph)
            self._as_of = self._calls, self._graph.changes
        return self._captured

    def late(self) -> bytes | None:
        """The same as of the call's end; None: as captured."""
        self._graph.scan()
        if self._graph.changes == self._as_of[1]:
            return None
        now = encoded(self._graph)
        return now if now != self._captured else None

    def end(self) -> None:
        graph_ = self._graph
        graph_.journal = None
        for node in tuple(graph_.fleeting):
            node.rest(graph_)
        for root in self._live:
            root.rest(graph_)

    def undo(self) -> None:
        """Everything as it was at begin; begin comes next."""
        graph_ = self._graph
        graph_.scan()
        journal, graph_.journal = graph_.journal or {}, None
        for node in graph_.nodes.values():
            if isinstance(node, FrameNames) and node.depth and not node.still:
                node.refuse_moved()
        for node, old in journal.items():
            if node.target is not None:
                node.put_back(old)
        graph_.scan()

    # ------------------------------------------------------------------ what is not carried

    def warnings(self) -> list[str]:
        """Variables that are too large to be carried, or are a burden, each once."""
        new = [name for name in self._graph.omitted if name not in self._warned]
        heavy = [name for name in self._graph.heavy if name not in self._warned]
        cut = [name for name in self._graph.cut_at if name not in self._warned]
        self._warned.update(new, heavy, cut)
        texts = [
            f"{name} has more than {values.ITEMS_MAX} items or {values.BYTES_MAX >> 10} KiB: a "
            "moved rank does not get it (hint: ks.register(name, save, load), or keep less)"
            for name in new
        ]
        texts += [
            f"{name} changes, and all of it ({self._graph.heavy[name] / 2**20:.1f} MiB) is carried "
            "with every step (hint: hand batches to the step as arguments; what all ranks have "
            "alike costs less as a buffer of the model)"
            for name in heavy
        ]
        texts += [
            "the script has more objects than are looked at, or nests them more deeply: "
            f"{name} is the first that a moved rank does not get (hint: ks.register(name, save, "
            "load))"
            for name in cut
        ]
        return texts

    def hold(self, thing: Any) -> bool:
        """A container or object that variables lead to, and that is set in place."""
        if isinstance(thing, torch.Tensor):
            return False
        node = self._graph.nodes.get(id(thing))
        return node is not None and node.target is thing and node.kind not in ("blob", "block")

    def lying_with(self, value: Any) -> tuple[list[Any], Any] | None:
        """A variable in the same memory, and the path to it; None: there is none. LookupError: it
        has no path."""
        place = sharing.place(value)
        there = self._graph.lying.get(place[0], {}) if place is not None else {}
        found = [node for node in there if node.target is not None]
        if not found:
            return None
        nearest = max(found, key=lambda node: (node.target is value, node.target.nbytes))
        return _path(nearest), nearest.target

    def reach(self, path: list[Any], stack: list[FrameType]) -> Any:
        """What the path leads to in this process, which stands in the same call. LookupError:
        nothing."""
        self.begin(stack)
        try:
            node: Node = self._graph.roots[path[0]]
            for key in path[1:]:
                node = node.children[_key(key)]
            return node.target
        finally:
            self.end()

    def heavy(self) -> dict[str, int]:
        """Sizes of what is carried whole."""
        return self._graph.heavy

    @staticmethod
    def of_optimizers(tree: bytes | None) -> list[str]:
        """Optimizers with objects that are carried as variables."""
        entries = values.decode(tree)[-1] if tree else []
        return [str(key) for _, kind, _, key, *_ in entries if kind == OptimizerNames.kind]

    def unknown(self) -> list[str]:
        """What step functions read, that changes from step to step, and that is not carried."""
        return self._witness.unknown(self._graph)

    # ------------------------------------------------------------------ the newcomer

    def restore(self, tree: bytes, stack: list[FrameType], *, lenient: bool = False) -> None:
        """Set this process's variables as the tree says. It stands in the same call as the rank
        that captured it, in the frames `stack`. `lenient`: what cannot be set is left, because
        another restore follows before it matters."""
        if not tree:
            return
        self.begin(stack)
        self._graph.journal = None
        form, *rest = values.decode(tree)
        if form != FORMAT:
            raise UsageError("variables come in another format", hint="use one Keepstep")
        slot, omitted, missed, shared, entries = rest
        if missed and not lenient:
            raise UsageError(
                f"{' and '.join(missed[:4])} changes from step to step and is read by them, and is "
                "too large, or holds things that cannot be carried to another process",
                hint="register it: ks.register(name, save, load, per_rank=True)",
            )
        for name in omitted:
            self._graph.omit(name)
        if lenient and not self._stands_there(entries):
            self.end()
            return
        landing = _Landing(self._graph, slot, lenient)
        landing.find(entries, {member[0] for group in shared for member in group})
        landing.join(shared)
        landing.fill(entries)
        landing.settle()
        self._graph.scan()
        landing.mark(entries)
        self.end()

    def _stands_there(self, entries: list[Any]) -> bool:
        """Whether all functions are running that were running there."""
        live = {root.label for root in self._live}
        return all(e[3] in live for e in entries if e[2] == 0 and e[1] == FrameNames.kind)


class _Landing:
    """Which object here stands for which node there."""

    def __init__(self, graph_: Graph, slot: list[str], lenient: bool = False) -> None:
        self._graph = graph_
        self._lenient = lenient
        self._objects: dict[int, Any] = {}
        self._nodes: dict[int, Node] = {}
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

    def find(self, entries: list[Any], joined: set[int]) -> None:
        """`joined`: they share their memory with others there."""
        # Where a stable name leads is certain; what is bound anew takes what is left.
        for certain in (True, False):
            for number, kind, parent, key, bound, about, payload in entries:
                if number in self._objects or (certain and bound):
                    continue
                if kind in _FUNCTIONS:
                    self._functions.add(number)
                self._labels[number] = f"{self._labels.get(parent, '')}{suffix(key)}"
                own = self._own(kind, parent, key, about)
                apart = bound and own is not None and (number in joined or _shared(own, about))
                if own is not None and not apart:
                    self._nodes[number] = own
                    self._objects[number] = own.target
                    self._taken.add(own.number)
                elif kind in _FUNCTIONS and (found := values.function_described(about)) is not None:
                    self._objects[number] = found
                elif (
                    kind in _FUNCTIONS or payload is None or (certain and self._comes_later(parent))
                ):
                    continue
                elif kind in _MADE and (bound or self._comes_later(parent)):
                    self._objects[number] = _made(kind, about, payload)
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

    def settle(self) -> None:
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

    def _own(self, kind: str, parent: int, key: Any, about: str) -> Node | None:
        if parent == 0:
            own: Node | None = self._graph.roots.get(key)
            if isinstance(own, FrameNames) and own.target is None:
                own = None
        else:
            above = self._nodes.get(parent)
            own = above.children.get(_key(key)) if above is not None else None
        if own is None or own.kind != kind or own.number in self._taken:
            return None
        return own if own.about() == about or (kind == "blob" and own.kind == kind) else None

    def fill(self, entries: list[Any]) -> None:
        graph_ = self._graph
        for number, kind, _, _, _, _, payload in entries:
            if payload is None:
                continue
            node = self._nodes.get(number)
            absent = number not in self._objects
            if absent and (self._lenient or number in self._functions):
                continue
            if node is None:
                target = self._objects[number]
                if kind in ("blob", "block"):
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


def _shared(own: Node, about: str) -> bool:
    """Whether it must not be changed in place, because others here may refer to it that refer to
    something else there."""
    if own.kind == "block":
        return True
    if own.kind == "blob":
        return own.about() != about or not contents.alone(own)
    if own.kind != "items":
        return False
    return sum(not str(key).startswith(OPERAND) for _, key in own.parents) > 1


_MAKE: Final[dict[str, Callable[..., Node]]] = {
    "items": Items,
    "blob": Blob,
    "block": Block,
    "names": DictNames,
    "slots": SlotNames,
    "iterator": Position,
}
_FUNCTIONS: Final = frozenset({"holder", "function", "class"})
_MADE: Final = frozenset({"items", "blob", "block", "names", "slots"})
_CONTAINERS: Final[dict[str, Callable[[], Any]]] = {
    "builtins:list": list,
    "builtins:dict": dict,
    "builtins:set": set,
    "collections:deque": deque,
    "collections:Counter": Counter,
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": defaultdict,
}


def _made(kind: str, about: str, payload: Any) -> Any:
    if kind == "blob":
        return contents.made(payload)
    if kind == "block":
        return blocks.made(payload)
    if about in _CONTAINERS:
        return _CONTAINERS[about]()
    found = values.class_named(about)
    return found.__new__(found) if kind == "items" else object.__new__(found)


def _refuse_collected(frames_: list[FrameType], function: Any) -> None:
    for frame in frames_:
        name = collector(frame)
        if name and not (name.startswith(".") and _calls(frame, name[1:])):
            called = getattr(function, "__qualname__", "a step")
            raise UsageError(
                f"{called} runs inside {name} in {frames.place(frame)}, which collects results "
                "where no other process can see them",
                hint="write a `for` loop, and collect in a variable",
            )


def _calls(frame: FrameType, name: str) -> bool:
    """Whether it is in a call of a function of this name that is written in Python."""
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner.f_back is not frame:
        inner = inner.f_back
    return inner is not None and inner.f_code.co_name == name


def _path(node: Node) -> list[Any]:
    path: list[Any] = []
    while node.depth:
        (_, key), parent = next(iter(node.parents.items()), ((0, None), None))
        if parent is None or len(path) > DEPTH_MAX:
            raise LookupError(node.label)
        path.append(key)
        node = parent
    return [node.label, *reversed(path)]


def _key(key: Any) -> Any:
    return tuple(map(_key, key)) if isinstance(key, list) else key


def _inside(arguments: tuple[Any, ...]) -> frozenset[int]:
    """A batch and what is in it: the walk has them from ks.batches."""
    found: list[int] = []
    todo: list[Any] = list(arguments)
    while todo and len(found) < 256:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found.append(id(item))
        elif isinstance(item, dict | list | tuple):
            found.append(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)
    return frozenset(found)


class OutsideSteps:
    """The script's variables where it is handed a batch, outside of any step or section."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def captured(self) -> bytes:
        self._variables.begin(frames.script_frames())
        data = self._variables.capture()
        self._variables.end()
        return data

    def put(self, data: bytes) -> None:
        self._variables.restore(data, frames.script_frames(), lenient=True)

    def handed_out(self, batch: Any) -> None:
        self._variables.handed_out(batch)
