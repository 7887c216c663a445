"""Several jobs and few nodes: whose turn it is, and who gives a node up.

Theory of operation. Jobs whose wants could be met by the same places are served one at a time. Who
is in need comes before whoever fills a pool or moves back; then priority decides; then those who
were given fewer places since they began to lack some, so that after a mass failure jobs of one
priority get one place each in turn; then who was submitted first. A job that was refused and waits
to ask again is woken when somebody behind it is about to ask: places that have become free
meanwhile are its own.

A job that may take nodes from others asks the scheduler first for what costs nobody anything. If
there is none, a job of lower priority here *yields* a node: one without ranks, else one whose loss
costs no step. It is drained as for any other reason. If its ranks have found no other place when
the grace is over, they end, right after a step of all ranks; the others hold the state, in memory
and on disk, until there is capacity again, and the job goes on by itself. A job that has lost
ranks of its own meanwhile keeps its node. Only if nobody here can yield, the scheduler is asked to
preempt whomever else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from keepstep.core import operator, provision
from keepstep.core.demand import domains, mismatch
from keepstep.core.facts import SECOND, Node
from keepstep.core.incidents import warn
from keepstep.core.job_views import protection_of
from keepstep.core.state import Job, Out
from keepstep.core.triage import name_ranks
from keepstep.model.job import Drain, Untaint
from keepstep.model.records import NodeYielded
from keepstep.model.schedule import Constraints

AGAIN_NS = 5 * SECOND
FRESH_NS = 3 * SECOND  # since the last step that was heard of
LOOK_NS = SECOND


class Offer(NamedTuple):
    """A node that could be given up; `why_not`: why it is not."""

    job: Job
    node: Node
    cost: tuple[int, int, int, int]
    why: str
    why_not: str = ""


def _asking(job: Job, now: int) -> bool:
    facts = job.capacity
    if facts.want is not None:
        return not facts.want.place
    return 0 < facts.again_at <= now  # it is about to


def _rank(job: Job) -> tuple[bool, int, int, int, str]:
    facts = job.capacity
    want = facts.want
    idle = (want.pool or bool(want.only)) if want is not None else facts.cheap
    return (idle, -job.spec.policy.priority, facts.given, job.submitted_at, job.id)


def _compete(one: Constraints, other: Constraints) -> bool:
    """The same place could do for both."""
    return all(
        "" in (mine, theirs) or mine == theirs
        for mine, theirs in (
            (one.partition, other.partition),
            (one.gpu_type, other.gpu_type),
            (one.features, other.features),
        )
    )


def _rivals(jobs: Iterable[Job], job: Job) -> list[Job]:
    mine = job.spec.provision
    assert mine is not None, "only those who ask have rivals"
    return [
        other
        for other in jobs
        if other is not job
        and other.ended is None
        and (theirs := other.spec.provision) is not None
        and theirs.scheduler == mine.scheduler
        and _compete(mine.constraints, theirs.constraints)
    ]


def before(jobs: Iterable[Job], job: Job, now: int) -> list[Job]:
    """Whoever is served before `job`; it has to wait for them."""
    rivals = [other for other in _rivals(jobs, job) if other.asks and _asking(other, now)]
    return sorted((other for other in rivals if _rank(other) < _rank(job)), key=_rank)


def wake(jobs: Iterable[Job], job: Job, now: int) -> None:
    """`job` has just wanted something: those before it who were refused ask again first."""
    for other in _rivals(jobs, job):
        waits = other.capacity.want is None and other.capacity.again_at > now
        if waits and not other.replayed and _rank(other) < _rank(job):
            other.capacity.again_at = now
            other.due_known = False


# ------------------------------------------------------------------ who yields


def offers(jobs: Iterable[Job], job: Job, rank: int) -> list[Offer]:
    """Nodes of jobs of lower priority, cheapest first; those that are not given up at the end."""
    near, _ = domains(job, rank)
    found: list[Offer] = []
    for other in _rivals(jobs, job):
        if other.spec.policy.priority >= job.spec.policy.priority:
            continue
        for node in other.order:
            if node.name in other.capacity.places and node.state == "connected":
                found.append(_offer(other, node, near))
    return sorted(found, key=lambda offer: (bool(offer.why_not), offer.cost))


def _offer(job: Job, node: Node, near: dict[str, str]) -> Offer:
    ranks = [worker.rank for worker in job.owners_on(node.name)]
    level = job.spec.policy.priority
    cost = (level, len(ranks), -job.submitted_at, -node.index)
    why = f"a spare of job {job.id} (priority {level})"
    if ranks:
        why = f"{name_ranks(ranks)} of job {job.id} (priority {level}) would be drained"
    return Offer(job, node, cost, why, _why_not(job, node, ranks, near))


def _why_not(job: Job, node: Node, ranks: Sequence[int], near: dict[str, str]) -> str:
    if not job.spec.policy.yields:
        return f"job {job.id} does not yield"
    if not job.asks:
        return f"job {job.id} could not ask for another one"
    if job.mode != "running" or job.replayed or job.attempt is not None or job.incidents:
        return f"job {job.id} is not at rest"
    if node.taints or node.name in job.capacity.retiring:
        return "it is being left already"
    wanted = Node(name="", index=-1, slots=0, labels=near)
    if why := mismatch(list(near), wanted, node):
        return why
    if not ranks:
        return ""
    if job.transparent or job.somebody_done():
        return f"job {job.id} could not go on without it"
    protected, why = protection_of(job)
    return "" if protected else f"job {job.id} would lose steps: {why}"


def trade(jobs: Sequence[Job], outs: dict[str, Out]) -> list[Job]:
    """Trade nodes between jobs. Returns those that have to look at their facts again."""
    changed: list[Job] = []
    for job in sorted(jobs, key=_rank):
        facts, now = job.capacity, outs[job.id].now
        facts.sharing = provision.may_preempt(job) and any(
            other.spec.policy.priority < job.spec.policy.priority for other in _rivals(jobs, job)
        )
        pending = [
            (other, node)
            for other in jobs
            for node, given in other.capacity.yields.items()
            if given.to == job.id
        ]
        if job.replayed:
            continue
        if facts.want is not None and not facts.want.place and before(jobs, job, now):
            facts.want.at = now  # its patience begins with its turn
        needy = provision.lacking(job) if job.mode == "running" else []
        came, facts.awaiting = facts.awaiting and not pending, bool(pending)
        if came and needy and facts.want is None:
            facts.again_at = now  # it is with the scheduler now
            changed.append(job)
            continue
        if not needy:
            for other, node in pending:
                if _take_back(other, outs[other.id], node, job.id):
                    changed.append(other)
            continue
        refused = facts.want is None and facts.again_at > now and not facts.cheap
        if pending or not facts.sharing or facts.forced or not refused:
            continue
        best = next(iter(offers(jobs, job, needy[0])), None)
        if best is None or best.why_not:
            facts.forced, facts.again_at = True, now
            changed.append(job)
            continue
        _give_up(best, job, outs[best.job.id])
        changed.append(best.job)
    return changed + _forsaken(jobs, outs)


def _forsaken(jobs: Sequence[Job], outs: dict[str, Out]) -> list[Job]:
    """Those who yield to a job that has ended."""
    live = {job.id for job in jobs}
    return [
        job
        for job in jobs
        for node, given in list(job.capacity.yields.items())
        if given.to not in live and _take_back(job, outs[job.id], node, given.to)
    ]


def _give_up(best: Offer, to: Job, out: Out) -> None:
    job, level = best.job, to.spec.policy.priority
    reason = f"job {to.id} of priority {level} needs a node"
    record = NodeYielded(job=job.id, at_ns=out.now, node=best.node.name, to=to.id, reason=reason)
    out.record(record)
    provision.apply(job, record)
    operator.drain(job, out, Drain(job=job.id, node=best.node.name, reason=reason))


def _take_back(job: Job, out: Out, node: str, to: str) -> bool:
    """Nobody needs it any more. Once its ranks have ended it is given up all the same."""
    given = job.capacity.yields[node]
    moving = job.attempt is not None
    if given.over or moving or job.nodes[node].state != "connected" or not job.nodes[node].taints:
        return False
    if not job.owners_on(node):
        return False  # it is empty: whoever asks next finds it with the scheduler
    _keep(job, out, node, f"job {to} does not need it any more")
    return True


def _keep(job: Job, out: Out, node: str, why: str) -> None:
    warn(job, out, f"{node} is kept: {why}")
    job.capacity.yields.pop(node)
    operator.untaint(job, out, Untaint(job=job.id, target=node))


def _may_lose(job: Job, now: int) -> bool:
    """The loss of a node costs no step. A node that has died without a sign looks well for a while,
    but no step is made without it: all ranks were alive when the last one was."""
    homes = {worker.node for worker in job.rank_owners() if worker.usable}
    there = all(job.nodes[name].state == "connected" for name in homes)
    return there and now - job.progress_at <= FRESH_NS and protection_of(job)[0]


def grace_is_over(job: Job, out: Out, node: str) -> None:
    """Its ranks found no other place. They end, and the others hold what they had."""
    given = job.capacity.yields[node]
    ranks = [worker for worker in job.owners_on(node) if worker.usable and not worker.done]
    if ranks and job.unplanned() is not None:
        _keep(job, out, node, f"job {job.id} has lost others, and may have its state here only")
        return
    if ranks and job.attempt is not None:
        given.until = out.now + AGAIN_NS  # they are on their way
        return
    if ranks and not _may_lose(job, out.now):
        given.until = out.now + LOOK_NS
        return
    given.over = True
    for worker in ranks:
        why = f"rank {worker.rank} gave {node} up to job {given.to}"
        job.causes[worker.rank] = ("preempted", why)
        out.kill(worker)
