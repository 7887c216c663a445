"""What ranks "train": numbers that show every mistake.

Few values stand for all state. The *shared* one is what replicas have in common: the next one is
made from the contributions of all ranks to one collective, so a step that was lost, doubled, mixed
from two generations or made from stale state leads to another number. The *own* one is what only
one rank has at a boundary (random streams, position): it travels as side state. In worlds with
parities there is a *shard* too, which no other rank has and no side state either: each step makes
the next one with a gradient.

Nothing depends on the generation, the process or the time, so the undisturbed run is known in
closed form, and every commit of every rank can be compared with it. Hashes of integers are the
same in every process whatever PYTHONHASHSEED says.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_step(tick: int) -> bool:
    """Every fifth transaction is a section: it counts a tick but no version."""
    return tick % 5 != 4


def contribution(shared: int, own: int, tick: int, rank: int) -> int:
    return hash((shared, own, tick, rank))


def next_shared(shared: int, tick: int, contributions: Sequence[int]) -> int:
    return hash((shared, tick, *contributions)) if is_step(tick) else shared


def next_own(own: int, tick: int, rank: int) -> int:
    return hash((own, tick, rank))


def gradient(shared: int, tick: int, rank: int) -> int:
    return hash((3, shared, tick, rank))


def next_shard(shard: int, gradient: int) -> int:
    return hash((shard, gradient))


def first_shard(rank: int) -> int:
    return hash((4, rank))


def first_shared() -> int:
    return hash((1, 1))


def first_own(rank: int) -> int:
    return hash((2, rank))


class Undisturbed:
    """Values of the run that nobody disturbs, by tick."""

    def __init__(self, world: int) -> None:
        self.shared = [first_shared()]
        self.own = [[first_own(rank) for rank in range(world)]]
        self.shard = [[first_shard(rank) for rank in range(world)]]
        self.version = [0]

    def upto(self, tick: int) -> None:
        while len(self.shared) <= tick:
            now = len(self.shared) - 1
            shared, own, shards = self.shared[now], self.own[now], self.shard[now]
            given = [contribution(shared, mine, now, rank) for rank, mine in enumerate(own)]
            self.shared.append(next_shared(shared, now, given))
            self.own.append([next_own(mine, now, rank) for rank, mine in enumerate(own)])
            self.shard.append(
                [next_shard(one, gradient(shared, now, rank)) for rank, one in enumerate(shards)]
                if is_step(now)
                else shards
            )
            self.version.append(self.version[now] + is_step(now))


_known: dict[int, Undisturbed] = {}


def undisturbed(world: int, ticks: int) -> Undisturbed:
    run = _known.setdefault(world, Undisturbed(world))
    run.upto(ticks)
    return run
