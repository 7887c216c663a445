"""Nodes from a scheduler: when one is asked for, and when one goes back.

Theory of operation. As long as a job has spares, or healthy slots to start some in, the scheduler
plays no part in a migration. If victims are left without one, a *want* is put on record, and after
that the scheduler is asked for one place, under the want's op. The answer is an agent that joins
under the name that the want gave, which is one more node as any other: its slots are free, so
spares are started there. One place is asked for at a time; if it is not enough, the next one is.

Two more reasons to ask: a job that goes back to a checkpoint and has no room for all ranks, and a
pool of nodes without ranks (`Policy.dedicated`) of which one was used. A pool is filled when
nothing else is going on, and only with what costs nobody else anything.

No answer changes anything but this: a refusal, an agent that does not come within the patience
of the job, or victims who need nothing any more close the want (SpareDenied), and what is still
lacking is asked for again after a while, under another op. What comes after that is late: the shell
gives back whatever belongs to no op on record, unless an agent was faster and has joined.

A node is left when it is dead, or when it is tainted and nothing runs there any more; its place
goes back once no attempt is under way, because until then it may be somebody's source of state.

Moving back is the same for another reason: a place that a spare has replaced is well again, so that
very place is wanted, and when its agent has joined, the spare's node is drained.

The shell looks at `look` and does what stands there, again and again until it does not: after a
restart, too, for everything here is on record.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.capacity import CapacityView, Want, Yielded
from keepstep.core.demand import domains, unmet, victims
from keepstep.core.facts import SECOND, Node
from keepstep.core.incidents import warn
from keepstep.core.placement import start_slots
from keepstep.core.processes import free_slots
from keepstep.core.state import Job, Out
from keepstep.errors import UsageError
from keepstep.model.job import JobSpec, PlaceReturned, SpareGranted, SpareRefused
from keepstep.model.records import (
    NodeJoined,
    NodeReturned,
    NodeYielded,
    SpareDenied,
    SpareGiven,
    SpareWanted,
)
from keepstep.model.schedule import START, Kind

AGAIN_NS = 15 * SECOND
SETTLE_NS = 3 * SECOND  # from the word to whoever publishes to what shows that it has
JOIN_NS = 60 * SECOND  # from a place to its agent

Happened = SpareWanted | SpareGiven | SpareDenied | NodeReturned | NodeYielded | NodeJoined


def lacking(job: Job) -> list[int]:
    """Ranks that need a spare and for whom the job's own nodes have no room."""
    needy = victims(job)
    if not needy:
        return []
    healthy = [
        worker
        for worker in job.watched.values()
        if job.nodes[worker.node].state in ("connected", "disconnected")
        and job.nodes[worker.node].healthy(worker.slot)
    ]
    room = [w.node for w in healthy if w.role == "spare" and w.usable]
    room += [w.node for w in healthy if w.alive and w.killed_at is not None]
    return unmet(job, needy, room + [node for node, _ in free_slots(job)])


def _fallen_short(job: Job) -> str:
    """Why a job that goes back to a checkpoint cannot start; empty if it can, or does not."""
    if not job.fallen or any(w.alive and w.role != "spare" for w in job.workers.values()):
        return ""
    if any(node.state in ("disconnected", "unreachable") for node in job.order):
        return ""  # it may come back
    placed, why = start_slots(job.spec, job.nodes, job.workers.values())
    return why if placed is None else ""


def unused(job: Job) -> list[Node]:
    """Nodes without ranks that a victim could move to, or that are about to be: its own pool."""
    return [
        node
        for node in job.order
        if node.state in ("absent", "connected", "disconnected")
        and not node.taints
        and node.name not in job.capacity.retiring
        and not job.owners_on(node.name)
    ]


def _pool_short(job: Job) -> bool:
    """A spare of its own was used, and nothing else is going on."""
    wanted = job.spec.policy.dedicated
    if not wanted or job.mode != "running" or job.attempt is not None or job.incidents:
        return False
    return len(unused(job)) < wanted


