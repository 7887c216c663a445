"""Where ranks had better be, once an emergency is over.

Theory of operation. In an emergency any spare is good enough: two ranks may end up on one node, a
job that went back to a checkpoint may have left its domains. When there is room again, ranks are
moved to better places: parked spares, or free slots. What is wrong with a place is counted. Counts
of different kinds are not weighed against each other, but looked at in this order:

* it is outside a domain that the job stays within: that of the node that torchrun would have taken;
* its node has more ranks than one node is meant to have;
* its buddy, which keeps the copy of its side state, is in the same failure domain.

A move makes the count of its rank less and nobody's more, so moving comes to an end. Being away
from home is nothing wrong in itself: the way back to a lost place is provision.py's.

An operator asks for all moves that are possible now, and they are made one after the other; with
`Policy.rebalance` one is made whenever nothing has happened for a while. Each move is to one place:
if that is not to be had when its turn comes, the rank stays.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from keepstep.core import placement, processes
from keepstep.core.demand import shared
from keepstep.core.facts import SECOND, Node, Worker
from keepstep.core.incidents import close_incident, open_incident
from keepstep.core.operator import check_running
from keepstep.core.state import Job, Out
from keepstep.errors import UsageError
from keepstep.model.job import Rebalance
from keepstep.model.views import MoveView, PlanView, RejectedView

CAUSE = "rebalance"
LOOK_NS = 30 * SECOND
BALANCED = "all ranks are where they belong"

Trouble = tuple[int, int, int]  # outside of its domains, ranks too many, domains of its buddy
NONE: Trouble = (0, 0, 0)


class Spot(NamedTuple):
    """Where a rank could go."""

    dearer: bool  # a process is being started there, or is to be
    number: int  # of its node
    slot: int
    node: Node

    @property
    def place(self) -> str:
        return f"{self.node.name}/{self.slot}"


class Move(NamedTuple):
    owner: Worker
    spot: Spot
    why: str


def _outside(job: Job, rank: int, node: Node) -> list[str]:
    home = job.order[rank // job.spec.local_world].labels
    wanted = (label for label in job.spec.policy.within if home.get(label))
    return [label for label in wanted if node.labels.get(label) != home[label]]


def _near_buddy(job: Job, node: Node) -> list[str]:
    buddy = placement.buddy_node(job.order, node)
    return shared(job.spec.policy.within, node, buddy) if buddy is not None else []


def _trouble(job: Job, rank: int, node: Node, ranks: int) -> Trouble:
    """`ranks` are on the node, this one included."""
    crowd = max(0, ranks - job.spec.local_world)
    return len(_outside(job, rank, node)), crowd, len(_near_buddy(job, node))


def _why(job: Job, rank: int, node: Node, ranks: int) -> str:
    if outside := _outside(job, rank, node):
        home = job.order[rank // job.spec.local_world].labels
        return f"rank {rank} is outside of its {outside[0]} {home[outside[0]]}"
    if ranks > job.spec.local_world:
        return f"{node.name} has {ranks} ranks, and {job.spec.local_world} belong on one node"
    both = ", ".join(_near_buddy(job, node))
    return f"what hits the {both} of {node.name} hits the copy of its side state, too"


def _spots(job: Job) -> list[Spot]:
    """Parked spares, then free slots."""
    found = [
        Spot(not w.parked, job.nodes[w.node].index, w.slot, job.nodes[w.node])
        for w in job.spares()
        if job.nodes[w.node].state == "connected" and job.nodes[w.node].healthy(w.slot)
    ]
    free = processes.free_slots(job)
    return sorted(found) + [Spot(True, job.nodes[n].index, slot, job.nodes[n]) for n, slot in free]


def moves(job: Job) -> list[Move]:
    """In order. Each is an improvement when those before it are made."""
    spots = _spots(job)
    owners = [w for w in job.rank_owners() if w.usable and not w.done]
    load = Counter(worker.node for worker in owners)
    found: list[Move] = []
    while spots:
        best: tuple[list[int], int, Worker, Spot] | None = None
        for owner in owners:
            here = job.nodes[owner.node]
            now = _trouble(job, owner.rank, here, load[here.name])
            for spot in spots if now > NONE and here.state == "connected" else ():
                ranks = load[spot.node.name] + (spot.node is not here)
                then = _trouble(job, owner.rank, spot.node, ranks)
                gain = [after - before for after, before in zip(then, now)]
                if then < now and (best is None or (gain, owner.rank) < best[:2]):
                    best = (gain, owner.rank, owner, spot)
        if best is None:
            break
        _, rank, owner, spot = best
        found.append(Move(owner, spot, _why(job, rank, *_at(job, owner, load))))
        load[owner.node] -= 1
        load[spot.node.name] += 1
        spots.remove(spot)
        owners.remove(owner)
    return found


def _at(job: Job, owner: Worker, load: Counter[str]) -> tuple[Node, int]:
    return job.nodes[owner.node], load[owner.node]


def plan(job: Job) -> PlanView:
    """What a request would lead to now."""
    check_running(job)
    found = moves(job)
    then = ["the moves are made one after the other"] if len(found) > 1 else []
    return PlanView(
        job=job.id,
        asked=CAUSE,
        moves=[
            MoveView(
                rank=move.owner.rank,
                origin=move.owner.place,
                to=move.spot.place,
                cost="process" if move.spot.dearer else "spare",
                reason=move.why,
            )
            for move in found
        ],
        rejected=_rejected(job, found),
        then=then,
    )


def _rejected(job: Job, found: list[Move]) -> list[RejectedView]:
    used = {move.spot.place for move in found}
    gone = {move.owner.rank for move in found}
    load = Counter(worker.node for worker in job.rank_owners() if worker.usable)
    load.subtract(Counter(move.owner.node for move in found))
    load.update(move.spot.node.name for move in found)
    nobody = "no rank would be better off there"
    rejected = [
        RejectedView(
            what=f"{spare.place} ({spare.id})",
            why=placement.unfit(spare, job.nodes[spare.node]) or nobody,
        )
        for spare in job.spares()
        if spare.place not in used
    ]
    free = [f"{node}/{slot}" for node, slot in processes.free_slots(job)]
    rejected += [RejectedView(what=f"{p} (free)", why=nobody) for p in free if p not in used]
    for worker in job.rank_owners():
        at = _at(job, worker, load)
        if worker.rank not in gone and _trouble(job, worker.rank, *at) > NONE:
            what, why = f"rank {worker.rank} stays in {worker.place}", _why(job, worker.rank, *at)
            rejected.append(RejectedView(what=what, why=f"{why}, and no other place is better"))
    return rejected


def rebalance(job: Job, out: Out, request: Rebalance) -> None:
    check_running(job)
    if job.attempt is not None or job.incidents:
        raise UsageError(
            f"something else is being moved in job {job.id}",
            hint="try again when `keepstep incidents` shows none that is OPEN",
        )
    _open(job, out, moves(job))


def look(job: Job, out: Out) -> None:
    """Its time has come, and nothing is going on."""
    job.balance_at = out.now + LOOK_NS
    if found := moves(job)[:1]:
        _open(job, out, found)


def deadline(job: Job) -> int | None:
    """When to look whether something can be made better; None: never, or not now."""
    policy = job.spec.policy
    if policy.rebalance == "never" or job.mode != "running" or job.replayed:
        return None
    if job.attempt is not None or job.incidents:
        return None
    last = max((view.opened_at_ns for view in job.closed), default=job.submitted_at)
    return max(job.balance_at, last + policy.quiet_ns)


def _open(job: Job, out: Out, found: list[Move]) -> None:
    whys = "; ".join(dict.fromkeys(move.why for move in found))
    incident = open_incident(
        job,
        out,
        trigger="planned",
        cause=CAUSE,
        victims=[move.owner.rank for move in found],
        reason=whys or BALANCED,
        toward={move.owner.rank: move.spot.place for move in found},
    )
    if not found:
        close_incident(job, out, incident, "RESOLVED", "")
