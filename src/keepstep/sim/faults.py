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
from typing import TYPE_CHECKING

from keepstep.core.migration import sources_for
from keepstep.core.state import Attempt, Job
from keepstep.model import messages as m
from keepstep.model.job import (
    AgentSaid,
    Cancel,
    Drain,
    Migrate,
    ProceedAnyway,
    Taint,
    Untaint,
)
from keepstep.sim.net import MS, ORCHESTRATOR, SECOND
from keepstep.sim.plan import Fault
from keepstep.sim.witness import Finding

if TYPE_CHECKING:
    from keepstep.sim.node import SimNode
    from keepstep.sim.rank import Rank
    from keepstep.sim.world import World

SLOWER = 10


def facts(world: World) -> Job | None:
    return world.orchestrator.core.state(world.plan.job) if world.orchestrator.alive else None


def strike(world: World, fault: Fault) -> bool:
    """False: there is nobody it could hit now."""
    name = STRIKES[fault.actor](world, fault)
    if name:
        world.fired(f"{fault.kind} of {fault.actor} {name}")
    return bool(name)


# ------------------------------------------------------------------ processes


def owners(world: World) -> list[Rank]:
    names = world.checker.owners
    found = [world.ranks[names[rank]] for rank in sorted(names) if names[rank] in world.ranks]
    return [process for process in found if process.alive]


def _attempt(world: World) -> Attempt | None:
    job = facts(world)
    return job.attempt if job is not None else None


def _victim(world: World) -> list[Rank]:
    attempt, job = _attempt(world), facts(world)
    if attempt is not None and job is not None and not attempt.committed:
        found = [job.owners.get(rank, "") for rank in attempt.moving]
    else:
        leaving = job.workers.values() if job is not None else ()
        found = [worker.id for worker in leaving if worker.role == "leaver"]
    return [world.ranks[name] for name in found if name in world.ranks]


def _source(world: World) -> list[Rank]:
    attempt, job = _attempt(world), facts(world)
    if attempt is None or job is None or attempt.committed:
        return owners(world)[-1:]
    moving = {job.owners[rank] for rank in attempt.moving if rank in job.owners}
    for _, name in sorted(attempt.newcomers.items()):
        sources = [s.serve.host for s in sources_for(job, attempt, job.workers[name])]
        sources = [s for s in sources if s not in moving]
        if sources:
            return [world.ranks[sources[0]]]
    return [p for p in owners(world) if p.id not in moving][:1]


def _spare(world: World) -> list[Rank]:
    attempt, job = _attempt(world), facts(world)
    if job is None:
        return []
    names = sorted(attempt.newcomers.values()) if attempt is not None else []
    if not names:
        names = [worker.id for worker in job.standbys()]
    return [world.ranks[name] for name in names if name in world.ranks][:1]


def _understudy(world: World) -> list[Rank]:
    job = facts(world)
    names = [worker.id for worker in job.understudies()] if job is not None else []
    found = [world.ranks[name] for name in names if name in world.ranks]
    return [world.random.choice(found)] if found else []


def _strike_later(world: World, fault: Fault) -> None:
    strike(world, fault)


def _waiting(world: World, fault: Fault) -> str:
    """A rank that has waited in its fence for so long that it is said to stand still."""
    since = world.now - world.plan.stall_ns - 2 * SECOND
    found = [p for p in owners(world) if p.mode == "fence" and p.fence_ns < since]
    if not found:
        world.after(SECOND, _strike_later, world, fault)
        return ""
    _hit_process(world, found[0], fault)
    return f"{found[0].id} (rank {found[0].rank})"


def _asking(world: World) -> list[Rank]:
    """A rank whose buddy is lost, and which asks for another one."""
    return [p for p in owners(world) if p.mode == "publish" and p.asked_ns]


def _bystander(world: World) -> list[Rank]:
    special = {p.id for p in _victim(world) + _source(world) + _spare(world)}
    others = [p for p in owners(world) if p.id not in special]
    return [world.random.choice(others)] if others else []


