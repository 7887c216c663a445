"""A circuit breaker for pre-emptive moves.

A detector that goes mad, or one cause that shows on many nodes (cooling, a switch, a bad driver),
taints a large part of a job at once. Moving all those ranks would take every spare and pause the
job again and again for nothing. So in any minute only so many ranks are told to move; further
taints stand on record as `Deferred` and are looked at again when the minute is over, if they are
still there. What is asked for by an operator (migrate, drain) is not limited.
"""

from __future__ import annotations

from keepstep.core.facts import SECOND
from keepstep.core.incidents import open_incident
from keepstep.core.state import Job, Out
from keepstep.core.triage import name_ranks
from keepstep.model.records import Deferred

WINDOW_NS = 60 * SECOND


def ranks_max(job: Job) -> int:
    """One node's ranks, or a fifth of all if that is more."""
    return max(job.spec.local_world, job.spec.world // 5)


def _recent(job: Job, now: int) -> int:
    return sum(count for at, count in job.preempted if at + WINDOW_NS > now)


def move_away(job: Job, out: Out, target: str, ranks: list[int], reason: str) -> None:
    """Open a pre-emptive incident, or put it off."""
    recent, most = _recent(job, out.now), ranks_max(job)
    if recent and recent + len(ranks) > most:
        if target in job.deferred:
            return
        why = (
            f"{name_ranks(ranks)} stay for now: {recent} ranks were told to leave tainted places "
            f"within {WINDOW_NS // SECOND} s and {most} may be; a common cause is likely"
        )
        job.deferred[target] = reason
        record = Deferred(job=job.id, at_ns=out.now, target=target, reason=reason, why=why)
        out.record(record)
        return
    job.deferred.pop(target, None)
    job.preempted = [one for one in job.preempted if one[0] + WINDOW_NS > out.now]
    job.preempted.append((out.now, len(ranks)))
    open_incident(
        job,
        out,
        trigger="pre-emptive",
        cause="taint",
        victims=ranks,
        reason=reason,
        target=target,
    )


def deadline(job: Job) -> int | None:
    """When the oldest move leaves the window and a deferred one may follow."""
    if not job.deferred:
        return None
    return min((at + WINDOW_NS for at, _ in job.preempted), default=0)
