"""A file in memory (`io.BytesIO`): what is in it, and where it stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from keepstep.errors import UsageError
from keepstep.worker.script import values
from keepstep.worker.script.nodes import Graph, VariableNode


class MemoryFile(VariableNode):
    kind = "stream"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self.last: list[Any] | None = None

    def carry_all(self, graph: Graph) -> None:
        if not self.carried:
            self.late = True
            graph.touch(self)

    def about(self) -> str:
        return type(self.target).__name__

    def scan(self, graph: Graph) -> None:
        target = self.target
        now: list[Any] = []
        if not target.closed:
            at = target.tell()
            size = target.seek(0, io.SEEK_END)
            target.seek(at)
            large = size > values.BYTES_MAX
            now = [None, size, at] if large else [target.getvalue(), at]
        if now != self.last:
            if now and now[0] is None and self.last is not None:
                graph.omit(self.label)
            if self.last is not None:
                graph.note(self, None, self.last)
                self.changing = True
            self.last = now
            graph.touch(self)

    def payload(self, graph: Graph) -> Any:
        return None if self.last and self.last[0] is None else self.last

    def put_back(self, old: Any) -> None:
        target = self.target
        if not old:
            target.close()
            return
        if target.closed:
            raise UsageError(
                f"{self.label}, a file in memory, was closed in a step that must be repeated, or "
                "by the newcomer of a rank that has it open",
                hint="close it between steps",
            )
        if old[0] is None:
            raise UsageError(
                f"{self.label}, a file in memory of {old[1] >> 10} KiB, was changed in a step that "
                "must be repeated",
                hint="write to it between steps",
            )
        target.seek(0)
        target.truncate()
        target.write(old[0])
        target.seek(old[1])

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        self.put_back(data)
