"""Whether anything had to be lost: what the living hold and what copies there are."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.sim.ground.memory import restored, unseen
from keepstep.sim.world.node import SimNode
from keepstep.sim.world.world import World


def recoverable(world: World, kept: int = -1) -> str:
    """Why nothing needed to be lost; empty if it was beyond saving, or nothing was lost because the
    state of tick `kept` is in a checkpoint."""
    owners = world.book.owners
    job = world.facts()
    assert job is not None
    # A node that was given up for good is as good as dead: its agent would have ended its ranks.
    # A process that hangs never answers, so nobody can take state from it; one whose device has
    # failed has none.
    alive = {
        rank: world.ranks[w]
        for rank, w in owners.items()
        if world.ranks[w].alive
        and not world.ranks[w].hung
        and world.ranks[w].error_kind != "device"
        and job.nodes[world.ranks[w].node.name].state != "dead"
    }
    if not alive:
        return ""
    top = max(process.tick for process in alive.values())
    for tick in (top, top + 1):
        if tick <= kept:
            continue
        able = [p.tick == tick or (p.tick == tick - 1 and p.in_fence) for p in alive.values()]
        if not all(able) or not any(p.tick == tick for p in alive.values()):
            continue
        missing = [rank for rank in owners if rank not in alive and not _held(world, rank, tick)]
        if not missing:
            return f"{len(alive)} ranks can hold at tick {tick} and all side states exist"
    return ""


def _held(world: World, rank: int, tick: int) -> bool:
    """By nodes that are not given up: those end what they hold."""
    job = world.facts()
    assert job is not None
    nodes = [
        node
        for name, node in world.nodes.items()
        if node.alive and name in job.nodes and job.nodes[name].state != "dead"
    ]
    gave = world.book.gave
    side = any(n.memory.blob(rank, tick) or tick in gave.get((n.name, rank), ()) for n in nodes)
    return tick == 0 or (side and (not world.plan.parity or covered(world, nodes, rank, tick)))


def covered(world: World, nodes: Sequence[SimNode], rank: int, tick: int) -> bool:
    """What these nodes have of a rank's shard is what it was."""
    memories = [node.memory for node in nodes]
    with unseen(memories):
        found = restored(memories, rank, world.truth.version[tick])
    return found == world.truth.shard[tick][rank]
