"""Judging a world: what has leaked, whether the job ended for a reason, and who is still there."""

from __future__ import annotations

from collections import Counter

from keepstep.core import parities, understudies
from keepstep.core.placement import buddy_node
from keepstep.core.state import Job
from keepstep.sim.ground.violation import Violation
from keepstep.sim.play.at_rest import KEPT
from keepstep.sim.play.healing import mend
from keepstep.sim.rules.losses import covered, recoverable
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World

GONE_NS = 40 * SECOND


def check_leaks(world: World) -> None:
    job = world.facts()
    assert job is not None
    for process in world.ranks.values():
        if not process.alive:
            continue
        worker = job.workers.get(process.id)
        known = worker is not None and worker.usable and worker.role in KEPT
        if not known:
            raise Violation(f"{process.id} runs and nobody knows why")
    for node in world.nodes.values():
        left = [g for g in node.stores if g != job.generation] if node.alive else []
        if left and node.stream is not None:
            raise Violation(f"{node.name} still hosts the stores of {left}")
    spares = len(job.spares())
    if spares > max(world.plan.spares, 0):
        raise Violation(f"{spares} spares, {world.plan.spares} are wanted")
    _check_understudies(world, job)
    _check_buddies(world, job)
    world.rules.at_rest()


def _check_understudies(world: World, job: Job) -> None:
    """As many as are wanted in every place that has a spare, each for another rank."""
    wanted = min(world.plan.understudies, world.plan.ranks)
    there = Counter(worker.place for worker in job.understudies())
    ranks = {(worker.place, worker.presumed) for worker in job.understudies()}
    failing = job.understudies_failed >= understudies.FAILURES_MAX
    for worker in job.spares():
        if there.pop(worker.place, 0) != wanted and not failing:
            raise Violation(f"not {wanted} understudies beside {worker.id}")
    if there or len(ranks) != len(job.understudies()):
        raise Violation(f"understudies without a spare, or twice: {sorted(ranks)}")


def _check_buddies(world: World, job: Job) -> None:
    """Everybody publishes where the core believes it does, if there is another node at all."""
    for rank, worker in job.owning():
        process = world.ranks[worker.id]
        if worker.done or process.page.hold:
            continue
        parity = process.parity.holder if process.parity is not None else None
        for kept, name in ((process.buddy, worker.buddy), (parity, worker.parity)):
            node = job.nodes.get(name)
            believed = node.blobs if node is not None else None
            if kept != believed:
                raise Violation(
                    f"rank {rank} ({worker.id}) has buddy or parity {kept}, "
                    f"the core believes {name!r} at {believed}"
                )
        if not worker.buddy and buddy_node(job.order, job.nodes[worker.node]) is not None:
            raise Violation(f"rank {rank} ({worker.id}) has no buddy")


def check_parities(world: World) -> None:
    """Whichever node is lost now, what its ranks alone had can be rebuilt, or the core knows
    that it cannot."""
    job = world.facts()
    if job is None or world.over or parities.uncovered(job):
        return
    for lost in sorted({worker.node for worker in job.rank_owners()}):
        nodes = [node for node in world.nodes.values() if node.alive and node.name != lost]
        ranks = [world.ranks[worker.id] for worker in job.rank_owners()]
        tick = max((p.tick for p in ranks if p.node.name != lost), default=0)
        for process in ranks:
            if process.node.name == lost and not covered(world, nodes, process.rank, tick):
                raise Violation(f"the shard of rank {process.rank} would be lost with {lost}")


def check_end(world: World) -> None:
    ended = world.book.job_ended
    assert ended is not None
    view = ended.view
    if view.state == "done":
        if any(fault.startswith("groups of ") for fault in world.fired_faults):
            raise Violation("ranks with different groups have trained")
        for rank, worker in sorted(world.book.owners.items()):
            process = world.ranks[worker]
            if process.tick != world.target:
                raise Violation(f"done, but rank {rank} stands at tick {process.tick}")
    elif view.state == "diverged":
        if not world.book.stands:
            raise Violation(f"nothing differed: {view.reason}")
    elif view.state == "cancelled":
        if "stop" not in [fault.kind for fault in world.plan.faults]:
            raise Violation(f"nobody asked for an end: {view.reason}")
    elif view.state == "fell_back":
        needless = recoverable(world)
        if needless:
            raise Violation(f"needless fall-back ({view.reason}): {needless}")
    elif "newcomers failed" in view.reason and not view.checkpoint:
        _check_given_up(world, view.reason)
    elif not _deserved(world, view.reason):
        raise Violation(f"the job ended {view.state}: {view.reason}")


def _check_given_up(world: World, reason: str) -> None:
    """Without a checkpoint only if a disk did not let it; one that is full says so."""
    disks = [fault.kind for fault in world.plan.faults if fault.actor == "disk"]
    if not disks or ("full" in disks and "could not write its part" not in reason):
        raise Violation(f"given up without a checkpoint: {reason}")


def _deserved(world: World, reason: str) -> bool:
    if world.book.owners and not world.owners():
        return True  # nothing was left to save
    kinds = [fault.kind for fault in world.plan.faults]
    if ("user" in kinds or "quit" in kinds) and "raised" in reason:
        return True
    if "newcomers failed" in reason:
        return kinds.count("crash") + kinds.count("user") + kinds.count("device") >= 5
    if "lost their connections" in reason:
        return kinds.count("reset") >= 6
    if "process group" in reason:
        return "groups" in kinds
    if "did not come to keepstep.attach" in reason:
        return kinds.count("hang") >= 2
    if "never all attached" in reason or "no node is left" in reason:
        return world.plan.from_start and len(world.fired_faults) >= 3
    if "exited with code" in reason or "before the first step" in reason:
        return world.plan.from_start  # a rank whose peers are gone cannot tell why
    # The same rank was really hit again and again.
    hits = [fault for fault in world.fired_faults if "(rank " in fault]
    return "died 3 times" in reason and len(hits) >= 3


def check_gone(world: World) -> None:
    """A job that has ended leaves no agent and no process behind."""
    mend(world)
    limit_ns = world.now + GONE_NS
    world.run(lambda: not any(n.alive for n in world.nodes.values()), limit_ns, ended=True)
    for node in world.nodes.values():
        if node.alive:
            raise Violation(f"{node.name} is still there {GONE_NS // SECOND} s after the end")
