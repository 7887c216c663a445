"""Which events need no look at all facts, because nothing can follow from them.

Theory of operation. `settle` looks at every rank, and nearly everything that is said changes one
fact of one rank: with n ranks a migration would cost n answers times n facts. But most answers
only bring a gate nearer ("all have reported") that stays shut as long as *one* rank lacks the
answer. So one such rank is kept in mind (a cursor), and while it still lacks the answer the gate
is shut, whatever else has come; when it has answered the cursor moves on to the next one that has
not. A cursor goes round once for each gate, so an answer costs a constant amount on average. It is
only ever a place to begin the search: a wrong one costs time and decides nothing.

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

from collections.abc import Callable, Sequence

from keepstep.core.migration import stage_one
from keepstep.core.phases import has_held, has_reported
from keepstep.core.rewire import has_resumed
from keepstep.core.state import Attempt, Job, Out, Worker
from keepstep.model.job import AgentJoined, AgentSaid, CoreInput
from keepstep.model.messages import (
    Attached,
    Done,
    Failure,
    Held,
    Progress,
    Report,
    Resumed,
    Staged,
    Stalled,
    Swapped,
    Unstalled,
    WorkerMessage,
    WorkerSaid,
    WorkerStarted,
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
    if isinstance(message, Progress) and job.mode == "running" and job.attempt is None:
        return True  # most of what is ever said
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
    if not isinstance(message, WorkerSaid):
        return False
    worker = job.workers.get(message.worker)
    if worker is None or job.owners.get(worker.rank) != worker.id or not worker.usable:
        return False
    if isinstance(message.said, Done):
        return attempt is None and not job.incidents and _somebody_gets_on(job, None)
    if attempt is None or attempt.solo or attempt.kind == "resume":
        return False
    if attempt.committed:
        rewired = isinstance(message.said, Swapped | Resumed)
        return rewired and _still_rewiring(job, attempt, [worker])
    return _still_gathering(job, out, attempt, worker, message.said)


def _in_recovery(attempt: Attempt | None) -> bool:
    return attempt is not None and attempt.kind == "unplanned" and not attempt.committed


# ------------------------------------------------------------------ gates that are still shut


def _lacking(
    job: Job, attempt: Attempt, what: str, ranks: Sequence[int], lacks: Callable[[Worker], bool]
) -> bool:
    """True: somebody in `ranks` lacks the answer."""
    owners, workers, count = job.owners, job.workers, len(ranks)
    first = attempt.cursors.get(what, 0)
    for number in range(first, first + count):
        if lacks(workers[owners[ranks[number % count]]]):
            attempt.cursors[what] = number % count
            return True
    return False


def _first(attempt: Attempt, what: str, tick: int = 0) -> bool:
    """The first answer shows that streams work, and silence is judged otherwise from then on."""
    if what in attempt.heard:
        return attempt.heard[what] != tick
    attempt.heard[what] = tick
    return True


def _still_gathering(
    job: Job, out: Out, attempt: Attempt, worker: Worker, said: WorkerMessage
) -> bool:
    ranks, generation = attempt.members, attempt.generation
    if isinstance(said, Failure):
        # Neighbours of a dead rank fail by the thousand; their Reports will say it again.
        if not _in_recovery(attempt) or said.error_kind == "device":
            return False
        job.alarm = None
        return True
    if isinstance(said, Report):
        report = worker.report
        if report is None or report.generation != generation or report.done or worker.done:
            return False
        if attempt.tick is not None or _first(attempt, "report"):
            return False
        if not _lacking(job, attempt, "report", ranks, lambda w: not has_reported(w, attempt)):
            return False
        if stage_one(job, out, attempt, worker):
            due = attempt.staged_at + job.build_ns
            job.due = due if job.due is None else min(job.due, due)
        return True
    if isinstance(said, Staged):
        moving = frozenset(attempt.moving)
        return _lacking(
            job, attempt, "stage", ranks, lambda w: w.staged != generation and w.rank not in moving
        )
    if isinstance(said, Held):
        held = worker.held
        if held is None or worker.done or not has_held(worker, attempt):
            return False
        if _first(attempt, "held", held.tick):
            return False
        # Who holds is not missed when a hang is looked for, which recoveries do not do.
        blind = _in_recovery(attempt)
        return _lacking(
            job,
            attempt,
            "held",
            ranks,
            lambda w: not has_held(w, attempt) and (blind or _gets_on(w)),
        )
    return False


def _still_rewiring(job: Job, attempt: Attempt, speakers: list[Worker]) -> bool:
    generation, ranks = attempt.generation, range(job.spec.world)
    if attempt.phase == "REWIRE":
        swapped = any(worker.swapped >= generation for worker in speakers)
        return not (swapped and _first(attempt, "swap")) and _lacking(
            job, attempt, "swap", ranks, lambda w: not w.done and w.swapped < generation
        )
    return attempt.phase == "RESUME" and _lacking(
        job, attempt, "resume", ranks, lambda w: not w.done and not has_resumed(w, generation)
    )


def _gets_on(worker: Worker) -> bool:
    return worker.stalled is None and worker.usable and not worker.done


def _somebody_gets_on(job: Job, attempt: Attempt | None) -> bool:
    """As long as one rank does, no hang can be told."""
    gathering = attempt if attempt is not None and not attempt.committed else None
    for number in range(job.cursor, job.cursor + job.spec.world):
        rank = number % job.spec.world
        worker = job.workers[job.owners[rank]]
        if _gets_on(worker) and (gathering is None or not has_held(worker, gathering)):
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
