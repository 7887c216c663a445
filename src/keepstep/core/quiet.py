"""Which events need no look at all facts, because nothing can follow from them.

Theory of operation. `settle` looks at every rank, and nearly everything that is said changes one
fact of one rank: with n ranks a migration would cost n answers times n facts. But most answers
only bring a gate nearer ("all have reported") that stays shut as long as *one* rank lacks the
answer. Whose answers are missing is counted (`Tally` in ranks.py), so an answer costs the same in
a job of any size. Where a gate asks for more than answers one rank that keeps it shut is kept in
mind (a cursor): it is only ever a place to begin the search, a wrong one costs time and decides
nothing.

`follows_nothing` says that a look after this event would find what the last one found. That needs

* a last look that left everything at rest (`Job.rest`): `settle` refills spares last, and what it
  starts or kills then is seen by the next look;
* an event that is known here by name, and a gate of it that is still shut. Whatever is not named
  here, bears a second meaning (an error, an end), or is the first of its kind is looked at.

Timers are facts too. What passes here only takes rows of timers.py away or moves them back, or
says which row it adds: so the earliest time known (`Job.due`) is never too late. It may be too
early, and whoever wakes up then asks once more (`Core.deadline` with the time it is).
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.core.facts import Attempt, Worker
from keepstep.core.phases import has_held
from keepstep.core.rewire import goes_on
from keepstep.core.state import Job, Out
from keepstep.model.agent_messages import (
    PathsSeen,
    Progress,
    Stalled,
    Unstalled,
    WorkerSaid,
    WorkersSaid,
    WorkerStarted,
)
from keepstep.model.job import AgentJoined, AgentSaid, CoreInput
from keepstep.model.messages import (
    Attached,
    Done,
    Failure,
    Held,
    Report,
    Resumed,
    Saved,
    Staged,
    Swapped,
    WorkerMessage,
)


def follows_nothing(job: Job, out: Out, event: CoreInput) -> bool:
    """Asked after the event's facts were noted, instead of a look."""
    if job.replayed or job.injects:
        return False
    if isinstance(event, AgentJoined):
        return job.rest and job.mode == "waiting" and not job.workers and _home_absent(job)
    if not isinstance(event, AgentSaid):
        return False
    message = event.message
    if isinstance(message, PathsSeen):
        return True  # for people only
    if isinstance(message, Progress) and job.mode == "running" and job.attempt is None:
        return not out.said  # most of what is ever said; a straggler may have been found
    if not job.rest:
        return False
    if isinstance(message, WorkerStarted):
        return job.mode in ("starting", "running")  # no decision asks for it
    if job.mode == "starting":
        return _start_waits(job, message)
    if job.mode != "running":
        return False
    attempt = job.attempt
    if isinstance(message, Progress):
        if attempt is None or not attempt.committed:
            return attempt is not None
        return _still_rewiring(job, attempt, job.owners_on(event.node))
    if isinstance(message, Stalled | Unstalled):
        return _in_recovery(attempt) or _somebody_gets_on(job, attempt)
    if isinstance(message, WorkersSaid):
        # Each one is asked about, because the first of a kind is noted as such.
        idle = [_is_idle(job, attempt, one) for one in _samples(job, message.said)]
        return all(idle)
    return isinstance(message, WorkerSaid) and _is_idle(job, attempt, message)


def _samples(job: Job, said: list[WorkerSaid]) -> Iterable[WorkerSaid]:
    """Ordinary ranks that give the same answer about the same tick stand for each other."""
    special, workers = job.watched, job.workers
    found: dict[object, WorkerSaid] = {}
    for one in said:
        alike = one.worker in workers and one.worker not in special
        kind = (type(one.said), getattr(one.said, "tick", 0))
        found[kind if alike else one.worker] = one
    return found.values()


