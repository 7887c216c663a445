"""State that nobody holds any more: back to the newest checkpoint, or the end of the job.

Theory of operation. The memory of the ranks, and the copies beside it, cover the loss of one node.
What they do not cover is lost since the newest complete checkpoint (checkpoints.py). Then all ranks
are ended, whatever they hold: the job goes back to one boundary of all of them. From there on it is
a job that was submitted with `--resume` (start.py): as soon as the old processes are gone,
spares become newcomers of an attempt without members. The incident stays open until they train,
ends FELL_BACK and says how many steps were lost.

Ticks are used a second time then. So whatever was kept about the first time is dropped: side state
of the dead, copies in agents (those of lower generations, by whoever hears of it later, too),
decisions, counts of deaths.

A checkpoint that two processes of the same rank cannot read is damaged: the job goes further back,
to the one before it.

Without a checkpoint, without room for all ranks, or when the same checkpoint has not helped three
times, the job ends.
"""

from __future__ import annotations

from keepstep.core.facts import Incident
from keepstep.core.incidents import EXIT_DIVERGED, close_incident, end_job
from keepstep.core.processes import close_stores
from keepstep.core.saves import Complete
from keepstep.core.state import Job, Out
from keepstep.model.agent_messages import Forget
from keepstep.model.records import FellBack

EXIT_FELL_BACK = 4
RETURNS_MAX = 3  # to the same checkpoint
UNREADABLE_MAX = 2  # processes of the same rank


def fall_back(job: Job, out: Out, reason: str, reached: int = 0) -> None:
    """`reached`: the step, if no rank is there that knows it."""
    newest, incident = job.saves.newest, job.unplanned()
    if newest is None or incident is None:
        _end(job, out, reason)
        return
    tick, times = job.saves.fallen
    times = times + 1 if tick == newest.tick else 1
    job.saves.fallen = (newest.tick, times)
    if times > RETURNS_MAX:
        why = f"{reason}; the job went back to {newest.path} {RETURNS_MAX} times before"
        _end(job, out, why)
        return
    version = max((worker.version for worker in job.rank_owners()), default=reached)
    lost = max(0, version - newest.version)
    incident.also(f"{reason}; back to {newest.path} at step {newest.version}")
    for other in list(job.incidents):
        if other is not incident:
            close_incident(job, out, other, "ABORTED", f"the job fell back in {incident.id}")
    out.record(
        FellBack(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            path=newest.path,
            tick=newest.tick,
            steps_lost=lost,
            generation=job.generation_max + 1,
            reason=reason,
        )
    )
    for worker in job.workers.values():
        if worker.role != "spare" and worker.alive:
            worker.role = "unwanted"
            out.kill(worker)
    fallen(job, incident, newest, lost, job.generation_max + 1)
    job.reason = f"{lost} steps are lost, going back to {newest.path}"
    close_stores(job, out, keep=set())
    for name in job.nodes:
        out.send(name, Forget(workers=[], before=job.saves.fallen_before))


def _end(job: Job, out: Out, reason: str) -> None:
    if job.divergence is not None:  # nothing is lost, but nothing can be trusted
        end_job(job, out, "diverged", EXIT_DIVERGED, reason)
    else:
        end_job(job, out, "fell_back", EXIT_FELL_BACK, reason)


def further_back(job: Job, out: Out, rank: int, why: str, *, surely: bool = False) -> bool:
    """A newcomer of a job that fell back cannot read the checkpoint; True: it is not the first, or
    so many have failed that it is `surely` of no use, and the job goes further back."""
    saves, bad = job.saves, job.saves.newest
    if bad is None or saves.older is None or job.resume != bad.path:
        return False
    saves.unreadable[rank] += 1
    if saves.unreadable[rank] < UNREADABLE_MAX and not surely:
        return False
    saves.back_to(saves.older.path)
    fall_back(job, out, f"{bad.path} cannot be read: {why}", bad.version)
    return True


def fallen(job: Job, incident: Incident, to: Complete, lost: int, generation: int) -> None:
    """The facts of it, also when they are read from the ledger."""
    job.mode = "waiting"
    job.attempt = None
    job.resume = to.path
    job.owners.clear()
    job.causes.clear()
    job.deaths.clear()
    job.reconnects = (-1, 0)
    job.alarm = job.judge_at = job.release_due = job.divergence = None
    job.checkpoint, job.checkpoint_tick = "", None
    job.saves.now = job.saves.due_at = None
    job.saves.unreadable.clear()
    job.saves.fallen_before = generation
    incident.fell_back, incident.no_understudies = True, True
    incident.steps_lost += lost
    incident.sticky_tick, incident.decision = None, ""
    incident.give_up, incident.give_up_at = "", 0
    incident.failures = incident.stage_failures = 0


def no_room(job: Job, out: Out, why: str) -> bool:
    """True: the job fell back and can not go on here; what it needs is on disk."""
    incident = job.unplanned()
    if incident is None or not incident.fell_back:
        return False
    hint = f"`keepstep run --resume {job.resume}` continues it"
    end_job(job, out, "fell_back", EXIT_FELL_BACK, f"{incident.reason}; {why} ({hint})")
    return True
