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

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from keepstep.worker.script.large_values import BlockRecords
from keepstep.worker.script.sharing import MemoryMap
from keepstep.worker.script.versions import Versions
from keepstep.worker.state import codec


class _Missing:
    def __repr__(self) -> str:
        return "(not there)"


MISSING: Final = _Missing()
OPAQUE: Final = _Missing()
LEAF: Final = _Missing()
# They begin keys of children, and are no names.
MODULE, PARAMETER, HOOK = "<module>", "<parameter>", "<hook>"
FUNCTIONS: Final = frozenset({"holder", "function", "class"})  # kinds that a script defines


class VariableNode:
    kind: ClassVar[str] = ""
    moves: ClassVar[bool] = False  # an iterator or a generator: not held between transactions

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        self.number = graph.next_number()
        self.target = target
        self.label = label
        self.depth = depth
        self.parents: dict[tuple[int, Any], VariableNode] = {}
        self.children: dict[Any, VariableNode] = {}
        self.changing = False
        self.late = graph.settled
        self.raw: Any = None  # encoded payload, while it is good
        self.entry: tuple[VariableNode, Any, bool, Any] | None = None  # and entry, by its only way
        self.refers: list[VariableNode] = []
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

    def hold(self, graph: Graph) -> None:
        """A transaction begins: hold again what is fleeting."""

    def wake(self, graph: Graph) -> None:
        """Everything is held again: look at it."""

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


@dataclass
class Notices:
    """What the script is told about its variables, by label."""

    omitted: dict[str, None] = field(default_factory=dict)
    heavy: dict[str, int] = field(default_factory=dict)  # blocks that are carried: bytes
    in_place: set[str] = field(default_factory=set)  # blocks that were changed in place
    cut_at: list[str] = field(default_factory=list)  # the first of too many objects


class Graph(ABC):
    """The graph as a node sees it: what is noted about all nodes, and the way to find more, which
    `discovery` knows."""

    def __init__(self) -> None:
        self.settled = False  # the script's first transaction has begun
        self.versions = Versions()
        self.nodes: dict[int, VariableNode] = {}  # by the id of their target
        self.roots: dict[str, VariableNode] = {}
        self.journal: dict[VariableNode, Any] | None = None
        self.fleeting: dict[VariableNode, None] = {}
        self.left: dict[VariableNode, None] = {}  # containers that change and are not carried
        self.records = BlockRecords()
        self.told = Notices()
        self.deep = True  # contents of blocks are looked at in this call
        self.carry: dict[VariableNode, None] = {}  # nodes with a payload
        self.memory = MemoryMap()
        self.changes = 0
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    @abstractmethod
    def adopt(
        self, value: Any, parent: VariableNode, key: Any, label: str = "", maker: Any = None
    ) -> Any:
        """A node below `parent`, LEAF, or OPAQUE."""

    @abstractmethod
    def release(self, parent: VariableNode, key: Any) -> None:
        """The binding is gone; so is the node, if it was the last."""

    @abstractmethod
    def unlink(self, child: VariableNode, parent: VariableNode, key: Any) -> None:
        """The child no longer has this parent."""

    @abstractmethod
    def forget_dead(self, node: VariableNode) -> None:
        """Its object is gone, and nobody has said so."""

    @abstractmethod
    def pack(self, value: Any, node: VariableNode) -> Any:
        """A value that the node refers to, as it travels."""

    @abstractmethod
    def name_of(self, thing: Any) -> str | None:
        """Of something that is attached."""

    @abstractmethod
    def names_by_id(self) -> dict[int, str]:
        """Of everything that is attached."""

    @abstractmethod
    def owner_of(self, tensor: Any) -> tuple[str, Any] | None:
        """The attached tensor in whose memory it lies, behind its name."""

    def pack_blob(self, plain: Any, tensor: bool) -> bytes:
        return codec.dumps_inline(torch.from_numpy(plain) if tensor else plain)

    def note(self, node: VariableNode, name: str | None, old: Any) -> None:
        """The first old value of what changes, for a retry."""
        if self.journal is None:
            return
        if name is None:
            self.journal.setdefault(node, old)
        else:
            self.journal.setdefault(node, {}).setdefault(name, old)

    def touch(self, node: VariableNode) -> None:
        """Its payload has changed."""
        node.raw = node.entry = None
        self.changes += 1
        if node.carried:
            self.carry[node] = None

    def omit(self, label: str) -> None:
        self.told.omitted.setdefault(label)


def suffix(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else key
    if isinstance(key, tuple | list) and key and key[0] in (MODULE, PARAMETER):
        return f".{key[1]}"
    return f"[{key!r}]"