def _is_idle(job: Job, attempt: Attempt | None, message: WorkerSaid) -> bool:
    worker = job.workers.get(message.worker)
    if worker is None or job.owners.get(worker.rank) != worker.id or not worker.usable:
        return False
    if isinstance(message.said, Done):
        return attempt is None and not job.incidents and _somebody_gets_on(job, None)
    if isinstance(message.said, Saved):
        saving = job.saves.now if attempt is None else None
        return saving is not None and saving.number == message.said.number and saving.parts.left > 0
    if attempt is None or attempt.solo or attempt.kind == "resume":
        return False
    if attempt.committed:
        rewired = isinstance(message.said, Swapped | Resumed)
        return rewired and _still_rewiring(job, attempt, [worker])
    return _still_gathering(job, attempt, worker, message.said)


def _in_recovery(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.kind == "unplanned" and not attempt.committed


# ------------------------------------------------------------------ gates that are still shut


def _first(attempt: Attempt, what: str, tick: int = 0) -> bool:
    """The first answer shows that streams work, and silence is judged otherwise from then on."""
    if what in attempt.heard:
        return attempt.heard[what] != tick
    attempt.heard[what] = tick
    return True


def _still_gathering(job: Job, attempt: Attempt, worker: Worker, said: WorkerMessage) -> bool:
    if isinstance(said, Failure):
        # Neighbours of a dead rank fail by the thousand; their Reports will say it again.
        if not _in_recovery(attempt) or said.error_kind == "device":
            return False
        job.alarm = None
        return True
    if isinstance(said, Report):
        report = worker.report
        if report is None or report.generation != attempt.generation or report.done or worker.done:
            return False
        if attempt.tick is not None or _first(attempt, "report"):
            return False
        return attempt.reports.left > 0
    if isinstance(said, Staged):
        return attempt.stages.left > 0
    if isinstance(said, Held):
        held = worker.held
        if held is None or worker.done or not has_held(worker, attempt):
            return False
        if _first(attempt, "held", held.tick):
            return False
        # Who holds is not missed when a hang is looked for, which recoveries do not do.
        return attempt.holds.left > 0 and (_in_recovery(attempt) or _somebody_gets_on(job, attempt))
    return False


def _still_rewiring(job: Job, attempt: Attempt, speakers: list[Worker]) -> bool:
    if attempt.phase == "REWIRE":
        swapped = any(worker.swapped >= attempt.generation for worker in speakers)
        return not (swapped and _first(attempt, "swap")) and goes_on(job, attempt.swaps)
    return attempt.phase == "RESUME" and goes_on(job, attempt.resumes)


def _gets_on(worker: Worker) -> bool:
    return worker.stalled is None and worker.usable and not worker.done


def _somebody_gets_on(job: Job, attempt: Attempt | None) -> bool:
    """As long as one rank does, no hang can be told."""
    holds = attempt.holds if attempt is not None and not attempt.committed else None
    for number in range(job.cursor, job.cursor + job.spec.world):
        rank = number % job.spec.world
        if holds is not None and not holds.lacks(rank):
            continue
        if _gets_on(job.workers[job.owners[rank]]):
            job.cursor = rank
            return True
    return False


def _start_waits(job: Job, message: object) -> bool:
    """Some are in attach and others are known to be missing: one more there changes nothing."""
    attached = isinstance(message, WorkerSaid) and isinstance(message.said, Attached)
    if not attached and not isinstance(message, Progress):
        return False
    if job.attempt is not None or job.start_fault is not None or job.attach_since is None:
        return False
    for number in range(job.cursor, job.cursor + job.spec.world):
        rank = number % job.spec.world
        worker = job.owner(rank)
        if worker is None:
            return False
        if not worker.attached and worker.where != "attaching" and not worker.done:
            job.cursor = rank
            return True
    return False


def _home_absent(job: Job) -> bool:
    """Ranks are started when the last of their nodes has joined."""
    homes = job.spec.world // job.spec.local_world
    for number in range(job.cursor, job.cursor + homes):
        if job.order[number % homes].state == "absent":
            job.cursor = number % homes
            return True
    return False
