"""What a request for a move would lead to now. Nothing here changes anything.

The choices are those of planned.py and processes.py, made one after the other on what is there
at this moment: a parked spare, else a process in a free slot, else a node of the scheduler, else
the move waits. Everything that was not chosen is named with its reason. What the scheduler has to
offer is for the shell to ask (`Ask`); the core only says what it would ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.core import operator, placement, processes, provision
from keepstep.core.demand import domains, mismatch, shared
from keepstep.core.facts import Node, Worker
from keepstep.core.priorities import Offer
from keepstep.core.state import Job
from keepstep.core.triage import name_ranks
from keepstep.model.job import Drain, Migrate
from keepstep.model.schedule import Ask
from keepstep.model.views import MoveView, OfferView, PlanView, RejectedView


def plan(job: Job, given: Migrate | Drain) -> tuple[PlanView, Ask | None]:
    """Raises UsageError where the request itself would."""
    if isinstance(given, Drain):
        ranks, target, asked = operator.check_drain(job, given), given.node, f"drain {given.node}"
    else:
        operator.check_migrate(job, given)
        ranks, target, asked = given.ranks, "", f"migrate {name_ranks(given.ranks)}"
    spares = job.spares()
    free = [place for place in processes.free_slots(job) if place[0] != target]
    moves: list[MoveView] = []
    rejected: dict[tuple[str, str], None] = {}  # in order; no values
    for rank in ranks:
        owner = job.workers[job.owners[rank]]
        move, refused = _move(job, owner, spares, free, target)
        moves.append(move)
        rejected |= dict.fromkeys(refused)
    chosen = {move.to for move in moves}
    lacking = [move.rank for move in moves if move.cost == "scheduler"]
    view = PlanView(
        job=job.id,
        asked=asked,
        moves=moves,
        rejected=[
            RejectedView(what=what, why=why)
            for what, why in rejected
            if what.partition(" ")[0] not in chosen
        ],
        then=_then(job, target, lacking),
    )
    return view, _ask(job, lacking[0]) if lacking else None


def with_offers(view: PlanView, found: Sequence[Offer]) -> PlanView:
    """What jobs of lower priority could yield is dearer than what nobody uses."""
    given = [one for one in found if not one.why_not]
    kept = [one for one in found if one.why_not]
    return msgspec.structs.replace(
        view,
        offers=[
            OfferView(place=one.job.capacity.places[one.node.name], kind="yield", reason=one.why)
            for one in given
        ],
        rejected=[
            *view.rejected,
            *(RejectedView(what=f"{o.node.name} of {o.job.id}", why=o.why_not) for o in kept),
        ],
    )


def _move(
    job: Job,
    owner: Worker,
    spares: list[Worker],
    free: list[tuple[str, int]],
    target: str,
) -> tuple[MoveView, list[tuple[str, str]]]:
    """Takes what it uses out of `spares` and `free`."""
    prepared = {
        one.place
        for one in job.understudies()
        if one.ready is not None and one.presumed == owner.rank
    }
    usable = [worker for worker in spares if worker.node != target]
    within, home = job.spec.policy.within, job.nodes[owner.node]
    best, why = placement.choose_spare(
        usable, job.nodes, away_from=owner.node, prepared=prepared, within=within
    )
    refused = [(_named(w), "its node is the one to be drained") for w in spares if w not in usable]
    refused += [
        (_named(worker), _rejection(job, worker, best, owner, prepared))
        for worker in usable
        if worker is not best
    ]
    if best is not None:
        spares.remove(best)
        cost = "understudy" if best.place in prepared else "spare"
        if cost == "understudy":
            why = f"a process built as rank {owner.rank} is ready in {best.place}"
        return _to(owner, best.place, cost, why), refused
    starting = [w for w in usable if _may_park(job, w) and not mismatch(within, home, _at(job, w))]
    if starting:
        spares.remove(starting[0])
        why = f"{starting[0].id} is still starting there: the move waits until it is parked"
        return _to(owner, starting[0].place, "spare", why), refused
    fit = [place for place in free if not mismatch(within, home, job.nodes[place[0]])]
    refused += [
        (f"{node}/{slot} (free)", why)
        for node, slot in free
        if (why := mismatch(within, home, job.nodes[node]))
    ]
    if fit:
        node, slot = fit[0]
        free.remove(fit[0])
        why = "no spare is left; a process is started in this free slot, then the rank moves"
        return _to(owner, f"{node}/{slot}", "process", why), refused
    spec = job.spec.provision
    if spec is not None and spec.kinds:
        why = f"the job's nodes have no room; {spec.scheduler} is asked for a node"
        return _to(owner, "", "scheduler", f"{why} ({', then '.join(spec.kinds)})"), refused
    why = "the job's nodes have no room, and no scheduler may be asked: training goes on, and the"
    return _to(owner, "", "wait", f"{why} move waits for a spare"), refused


def _at(job: Job, worker: Worker) -> Node:
    return job.nodes[worker.node]


def _may_park(job: Job, worker: Worker) -> bool:
    return _at(job, worker).healthy(worker.slot) and not worker.parked


def _to(owner: Worker, place: str, cost: str, why: str) -> MoveView:
    return MoveView(rank=owner.rank, origin=owner.place, to=place, cost=cost, reason=why)


def _named(worker: Worker) -> str:
    return f"{worker.place} ({worker.id})"


def _rejection(
    job: Job, worker: Worker, best: Worker | None, owner: Worker, prepared: set[str]
) -> str:
    home, within = job.nodes[owner.node], job.spec.policy.within
    if why := placement.unfit(worker, _at(job, worker), home, within):
        return why
    assert best is not None, "whoever is fit and not the best is behind it"
    if best.place in prepared and worker.place not in prepared:
        return f"what is built as rank {owner.rank} is ready elsewhere"
    if worker.node == owner.node != best.node:
        return f"on the node of rank {owner.rank}: what hits one may hit the other"
    both = shared(within, home, _at(job, worker))
    if len(both) > len(shared(within, home, _at(job, best))):
        return f"in the same {', '.join(both)} as rank {owner.rank}: what hits one may hit both"
    return f"as good as {best.place}, and behind it in the order of nodes"


def _then(job: Job, target: str, lacking: Sequence[int]) -> list[str]:
    said: list[str] = []
    spec = job.spec.provision
    if lacking:
        said.append(
            f"nodes are asked for one at a time, until there is room for {name_ranks(lacking)}"
        )
    if target:
        said.append(f"{target} is tainted: nothing is started there until `keepstep untaint`")
        place = job.capacity.places.get(target, "")
        if place and spec is not None:
            said.append(f"{place} is drained in {spec.scheduler}, and goes back when it is empty")
    return said


def _ask(job: Job, rank: int) -> Ask:
    spec = job.spec.provision
    assert spec is not None, "nobody else has a scheduler"
    old = provision.place_of(job, rank)
    near, apart = domains(job, rank)
    return Ask(
        job=job.id,
        op="plan",
        constraints=spec.constraints,
        kinds=spec.kinds,
        avoid=provision.avoided(job, old),
        near=near,
        apart=apart,
    )
