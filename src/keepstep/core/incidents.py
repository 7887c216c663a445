"""Opening, widening and closing incidents, and ending a job.

An incident is one cause with a set of victims. At most one unplanned incident is open in a job:
whatever else breaks before it is resolved widens it, because the ranks are being rewired anyway.
Planned ones queue behind it. Closing writes the whole story as one record.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.facts import SECOND, Incident
from keepstep.core.job_views import incident_view, job_view
from keepstep.core.state import Job, Out
from keepstep.core.timeline import Timeline
from keepstep.model.agent_messages import Stop
from keepstep.model.commands import Finish
from keepstep.model.records import (
    IncidentClosed,
    IncidentOpened,
    IncidentWidened,
    JobEnded,
    Trigger,
    Warned,
)
from keepstep.model.views import JobState, Outcome

STOP_GRACE_NS = 3 * SECOND
EXIT_DIVERGED = 5
NEVER_ATTACHED = (
    "the script never called keepstep.attach, so its progress is unknown and it started again"
)


def open_incident(
    job: Job,
    out: Out,
    *,
    trigger: Trigger,
    cause: str,
    victims: Sequence[int],
    reason: str,
    target: str = "",
    toward: dict[int, str] | None = None,
) -> Incident:
    incident = Incident(
        id=f"{job.id}-{job.incident_next}",
        trigger=trigger,
        cause=cause,
        opened_at=out.now,
        victims=sorted(victims),
        reason=reason,
        timeline=Timeline(opened_at=out.now),
        pending=sorted(victims) if trigger != "unplanned" else [],
        target=target,
        toward=toward or {},
        generation=job.generation,
    )
    job.incident_next += 1
    job.incidents.append(incident)
    out.record(
        IncidentOpened(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            trigger=trigger,
            cause=cause,
            victims=incident.victims,
            reason=reason,
            target=target,
            toward=incident.toward,
        )
    )
    return incident


def widen_incident(
    job: Job, out: Out, incident: Incident, cause: str, victims: Sequence[int], reason: str
) -> None:
    added = sorted(set(victims) - set(incident.victims))
    incident.victims = sorted(set(incident.victims) | set(victims))
    incident.also(reason, "; then ")
    out.record(
        IncidentWidened(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            cause=cause,
            victims=added,
            reason=reason,
        )
    )


def close_incident(
    job: Job,
    out: Out,
    incident: Incident,
    outcome: Outcome,
    reason: str,
) -> None:
    """`reason` is added to why it was opened."""
    lost = incident.steps_lost
    if incident.cause == "start" and outcome == "RESOLVED" and not _attached(job):
        outcome, reason = "FELL_BACK", NEVER_ATTACHED
    if incident.diverged:
        outcome = "DIVERGED"  # whether it went on, went back or ended
    elif incident.fell_back and outcome in ("RESOLVED", "ABORTED"):
        outcome = "FELL_BACK"  # it went on, but the steps are lost all the same
    elif outcome == "FELL_BACK" and not incident.fell_back:
        lost = max((worker.version for _, worker in job.owning()), default=0)
    incident.also(reason)
    view = incident_view(job, incident, out.now, outcome=outcome, steps_lost=lost)
    job.incidents.remove(incident)
    job.closed.append(view)
    out.record(IncidentClosed(job=job.id, at_ns=out.now, view=view))


def _attached(job: Job) -> bool:
    """Some rank has, and then all have: its attach waits for them."""
    return any(worker.attached for worker in job.rank_owners())


def warn(job: Job, out: Out, message: str) -> None:
    out.record(Warned(job=job.id, at_ns=out.now, message=message))


def end_job(job: Job, out: Out, state: JobState, exit_code: int, reason: str) -> None:
    """Whatever is open is closed with it, and every agent is told to stop."""
    if job.ended is not None:
        return
    outcomes: dict[str, Outcome] = {
        "done": "RESOLVED",
        "cancelled": "ABORTED",
        "fell_back": "FELL_BACK",
        "diverged": "DIVERGED",
    }
    for incident in list(job.incidents):
        outcome = outcomes.get(state, "FAILED")
        if incident.trigger != "unplanned" and incident.pending and outcome == "RESOLVED":
            outcome = "ABORTED"
        close_incident(job, out, incident, outcome, reason)
    job.attempt = job.divergence = None
    job.reason = reason
    job.ended = job_view(job, state=state, exit_code=exit_code)
    out.record(JobEnded(job=job.id, at_ns=out.now, view=job.ended))
    finished = state == "done"
    for worker in job.workers.values() if finished else ():
        out.tell(worker, Finish())
    for node in job.nodes.values():
        out.send(node.name, Stop(grace_ns=STOP_GRACE_NS, finished=finished))
