"""Nodes for locals: of functions that are running, and of suspended generators. See nodes.py."""

from __future__ import annotations

import types
from types import FrameType
from typing import Any, Final

from keepstep.errors import UsageError
from keepstep.worker.script import frames, iterators, stack, values
from keepstep.worker.script.namespaces import Names, Unbound
from keepstep.worker.script.nodes import MISSING, Graph

ENDED: Final = "ended"  # said of a generator
_NOWHERE: Final = -2
_LOOP: Final = "for"  # begins the key of a loop's iterator; no variable can be called that


class FrameNames(Unbound, Names):
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
            return ENDED
        at = f"@{frame.f_lasti}" if isinstance(self.target, types.GeneratorType) else ""
        return f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}{at}"

    def scan(self, graph: Graph) -> None:
        frame = self.frame()
        if self.still and graph.journal is not None:
            return
        stands = frame.f_lasti if frame is not None else _NOWHERE
        if self.depth > 0 and stands != self._stood:
            self._stood = stands  # it is part of what is said about a generator
            graph.touch(self)
        if self.depth == 0 and graph.journal is not None:
            # A step that runs inside reaches the locals of its callers through cells only.
            if frame is not None and _cells(frame):
                self._scan_cells(graph, frame)
            return
        super().scan(graph)
        if graph.journal is not None:
            return
        self._at = stands
        if frame is None:
            return
        for i, (iterator, line) in enumerate(self._loops(frame)):
            key = (_LOOP, i)
            child = self.children.get(key)
            if child is None or child.target is not iterator:
                graph.release(self, key)
                if iterators.is_iterator(iterator):
                    graph.adopt(iterator, self, key, f"{self.label} line {line}")

    def refuse_moved(self) -> None:
        """Before a retry: a generator that stands at another `yield` cannot go back."""
        frame = self.frame()
        if (frame.f_lasti if frame is not None else _NOWHERE) != self._at:
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
        if frame is None or key.__class__ is not tuple or key[0] != _LOOP:
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
        while isinstance(key, tuple) and key[0] != _LOOP:
            key = key[0]  # something inside a tuple: its name counts
        return isinstance(key, tuple) or super().varies(key)

    def rest(self, graph: Graph) -> None:
        super().rest(graph)
        for key in [key for key in self.children if isinstance(key, tuple) and key[0] == _LOOP]:
            graph.release(self, key)
        if self.depth == 0:
            self.target = None

    def leave(self, graph: Graph) -> None:
        """The function has returned."""
        for key in list(self.children):
            graph.release(self, key)
        self.last = {n: v for n, v in self.last.items() if v.__class__ in values.SCALARS}


def _cells(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_cellvars + code.co_freevars
