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

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker.script import blocks, frames, graph, read_witness, values
from keepstep.worker.script.discovery import DEPTH_MAX, Discovery, Named
from keepstep.worker.script.encoding import FORMAT, encoded
from keepstep.worker.script.frame_names import FrameNames
from keepstep.worker.script.namespaces import FunctionNames, ModuleGlobals
from keepstep.worker.script.nodes import VariableNode
from keepstep.worker.script.restoration import Restoration, key_of
from keepstep.worker.script.stack import collector
from keepstep.worker.script.torch_names import OptimizerNames

SWEEP_EVERY: Final = 256
_EMPTY: Final = b""


class Variables:
    """`known(thing)`: it belongs to the attached state (models, optimizers, their tensors,
    registered objects) and is carried by others; `attached(tensor)`: its memory does."""

    def __init__(
        self,
        known: Callable[[Any], bool] = lambda _: False,
        attached: Callable[[torch.Tensor], bool] = lambda _: False,
        names: Named | None = None,
    ) -> None:
        frames.refuse_unless_available()
        self._graph = Discovery(known, attached, names)
        self._live: list[FrameNames] = []
        self._modules = 0, 0
        self._calls = 0
        self._captured = _EMPTY
        self._as_of = -1, -1  # call and changes that it was captured in
        self._witness = read_witness.Witness()
        self._watched: list[Any] = []
        self._warned: set[str] = set()
        self._handed_out: set[type] = set()  # classes
        self._batches: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors in them, by id

    # ------------------------------------------------------------------ the transaction

    def handed_out(self, batch: Any) -> None:
        """By ks.batches."""
        for part in (batch, *batch) if type(batch) in (tuple, list) else (batch,):
            if type(part) not in self._handed_out:
                self._handed_out.add(type(part))
                self._graph.leave_alone(type(part))
        for key, item in _inside((batch,)).items():
            if isinstance(item, torch.Tensor):
                gone = functools.partial(self._batches.pop, key)
                self._batches[key] = weakref.ref(item, lambda _, gone=gone: gone())  # type: ignore[misc]

    def _handed(self, inside: dict[int, Any]) -> frozenset[int]:
        """Those of a step's arguments that ks.batches has handed out, or that contain such."""
        found = {
            key
            for key, item in inside.items()
            if isinstance(item, torch.Tensor) and key in self._batches
        }
        for key, item in reversed(inside.items()):  # what is inside comes first
            if isinstance(item, torch.Tensor):
                continue
            items = list(item.values() if isinstance(item, dict) else item)
            if set(map(type, items)) <= values.SCALARS:
                continue
            if any(id(x) in found or not _looked_into(x) for x in items):
                found.add(key)
        return frozenset(found)

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
        inside = _inside(arguments)
        graph_.excluded = frozenset(inside)
        graph_.handed = self._handed(inside)
        graph_.deep = self._calls < blocks.FIRST or self._calls % blocks.EVERY == 0
        if function is not None:
            graph_.reads.begins(function, graph_.deep)
        graph_.read = graph_.reads.ids()
        self._enter(stack)
        for node in tuple(graph_.fleeting):
            node.hold(graph_)
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
        told = self._graph.told
        new = [name for name in told.omitted if name not in self._warned]
        heavy = [name for name in told.heavy if name not in self._warned]
        cut = [name for name in told.cut_at if name not in self._warned]
        self._warned.update(new, heavy, cut)
        texts = [
            f"{name} has more than {values.ITEMS_MAX} items or {values.BYTES_MAX >> 10} KiB: a "
            "moved rank does not get it (hint: ks.register(name, save, load), or keep less)"
            for name in new
        ]
        texts += [
            f"{name} changes, and all of it ({told.heavy[name] / 2**20:.1f} MiB) is carried "
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
        found = [node for node in self._graph.memory.at(value) if node.target is not None]
        if not found:
            return None
        nearest = max(found, key=lambda node: (node.target is value, node.target.nbytes))
        return _path(nearest), nearest.target

    def reach(self, path: list[Any], stack: list[FrameType]) -> Any:
        """What the path leads to in this process, which stands in the same call. LookupError:
        nothing."""
        self.begin(stack)
        try:
            node: VariableNode = self._graph.roots[path[0]]
            for key in path[1:]:
                node = node.children[key_of(key)]
            return node.target
        finally:
            self.end()

    def heavy(self) -> dict[str, int]:
        """Sizes of what is carried whole."""
        return self._graph.told.heavy

    @staticmethod
    def of_optimizers(tree: bytes | None) -> list[str]:
        """Optimizers with objects that are carried as variables."""
        entries = values.decode(tree)[-1] if tree else []
        return [
            str(key)
            for _, kind, _, key, *_, payload in entries
            if kind == OptimizerNames.kind and payload is not None
        ]

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
        landing = Restoration(self._graph, slot, lenient)
        landing.find(entries, {member[0] for group in shared for member in group})
        landing.join(shared)
        landing.fill(entries)
        landing.fill_joined()
        self._graph.scan()
        landing.mark(entries)
        self.end()

    def _stands_there(self, entries: list[Any]) -> bool:
        """Whether all functions are running that were running there."""
        live = {root.label for root in self._live}
        return all(e[3] in live for e in entries if e[2] == 0 and e[1] == FrameNames.kind)


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


def _path(node: VariableNode) -> list[Any]:
    path: list[Any] = []
    while node.depth:
        (_, key), parent = next(iter(node.parents.items()), ((0, None), None))
        if parent is None or len(path) > DEPTH_MAX:
            raise LookupError(node.label)
        path.append(key)
        node = parent
    return [node.label, *reversed(path)]


def _inside(arguments: tuple[Any, ...]) -> dict[int, Any]:
    """A batch and what is in it: tensors and containers."""
    found: dict[int, Any] = {}
    todo: list[Any] = list(arguments)
    while todo and len(found) < 256:
        item = todo.pop()
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, dict | list | tuple):
            found[id(item)] = item
            todo.extend(item.values() if isinstance(item, dict) else item)
    return found


def _looked_into(item: Any) -> bool:
    kind = item.__class__
    return kind in values.SCALARS or isinstance(item, torch.Tensor | dict | list | tuple)


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
