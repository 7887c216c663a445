"""Words: detectors that lie, and operators that get in the way."""

from __future__ import annotations

from keepstep.model import agent_messages
from keepstep.model.job import AgentSaid, Cancel, Drain, Migrate, ProceedAnyway, Taint, Untaint
from keepstep.sim.faults.processes import LATER
from keepstep.sim.faults.victims import node_of, spare
from keepstep.sim.ground.ills import Finding
from keepstep.sim.plans.world_plan import Fault
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World


def detector(world: World, fault: Fault) -> str:
    """It lies: healthy ranks are said to stand still (and that is taken back), or a healthy node
    is called bad."""
    ranks = world.owners()
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
    stalled = agent_messages.Stalled(
        worker=process.id,
        rank=process.rank,
        version=process.version,
        tick=process.tick,
        marks=process.page.marks - process.page.tick_marks,
        where="compute",
        heartbeat_age_ns=0,
        stopped=False,
        cpu_busy=False,
    )
    said = AgentSaid(job=world.plan.job, node=process.node.name, message=stalled)
    _hear(world, process.node.name, said)
    stream = node_of(process).stream
    if lost and stream is not None:
        world.after(length_ns, stream.close, "orchestrator")
    else:
        world.after(length_ns, _take_back, world, process)


def _take_back(world: World, process: Rank) -> None:
    """The truth is what its agent has seen for itself meanwhile."""
    node = node_of(process)
    truth = node.stalls.get(process.id, agent_messages.Unstalled(worker=process.id))
    _hear(world, node.name, AgentSaid(job=world.plan.job, node=node.name, message=truth))


def _hear(world: World, node: str, said: AgentSaid) -> None:
    if (world.plan.job, node) in world.orchestrator.peers:
        world.orchestrator.submit(said)


def operator(world: World, fault: Fault) -> str:
    ranks = [process for process in world.owners() if not process.done]
    if not ranks:
        return ""
    process = world.random.choice(ranks)
    if fault.kind == "drain-spare":
        spares = spare(world)
        if not spares:
            return ""
        operate(world, Drain(job=world.plan.job, node=spares[0].node.name))
        return spares[0].node.name
    if fault.kind == "proceed":
        return _proceed(world)
    if fault.kind == "stop":
        cancel = Cancel(job=world.plan.job, reason="SIGTERM", exit_code=143, checkpoint=True)
        operate(world, cancel)
        return "stops the job"
    if fault.kind == "untaint":
        for target in sorted(world.book.tainted):
            operate(world, Untaint(job=world.plan.job, target=target))
        return ", ".join(sorted(world.book.tainted))
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


def _proceed(world: World) -> str:
    """As soon as the job stands, and says why."""
    job = world.facts()
    if job is not None and job.divergence is not None and job.divergence.text:
        operate(world, ProceedAnyway(job=world.plan.job))
        return "accepts what differs"
    return LATER


def witness(world: World, _: Fault) -> str:
    """In a fence that no rank has come to yet."""
    world.ills.differs_at = max(world.book.best.values()) + 2
    world.ills.finding = Finding.draw(world.random)
    return f"of tick {world.ills.differs_at}"


def operate(
    world: World, request: Drain | Migrate | Taint | Untaint | ProceedAnyway | Cancel
) -> None:
    if world.orchestrator.alive:
        world.orchestrator.submit(request)
    else:
        world.after(SECOND, operate, world, request)
