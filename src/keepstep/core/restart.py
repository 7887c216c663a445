"""After a restart of the orchestrator.

Replaying the ledger gives everything that was decided; the agents' Hellos give everything that
happened since. In between (`Job.replayed`) the core only collects. Then:

* nothing was open: nothing is sent to any rank, training never noticed;
* an unplanned incident was open, or a committed one not yet resumed: the answers that were on
  their way are lost, so a fresh attempt asks all ranks again under a larger generation. Ranks
  that may have missed their Swap get it first: a newcomer reports only once it is a rank;
* a planned attempt was open: it is undone, and its incident waits for the next one;
* the job stood because numbers differ: it stands on, and who waits says so again.
"""

from __future__ import annotations

from keepstep.core import divergence, parities, provision, stopping
from keepstep.core.facts import SECOND, Incident, Node, Role, Worker
from keepstep.core.fallback import fallen
from keepstep.core.incidents import close_incident
from keepstep.core.processes import give_buddy
from keepstep.core.saves import Complete
from keepstep.core.state import Job, Out
from keepstep.core.timeline import Timeline
from keepstep.model.commands import Buddy, Swap
from keepstep.model.job import JobSpec
from keepstep.model.records import (
    AttemptStarted,
    CheckpointSealed,
    CheckpointWritten,
    Committed,
    Decided,
    Deferred,
    DivergenceAccepted,
    DivergenceFound,
    FellBack,
    IncidentClosed,
    IncidentOpened,
    IncidentWidened,
    InjectDone,
    JobEnded,
    JobStarted,
    JobSubmitted,
    NodeJoined,
    NodeLost,
    Placed,
    Record,
    StartBegun,
    StopBegun,
    Tainted,
    Untainted,
    WorkerEnded,
)


def new_job(spec: JobSpec, at_ns: int) -> Job:
    nodes = {
        node.name: Node(name=node.name, index=index, slots=node.slots)
        for index, node in enumerate(spec.nodes)
    }
    job = Job(spec=spec, submitted_at=at_ns, nodes=nodes, order=list(nodes.values()))
    job.injects = {inject.id: inject for inject in spec.inject}
    return job


def add_node(job: Job, name: str, slots: int) -> Node:
    if name not in job.nodes:
        job.nodes[name] = Node(name=name, index=len(job.nodes), slots=slots)
        job.order.append(job.nodes[name])
    return job.nodes[name]


def apply(jobs: dict[str, Job], record: Record) -> None:
    """One record onto the state. Kinds that only inform change nothing."""
    if isinstance(record, JobSubmitted):
        jobs[record.job] = new_job(record.spec, record.at_ns)
        return
    job = jobs.get(record.job)
    if job is None:
        return
    job.replayed = True
    job.note(record)
    if isinstance(record, provision.Happened):
        provision.apply(job, record)
    if isinstance(record, Placed | WorkerEnded | NodeLost | NodeJoined | StartBegun | JobStarted):
        _apply_processes(job, record)
    elif isinstance(record, IncidentOpened | IncidentWidened | IncidentClosed):
        _apply_incident(job, record)
    elif isinstance(record, AttemptStarted | Decided | Committed):
        _apply_attempt(job, record)
    elif isinstance(record, Tainted | Untainted):
        apply_taint(job, record.target, record.reason if isinstance(record, Tainted) else None)
        if isinstance(record, Untainted):
            job.deferred.pop(record.target, None)
            job.capacity.yields.pop(record.target, None)
    elif isinstance(record, Deferred):
        job.deferred[record.target] = record.reason
    elif isinstance(record, CheckpointWritten):
        job.checkpoint, job.checkpoint_tick = record.path, record.tick
    elif isinstance(record, CheckpointSealed):
        complete = Complete(record.path, record.tick, record.version, record.at_ns)
        job.saves.sealed(complete, record.snapshot_ns, record.write_ns)
    elif isinstance(record, FellBack):
        _apply_fall_back(job, record)
    elif isinstance(record, DivergenceFound | DivergenceAccepted):
        divergence.replayed(job, record)
    elif isinstance(record, StopBegun):
        stopping.replayed(job, record)
    elif isinstance(record, InjectDone):
        job.fired.append(record.inject)
    elif isinstance(record, JobEnded):
        job.ended = record.view
        job.incidents.clear()


