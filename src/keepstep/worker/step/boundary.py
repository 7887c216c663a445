"""Small state that replicas share, as the last transaction has found and left it.

State is copied at the entry of the transaction that comes next: what the script does in between (a
scheduler's step) has been done to it. A newcomer's script does it, too, on its way there. At that
entry everything is put in place again, if it has come to differ; but code on the way would see what
has been changed twice, and behind the last step of all there is no such entry. So every rank
remembers registered objects, if they are small, and the hyperparameters of optimizers, as the last
transaction has left them. A newcomer of a rank that has ended it begins with those. One that has to
make the rest of the step itself begins that with what the transaction has found.

Parameters and large objects are not remembered. Where the script changes them behind its last step,
a newcomer that comes to the script's end has others than those who have ended, and says so
(newcomer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from keepstep.worker.state import codec
from keepstep.worker.state.objects import SNAPSHOT_BYTES_MAX, Registered, Undo
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import set_hyper

Hyper = list[dict[str, Any]]


class Boundary:
    def __init__(self, rank: RankFacts, changing: Callable[[], Iterable[str]]) -> None:
        """`changing()`: objects that have changed at all."""
        self._rank = rank
        self._changing = changing
        self._tick = -1
        self._found: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        self._hyper: list[tuple[Hyper, Hyper]] = []  # found and left, of each optimizer

    def passed(self, undo: Undo) -> None:
        """A transaction has ended."""
        objects = self._rank.objects
        self._tick = self._rank.tick + 1
        self._found = {item.name: data for item, data in undo.objects if data is not None}
        wanted = {name for name, item in objects.items() if item.alike}.union(self._changing())
        left = {n: objects[n].small_snapshot() for n in sorted(wanted) if self._shared(n)}
        self._left = {name: data for name, data in left.items() if data is not None}
        self._hyper = list(zip(undo.hyper(), map(hyper_of, self._rank.optimizers.values())))

    def _shared(self, name: str) -> bool:
        item: Registered | None = self._rank.objects.get(name)
        return item is not None and not (item.per_rank or item.own or item.sharded)

    def export(self) -> dict[str, Any]:
        if self._tick != self._rank.tick:
            return {}
        found = {
            name: data
            for name, data in self._found.items()
            if self._shared(name) and len(data) <= SNAPSHOT_BYTES_MAX
        }
        plain = [pair if _is_plain(pair) else None for pair in self._hyper]
        return {"tick": self._tick, "found": found, "left": self._left, "hyper": plain}

    def load(self, told: dict[str, Any]) -> None:
        """On a newcomer."""
        self._tick = told.get("tick", -1)
        self._found, self._left = told.get("found", {}), told.get("left", {})
        self._hyper = [pair or ([], []) for pair in told.get("hyper", [])]

    def put_found(self) -> None:
        self._put(self._found, 0)

    def put_left(self) -> None:
        self._put(self._left, 1)

    def _put(self, objects: dict[str, bytes], which: int) -> None:
        if self._tick != self._rank.tick:
            return
        for name, data in objects.items():
            if self._shared(name) and self._rank.objects[name].snapshot() != data:
                self._rank.objects[name].load(codec.loads_inline(data))
        for optimizer, pair in zip(self._rank.optimizers.values(), self._hyper):
            if len(pair[which]) == len(optimizer.param_groups):
                set_hyper(optimizer, pair[which])


def hyper_of(optimizer: torch.optim.Optimizer) -> Hyper:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _is_plain(pair: tuple[Hyper, Hyper]) -> bool:
    """A learning rate in a tensor changes in place."""
    groups = (*pair[0], *pair[1])
    return not any(isinstance(value, torch.Tensor) for group in groups for value in group.values())
