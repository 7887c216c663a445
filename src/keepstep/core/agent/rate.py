"""How fast a rank steps, from what its progress page shows: pure."""

from __future__ import annotations

import math

from keepstep.model.page import Sample

SMOOTHING_NS = 3_000_000_000


class Rate:
    """Smoothed steps per second of one worker.

    Measured between commits on the worker's own clock, so it does not depend on when the agent
    looks. A new generation starts anew: a newcomer's version jumps when it takes its rank over."""

    def __init__(self) -> None:
        self._last: Sample | None = None
        self._per_s = 0.0

    def observe(self, now_ns: int, sample: Sample) -> float:
        last = self._last
        if last is None or last.generation != sample.generation or sample.version < last.version:
            self._last, self._per_s = sample, 0.0
        elif sample.version > last.version:
            self._advance(last, sample)
            self._last = sample
        return round(self._bounded(now_ns, sample), 2)

    def _advance(self, last: Sample, sample: Sample) -> None:
        elapsed_ns = sample.commit_ns - last.commit_ns
        if last.commit_ns == 0 or elapsed_ns <= 0:
            return
        measured = (sample.version - last.version) * 1e9 / elapsed_ns
        if self._per_s == 0.0:
            self._per_s = measured
        else:
            self._per_s += (1 - math.exp(-elapsed_ns / SMOOTHING_NS)) * (measured - self._per_s)

    def _bounded(self, now_ns: int, sample: Sample) -> float:
        """Nothing has been committed for a while: it can not be faster than that."""
        idle_ns = now_ns - sample.commit_ns
        if self._per_s == 0.0 or idle_ns <= 2e9 / self._per_s + 1e9:
            return self._per_s
        return min(self._per_s, 1e9 / idle_ns)
