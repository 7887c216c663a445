"""Which node keeps the parity of which ranks, with `--redundancy parity`.

The groups follow from the home layout and never change; placement.py says which. The holder of a
group stays who it is until it is lost or a member has moved to it: a new holder has nothing until
all members have begun with new bases. After a restart of the orchestrator it is chosen anew, from
the same facts.
"""

from __future__ import annotations

from keepstep.core import placement
from keepstep.core.facts import Worker
from keepstep.core.state import Job
from keepstep.core.triage import name_ranks
from keepstep.model.commands import Parity
from keepstep.model.messages import Address


def give(job: Job, worker: Worker) -> Parity | None:
    """What the rank is to be told now, and is taken to know from here on; None: no node is left."""
    if job.spec.redundancy != "parity":
        return None
    members = placement.parity_group(job.spec, worker.rank)
    worker.parity = job.parities[members[0]] = holder_of(job, members)
    job.lonely |= not worker.parity
    blobs = job.nodes[worker.parity].blobs if worker.parity else None
    return Parity(holder=blobs, members=members) if blobs is not None else None


def holder_of(job: Job, members: list[int]) -> str:
    kept = job.parities.get(members[0], "")
    places = nodes_of(job, members)
    node = job.nodes.get(kept)
    if node is not None and node.state not in ("absent", "dead") and kept not in places:
        return kept
    return _choose(job, members, places)


def replace(job: Job, rank: int, lost: Address) -> None:
    """Another one, unless a member has said the same before; the same one if there is no other."""
    members = placement.parity_group(job.spec, rank)
    kept = job.nodes.get(job.parities.get(members[0], ""))
    if kept is not None and kept.blobs == lost:
        other = _choose(job, members, {*nodes_of(job, members), kept.name})
        job.parities[members[0]] = other or kept.name


def _choose(job: Job, members: list[int], avoid: set[str]) -> str:
    node = placement.parity_node(job.order, members[-1] // job.spec.local_world + 1, avoid)
    return node.name if node is not None else ""


def nodes_of(job: Job, members: list[int]) -> set[str]:
    """Also of members that are started after the one that asks, and not at home."""
    found = set()
    for member in members:
        owner, home = job.owner(member), job.spec.nodes[member // job.spec.local_world].name
        found.add(owner.node if owner is not None else job.places.get(member, home))
    return found


def uncovered(job: Job) -> str:
    """Whose loss with a node no parity covers, in words; empty if there is nobody."""
    for rank in range(job.spec.world):
        members = placement.parity_group(job.spec, rank)
        if rank != members[0]:
            continue
        if not holder_of(job, members):
            return f"no node is left that could keep the parity of {name_ranks(members)}"
        if len(nodes_of(job, members)) < len(members):
            return f"of {name_ranks(members)}, which share a parity, two are on one node"
    return ""
