"""Healing a world: links, disks and paused processes are well again, and there are enough slots.

What died stays dead, and what hung stays hung.
"""

from __future__ import annotations

from keepstep.model.job import Untaint
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World


def heal(world: World) -> None:
    world.trace("healed")
    mend(world)
    _give_slots(world)
    _untaint(world)


def mend(world: World) -> None:
    world.net.heal_all()
    world.ills.spawn_failures = 0
    orchestrator = world.orchestrator
    orchestrator.disk_full = False
    orchestrator.crash_at = ""
    orchestrator.resume()
    orchestrator.restart()
    for node in list(world.nodes.values()):
        node.resume()
        node.disk = ""
    world.ills.mend_places()
    for process in list(world.ranks.values()):
        process.resume()
        process.slow = 1


def _give_slots(world: World) -> None:
    """A provider that delivers at last: room for all ranks and spares."""
    plan = world.plan
    slots = sum(node.slots for node in world.nodes.values() if node.alive)
    number = 0
    while slots < plan.ranks + plan.spares + 1:
        number += 1
        world.add_node(f"m{number}", plan.per_node + 1)
        slots += plan.per_node + 1


def _untaint(world: World) -> None:
    """Operators look again and again at what is tainted, and clear it."""
    job = world.facts()
    if job is not None and not world.over and not job.replayed:
        for name in sorted(job.nodes):
            node = job.nodes[name]
            targets = [name] if node.taints else []
            targets += [f"{name}/{slot}" for slot in sorted(node.slot_taints)]
            for target in targets:
                world.orchestrator.submit(Untaint(job=world.plan.job, target=target))
    world.after(20 * SECOND, _untaint, world)
