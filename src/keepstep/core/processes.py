"""Starting and losing processes: ranks, spares, nodes.

A process has ended when its agent says so, when its node is dead, or when its agent comes back
without it. Ending is one function whatever the way; what follows from it (an incident, a
new spare) is not decided here but by the next look at all facts.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from keepstep.core import demand, parities, placement
from keepstep.core.facts import Node, Role, Worker
from keepstep.core.incidents import warn
from keepstep.core.state import Job, Out
from keepstep.model.agent_messages import CloseStore, SendSignal, StartWorker
from keepstep.model.commands import Arm, Buddy, Swap
from keepstep.model.messages import Address
from keepstep.model.records import InjectDone, NodeLost, Placed, Tainted, WorkerEnded

SIGKILL = 9
SIGSTOP = 19
NOWHERE = Address(host="127.0.0.1", port=0)


def start_worker(
    job: Job, out: Out, node: str, slot: int, rank: int, role: Role, presumed: int = -1
) -> Worker:
    worker = Worker(
        id=f"{node}.w{job.worker_next}",
        node=node,
        slot=slot,
        role=role,
        rank=rank,
        presumed=presumed,
        started_at=out.now,
    )
    job.worker_next += 1
    job.add_worker(worker)
    buddy = placement.buddy_node(job.order, job.nodes[node]) if rank >= 0 else None
    worker.buddy = buddy.name if buddy is not None else ""
    job.lonely |= buddy is None and rank >= 0
    parity = parities.give(job, worker) if rank >= 0 else None
    generation = job.generation_max if rank >= 0 else job.generation
    worker.start = StartWorker(
        worker=worker.id,
        slot=slot,
        rank=rank,
        generation=generation,
        world=job.spec.world,
        local_world=job.spec.local_world,
        master=job.master or NOWHERE,
        buddy=buddy.blobs if buddy is not None else None,
        script=job.spec.script,
        env=job.spec.env,
        redundancy=job.spec.redundancy,
        checkpoints=job.spec.checkpoints,
        parity=parity,
        transparent=job.transparent,
    )
    out.record(
        Placed(
            job=job.id,
            at_ns=out.now,
            worker=worker.id,
            node=node,
            slot=slot,
            rank=rank,
            generation=generation,
            presumed=presumed,
        )
    )
    out.send(node, worker.start)
    if rank >= 0:
        arm(job, out, worker, version=-1)
    return worker


def worker_ended(job: Job, out: Out, worker: Worker, code: int, why: str, cause: str) -> None:
    if not worker.alive:
        return
    wanted = worker.killed_at is not None or worker.role in ("leaver", "unwanted") or worker.done
    worker.alive = False
    worker.stalled = None
    out.record(
        WorkerEnded(
            job=job.id, at_ns=out.now, worker=worker.id, rank=worker.rank, code=code, why=why
        )
    )
    node = job.nodes[worker.node]
    if worker.role == "rank" and job.owners.get(worker.rank) == worker.id:
        job.causes.setdefault(worker.rank, (cause, f"rank {worker.rank} ({worker.id}) {why}"))
    if worker.role == "understudy":
        job.understudies_failed += not wanted and node.state != "dead"
    elif not wanted and not worker.injected and node.state != "dead":
        crash(job, out, node, worker.slot)
    # A leaver that is gone is nobody's loss, and its side state is of no use any more.


def crash(job: Job, out: Out, node: Node, slot: int) -> None:
    node.crashes[slot] = node.crashes.get(slot, 0) + 1
    if node.crashes[slot] >= placement.CRASHES_MAX and not node.slot_taints.get(slot):
        node.slot_taints[slot] = ["repeated failures"]
        out.record(
            Tainted(
                job=job.id,
                at_ns=out.now,
                target=f"{node.name}/{slot}",
                reason="repeated failures",
            )
        )


def ask_holders_again(job: Job) -> None:
    """A node came back, or will never: newcomers that lack their side state look once more. What
    they hear about a question from before does not count as the last word."""
    for worker in job.watched.values():  # newcomers are
        worker.missing = 0
        if worker.lacks_holders:
            worker.lacks_holders = False
            look_again(worker)


def look_again(worker: Worker) -> None:
    """A newcomer lacks what its rank had published: all of it, or the record from before attach."""
    worker.asked.pop("copy", None)
    if not worker.arrived:
        worker.asked.pop("assign", None)


def node_lost(job: Job, out: Out, node: Node, why: str) -> None:
    """Fenced: nothing of it runs any more (its launcher swept it, or its ranks ended themselves
    because they could reach nobody for the stall timeout)."""
    if node.state == "dead":
        return
    node.state = "dead"
    node.stores.clear()
    ask_holders_again(job)
    out.record(NodeLost(job=job.id, at_ns=out.now, node=node.name, why=why))
    for worker in job.placed_on.get(node.name, ()):
        if worker.alive:
            if worker.killed_at is None:
                worker.killed_at = out.now  # never to be told anything again
                if worker.role == "rank":
                    job.causes.setdefault(
                        worker.rank,
                        ("node-lost", f"rank {worker.rank} was on {node.name}, which {why}"),
                    )
            worker_ended(job, out, worker, -SIGKILL, f"lost with {node.name}", "node-lost")


def refill(job: Job, out: Out, needed: int, forced: bool) -> None:
    """Keep `spares` spares, or as many as are needed at once. During a recovery (`forced`)
    only the needed ones: the machine has better things to do than to warm up the next."""
    for worker in job.spares() + job.understudies():
        node = job.nodes[worker.node]
        if node.state == "connected" and not node.healthy(worker.slot):
            worker.role = "unwanted"
            out.kill(worker)
    wanted = needed if forced else max(job.spec.spares, needed)
    spares = _helpful_first(job, job.spares())
    if not forced:
        aims = aimed_at(job)
        spares = [worker for worker in spares if worker.place not in aims]
        for node_name, slot in free_slots(job) if aims else ():
            if f"{node_name}/{slot}" in aims:
                start_worker(job, out, node_name, slot, -1, "spare")
        # Started for a move that came to nothing: the youngest go first.
        for worker in reversed(spares[max(0, wanted) :]):
            worker.role = "unwanted"
            out.kill(worker)
        spares = spares[: max(0, wanted)]
    missing, lacking = wanted - len(spares), 0
    if needed > 0 and job.spec.policy.within:
        lacking = needed - sum(demand.helps(job, worker.node) for worker in spares)
    if max(missing, lacking) <= 0:
        return
    free = free_slots(job)
    helpful = [place for place in free if demand.helps(job, place[0])]
    others = [place for place in free if place not in helpful]
    chosen = helpful[: max(missing, lacking)]
    for node_name, slot in chosen + others[: max(0, missing - len(chosen))]:
        start_worker(job, out, node_name, slot, -1, "spare")


def aimed_at(job: Job) -> set[str]:
    """Places that a move is meant for: a spare there is kept for it, and does not count."""
    return {i.toward[i.pending[0]] for i in job.incidents if i.toward and i.pending}


def may_come(job: Job, place: str) -> bool:
    """A spare is starting there, or could be started."""
    name, _, slot = place.partition("/")
    node = job.nodes[name]
    if node.state != "connected" or not node.healthy(int(slot)):
        return False
    there = [w for w in job.placed_on.get(name, ()) if w.alive and w.slot == int(slot)]
    return all(w.killed_at is not None or w.role in ("spare", "understudy") for w in there)


def _helpful_first(job: Job, spares: list[Worker]) -> list[Worker]:
    """Where ranks stay within a domain, those who need a spare need one that is in it."""
    if not job.spec.policy.within:
        return spares
    return sorted(spares, key=lambda worker: not demand.helps(job, worker.node))


def end_left_over(job: Job, out: Out) -> None:
    """A spare and the understudies beside it make one rank; the rest is ended when that is
    taken and training goes on. So are understudies that have lost their spare."""
    parked = {worker.place for worker in job.spares()}
    for worker in list(job.watched.values()):
        waiting = worker.role in ("spare", "understudy") and worker.usable
        if waiting and worker.place not in parked:
            worker.role = "unwanted"
            out.kill(worker)


def may_get_spare(job: Job) -> bool:
    """A spare is on its way or could be started: waiting will help."""
    if any(
        job.nodes[w.node].state in ("connected", "disconnected")
        and job.nodes[w.node].healthy(w.slot)
        and demand.helps(job, w.node)
        for w in job.spares()
    ):
        return True
    if any(demand.helps(job, node) for node, _ in free_slots(job)):
        return True
    # A slot that is being emptied.
    return any(
        worker.alive
        and worker.killed_at is not None
        and job.nodes[worker.node].state == "connected"
        and job.nodes[worker.node].healthy(worker.slot)
        and demand.helps(job, worker.node)
        for worker in job.watched.values()
    )


def _shares_its_slot(job: Job, worker: Worker) -> bool:
    if worker.presumed >= 0:
        return worker.role in ("understudy", "unwanted")
    return worker.role == "spare" and bool(job.spec.understudies) and job.is_taken(worker)


def free_slots(job: Job) -> list[tuple[str, int]]:
    """Only nodes that run fewer processes than they have slots are looked at; those that share a
    slot with another do not count."""
    dead = Counter(
        worker.node
        for worker in job.watched.values()
        if not worker.alive or _shares_its_slot(job, worker)
    )
    roomy = {
        node.name: node
        for node in job.order
        if len(job.placed_on.get(node.name, ())) - dead[node.name] < node.slots
    }
    there = (worker for name in roomy for worker in job.placed_on.get(name, ()))
    return placement.free_slots(roomy, there)


def give_buddy(job: Job, out: Out, worker: Worker, avoid: str = "") -> Address | None:
    """Choose the buddy anew and remember it; the caller sends it."""
    buddy = placement.buddy_node(job.order, job.nodes[worker.node], avoid)
    worker.buddy = buddy.name if buddy is not None else ""
    job.lonely |= buddy is None
    return buddy.blobs if buddy is not None else None


def swap_of(job: Job, out: Out, worker: Worker) -> Swap:
    """What it is told alone. Its buddy and its parity may be others than when the Swap was decided,
    and it has been told so with a command that the Swap follows: it must not take that back."""
    assert worker.swap is not None
    if job.nodes[worker.node].state == "connected":
        buddy, parity = give_buddy(job, out, worker), parities.give(job, worker)
        worker.swap = msgspec.structs.replace(worker.swap, buddy=buddy, parity=parity)
    return worker.swap


def replace_buddy(job: Job, out: Out, worker: Worker, error: str) -> None:
    """A rank waits in its fence for this, so it is answered even if there is no other node."""
    lost = worker.buddy
    state = job.nodes[lost].state if lost in job.nodes else "dead"
    address = give_buddy(job, out, worker, avoid=lost)
    if address is None and state == "connected":
        # The only other node is there as far as we know: a passing failure, try it again.
        address = give_buddy(job, out, worker)
    warn(job, out, f"rank {worker.rank} lost its buddy {lost or '(none)'}: {error}")
    out.tell(worker, Buddy(address=address, parity=parities.give(job, worker)))
    worker.buddy_due = True


def replace_parity(job: Job, out: Out, worker: Worker, holder: Address, error: str) -> None:
    """It goes on without. All members get another one, and begin there with their next bases."""
    if job.spec.redundancy != "parity":
        return
    warn(job, out, f"rank {worker.rank} lost its parity at {holder.host}:{holder.port}: {error}")
    parities.replace(job, worker.rank, holder)
    for rank in placement.parity_group(job.spec, worker.rank):
        member = job.owner(rank)
        if member is not None and member.usable and not member.done:
            address = job.nodes[member.buddy].blobs if member.buddy else None
            out.tell(member, Buddy(address=address, parity=parities.give(job, member)))
            member.buddy_due = True


def close_stores(job: Job, out: Out, keep: set[int]) -> None:
    for node in job.nodes.values():
        for generation in sorted(node.stores - keep):
            if out.send(node.name, CloseStore(generation=generation)):
                node.stores.discard(generation)


# ------------------------------------------------------------------ fault injection


def arm(job: Job, out: Out, worker: Worker, version: int) -> None:
    """A fault planned for a later step moves with its rank. One planned for the step that was
    being made is not armed again: its report may have died with the process."""
    for inject in job.injects.values():
        if inject.id in job.fired or inject.rank != worker.rank or inject.step <= version:
            continue
        if inject.action == "kill-node" or inject.step < 0:
            continue
        arm_now(out, worker, inject.id, inject.action, inject.step, inject.point)


def arm_now(out: Out, worker: Worker, inject: str, action: str, step: int, point: str) -> None:
    assert action in ("kill", "stop", "device-error")
    out.tell(
        worker,
        Arm(inject=inject, action=action, step=step, point=point),  # type: ignore[arg-type]
    )


def signal_now(out: Out, worker: Worker, action: str, seconds: float) -> None:
    number = SIGKILL if action == "kill" else SIGSTOP
    resume_after_ns = int(seconds * 1e9) if action == "stop" else 0
    worker.injected = action == "kill"
    out.send(
        worker.node,
        SendSignal(worker=worker.id, signal=number, resume_after_ns=resume_after_ns),
    )


def inject_fired(job: Job, out: Out, inject: str, detail: str) -> None:
    if inject in job.fired:
        return
    job.fired.append(inject)
    out.record(InjectDone(job=job.id, at_ns=out.now, inject=inject, detail=detail))
