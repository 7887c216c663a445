"""A disk that all nodes share: periodic checkpoints, whole and in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keepstep.sim.plans.world_plan import SAVED


class SavedState(NamedTuple):
    """A rank's part of a checkpoint."""

    number: int
    tick: int
    version: int
    own: int
    shared: int
    shard: int


class SharedDisk:
    def __init__(self, spoils: bool) -> None:
        self.saved: dict[str, dict[int, SavedState]] = {}  # complete ones, by path
        self.spoiled: str | None = None  # the one of them that is damaged; None: not chosen yet
        self._spoils = spoils
        self._parts: dict[int, dict[int, SavedState]] = {}  # tick -> rank -> part

    def keep(self, rank: int, part: SavedState) -> None:
        self._parts.setdefault(part.tick, {})[rank] = part

    def seal(self, number: int, tick: int, world: int, keep: Sequence[str]) -> str:
        """The path of the checkpoint that the parts of all ranks make; empty if one is missing."""
        path, parts = f"{SAVED}/checkpoint-{tick}", self._parts.get(tick, {})
        right = [rank for rank, part in parts.items() if part.number == number]
        if len(right) < world:
            return ""
        self.saved = {kept: self.saved[kept] for kept in keep if kept in self.saved}
        self.saved[path] = dict(parts)
        if self.spoiled == path:
            self.spoiled = ""  # written anew
        return path

    def is_spoiled(self, path: str) -> bool:
        if self._spoils and self.spoiled is None and len(self.saved) > 1:
            self.spoiled = path if path == next(reversed(self.saved)) else None
        return path == self.spoiled
