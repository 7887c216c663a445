"""A view of a weight that a variable holds: `best = model.state_dict()`.

What is written to the weight is in the view, too. So it is carried as its place in that weight, and
made again as a view of the newcomer's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from keepstep.worker.script import sharing
from keepstep.worker.script.nodes import Graph, VariableNode
from keepstep.worker.state import codec, shards


class View(VariableNode):
    kind = "view"

    def about(self) -> str:
        return f"{self.target.dtype} {list(self.target.shape)}"

    def __init__(self, graph: Graph, target: Any, label: str, depth: int) -> None:
        super().__init__(graph, target, label, depth)
        self._lies: list[Any] | None = None
        self._owner: Callable[[], torch.Tensor | None] = lambda: None
        self._at = 0  # address of the weight

    def scan(self, graph: Graph) -> None:
        """What is in it is the weight's, as long as the weight stays where it is."""
        owner = self._owner()
        if owner is not None and shards.local(owner).data_ptr() == self._at:
            return
        lies = self._place(graph)
        if self._lies is not None and lies != self._lies:
            self.changing = True
            if lies is None:
                graph.omit(f"{self.label} (a view of a weight that now lies elsewhere)")
        self._lies = lies
        graph.touch(self)

    def payload(self, graph: Graph) -> Any:
        return None if self._lies is None else codec.dumps_inline(self._lies)

    def _place(self, graph: Graph) -> list[Any] | None:
        owner = graph.owner_of(self.target)
        there = sharing.place(shards.local(owner[1])) if owner is not None else None
        here = sharing.place(self.target)
        if owner is None or there is None or here is None:
            return None
        self._owner, self._at = weakref.ref(owner[1]), shards.local(owner[1]).data_ptr()
        layout, shape = sharing.layout(self.target), list(self.target.shape)
        about = [owner[0], here[1] - there[1], layout, shape, self.target.dtype]
        return [*about, self.target.requires_grad]

    def put_back(self, old: Any) -> None:
        """Nothing is noted."""

    def apply(self, data: Any, referred: Callable[[int], Any]) -> None:
        """Under a name that is never bound anew it is the newcomer's own."""


def made(named: Callable[[str], Any], payload: bytes) -> torch.Tensor:
    name, offset, steps, shape, dtype, graded = codec.loads_inline(payload)
    like = torch.empty(shape, dtype=dtype, device="meta")
    found: torch.Tensor = sharing.Memory(shards.local(named(name)), 0).view(offset, steps, like)
    return found.requires_grad_(graded)