def _apply_fall_back(job: Job, record: FellBack) -> None:
    incident = next(i for i in job.incidents if i.id == record.incident)
    newest, (tick, times) = job.saves.back_to(record.path), job.saves.fallen
    job.saves.fallen = (newest.tick, times + 1 if tick == newest.tick else 1)
    for worker in job.workers.values():
        if worker.role != "spare":
            worker.role = "unwanted"
    fallen(job, incident, newest, record.steps_lost, record.generation)


def _role(record: Placed) -> Role:
    if record.rank >= 0:
        return "rank"
    return "understudy" if record.presumed >= 0 else "spare"


def _apply_processes(
    job: Job,
    record: Placed | WorkerEnded | NodeLost | NodeJoined | StartBegun | JobStarted,
) -> None:
    if isinstance(record, Placed):
        worker = Worker(
            id=record.worker,
            node=record.node,
            slot=record.slot,
            role=_role(record),
            rank=record.rank,
            presumed=record.presumed,
            running=True,
            started_at=record.at_ns,
        )
        job.add_worker(worker)
        job.worker_next = max(job.worker_next, int(worker.id.rsplit(".w", 1)[1]) + 1)
        if record.rank >= 0:
            job.owners[record.rank] = worker.id
            job.mode = "starting"
    elif isinstance(record, WorkerEnded):
        job.workers[record.worker].alive = False
    elif isinstance(record, NodeLost):
        job.nodes[record.node].state = "dead"
        for worker in job.placed_on.get(record.node, ()):
            worker.alive = False
    elif isinstance(record, NodeJoined):
        node = add_node(job, record.node, record.slots)
        node.state, node.labels = "disconnected", record.labels
    elif isinstance(record, StartBegun):
        job.generation = job.generation_max = max(job.generation_max, record.generation)
        job.owners.clear()
        for worker in job.workers.values():
            if worker.role == "rank":
                worker.role = "unwanted"
    else:
        job.mode = "running"
        job.generation = record.generation


def _apply_incident(job: Job, record: IncidentOpened | IncidentWidened | IncidentClosed) -> None:
    if isinstance(record, IncidentOpened):
        planned = record.trigger != "unplanned"
        incident = Incident(
            id=record.incident,
            trigger=record.trigger,
            cause=record.cause,
            opened_at=record.at_ns,
            victims=list(record.victims),
            reason=record.reason,
            timeline=Timeline(opened_at=record.at_ns),
            pending=list(record.victims) if planned else [],
            target=record.target,
            toward=record.toward,
            generation=job.generation,
            interrupted=True,
        )
        job.incidents.append(incident)
        if record.trigger == "pre-emptive":
            job.preempted.append((record.at_ns, len(record.victims)))
            job.deferred.pop(record.target, None)
        job.incident_next = int(record.incident.rsplit("-", 1)[1]) + 1
    elif isinstance(record, IncidentWidened):
        for incident in job.incidents:
            if incident.id == record.incident:
                incident.victims = sorted(set(incident.victims) | set(record.victims))
                incident.also(record.reason, "; then ")
    else:
        job.closed.append(record.view)
        job.incidents = [i for i in job.incidents if i.id != record.view.id]


def _apply_attempt(job: Job, record: AttemptStarted | Decided | Committed) -> None:
    incident = next((i for i in job.incidents if i.id == record.incident), None)
    job.generation_max = max(job.generation_max, record.generation)
    if isinstance(record, Committed):
        for rank, worker_id in record.placement.items():
            old = job.owner(rank)
            if old is not None and old.id != worker_id:
                old.role = "leaver"
            job.owners[rank] = worker_id
            worker = job.workers[worker_id]
            worker.role, worker.rank, worker.attached = "rank", rank, True
        job.generation = record.generation
    if incident is None:
        return
    if isinstance(record, AttemptStarted):
        incident.attempts += 1
        incident.moving = list(record.ranks)
        incident.attempt_generation = record.generation
    elif isinstance(record, Decided):
        incident.sticky_tick, incident.decision = record.tick, record.decision
    else:
        incident.sticky_tick = None
        incident.committed = incident.generation = record.generation
        incident.moves += record.moves
        incident.pending = [rank for rank in incident.pending if rank not in incident.moving]