def _cheap(job: Job) -> list[Kind]:
    """What costs nobody else anything: a pool is filled with no more than that."""
    spec = job.spec.provision
    return [kind for kind in spec.kinds if kind != "preempt"] if spec is not None else []


def advance(job: Job, out: Out) -> None:
    """Asked at the end of every look at all facts."""
    if not job.asks:
        return
    facts = job.capacity
    resuming = job.attempt is not None and job.attempt.kind == "resume" and job.saves.fallen_before
    needy = lacking(job) if job.mode == "running" or resuming else []
    short = _fallen_short(job)
    refill = not needy and not short and _pool_short(job) and bool(_cheap(job))
    if facts.want is not None:
        if not needy and not short and not refill and not facts.want.only:
            deny(job, out, "it is not needed any more", again_ns=0)
        return
    if not needy and not short:
        facts.given, facts.forced = 0, False
    if not needy and not short and not refill:
        facts.denied, facts.again_at = "", 0
        return
    if out.now < facts.again_at and not (facts.cheap and (needy or short)):
        return
    if needy:
        want(
            job,
            out,
            f"no spare for {len(needy)} of the ranks, the first of them is {needy[0]}",
            rank=needy[0],
            kinds=_modest(job),
        )
    elif short:
        want(job, out, f"the job goes back to a checkpoint: {short}")
    else:
        have, wanted = len(unused(job)), job.spec.policy.dedicated
        why = f"{have} of {wanted} spare nodes are left"
        want(job, out, why, kinds=_cheap(job), pool=True)


def may_preempt(job: Job) -> bool:
    return job.spec.provision is not None and "preempt" in job.spec.provision.kinds


def _modest(job: Job) -> list[Kind]:
    """As long as another job here may yield a node, nobody else is preempted for it. Whatever is
    yielded is idle then."""
    facts = job.capacity
    return (_cheap(job) or ["idle"]) if facts.sharing and not facts.forced else []


def want(
    job: Job,
    out: Out,
    reason: str,
    *,
    rank: int = -1,
    kinds: Sequence[Kind] = (),
    pool: bool = False,
) -> None:
    """`rank`: the first of those that it is for."""
    old = place_of(job, rank)
    near, apart = domains(job, rank)
    record = SpareWanted(
        job=job.id,
        at_ns=out.now,
        op=f"spare-{job.capacity.asked + 1}",
        node=_free_name(job),
        instead_of=old,
        avoid=avoided(job, old),
        reason=reason,
        kinds=list(kinds),
        near=near,
        apart=apart,
        pool=pool,
    )
    out.record(record)
    apply(job, record)


def place_of(job: Job, rank: int) -> str:
    owner = job.owner(rank)
    return job.capacity.places.get(owner.node, "") if owner is not None else ""


def avoided(job: Job, old: str) -> list[str]:
    """Places that are of no use in the stead of `old`."""
    places = job.capacity.places
    bad = {places[n.name] for n in job.order if n.name in places and _bad(n)}
    return sorted(bad | ({old} - {""}))


def _is_quiet(job: Job, now: int) -> bool:
    """No incident has begun for a while."""
    policy = job.spec.policy
    last = max((view.opened_at_ns for view in job.closed), default=0)
    return policy.back != "quiet" or now >= last + policy.quiet_ns


def go_back(job: Job, out: Out, place: str) -> None:
    """Only if nothing else is going on: it is nobody's emergency."""
    facts = job.capacity
    spare = _stand_in(job, place)
    busy = facts.want is not None or job.attempt is not None or bool(job.incidents)
    busy = busy or not _is_quiet(job, out.now)
    if spare is None or busy or job.mode != "running" or place in facts.places.values():
        return
    record = SpareWanted(
        job=job.id,
        at_ns=out.now,
        op=f"spare-{facts.asked + 1}",
        node=_free_name(job),
        instead_of=facts.places[spare.name],
        avoid=[],
        only=place,
        reason=f"{place} is well again",
    )
    out.record(record)
    apply(job, record)


