"""Facts -> what operators see. Nothing here changes anything."""

from __future__ import annotations

from keepstep.core import parities
from keepstep.core.capacity import Capacity
from keepstep.core.facts import SECOND, Incident, Node, Worker
from keepstep.core.interval import HOUR
from keepstep.core.placement import buddy_node
from keepstep.core.saves import Complete
from keepstep.core.state import Job
from keepstep.core.triage import name_ranks
from keepstep.model.views import (
    CheckpointsView,
    IncidentView,
    JobState,
    JobView,
    NodeView,
    Outcome,
    RankView,
    SpareView,
    UnderstudyView,
)


def job_state(job: Job) -> JobState:
    if job.ended is not None:
        return job.ended.state
    if job.divergence is not None:
        return "held"
    if any(incident.fell_back for incident in job.incidents):
        return "recovering"
    if job.mode != "running":
        return "starting"
    attempt = job.attempt
    if attempt is not None and attempt.kind == "unplanned":
        return "held" if attempt.no_spare and not attempt.committed else "recovering"
    # After a restart nobody has been asked yet, and the ranks may hold.
    if job.dead() or (job.replayed and job.unplanned() is not None):
        return "recovering"
    return "running"


def rank_state(job: Job, rank: int, worker: Worker) -> str:
    if worker.done:
        return "done"
    if not worker.usable:
        return "dead"
    if job.divergence is not None and worker.id in job.divergence.waiting:
        return "holding"
    attempt = job.attempt
    if attempt is not None and not attempt.committed:
        held = worker.held
        if held is not None and held.generation == attempt.generation:
            return "holding"
        if attempt.kind == "unplanned":
            return "holding" if attempt.tick is not None else "running"
    if attempt is not None and attempt.committed and worker.swapped < attempt.generation:
        return "joining" if worker.id in attempt.newcomers.values() else "holding"
    if job.mode != "running" and not worker.attached:
        return "starting"
    return "running"


def job_view(job: Job, state: JobState | None = None, exit_code: int | None = None) -> JobView:
    if job.ended is not None:
        return job.ended
    ranks = [rank_view(job, rank) for rank in range(job.spec.world)]
    protected, protection = protection_of(job)
    moving = {w.id for _, w in job.owning() if w.usable and not w.done}
    speeds = [job.workers[w].steps_per_s for w in moving if job.workers[w].steps_per_s > 0]
    newest = job.incidents[-1].id if job.incidents else ""
    if not newest and job.closed:
        newest = job.closed[-1].id
    return JobView(
        job=job.id,
        state=state or job_state(job),
        reason=state_reason(job),
        exit_code=exit_code,
        generation=job.generation,
        world=job.spec.world,
        committed_step=max((view.committed_step for view in ranks), default=0),
        steps_per_s=min(speeds, default=0.0),
        script=" ".join(job.spec.script),
        directory=job.spec.directory,
        node_loss_protected=protected,
        protection=protection,
        ranks=ranks,
        spares=[spare_view(job, w) for w in job.workers.values() if is_spare(w)],
        nodes=[node_view(node, job.capacity) for node in job.order],
        last_incident=newest,
        injects_fired=list(job.fired),
        traceback=job.traceback,
        checkpoint=job.checkpoint,
        notes=list(job.notes),
        stall_timeout_ns=job.stall_ns,
        checkpoints=checkpoints_view(job) if job.spec.checkpoints else None,
        priority=job.spec.policy.priority,
        stragglers=[slow.said for slow in job.pace.slow.values() if slow.said],
        divergence=divergence_text(job),
    )


def divergence_text(job: Job) -> str:
    if job.divergence is None:
        return ""
    return job.divergence.text or "numbers differ between ranks: finding out which"


def checkpoints_view(job: Job) -> CheckpointsView:
    saves = job.saves
    newest = saves.newest or Complete(path="", tick=0, version=0, at=0)
    return CheckpointsView(
        directory=job.spec.checkpoints,
        interval_s=saves.interval_ns / SECOND,
        mttf_h=saves.mttf_ns / HOUR,
        cost_ms=saves.cost_ns / 1e6,
        write_s=saves.write_ns / SECOND,
        saving=saves.now is not None,
        put_off=saves.put_off,
        newest=newest.path,
        step=newest.version,
        written_at_ns=newest.at,
    )


def state_reason(job: Job) -> str:
    if job.divergence is not None:
        return divergence_text(job)
    if job.attempt is not None and job.attempt.no_spare:
        return job.attempt.no_spare
    if job.reason:
        return job.reason
    if job.mode == "starting" and job.attempt is None:
        there, missing = job.attaching()
        waiting = f"; {name_ranks(there)} did" if there else ""
        return f"waiting for {name_ranks(missing)} to call keepstep.attach{waiting}"
    return job.incidents[0].reason if job.incidents else ""


