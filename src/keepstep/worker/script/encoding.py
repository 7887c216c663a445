"""The tree of the script's variables, as bytes.

Everything that is carried is written at every fence, and a script may carry a lot: a history with a
dict per epoch grows for weeks. So an entry is made once and kept as bytes with its node, until the
node changes, is bound elsewhere, or its binding begins to be carried. What comes and goes (frames,
iterators) and what several names lead to is made anew.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import msgspec

from keepstep.worker.script import values
from keepstep.worker.script.blocks import Block
from keepstep.worker.script.contents import Items
from keepstep.worker.script.discovery import Discovery
from keepstep.worker.script.frame_names import FrameNames
from keepstep.worker.script.nodes import FUNCTIONS, VariableNode

FORMAT: Final = 4


def encoded(graph: Discovery) -> bytes:
    """Empty: nothing is carried."""
    return _Encoding(graph).bytes()


class _Encoding:
    def __init__(self, graph: Discovery) -> None:
        self._graph = graph
        self._out: list[Any] = []
        self._placed: dict[int, Any] = {}  # number -> entry, kept or new
        self._new: list[tuple[VariableNode, list[Any]]] = []
        self._carries = False

    def bytes(self) -> bytes:
        todo, looked_at = deque(self._graph.carry), set()
        while todo:
            node = todo.popleft()
            if node.number in looked_at:
                continue
            looked_at.add(node.number)
            entry = self._place(node)
            if entry is None:
                continue
            if entry.__class__ is list and entry[6] is None and node.carried:
                entry[6] = self._raw(node)
            todo.extend(node.refers)
        shared = [group for group in map(self._group, tuple(self._graph.memory.shared)) if group]
        self._keep()
        missed = self._graph.missed()
        if not self._carries and not missed:
            return b""
        head = [FORMAT, values.slot_now, list(self._graph.told.omitted), missed]
        return values.encode([*head, shared, self._out])

    def _group(self, address: int) -> list[Any]:
        """Those in one memory: all that are carried, and if possible one that the newcomer has."""
        there = [node for node in self._graph.memory.lying[address] if node.target is not None]
        group = [node for node in there if self._placed.get(node.number) is not None]
        if not group or len(there) < 2:
            return []
        anchor = max(there, key=self._suits)
        if self._suits(anchor)[0] and anchor not in group and self._place(anchor) is not None:
            group.append(anchor)
        return [node.laid for node in group] if len(group) > 1 else []

    def _suits(self, node: VariableNode) -> tuple[bool, int]:
        """As the one whose memory the newcomer has itself."""
        way = self._way(node)
        return way is not None and not way[2], node.target.nbytes

    def _keep(self) -> None:
        for node, entry in self._new:
            self._carries = self._carries or entry[6] is not None
            if len(node.parents) == 1 and not node.moves:
                (((_, key), parent),) = node.parents.items()
                node.entry = parent, key, entry[4], msgspec.Raw(values.encode(entry))

    def _place(self, node: VariableNode) -> Any:
        """Append it behind its parent; None: no root leads here."""
        placed = self._placed
        if node.number in placed:
            return placed[node.number]
        placed[node.number] = None  # a way that comes back here is none
        if node.entry is not None:
            parent, key, bound, kept = node.entry
            if self._place(parent) is not None and parent.varies(key) == bound:
                self._carries = self._carries or node.raw is not None
                placed[node.number] = kept
                self._out.append(kept)
                return kept
        where = self._way(node)
        if where is None:
            del placed[node.number]
            return None
        number, key, bound = where
        entry = [node.number, node.kind, number, key, bound, node.about(), None]
        placed[node.number] = entry
        self._out.append(entry)
        self._new.append((node, entry))
        if bound:
            node.carry_all(self._graph)
        if node.carried:
            entry[6] = self._raw(node)
        return entry

    def _way(self, node: VariableNode) -> tuple[int, Any, bool] | None:
        if node.depth == 0:
            if isinstance(node, FrameNames) and node.target is None:
                return None
            return 0, node.label, False
        ways = list(node.parents.items())
        if len(ways) > 1:
            # A newcomer may not have come to define a function yet.
            ways.sort(key=lambda way: (way[1].varies(way[0][1]), way[1].kind in FUNCTIONS))
        for (_, key), parent in ways:
            if self._place(parent) is not None:
                return parent.number, _plain(key), parent.varies(key)
        return None

    def _raw(self, node: VariableNode) -> Any:
        if node.raw is None:
            node.refers = []
            try:
                raw = values.encode(node.payload(self._graph))
            except (OverflowError, UnicodeEncodeError):  # scalars that msgpack does not know
                assert isinstance(node, Items)
                node.flat = False
                raw = values.encode(node.payload(self._graph))
            if len(raw) > values.BYTES_MAX and not isinstance(node, Block):
                self._graph.omit(node.label)
                raw = values.encode(None)
            node.raw = msgspec.Raw(raw)
            if isinstance(node, Block):
                node.record.raw = node.raw
        return node.raw


def _plain(key: Any) -> Any:
    return list(map(_plain, key)) if isinstance(key, tuple) else key
