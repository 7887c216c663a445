"""Links: cut for a while, slow, or broken with what was under way."""

from __future__ import annotations

from keepstep.sim.faults.victims import node_at_stake
from keepstep.sim.ground.connections import ORCHESTRATOR
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.times import MS, SECOND
from keepstep.sim.world.world import World


def link(world: World, fault: Fault) -> str:
    node = node_at_stake(world)
    if node is None:
        return ""
    if fault.kind == "crash":
        if node.stream is not None:
            node.stream.close(world.random.choice(("agent", "orchestrator")))
        if world.random.random() < 0.3:
            groups = [p.group for p in world.owners() if p.group is not None]
            if groups:
                groups[0].reset()
    elif fault.kind in ("hang", "pause"):
        cut(world, [(node.name, ORCHESTRATOR), (ORCHESTRATOR, node.name)], fault.length_ns)
    else:
        world.net.slow(node.name, ORCHESTRATOR, 2 * SECOND)
        world.net.slow(ORCHESTRATOR, node.name, 2 * SECOND)
        world.after(fault.length_ns, world.net.slow, node.name, ORCHESTRATOR, 0)
        world.after(fault.length_ns, world.net.slow, ORCHESTRATOR, node.name, 0)
    return f"of {node.name}"


def partition(world: World, fault: Fault) -> str:
    node = node_at_stake(world)
    if node is None:
        return ""
    others = [*(name for name in world.nodes if name != node.name), ORCHESTRATOR]
    out = [(node.name, other) for other in others]
    back = [(other, node.name) for other in others]
    if fault.kind == "slow-down":
        links = out + back
        world.random.shuffle(links)
        for index, link in enumerate(links):  # clogs come one by one and go in another order
            world.after(index * 50 * MS, cut, world, [link], world.random.randrange(2 * SECOND))
    elif fault.kind == "hang":
        cut(world, world.random.choice((out, back)), fault.length_ns)
    else:
        cut(world, out + back, fault.length_ns)
    return f"around {node.name}"


def data_network(world: World, fault: Fault) -> str:
    """No node reaches another; the orchestrator reaches them all."""
    names = sorted(world.nodes)
    cut(world, [(a, b) for a in names for b in names if a != b], fault.length_ns)
    return "network between all nodes"


def cut(world: World, links: list[tuple[str, str]], length_ns: int) -> None:
    for source, target in links:
        world.net.cut(source, target)
        world.after(length_ns, world.net.heal, source, target)


def slow(world: World, name: str, length_ns: int) -> None:
    for other in [*world.nodes, ORCHESTRATOR]:
        for link in ((name, other), (other, name)):
            world.net.slow(*link, SECOND)
            world.after(length_ns, world.net.slow, *link, 0)