def apply_taint(job: Job, target: str, reason: str | None) -> None:
    """`reason` None removes."""
    name, _, slot = target.partition("/")
    node = job.nodes[name]
    if slot:
        if reason is None:
            node.slot_taints.pop(int(slot), None)
            node.crashes.pop(int(slot), None)
        else:
            node.slot_taints.setdefault(int(slot), []).append(reason)
    elif reason is None:
        node.taints.clear()
    else:
        node.taints.append(reason)


def begin_waiting(job: Job, now: int) -> None:
    """First event after a replay: from now on agents have time to come back."""
    wait = max(10 * SECOND, job.stall_ns)
    job.rejoin_until = now + wait
    for node in job.nodes.values():
        if node.state != "dead":
            node.state = "disconnected"
            node.gone_at = now + wait - job.stall_ns


def agents_are_back(job: Job, out: Out) -> bool:
    """True once the wait is over; whoever is still missing has its own timer."""
    away = any(node.state in ("absent", "disconnected") for node in job.nodes.values())
    if away and job.rejoin_until is not None:
        return False
    job.rejoin_until = None
    job.replayed = False
    if job.divergence is not None:
        job.divergence.named_at = out.now  # operators could say nothing meanwhile
    if job.stopping is not None:
        job.stopping.since = out.now
    if job.mode != "running":
        _start_over(job, out)
        return True
    for _, worker in job.owning():
        worker.attached = True
        if worker.swapped < job.generation:
            solo = job.somebody_done()
            buddy = give_buddy(job, out, worker)
            parity = parities.give(job, worker)
            worker.swap = Swap(generation=job.generation, buddy=buddy, solo=solo, parity=parity)
            worker.resync = True
            worker.buddy_due = job.nodes[worker.node].state != "connected"  # it may have swapped
        elif worker.usable:
            tell_buddy(job, out, worker)
    for incident in [i for i in job.incidents if i.interrupted]:
        _reopen(job, out, incident)
    # Whether a planned attempt was being undone is not on record: whoever still holds goes on.
    if job.generation_max > job.generation:
        job.released = job.generation_max
        for _, worker in job.owning():
            if worker.usable and not worker.done:
                worker.release_due = job.generation_max
    return True


def tell_buddy(job: Job, out: Out, worker: Worker) -> None:
    """Who it was is not on record."""
    address = give_buddy(job, out, worker)
    parity = parities.give(job, worker)
    worker.buddy_heard = out.tell(worker, Buddy(address=address, parity=parity))
    worker.buddy_due = True


def _reopen(job: Job, out: Out, incident: Incident) -> None:
    incident.interrupted = False
    why = f"the orchestrator was restarted during incident {incident.id}"
    unplanned = incident.trigger == "unplanned"
    open_attempt = incident.attempt_generation > (incident.committed or -1)
    if job.divergence is not None and job.divergence.incident == incident.id and not open_attempt:
        return  # every rank is where it was, and waits
    if unplanned or (incident.committed is not None and not open_attempt):
        job.alarm = ("connection", why)
        if not unplanned and not incident.pending:
            close_incident(job, out, incident, "RESOLVED", f"moved; {why}")
    elif incident.attempt_generation >= 0:
        incident.also(why)


def _start_over(job: Job, out: Out) -> None:
    """No step was made. Ranks that all live go on and attach; anything else starts again."""
    owners = [worker for _, worker in job.owning()]
    if len(owners) == job.spec.world and all(worker.usable for worker in owners):
        for worker in owners:
            tell_buddy(job, out, worker)
        return
    for incident in list(job.incidents):
        close_incident(job, out, incident, "ABORTED", "the orchestrator was restarted")
    for worker in job.workers.values():
        worker.role = "unwanted"
        out.kill(worker)
    job.owners.clear()
    job.causes.clear()
    job.mode = "waiting"
