"""Who is hit: processes by the part that they have in what is going on, and their nodes."""

from __future__ import annotations

from keepstep.core.facts import Attempt
from keepstep.core.migration import sources_for
from keepstep.sim.rank.rank import Rank
from keepstep.sim.world.node import SimNode
from keepstep.sim.world.world import World


def current_attempt(world: World) -> Attempt | None:
    job = world.facts()
    return job.attempt if job is not None else None


def victim(world: World) -> list[Rank]:
    attempt, job = current_attempt(world), world.facts()
    if attempt is not None and job is not None and not attempt.committed:
        found = [job.owners.get(rank, "") for rank in attempt.moving]
    else:
        leaving = job.workers.values() if job is not None else ()
        found = [worker.id for worker in leaving if worker.role == "leaver"]
    return [world.ranks[name] for name in found if name in world.ranks]


def source(world: World) -> list[Rank]:
    attempt, job = current_attempt(world), world.facts()
    if attempt is None or job is None or attempt.committed:
        return world.owners()[-1:]
    moving = {job.owners[rank] for rank in attempt.moving if rank in job.owners}
    for _, name in sorted(attempt.newcomers.items()):
        sources = [s.serve.host for s in sources_for(job, attempt, job.workers[name])]
        sources = [s for s in sources if s not in moving]
        if sources:
            return [world.ranks[sources[0]]]
    return [p for p in world.owners() if p.id not in moving][:1]


def spare(world: World) -> list[Rank]:
    attempt, job = current_attempt(world), world.facts()
    if job is None:
        return []
    names = sorted(attempt.newcomers.values()) if attempt is not None else []
    if not names:
        names = [worker.id for worker in job.spares()]
    return [world.ranks[name] for name in names if name in world.ranks][:1]


def understudy(world: World) -> list[Rank]:
    job = world.facts()
    names = [worker.id for worker in job.understudies()] if job is not None else []
    found = [world.ranks[name] for name in names if name in world.ranks]
    return [world.random.choice(found)] if found else []


def asking(world: World) -> list[Rank]:
    """A rank whose buddy is lost, and which asks for another one."""
    return [p for p in world.owners() if p.mode == "publish" and p.page.asked_ns]


def bystander(world: World) -> list[Rank]:
    special = {p.id for p in victim(world) + source(world) + spare(world)}
    others = [p for p in world.owners() if p.id not in special]
    return [world.random.choice(others)] if others else []


def node_of(process: Rank) -> SimNode:
    assert isinstance(process.node, SimNode)
    return process.node


def node_at_stake(world: World) -> SimNode | None:
    """One that matters now: of the victim, the spare, the source, the store, or any."""
    near = [node_of(p) for p in victim(world) + spare(world) + source(world) + bystander(world)]
    attempt = current_attempt(world)
    if attempt is not None and attempt.store_node:
        near.append(world.nodes[attempt.store_node])
    near = [node for node in near if node.alive]
    return world.random.choice(near) if near else None