def _stand_in(job: Job, place: str) -> Node | None:
    for name, origin in job.capacity.origins.items():
        node = job.nodes[name]
        if origin == place and node.state == "connected" and not node.taints:
            return node if name in job.capacity.places else None
    return None


def retired(job: Job) -> str:
    """A node to be drained, because there is an agent in the place that it stood in for."""
    facts = job.capacity
    if not facts.retiring or job.mode != "running" or job.replayed or job.ended is not None:
        return ""
    if job.attempt is not None or job.incidents:
        return ""
    for name in sorted(facts.retiring):
        op = facts.swaps.get(facts.places[name], "")
        heirs = [job.nodes[n] for n, one in facts.ops.items() if one == op and n in job.nodes]
        well = heirs and all(n.state == "connected" for n in [job.nodes[name], *heirs])
        if well and not job.nodes[name].taints:
            return name
    return ""


def _bad(node: Node) -> bool:
    return bool(node.taints) or node.state in ("unreachable", "dead")


def _free_name(job: Job) -> str:
    """Never the same again: the agent of a want that was given up may still come."""
    number = len(job.spec.nodes) + job.capacity.asked
    while f"n{number}" in job.nodes:
        number += 1
    return f"n{number}"


def deny(job: Job, out: Out, why: str, again_ns: int = AGAIN_NS) -> None:
    want = job.capacity.want
    assert want is not None
    record = SpareDenied(job=job.id, at_ns=out.now, op=want.op, why=why)
    out.record(record)
    apply(job, record)
    job.capacity.again_at = out.now + again_ns if again_ns else 0


def answered(job: Job, out: Out, event: SpareGranted | SpareRefused | PlaceReturned) -> None:
    facts = job.capacity
    if isinstance(event, PlaceReturned):
        if event.node not in facts.places:
            return
        place = facts.places[event.node]
        record = NodeReturned(job=job.id, at_ns=out.now, node=event.node, place=place)
        out.record(record)
        apply(job, record)
        return
    want = facts.want
    if want is None or want.op != event.op:
        raise UsageError(f"job {job.id} does not want {event.op}", hint="the answer came too late")
    if isinstance(event, SpareGranted):
        if not want.place:
            given = SpareGiven(
                job=job.id, at_ns=out.now, op=want.op, node=want.node, place=event.place
            )
            out.record(given)
            apply(job, given)
        return
    if event.why != facts.denied:
        warn(job, out, f"the scheduler gives no node: {event.why}")
    deny(job, out, event.why)


def late(job: Job, out: Out) -> None:
    warn(job, out, "no agent joined in the place that the scheduler was asked for")
    deny(job, out, "no agent joined in time")


def timers(job: Job) -> list[tuple[int, str, str]]:
    spec, facts = job.spec.provision, job.capacity
    if spec is None:
        return []
    rows = [(one.until, "yield", node) for node, one in facts.yields.items() if not one.over]
    if facts.want is not None:
        return [*rows, (facts.want.at + spec.patience_ns + JOIN_NS, "spare", "")]
    return [*rows, (facts.again_at, "ask-again", "")] if facts.again_at else rows


