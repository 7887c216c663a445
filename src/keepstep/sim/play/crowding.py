"""Whether ranks are where they should be, as somebody sees it who knows the whole world."""

from __future__ import annotations

from collections import Counter

from keepstep.sim.world.world import World


def relieved(world: World) -> bool:
    """No rank is in a place that makes it slow, or there was no better one for it."""
    job = world.facts()
    if job is None or world.over:
        return job is not None
    slow = [worker for worker in job.rank_owners() if worker.place in world.ills.dragged]
    reasons = [one.stays for one in job.pace.slow.values()]
    stays = any(why and "within" not in why for why in reasons)  # that one is for a while
    return not job.incidents and (not slow or stays)


def balanced(world: World) -> bool:
    """No node has too many ranks while another has room for one more of its own."""
    job = world.facts()
    if job is None or world.over:
        return job is not None
    if job.incidents or job.attempt is not None:
        return False
    fair = world.plan.per_node
    load = Counter(worker.node for worker in job.rank_owners())
    crowd = any(count > fair for count in load.values())
    room = any(
        load[node.name] < min(fair, node.slots)
        for node in job.connected()
        if not node.taints and len(node.slot_taints) < node.slots - load[node.name]
    )
    return not (crowd and room)
