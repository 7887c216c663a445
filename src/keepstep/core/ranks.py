"""Sets of ranks that cost nothing where all ranks are alike.

A look at all facts that walks over 131,072 objects takes longer than a decision may. Nearly all
ranks of a job are always in the same state, so a set of ranks is kept as "all of them without
these", and who has answered as one byte per rank that C code searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Ranks:
    """Ranks 0 to world - 1, in order, without some. Never changes."""

    __slots__ = ("_without", "_world")

    def __init__(self, world: int, without: Iterable[int] = ()) -> None:
        self._world = world
        self._without = frozenset(without)

    def __contains__(self, rank: int) -> bool:
        return 0 <= rank < self._world and rank not in self._without

    def __iter__(self) -> Iterator[int]:
        without = self._without
        return (rank for rank in range(self._world) if rank not in without)

    def __len__(self) -> int:
        return self._world - len(self._without)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranks):
            return NotImplemented
        return (self._world, self._without) == (other._world, other._without)

    def __hash__(self) -> int:
        return hash((self._world, self._without))

    def tally(self, without: Iterable[int] = ()) -> Tally:
        """Nobody in it has answered yet; those `without` need not."""
        return Tally(self._world, self._without.union(without))


class Tally:
    """Whose answer is still missing."""

    __slots__ = ("_answered", "left")

    def __init__(self, world: int, needless: frozenset[int] = frozenset()) -> None:
        self._answered = bytearray(world)
        self.left = world
        for rank in needless:
            self.note(rank)

    def note(self, rank: int, answered: bool = True) -> None:
        if self._answered[rank] != answered:
            self._answered[rank] = answered
            self.left += -1 if answered else 1

    def lacks(self, rank: int) -> bool:
        return not self._answered[rank]

    def missing(self, first: int = 0) -> Iterator[int]:
        """Ranks without an answer, from `first` on in order."""
        rank = self._answered.find(0, first)
        while rank >= 0:
            yield rank
            rank = self._answered.find(0, rank + 1)


@dataclass(frozen=True, slots=True)
class Told:
    """All ordinary ranks were told something at once, except some workers. See together.py."""

    number: int
    at: int
    besides: frozenset[str]
