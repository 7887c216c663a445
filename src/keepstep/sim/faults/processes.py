"""Processes: a rank, a spare, everybody, and those that nobody would think of."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.sim.faults.links import cut
from keepstep.sim.faults.victims import bystander, node_of
from keepstep.sim.ground.connections import ORCHESTRATOR
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World

SLOWER = 10
LATER = "later"  # what it waits for may still come


def process(choose: Callable[[World], list[Rank]]) -> Callable[[World, Fault], str]:
    def hit(world: World, fault: Fault) -> str:
        found = [process for process in choose(world) if process.alive]
        if not found:
            return ""
        _hit(world, found[0], fault)
        return f"{found[0].id} (rank {found[0].rank})"

    return hit


def _hit(world: World, process: Rank, fault: Fault) -> None:
    if fault.kind == "crash":
        process.exit(-9)
    elif fault.kind == "hang":
        process.hung = True
    elif fault.kind == "pause":
        process.stop()
        world.after(fault.length_ns, process.resume)
    elif fault.kind == "slow-down":
        process.slow, process.was_slow = SLOWER, True
        world.after(fault.length_ns, setattr, process, "slow", 1)
    elif fault.kind == "freeze":  # stopped beyond the limit
        process.stop()
        world.after(fault.length_ns, process.resume)
    elif fault.kind == "stuck-builder":  # one rank never finishes its next groups
        process.builder_stuck = True
    elif fault.kind == "groups":  # it creates one that the others do not have
        process.odd_groups = True
    elif fault.kind == "quit":  # its script raises outside of any step
        process.fail("user")
    elif process.mode in ("init", "building", "arrived", "warming", "joining"):
        process.fail(fault.kind)
    else:
        process.error = fault.kind  # raised by its next computation


def waiting(world: World, fault: Fault) -> str:
    """A rank that has waited in its fence for so long that it is said to stand still."""
    since = world.now - world.plan.stall_ns - 2 * SECOND
    found = [p for p in world.owners() if p.mode == "fence" and p.fence_ns < since]
    if not found:
        return LATER
    _hit(world, found[0], fault)
    return f"{found[0].id} (rank {found[0].rank})"


def everyone(world: World, fault: Fault) -> str:
    """All ranks at once: somebody stops the whole job for a while, or kills it."""
    for process in world.owners():
        if fault.kind == "crash":
            process.exit(-9)
            continue
        process.stop()
        world.after(fault.length_ns, process.resume)
    return "of the job"


def half_open(world: World, fault: Fault) -> str:
    """A rank hangs, and its node's stream breaks in a way that only the orchestrator notices."""
    for process in bystander(world):
        node = node_of(process)
        process.hung = True
        cut(world, [(node.name, ORCHESTRATOR), (ORCHESTRATOR, node.name)], fault.length_ns)
        if node.stream is not None:
            node.stream.close("orchestrator")
        return f"{process.id} (rank {process.rank})"
    return ""


def new_groups(world: World, fault: Fault) -> str:
    """The connections of the generation that is being committed break."""
    groups = [process.staged for process in world.owners() if process.staged is not None]
    for group in groups[:1]:
        group.reset()
        return f"of generation {group.generation}"
    return ""


def echoes(world: World, fault: Fault) -> str:
    """What ranks answer in an attempt is heard once more in the next one."""
    world.ills.echoes = True
    return "of every answer"
