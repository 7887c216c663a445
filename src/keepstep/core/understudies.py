"""Understudies: processes that are built as a presumed rank before anybody needs them.

Theory of operation. A spare parks at the script's first question about its rank, because all that
follows may depend on the answer: it can take any rank over, but it builds its model when a rank is
dead already. Where construction takes long, `JobSpec.understudies` processes beside each spare are
given an answer ahead of time. They go the way of a newcomer as far as Ready (in solo mode, at
whatever position the job has then) and wait there. When a rank is lost, its understudy, if one is
ready, becomes its newcomer instead of the spare of the same place. It is assigned like any other
and answers at once with what it said before; Copy leads it on to where the job is.

A place (a slot) still makes one rank. As soon as one of its processes takes a rank over, the others
are not used, and when training goes on they are ended. Nobody waits for
an understudy, so nothing ever depends on there being one: if it fails, the spare is there.

They are started one at a time on each node, while nothing is wrong.
"""

from __future__ import annotations

from keepstep.core.facts import Worker
from keepstep.core.incidents import warn
from keepstep.core.migration import group_trouble, side_state_holders
from keepstep.core.processes import NOWHERE, start_worker
from keepstep.core.state import Job, Out
from keepstep.core.triage import headline
from keepstep.model.commands import Assign, Position
from keepstep.model.messages import Arrived, Attached, Failure, Ready, WorkerMessage
from keepstep.model.page import NEWEST

FAILURES_MAX = 3


def keep(job: Job, out: Out) -> None:
    """Called when no attempt is running: start what is missing, and lead everybody to Ready."""
    if not job.spec.understudies or job.mode != "running" or job.incidents:
        return
    there = job.understudies()
    for worker in there:
        _lead(job, out, worker)
    if job.understudies_failed >= FAILURES_MAX:
        return
    busy = {worker.node for worker in there if worker.ready is None}
    for spare in job.spares():
        node = job.nodes[spare.node]
        if node.state != "connected" or not spare.parked or spare.node in busy:
            continue
        here = {worker.presumed for worker in there if worker.place == spare.place}
        if len(here) < min(job.spec.understudies, job.spec.world):
            rank = _least_covered(job, spare, here, [worker.presumed for worker in there])
            start_worker(job, out, spare.node, spare.slot, -1, "understudy", presumed=rank)
            busy.add(spare.node)


def _least_covered(job: Job, spare: Worker, here: set[int], covered: list[int]) -> int:
    """Ranks of other nodes first: they can be lost without this place being lost with them."""
    near = {worker.rank for worker in job.owners_on(spare.node)}
    missing = [rank for rank in range(job.spec.world) if rank not in here]
    return min(missing, key=lambda rank: (covered.count(rank), rank in near, rank))


def _lead(job: Job, out: Out, worker: Worker) -> None:
    rank = worker.presumed
    holders = side_state_holders(job, rank)
    if worker.parked and not worker.arrived:
        assign = Assign(
            rank=rank,
            generation=job.generation + 1,
            master=job.master or NOWHERE,
            buddy=None,
            holders=holders,
            presumed=True,
        )
        out.ask(worker, "assign", job.generation + 1, assign)
    elif worker.arrived and worker.ready is None:
        position = Position(
            generation=job.generation + 1, tick=NEWEST, final=False, holders=holders
        )
        out.ask(worker, "position", job.generation + 1, position)


def said(job: Job, out: Out, worker: Worker, said: WorkerMessage) -> None:
    if isinstance(said, Arrived):
        worker.arrived = True
    elif isinstance(said, Ready):
        worker.arrived, worker.ready = True, said
        job.understudies_failed = 0
    elif isinstance(said, Attached):
        worker.redundant, worker.groups = said.redundant, said.members
        trouble = group_trouble(job, worker.presumed, said.members)
        if trouble:
            _failed(job, out, worker, trouble)
    elif isinstance(said, Failure):
        _failed(job, out, worker, f"it raised {headline(said.error)}")


def _failed(job: Job, out: Out, worker: Worker, why: str) -> None:
    job.understudies_failed += 1
    lost(job, out, worker, why)
    worker.role = "unwanted"
    out.kill(worker)


def lost(job: Job, out: Out, worker: Worker, why: str) -> None:
    """Its failure is counted already."""
    what = f"understudy {worker.id} of rank {worker.presumed} in {worker.place}: {why}"
    if job.understudies_failed == FAILURES_MAX:
        what += f"; no more are started after {FAILURES_MAX} failures in a row"
    warn(job, out, what)


def due(job: Job, worker: Worker, park_ns: int) -> int | None:
    """When one that is not ready by then is given up: each stage has its time, as a newcomer's.
    None: it owes no answer, because it has not been asked (again)."""
    if not worker.parked:
        return worker.started_at + max(park_ns, job.stall_ns)
    what = "position" if worker.arrived else "assign"
    asked = worker.asked.get(what)
    return asked[1] + job.build_ns if asked is not None else None


def late(job: Job, out: Out, worker: Worker) -> None:
    _failed(job, out, worker, "it was not ready in time")
