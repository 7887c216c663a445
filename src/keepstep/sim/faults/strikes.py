"""What can go wrong with whom. `strike` is the only place where a world is disturbed.

    kind        a process             an agent              orchestrator     link, partition
    crash       SIGKILL               its node dies         kill -9          streams reset; cut off
    hang        main thread stuck     stopped > the limit   stopped > limit  cut > the limit
    pause       stopped < the limit   stopped < the limit   stopped < limit  cut < the limit
    slow-down   10 times slower       slow links            slow disk        slow; swizzle-clogging

Everything but a hung main thread and a death is over after a while by itself; those two are for
the control plane to notice.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.sim.faults import links, machines, processes, victims, words
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World

STRIKES: dict[str, Callable[[World, Fault], str]] = {
    "victim": processes.process(victims.victim),
    "source": processes.process(victims.source),
    "spare": processes.process(victims.spare),
    "understudy": processes.process(victims.understudy),
    "bystander": processes.process(victims.bystander),
    "waiting": processes.waiting,
    "asking": processes.process(victims.asking),
    "agent": machines.agent,
    "orchestrator": machines.orchestrator,
    "link": links.link,
    "partition": links.partition,
    "detector": words.detector,
    "operator": words.operator,
    "witness": words.witness,
    "provider": machines.provider,
    "store": machines.store,
    "disk": machines.disk,
    "slot": machines.slot,
    "place": machines.place,
    "echo": processes.echoes,
    "everyone": processes.everyone,
    "spare-node": machines.spare_node,
    "data": links.data_network,
    "new-groups": processes.new_groups,
    "buddy": machines.buddy,
    "half-open": processes.half_open,
}


def strike(world: World, fault: Fault) -> bool:
    """False: there is nobody it could hit now."""
    name = STRIKES[fault.actor](world, fault)
    if name == processes.LATER:
        world.after(SECOND, _strike_later, world, fault)
        return False
    if name:
        world.fired(f"{fault.kind} of {fault.actor} {name}")
    return bool(name)


def _strike_later(world: World, fault: Fault) -> None:
    strike(world, fault)
