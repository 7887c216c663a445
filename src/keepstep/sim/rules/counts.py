"""What the core keeps at hand is what it would find if it walked over all workers."""

from __future__ import annotations

from keepstep.core.facts import Attempt
from keepstep.core.phases import has_held, has_reported
from keepstep.core.rewire import has_resumed
from keepstep.core.state import Job
from keepstep.sim.ground.violation import ensure, violated


def sorted_in(job: Job) -> None:
    special, owners, count = job.watched, job.owners, 0
    for worker in job.workers.values():
        if not worker.ordinary:
            count += 1
            if worker.id not in special:
                violated(f"{worker.id} is special, and not among {set(special)}")
        elif owners.get(worker.rank) != worker.id:
            violated(f"{worker.id} is ordinary and owns nothing")
    if count != len(special):
        violated(f"{count} workers are special, not {set(special)}")


def counted(job: Job, attempt: Attempt) -> None:
    if attempt.committed:
        owners = list(job.rank_owners())
        swapped = sum(w.swapped < attempt.generation for w in owners)
        resumed = sum(not has_resumed(w, attempt.generation) for w in owners)
        counts, found = (attempt.swaps, attempt.resumes), (swapped, resumed)
    else:
        owners = [job.workers[job.owners[rank]] for rank in attempt.members]
        reported = sum(not has_reported(w, attempt) for w in owners)
        held = sum(not has_held(w, attempt) for w in owners)
        counts, found = (attempt.reports, attempt.holds), (reported, held)
    left = tuple(tally.left for tally in counts)
    ensure(left == found, f"{left} answers are missing by count, {found} in fact")
