"""Planned and pre-emptive moves: make before break.

Training runs until everything that can be prepared is prepared; only copy and swap stand inside
the pause, and until Committed all of it can be undone by one Release. Planned incidents wait in
a queue: for a parked spare, for an unplanned incident to be over, for their next wave. One runs
at a time. The phases are those of migration.py.
"""

from __future__ import annotations

from typing import Literal

from keepstep.core import placement
from keepstep.core.facts import Attempt, Incident
from keepstep.core.incidents import close_incident
from keepstep.core.migration import (
    assign_row,
    copy_row,
    position_row,
    prepared_places,
    stage_row,
    start_attempt,
    store_row,
)
from keepstep.core.phases import (
    all_ready,
    all_staged,
    mark,
    newcomers,
    phase_now,
)
from keepstep.core.processes import close_stores, may_come
from keepstep.core.state import Job, Out
from keepstep.core.together import ask_ranks
from keepstep.core.triage import name_ranks
from keepstep.model.commands import Hold

FAILURES_MAX = 3


def pending_ranks(job: Job) -> int:
    """Spares wanted by moves that have not started yet."""
    return sum(len(i.pending) for i in job.incidents if i.wants_spares)


def drop_done(job: Job, out: Out, incident: Incident) -> None:
    close_incident(job, out, incident, "ABORTED", "the script is ending: nothing is left to move")


def next_move(job: Job, out: Out) -> None:
    """Start the first planned incident that can start."""
    waiting = [i for i in job.incidents if i.trigger != "unplanned" and i.cause != "resume"]
    if not waiting:
        return
    if job.somebody_done():
        for incident in waiting:
            drop_done(job, out, incident)
        return
    if any(n.state != "connected" and job.owners_on(n.name) for n in job.nodes.values()):
        return
    for incident in waiting:
        if not incident.pending:  # emptied by an unplanned incident meanwhile
            close_incident(job, out, incident, "RESOLVED", "nothing is left to move")
            continue
        if _start_wave(job, out, incident):
            return


def _start_wave(job: Job, out: Out, incident: Incident) -> bool:
    spares = job.spares()
    wave: list[int] = []
    if incident.toward:
        return _start_better(job, out, incident)
    for rank in incident.pending:
        owner = job.workers[job.owners[rank]]
        spare, why = placement.choose_spare(
            spares,
            job.nodes,
            away_from=owner.node,
            prepared=prepared_places(job, incident, rank),
            within=job.spec.policy.within,
        )
        if spare is None and not job.spec.policy.within:
            break
        if spare is None:
            continue  # there may be one in the domain of the next
        wave.append(rank)
        spares.remove(spare)
    if not wave:
        wait = f"waiting for a spare for {name_ranks(incident.pending)}: {why}"
        if not incident.reason.endswith(wait):
            incident.reason = f"{incident.reason.split('; waiting for a spare')[0]}; {wait}"
        return False
    incident.reason = incident.reason.split("; waiting for a spare")[0]
    rest = len(incident.pending) - len(wave)
    later = f", {rest} later when spares are free" if rest else ""
    start_attempt(
        job, out, "planned", incident, wave, {}, f"{name_ranks(wave)} to parked spares{later}"
    )
    return True


def _start_better(job: Job, out: Out, incident: Incident) -> bool:
    """The first rank whose better place is still to be had; the others stay where they are."""
    while incident.pending:
        rank = incident.pending[0]
        place = incident.toward[rank]
        spare, why = placement.choose_spare(
            placement.only_at(place, job.spares()), job.nodes, away_from=""
        )
        if spare is not None:
            start_attempt(job, out, "planned", incident, [rank], {}, f"rank {rank} to {place}")
            return True
        if may_come(job, place):
            return False
        incident.pending.remove(rank)
        incident.also(f"rank {rank} stays, {place} is not to be had any more ({why})")
    outcome: Literal["RESOLVED", "ABORTED"] = "RESOLVED" if incident.moves else "ABORTED"
    close_incident(job, out, incident, outcome, "")
    return False


def move(job: Job, out: Out, attempt: Attempt) -> None:
    if job.somebody_done():
        release(job, out, attempt)
        drop_done(job, out, attempt.incident)
        return
    store_row(job, out, attempt)
    assign_row(job, out, attempt)
    stage_row(job, out, attempt)
    position_row(job, out, attempt)
    _hold_row(job, out, attempt)
    if job.attempt is not attempt:
        return
    copy_row(job, out, attempt)
    mark(attempt, out, phase_now(job, attempt))


def _hold_row(job: Job, out: Out, attempt: Attempt) -> None:
    if not attempt.holding:
        staged = job.transparent or all_staged(job, attempt)
        if not (all_ready(job, attempt) and staged):
            return
        attempt.holding = True
        attempt.hold_at = out.now
    ask_ranks(out, "hold", attempt, Hold(generation=attempt.generation), attempt.holds)
    ticks = attempt.held_ticks
    if len(ticks) > 1:
        fail_move(job, out, attempt, f"ranks hold at different ticks {sorted(ticks)}")
    elif ticks and attempt.holds.left == 0:
        attempt.tick = min(ticks)


def release(job: Job, out: Out, attempt: Attempt) -> None:
    """Undo: ranks go on as before, newcomers (whose position is stale by then) are replaced."""
    away = [n.name for n in job.nodes.values() if n.state != "connected"]
    for worker in [*job.watched_owners(), *(w for name in away for w in job.owners_on(name))]:
        if worker.usable and not worker.done:
            worker.release_due = attempt.generation
    job.release_due = attempt.generation
    for worker in newcomers(job, attempt):
        worker.role = "unwanted"
        out.kill(worker)
    job.released = attempt.generation
    job.attempt = None
    close_stores(job, out, keep={job.generation})  # frees whoever still waits in its rendezvous


def fail_move(job: Job, out: Out, attempt: Attempt, why: str, *, again: bool = True) -> None:
    """`again`: another spare may do."""
    release(job, out, attempt)
    incident = attempt.incident
    incident.failures += 1
    incident.reason = f"{incident.reason}; attempt {incident.attempts} undone: {why}"
    if not again:
        close_incident(job, out, incident, "ABORTED", "nothing changed")
    elif incident.failures >= FAILURES_MAX:
        close_incident(
            job, out, incident, "ABORTED", f"gave up after {FAILURES_MAX} attempts, nothing changed"
        )
