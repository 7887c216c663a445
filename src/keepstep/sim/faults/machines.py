"""Nodes and what is on them: agents, disks, slots, stores. And the orchestrator's process."""

from __future__ import annotations

from keepstep.sim.faults.links import cut, slow
from keepstep.sim.faults.victims import bystander, current_attempt, node_at_stake, node_of, spare
from keepstep.sim.ground.connections import ORCHESTRATOR
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.times import MS
from keepstep.sim.world.world import World


def agent(world: World, fault: Fault) -> str:
    node = node_at_stake(world)
    if node is None:
        return ""
    if fault.kind == "crash":
        node.die(silently=world.random.random() < 0.4)
    elif fault.kind == "vanish":
        node.die(silently=True)
    elif fault.kind in ("hang", "pause"):
        node.pause()
        world.after(fault.length_ns, node.resume)
    else:
        slow(world, node.name, fault.length_ns)
    return node.name


def spare_node(world: World, fault: Fault) -> str:
    """The node a newcomer runs on dies."""
    for process in spare(world):
        node_of(process).die(silently=False)
        return process.node.name
    return ""


def buddy(world: World, fault: Fault) -> str:
    """The node that keeps the other copy of the victim's side state dies."""
    attempt, job = current_attempt(world), world.facts()
    if attempt is None or job is None:
        return ""
    for rank in attempt.moving:
        owner = job.owner(rank)
        node = world.nodes.get(owner.buddy) if owner is not None else None
        if node is not None and node.alive:
            node.die(silently=False)
            return f"of rank {rank}, {node.name}"
    return ""


def orchestrator(world: World, fault: Fault) -> str:
    orchestrator = world.orchestrator
    if fault.kind == "crash":
        orchestrator.crash()
        world.after(fault.length_ns, orchestrator.restart)
    elif fault.kind in ("record", "effect"):
        orchestrator.crash_at = fault.kind
    elif fault.kind == "full":
        orchestrator.disk_full = True
    elif fault.kind == "blackout":
        links = [(name, ORCHESTRATOR) for name in world.nodes]
        cut(world, links + [(b, a) for a, b in links], fault.length_ns)
    elif fault.kind in ("hang", "pause"):
        orchestrator.pause()
        world.after(fault.length_ns, orchestrator.resume)
    else:
        orchestrator.append_ns = 200 * MS
        world.after(fault.length_ns, setattr, orchestrator, "append_ns", MS // 2)
    return "process"


def provider(world: World, fault: Fault) -> str:
    if fault.kind == "node":
        world.add_node(f"x{len(world.nodes)}", world.plan.per_node)
        return "delivers"
    world.ills.spawn_failures += 1 + world.random.randrange(2)
    return "refuses"


def disk(world: World, fault: Fault) -> str:
    """Of a node with ranks: what they write now fails, or never ends."""
    node = world.random.choice(world.owners()).node
    node.disk = fault.kind
    world.after(fault.length_ns, setattr, node, "disk", "")
    return f"of {node.name}"


def place(world: World, fault: Fault) -> str:
    """From now on whichever rank is there takes longer than the others."""
    for process in bystander(world):
        world.ills.drag(process.place, 2 + world.random.randrange(2))
        return process.place
    return ""


def slot(world: World, fault: Fault) -> str:
    for process in spare(world):
        world.ills.bad_slots[process.place] = 0
        process.exit(1)
        return process.place
    return ""


def store(world: World, fault: Fault) -> str:
    """Its program cannot be started, says nothing, or dies with ranks waiting in it."""
    if fault.kind in ("refuse", "mute"):
        world.ills.store_failure = fault.kind
        return "of the next generation"
    attempt = current_attempt(world)
    node = world.nodes.get(attempt.store_node) if attempt is not None else None
    if fault.kind == "host" and node is not None and node.alive:
        node.die(silently=False)
        return f"with {node.name}"
    generation = attempt.generation if attempt is not None else world.book.generation
    for host in [node] if node is not None else list(world.nodes.values()):
        if generation in host.stores and host.alive:
            host.store_died(generation)
            return f"of generation {generation}"
    return ""
