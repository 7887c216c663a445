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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from keepstep.worker.script.discovery import Graph


class _Missing:
    def __repr__(self) -> str:
        return "(not there)"


MISSING: Final = _Missing()
OPAQUE: Final = _Missing()
LEAF: Final = _Missing()


class Node:
    kind: ClassVar[str] = ""
    moves: ClassVar[bool] = False  # an iterator or a generator: not held between transactions

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
        self.entry: tuple[Node, Any, bool, Any] | None = None  # and entry, by its only way
        self.refers: list[Node] = []
        self.place: tuple[int, int] | None = None  # of a tensor or array, in memory
        self.laid: list[Any] = []  # and as it is told
        self.helps = False  # of, or in, an object of an installed package (graph.py)
        self.still = False  # only a running loop has it: it cannot move while a transaction runs

    @property
    def carried(self) -> bool:
        return self.changing or self.late

    def varies(self, key: Any) -> bool:
        """Whether the binding under this key is carried."""
        return self.carried

    def carry_all(self, graph: Graph) -> None:
        """Only bindings that are carried lead here: the newcomer's own may be another one, so
        everything of it is carried, also what has not changed."""

    def about(self) -> str:
        """What the newcomer's must be like."""
        return ""

    def scan(self, graph: Graph) -> None:
        raise NotImplementedError

    def wake(self, graph: Graph) -> None:
        """A transaction begins: hold again what is fleeting."""

    def rest(self, graph: Graph) -> None:
        """The transaction is over: hold nothing that the script may want to be freed."""

    def set_loop(self, key: Any, iterator: Any) -> bool:
        """Whether the loop under this key goes on with this iterator now."""
        return False

    def payload(self, graph: Graph) -> Any:
        raise NotImplementedError

    def put_back(self, old: Any) -> None:
        raise NotImplementedError

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        raise NotImplementedError


def suffix(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else key
    if isinstance(key, tuple) and key and key[0] == "module":
        return f".{key[1]}"
    return f"[{key!r}]"