def rank_view(job: Job, rank: int) -> RankView:
    worker = job.owner(rank)
    if worker is None:
        newcomer = job.attempt.newcomers.get(rank) if job.attempt is not None else None
        if newcomer is None:
            return RankView(
                rank=rank,
                pid=0,
                node="",
                slot="",
                worker="",
                generation=job.generation,
                committed_step=0,
                state="starting",
            )
        worker = job.workers[newcomer]
        state = "joining"
    else:
        state = rank_state(job, rank, worker)
        if state == "dead" and job.attempt is not None and rank in job.attempt.newcomers:
            worker, state = job.workers[job.attempt.newcomers[rank]], "joining"
    return RankView(
        rank=rank,
        pid=worker.pid,
        node=worker.node,
        slot=worker.place,
        worker=worker.id,
        generation=job.generation,
        committed_step=worker.version,
        state=state,
        own_ms=round(worker.own_ns / 1e6, 3),
    )


def is_spare(worker: Worker) -> bool:
    return worker.usable and worker.role in ("spare", "newcomer")


def spare_view(job: Job, worker: Worker) -> SpareView:
    state = "parked" if worker.parked else "starting"
    return SpareView(
        worker=worker.id,
        pid=worker.pid,
        node=worker.node,
        slot=worker.place,
        state="assigned" if worker.role == "newcomer" else state,
        parked_at=worker.parked,
        understudies=[
            UnderstudyView(
                rank=one.presumed,
                worker=one.id,
                pid=one.pid,
                state="ready" if one.ready is not None else "building",
            )
            for one in job.understudies()
            if one.place == worker.place
        ],
    )


def node_view(node: Node, capacity: Capacity) -> NodeView:
    taints = list(node.taints)
    for slot, reasons in sorted(node.slot_taints.items()):
        taints += [f"{node.name}/{slot}: {reason}" for reason in reasons]
    return NodeView(
        node=node.name,
        state="disconnected" if node.state in ("absent", "unreachable") else node.state,
        pid=node.pid,
        session=node.session,
        slots=node.slots,
        taints=taints,
        paths=node.paths,
        place=capacity.places.get(node.name, ""),
        labels=node.labels,
    )


def protection_of(job: Job) -> tuple[bool, str]:
    """Would the loss of any one node cost a step? Said before it happens, not after."""
    owners = [worker for _, worker in job.owning() if worker.usable]
    if not owners:
        return False, "no rank is running"
    if job.mode != "running" and not all(worker.attached for worker in owners):
        return False, "nothing is protected before every rank has called keepstep.attach"
    if not all(worker.redundant for worker in owners):
        return False, "some state has no replica on another rank: its rank's loss falls back"
    kept = sum(worker.kept_bytes for worker in owners)
    if job.spec.world == 1 and not kept:
        return False, "there is one rank only: nobody holds a replica of its state"
    homes = {worker.node for worker in owners}
    if len(homes) == 1:
        node = next(iter(homes))
        where = f" ({_megabytes(kept)} that one rank has are kept by its agent)" if kept else ""
        return False, f"any rank may die{where}; all ranks are on {node}, whose loss falls back"
    lonely = {name for name in homes if buddy_node(job.order, job.nodes[name]) is None}
    alone = [w.rank for w in owners if not w.done and w.node in lonely]
    if alone:
        return False, f"rank {alone[0]} has no buddy on another node for its side state"
    where = f"; {_megabytes(kept)} that one rank has are kept by another node" if kept else ""
    if kept and job.spec.redundancy == "parity":
        lost = parities.uncovered(job)
        if lost:
            return False, f"any rank may die, but {lost}: the loss of a node may fall back"
        where = f"; {_megabytes(kept)} that one rank has are kept by its agent and a parity"
    return True, f"any rank or any one node may be lost without losing a step{where}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def incident_view(
    job: Job,
    incident: Incident,
    now: int,
    outcome: Outcome = "OPEN",
    steps_lost: int | None = None,
) -> IncidentView:
    timeline = incident.timeline
    return IncidentView(
        id=incident.id,
        job=job.id,
        trigger=incident.trigger,
        cause=incident.cause,
        victims=list(incident.victims),
        moves=list(incident.moves),
        generation=incident.generation,
        opened_at_ns=incident.opened_at,
        phases=timeline.phases(now),
        timings_ms=dict(timeline.timings_ms),
        source=incident.source,
        decision=incident.decision,
        pause_ms=max(0.0, timeline.pause_ms),
        steps_lost=incident.steps_lost if steps_lost is None else steps_lost,
        steps_recomputed=incident.steps_recomputed,
        outcome=outcome,
        reason=incident.reason,
        attempts=max(1, incident.attempts),
    )
