"""Which workers stand still: pure, fed with samples of the progress pages.

A worker's clock starts at its last change of `marks` (as seen here) and is reset whenever standing
still is legitimate: no transaction has begun yet, the rank holds for a migration, it is parked,
or its script has ended. After `timeout_ns` it is reported once, and again only if what triage
looks at has changed: a heartbeat goes stale a little later than the marks do, and a process can
be stopped when it already stood still. The first progress after a report takes it back.

A rank that holds by itself (its buddy is lost, its step has failed) asks for what it needs again
and again. Each time counts as progress; if it asks no more, nobody but this would ever miss it.

If the observer itself was away (suspended with the machine, or starved) it has not seen the
workers stand still, it has not seen them at all: a gap between two samples resets the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.model.agent_messages import Stalled, Unstalled
from keepstep.model.page import Sample

# A rank waiting in a collective sleeps; one in an endless loop uses a core. A quarter of the
# stall leaves room for a machine with more busy processes than cores.
CPU_BUSY_PART = 4


@dataclass
class _Watch:
    marks: int
    asked_ns: int
    since_ns: int  # of the last progress
    cpu_ns: int  # used by the main thread at that moment
    seen_ns: int  # last sample
    report: Stalled | None = None


def may_stand_still(sample: Sample | None) -> bool:
    if sample is None or not sample.stepping or sample.where in ("parked", "done"):
        return True
    return sample.hold and not sample.asked_ns


class StallDetector:
    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._watches: dict[str, _Watch] = {}

    def observe(
        self,
        now_ns: int,
        worker: str,
        rank: int,
        sample: Sample | None,
        *,
        cpu_ns: int,
        stopped: bool,
    ) -> Stalled | Unstalled | None:
        """Take one sample; the answer is what the orchestrator has to hear, if anything."""
        if sample is None or may_stand_still(sample):
            watch = self._watches.pop(worker, None)
            return Unstalled(worker=worker) if watch and watch.report else None
        watch = self._watches.get(worker)
        if watch is None:
            self._watches[worker] = _Watch(sample.marks, sample.asked_ns, now_ns, cpu_ns, now_ns)
            return None
        gap_ns = now_ns - watch.seen_ns
        watch.seen_ns = now_ns
        if (sample.marks, sample.asked_ns) != (watch.marks, watch.asked_ns):
            was_reported = watch.report is not None
            self._watches[worker] = _Watch(sample.marks, sample.asked_ns, now_ns, cpu_ns, now_ns)
            return Unstalled(worker=worker) if was_reported else None
        if gap_ns > self._timeout_ns // 2 and watch.report is None:
            watch.since_ns, watch.cpu_ns = now_ns, cpu_ns
            return None
        if now_ns - watch.since_ns < self._timeout_ns:
            return None
        report = self._report(now_ns, worker, rank, sample, watch, cpu_ns, stopped)
        if watch.report is not None and self._evidence(report) == self._evidence(watch.report):
            return None
        watch.report = report
        return report

    def forget(self, worker: str) -> None:
        self._watches.pop(worker, None)

    def reports(self) -> list[Stalled]:
        """Everything reported and not taken back: for an orchestrator that missed it."""
        return [watch.report for watch in self._watches.values() if watch.report is not None]

    def all_stalled(self, workers: Iterable[str]) -> bool:
        """True if there are some and each of them stands reported."""
        watches = [self._watches.get(worker) for worker in workers]
        return bool(watches) and all(w is not None and w.report is not None for w in watches)

    def _report(
        self,
        now_ns: int,
        worker: str,
        rank: int,
        sample: Sample,
        watch: _Watch,
        cpu_ns: int,
        stopped: bool,
    ) -> Stalled:
        stall_ns = now_ns - watch.since_ns
        return Stalled(
            worker=worker,
            rank=rank,
            version=sample.version,
            tick=sample.tick,
            marks=sample.marks - sample.tick_marks,
            where=sample.where,
            heartbeat_age_ns=max(0, now_ns - sample.heartbeat_ns),
            stopped=stopped,
            cpu_busy=(cpu_ns - watch.cpu_ns) * CPU_BUSY_PART >= stall_ns,
        )

    def _evidence(self, report: Stalled) -> tuple[bool, bool, bool]:
        stale = report.heartbeat_age_ns > self._timeout_ns
        return report.stopped, report.cpu_busy, stale