def apply(job: Job, record: Happened) -> None:
    """One record onto the facts, when it is written and when it is replayed."""
    facts = job.capacity
    want = facts.want
    if isinstance(record, SpareWanted):
        facts.asked += 1
        facts.again_at = 0
        facts.want = Want(
            op=record.op,
            node=record.node,
            instead_of=record.instead_of,
            avoid=record.avoid,
            at=record.at_ns,
            only=record.only,
            kinds=record.kinds,
            near=record.near,
            apart=record.apart,
            pool=record.pool,
        )
    elif isinstance(record, SpareGiven):
        facts.places[record.node], facts.ops[record.node] = record.place, record.op
        facts.given += 1
        if want is not None:
            want.place = record.place
    elif isinstance(record, NodeYielded):
        until = record.at_ns + job.spec.policy.grace_ns
        facts.yields[record.node] = Yielded(to=record.to, until=until)
    elif isinstance(record, SpareDenied):
        facts.denied, facts.cheap = record.why, want is not None and want.pool
        if want is not None and want.place:
            facts.late[want.node] = (facts.places.pop(want.node), facts.ops.pop(want.node))
        facts.want = None
        facts.again_at = record.at_ns + AGAIN_NS
    elif isinstance(record, NodeReturned):
        facts.places.pop(record.node, None)
        facts.ops.pop(record.node, None)
        facts.swaps.pop(record.place, None)
        facts.origins.pop(record.node, None)
        facts.retiring.discard(record.node)
        facts.yields.pop(record.node, None)
    elif record.node in facts.late:
        facts.places[record.node], facts.ops[record.node] = facts.late.pop(record.node)
    elif want is not None and record.node == want.node:
        if want.instead_of:
            facts.swaps[want.instead_of] = want.op
        if want.only:
            facts.retiring |= {n for n, place in facts.places.items() if place == want.instead_of}
        elif want.instead_of:
            facts.origins[want.node] = want.instead_of
        facts.want, facts.denied, facts.again_at = None, "", 0


def look(job: Job) -> CapacityView | None:
    """None: no scheduler has anything to do with it (any more)."""
    if job.spec.provision is None or job.ended is not None:
        return None
    facts, nodes = job.capacity, job.nodes
    known = {name: nodes[name] for name in facts.places if name in nodes}
    want = facts.want
    start = {n: facts.places[n] for n, node in known.items() if node.state == "absent"}
    if want is not None and want.place:
        start[want.node] = want.place
    return CapacityView(
        want=want,
        start=start,
        connected={n for n, node in known.items() if node.state == "connected"},
        away={
            n: facts.places[n]
            for n, node in known.items()
            if node.state in ("disconnected", "unreachable")
        },
        fence={n: facts.places[n] for n, node in known.items() if node.state == "unreachable"},
        taint={
            n: (facts.places[n], "; ".join(node.taints))
            for n, node in known.items()
            if node.taints and n not in facts.retiring and n not in facts.yields
        },
        leave={
            n: (facts.places[n], facts.swaps.get(facts.places[n], ""))
            for n, node in known.items()
            if _is_left(job, node)
        },
        places=dict(facts.places),
        origins=set(facts.origins.values()) if _goes_back(job.spec) else set(),
        ops={START, *facts.ops.values(), *([want.op] if want is not None else [])},
    )


def _goes_back(spec: JobSpec) -> bool:
    after_ns = spec.provision.back_after_ns if spec.provision is not None else 0
    return bool(after_ns) and spec.policy.back != "never"


def _is_on_disk(job: Job) -> bool:
    """What the ranks hold without a spare."""
    attempt = job.attempt
    if attempt is None or attempt.committed or attempt.kind != "unplanned":
        return False
    return attempt.tick is not None and job.checkpoint_tick == attempt.tick


def _is_left(job: Job, node: Node) -> bool:
    if job.mode != "running" or job.replayed:
        return False
    # A yielded node is no source of state any more once that is on disk.
    yielded = node.name in job.capacity.yields and _is_on_disk(job)
    if job.attempt is not None and not yielded:
        return False
    if node.state == "dead":
        return True
    if node.state != "connected" or not node.taints:
        return False
    # It has the only copies of some side states until a step was made with them elsewhere.
    stands = job.attempt is not None or job.progress_at < node.copied_until + SETTLE_NS
    if node.copied_until and stands:
        return False
    return not any(worker.alive for worker in job.placed_on.get(node.name, ()))