def _process(choose: Callable[[World], list[Rank]]) -> Callable[[World, Fault], str]:
    def hit(world: World, fault: Fault) -> str:
        found = [process for process in choose(world) if process.alive]
        if not found:
            return ""
        _hit_process(world, found[0], fault)
        return f"{found[0].id} (rank {found[0].rank})"

    return hit


def _hit_process(world: World, process: Rank, fault: Fault) -> None:
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


# ------------------------------------------------------------------ nodes and links


def _node(world: World) -> SimNode | None:
    """One that matters now: of the victim, the spare, the source, the store, or any."""
    near = [p.node for p in _victim(world) + _spare(world) + _source(world) + _bystander(world)]
    attempt = _attempt(world)
    if attempt is not None and attempt.store_node:
        near.append(world.nodes[attempt.store_node])
    near = [node for node in near if node.alive]
    return world.random.choice(near) if near else None


def _agent(world: World, fault: Fault) -> str:
    node = _node(world)
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
        _slow(world, node.name, fault.length_ns)
    return node.name


def _orchestrator(world: World, fault: Fault) -> str:
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
        _cut(world, links + [(b, a) for a, b in links], fault.length_ns)
    elif fault.kind in ("hang", "pause"):
        orchestrator.pause()
        world.after(fault.length_ns, orchestrator.resume)
    else:
        orchestrator.append_ns = 200 * MS
        world.after(fault.length_ns, setattr, orchestrator, "append_ns", MS // 2)
    return "process"


def _link(world: World, fault: Fault) -> str:
    node = _node(world)
    if node is None:
        return ""
    if fault.kind == "crash":
        if node.stream is not None:
            node.stream.close(world.random.choice(("agent", "orchestrator")))
        if world.random.random() < 0.3:
            groups = [p.group for p in owners(world) if p.group is not None]
            if groups:
                groups[0].reset()
    elif fault.kind in ("hang", "pause"):
        _cut(world, [(node.name, ORCHESTRATOR), (ORCHESTRATOR, node.name)], fault.length_ns)
    else:
        world.net.slow(node.name, ORCHESTRATOR, 2 * SECOND)
        world.net.slow(ORCHESTRATOR, node.name, 2 * SECOND)
        world.after(fault.length_ns, world.net.slow, node.name, ORCHESTRATOR, 0)
        world.after(fault.length_ns, world.net.slow, ORCHESTRATOR, node.name, 0)
    return f"of {node.name}"


def _partition(world: World, fault: Fault) -> str:
    node = _node(world)
    if node is None:
        return ""
    others = [*(name for name in world.nodes if name != node.name), ORCHESTRATOR]
    out = [(node.name, other) for other in others]
    back = [(other, node.name) for other in others]
    if fault.kind == "slow-down":
        links = out + back
        world.random.shuffle(links)
        for index, link in enumerate(links):  # clogs come one by one and go in another order
            world.after(index * 50 * MS, _cut, world, [link], world.random.randrange(2 * SECOND))
    elif fault.kind == "hang":
        _cut(world, world.random.choice((out, back)), fault.length_ns)
    else:
        _cut(world, out + back, fault.length_ns)
    return f"around {node.name}"


def _cut(world: World, links: list[tuple[str, str]], length_ns: int) -> None:
    for source, target in links:
        world.net.cut(source, target)
        world.after(length_ns, world.net.heal, source, target)


def _slow(world: World, name: str, length_ns: int) -> None:
    for other in [*world.nodes, ORCHESTRATOR]:
        for link in ((name, other), (other, name)):
            world.net.slow(*link, SECOND)
            world.after(length_ns, world.net.slow, *link, 0)


# ------------------------------------------------------------------ detectors, operators


def _detector(world: World, fault: Fault) -> str:
    """It lies: healthy ranks are said to stand still (and that is taken back), or a healthy node
    is called bad."""
    ranks = owners(world)
    if not ranks:
        return ""
    liar = world.random.choice(ranks)
    if fault.kind == "taint":
        operate(world, Taint(job=world.plan.job, target=liar.node.name, reason="a lying detector"))
        return liar.node.name
    some = max(2, len(ranks))  # there may be one left
    count = len(ranks) if fault.kind == "all-stalled" else world.random.randrange(1, some)
    for process in world.random.sample(ranks, count):
        _lie(world, process, fault.length_ns, fault.kind == "stalled-lost")
    return f"on {count} ranks"


def _lie(world: World, process: Rank, length_ns: int, lost: bool) -> None:
    """`lost`: that it is over is said on a stream that breaks."""
    stalled = m.Stalled(
        worker=process.id,
        rank=process.rank,
        version=process.version,
        tick=process.tick,
        marks=process.marks - process.tick_marks,
        where="compute",
        heartbeat_age_ns=0,
        stopped=False,
        cpu_busy=False,
    )
    said = AgentSaid(job=world.plan.job, node=process.node.name, message=stalled)
    _hear(world, process.node.name, said)
    if lost and process.node.stream is not None:
        world.after(length_ns, process.node.stream.close, "orchestrator")
    else:
        world.after(length_ns, _take_back, world, process)


def _take_back(world: World, process: Rank) -> None:
    """The truth is what its agent has seen for itself meanwhile."""
    node = process.node
    truth = node.stalls.get(process.id, m.Unstalled(worker=process.id))
    _hear(world, node.name, AgentSaid(job=world.plan.job, node=node.name, message=truth))


def _hear(world: World, node: str, said: AgentSaid) -> None:
    if (world.plan.job, node) in world.orchestrator.peers:
        world.orchestrator.submit(said)


def _operator(world: World, fault: Fault) -> str:
    ranks = [process for process in owners(world) if not process.done]
    if not ranks:
        return ""
    process = world.random.choice(ranks)
    if fault.kind == "drain-spare":
        spares = _spare(world)
        if not spares:
            return ""
        operate(world, Drain(job=world.plan.job, node=spares[0].node.name))
        return spares[0].node.name
    if fault.kind == "proceed":
        return _proceed(world, fault)
    if fault.kind == "stop":
        cancel = Cancel(job=world.plan.job, reason="SIGTERM", exit_code=143, checkpoint=True)
        operate(world, cancel)
        return "stops the job"
    if fault.kind == "untaint":
        for target in sorted(world.checker.tainted):
            operate(world, Untaint(job=world.plan.job, target=target))
        return ", ".join(sorted(world.checker.tainted))
    if fault.kind == "drain":
        operate(world, Drain(job=world.plan.job, node=process.node.name))
    elif fault.kind == "mass-taint":
        nodes = sorted({owner.node.name for owner in ranks})
        hit = world.random.sample(nodes, max(2, len(nodes) * 3 // 10))
        for index, name in enumerate(hit):
            taint = Taint(job=world.plan.job, target=name, reason="correlated errors")
            world.after(index * SECOND, operate, world, taint)
        return ", ".join(hit)
    else:
        operate(world, Migrate(job=world.plan.job, ranks=[process.rank]))
    return f"rank {process.rank}"


def _proceed(world: World, fault: Fault) -> str:
    """As soon as the job stands, and says why."""
    job = facts(world)
    if job is not None and job.divergence is not None and job.divergence.text:
        operate(world, ProceedAnyway(job=world.plan.job))
        return "accepts what differs"
    world.after(SECOND, _strike_later, world, fault)
    return ""


def _witness(world: World, _: Fault) -> str:
    """In a fence that no rank has come to yet."""
    world.differs_at = max(world.checker.best.values()) + 2
    world.finding = Finding.draw(world.random)
    return f"of tick {world.differs_at}"


def operate(
    world: World, request: Drain | Migrate | Taint | Untaint | ProceedAnyway | Cancel
) -> None:
    if world.orchestrator.alive:
        world.orchestrator.submit(request)
    else:
        world.after(SECOND, operate, world, request)


def _provider(world: World, fault: Fault) -> str:
    if fault.kind == "node":
        world.add_node(f"x{len(world.nodes)}", world.plan.per_node)
        return "delivers"
    world.spawn_failures += 1 + world.random.randrange(2)
    return "refuses"


def _disk(world: World, fault: Fault) -> str:
    """Of a node with ranks: what they write now fails, or never ends."""
    node = world.random.choice(owners(world)).node
    node.disk = fault.kind
    world.after(fault.length_ns, setattr, node, "disk", "")
    return f"of {node.name}"


def _place(world: World, fault: Fault) -> str:
    """From now on whichever rank is there takes longer than the others."""
    for process in _bystander(world):
        place = f"{process.node.name}/{process.slot}"
        world.dragged[place] = 2 + world.random.randrange(2)
        world.were_dragged.add(place)
        return place
    return ""


def _slot(world: World, fault: Fault) -> str:
    for process in _spare(world):
        place = f"{process.node.name}/{process.slot}"
        world.bad_slots[place] = 0
        process.exit(1)
        return place
    return ""


def _store(world: World, fault: Fault) -> str:
    """Its program cannot be started, says nothing, or dies with ranks waiting in it."""
    if fault.kind in ("refuse", "mute"):
        world.store_failure = fault.kind
        return "of the next generation"
    attempt = _attempt(world)
    node = world.nodes.get(attempt.store_node) if attempt is not None else None
    if fault.kind == "host" and node is not None and node.alive:
        node.die(silently=False)
        return f"with {node.name}"
    generation = attempt.generation if attempt is not None else world.checker.generation
    for host in [node] if node is not None else list(world.nodes.values()):
        if generation in host.stores and host.alive:
            host.store_died(generation)
            return f"of generation {generation}"
    return ""


def _echoes(world: World, fault: Fault) -> str:
    """What ranks answer in an attempt is heard once more in the next one."""
    world.echoes = True
    return "of every answer"


def _everyone(world: World, fault: Fault) -> str:
    """All ranks at once: somebody stops the whole job for a while, or kills it."""
    for process in owners(world):
        if fault.kind == "crash":
            process.exit(-9)
            continue
        process.stop()
        world.after(fault.length_ns, process.resume)
    return "of the job"


def _spare_node(world: World, fault: Fault) -> str:
    """The node a newcomer runs on dies."""
    for process in _spare(world):
        process.node.die(silently=False)
        return process.node.name
    return ""


def _data(world: World, fault: Fault) -> str:
    """No node reaches another; the orchestrator reaches them all."""
    names = sorted(world.nodes)
    _cut(world, [(a, b) for a in names for b in names if a != b], fault.length_ns)
    return "network between all nodes"


def _new_groups(world: World, fault: Fault) -> str:
    """The connections of the generation that is being committed break."""
    groups = [process.staged for process in owners(world) if process.staged is not None]
    for group in groups[:1]:
        group.reset()
        return f"of generation {group.generation}"
    return ""


def _buddy(world: World, fault: Fault) -> str:
    """The node that keeps the other copy of the victim's side state dies."""
    attempt, job = _attempt(world), facts(world)
    if attempt is None or job is None:
        return ""
    for rank in attempt.moving:
        owner = job.owner(rank)
        node = world.nodes.get(owner.buddy) if owner is not None else None
        if node is not None and node.alive:
            node.die(silently=False)
            return f"of rank {rank}, {node.name}"
    return ""


def _half_open(world: World, fault: Fault) -> str:
    """A rank hangs, and its node's stream breaks in a way that only the orchestrator notices."""
    for process in _bystander(world):
        node = process.node
        process.hung = True
        _cut(world, [(node.name, ORCHESTRATOR), (ORCHESTRATOR, node.name)], fault.length_ns)
        if node.stream is not None:
            node.stream.close("orchestrator")
        return f"{process.id} (rank {process.rank})"
    return ""


STRIKES: dict[str, Callable[[World, Fault], str]] = {
    "victim": _process(_victim),
    "source": _process(_source),
    "spare": _process(_spare),
    "understudy": _process(_understudy),
    "bystander": _process(_bystander),
    "waiting": _waiting,
    "asking": _process(_asking),
    "agent": _agent,
    "orchestrator": _orchestrator,
    "link": _link,
    "partition": _partition,
    "detector": _detector,
    "operator": _operator,
    "witness": _witness,
    "provider": _provider,
    "store": _store,
    "disk": _disk,
    "slot": _slot,
    "place": _place,
    "echo": _echoes,
    "everyone": _everyone,
    "spare-node": _spare_node,
    "data": _data,
    "new-groups": _new_groups,
    "buddy": _buddy,
    "half-open": _half_open,
}
