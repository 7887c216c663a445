"""Small state that replicas share, as the last transaction had and left it.

State is copied at the entry of the transaction that comes next: what the script does in between (a
scheduler's step) has been done to it. A newcomer's script does it, too, on its way there. At that
entry everything is put in place again, if it has come to differ; but code on the way would see what
has been changed twice, and behind the last step of all there is no such entry. So every rank
remembers registered objects, if they are small, and the hyperparameters of optimizers, as the last
transaction has left them. A newcomer of a rank that has ended it begins with those. One that has to
make the rest of the step itself begins that with what they were in the fence. It has no gradients,
so what an optimizer makes of them in its groups or attributes is remembered behind each update.

Parameters and large objects are not remembered. Where the script changes them behind its last step,
a newcomer that comes to the script's end has others than those who have ended, and says so
(newcomer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from keepstep.worker.state import codec
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import set_hyper

Hyper = list[dict[str, Any]]
Small = tuple[dict[str, bytes], dict[str, Hyper]]  # objects by name, optimizers by name

NOTHING: Small = ({}, {})


class Boundary:
    def __init__(
        self, rank: RankFacts, changing: Callable[[], Iterable[str]], of_optimizers: str
    ) -> None:
        """`changing()`: objects that have changed at all. `of_optimizers`: how the names begin of
        those that are attributes of optimizers."""
        self._rank = rank
        self._changing = changing
        self._of_optimizers = of_optimizers
        self._tick = -1
        self._fence, self._left = NOTHING, NOTHING
        self._updated: dict[str, list[Small]] = {}  # by optimizer, behind each of its updates
        self._made: Counter[str] = Counter()  # of those, again by a newcomer
        # Of the transaction that runs.
        self._fence_now = NOTHING
        self._updated_now: dict[str, list[Small]] = {}

    # ------------------------------------------------------------------ the life of a step

    def fenced(self) -> None:
        """An update is about to follow."""
        self._updated_now.clear()
        self._fence_now = self._small(self._wanted(), self._rank.optimizers.keys())

    def updated(self, optimizer: str) -> None:
        names = (n for n in self._rank.objects if n.startswith(self._of_optimizers))
        found = self._small(names, [optimizer])
        self._updated_now.setdefault(optimizer, []).append(found)

    def passed(self) -> None:
        """A transaction has ended."""
        self._tick = self._rank.tick + 1
        self._left = self._small(self._wanted(), self._rank.optimizers.keys())
        self._fence, self._fence_now = self._fence_now, NOTHING
        self._updated, self._updated_now = self._updated_now, {}

    def _wanted(self) -> set[str]:
        found = {name for name, item in self._rank.objects.items() if item.alike}
        return found.union(self._changing())

    def _small(self, objects: Iterable[str], optimizers: Iterable[str]) -> Small:
        found = {n: self._rank.objects[n].small_snapshot() for n in sorted(objects) if self._has(n)}
        hypers = {name: hyper_of(self._rank.optimizers[name]) for name in optimizers}
        return (
            {name: data for name, data in found.items() if data is not None},
            {name: hyper for name, hyper in hypers.items() if _is_plain(hyper)},
        )

    def _has(self, name: str) -> bool:
        item: Registered | None = self._rank.objects.get(name)
        return item is not None and not (item.per_rank or item.own or item.sharded)

    # ------------------------------------------------------------------ on a newcomer

    def export(self) -> dict[str, Any]:
        if self._tick != self._rank.tick:
            return {}
        parts = {"fence": self._fence, "left": self._left, "updated": self._updated}
        return {"tick": self._tick, **parts}

    def load(self, told: dict[str, Any]) -> None:
        self._tick = told.get("tick", -1)
        self._fence, self._left = told.get("fence", NOTHING), told.get("left", NOTHING)
        self._updated = told.get("updated", {})
        self._made.clear()

    def put_fence(self) -> None:
        self._put(*self._fence)

    def put_updated(self, optimizer: str) -> None:
        """Behind an update that changes nothing, because its gradients are lost."""
        made, behind = self._made[optimizer], self._updated.get(optimizer, [])
        self._made[optimizer] += 1
        if made < len(behind):
            self._put(*behind[made])

    def put_left(self) -> None:
        self._put(*self._left)

    def not_remembered(self, names: Iterable[str]) -> list[str]:
        """Of tensors, those that are not of objects which `put_left` has put in place."""
        known = self._left[0].keys() if self._tick == self._rank.tick else ()
        return [
            name
            for name in names
            if "/" in name and not any(name.startswith(f"object/{one}/") for one in known)
        ]

    def _put(self, objects: dict[str, bytes], hypers: dict[str, Hyper]) -> None:
        if self._tick != self._rank.tick:
            return
        for name, data in objects.items():
            if self._has(name) and self._rank.objects[name].snapshot() != data:
                self._rank.objects[name].load(codec.loads_inline(data))
        for name, hyper in hypers.items():
            if len(hyper) == len(self._rank.optimizers[name].param_groups):
                set_hyper(self._rank.optimizers[name], hyper)


def hyper_of(optimizer: torch.optim.Optimizer) -> Hyper:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _is_plain(hyper: Hyper) -> bool:
    """A learning rate in a tensor changes in place."""
    return not any(isinstance(value, torch.Tensor) for group in hyper for value in group.values())
