"""Side states of other nodes' ranks, kept as their buddy."""

from __future__ import annotations

from keepstep.model.page import INIT_TICK, NEWEST, TICKS_KEPT, is_late


class BlobStore:
    """Copies in memory: per rank the newest ticks and the init record."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, bytes]] = {}

    def put(self, rank: int, tick: int, data: bytes) -> None:
        ticks = self._ranks.setdefault(rank, {})
        ticks[tick] = data
        late = is_late(tick)
        steps = sorted(kept for kept in ticks if kept != INIT_TICK and is_late(kept) == late)
        if late:
            steps.reverse()
        # What was just acknowledged is never the one to go, even if it is not among the newest.
        while len(steps) > TICKS_KEPT:
            oldest = next(kept for kept in steps if kept != tick)
            steps.remove(oldest)
            del ticks[oldest]

    def drop(self, rank: int, tick: int) -> None:
        del self._ranks[rank][tick]

    def get(self, rank: int, tick: int) -> tuple[int, bytes] | None:
        ticks = self._ranks.get(rank, {})
        if tick == NEWEST:
            tick = max((kept for kept in ticks if kept >= 0), default=NEWEST)
        return (tick, ticks[tick]) if tick in ticks else None

    def ticks(self, rank: int) -> list[int]:
        return sorted(self._ranks.get(rank, {}))
