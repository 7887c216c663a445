"""What operators ask for. Everything is checked before anything is changed.

A wrong request is a UsageError with a hint and leaves no trace; a request that cannot be met
*yet* (no spare) is accepted and says in its incident what it waits for.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from keepstep.core import breaker, divergence, processes, stopping
from keepstep.core.facts import Node, Worker
from keepstep.core.faults import newcomer_failed
from keepstep.core.incidents import close_incident, end_job, open_incident
from keepstep.core.placement import parity_trouble
from keepstep.core.restart import apply_taint, tell_buddy
from keepstep.core.state import Job, Out
from keepstep.errors import UsageError
from keepstep.model import labels
from keepstep.model.agent_messages import KillNode, PathNoticed
from keepstep.model.job import (
    POINTS,
    Cancel,
    Drain,
    InjectNow,
    InjectSpec,
    JobSpec,
    Migrate,
    Note,
    ProceedAnyway,
    Taint,
    Untaint,
)
from keepstep.model.records import SignalSeen, Tainted, Untainted

# One request must not make the orchestrator count to infinity: whatever is looped over is bounded.
SLOTS_MAX = 1 << 20
STALL_NS_MAX = 10**18
INJECT_S_MAX = 1e6
PRIORITY_MAX = 1_000_000
NODE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


def check_node(name: str, slots: int) -> None:
    if not NODE_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a node's name", hint="use letters, digits, '_' and '-'"
        )
    if not 1 <= slots <= SLOTS_MAX:
        raise UsageError(f"node {name} has {slots} slots", hint=f"1 to {SLOTS_MAX} are possible")


def check_spec(spec: JobSpec) -> None:
    def refuse(message: str, hint: str) -> None:
        raise UsageError(f"job {spec.job}: {message}", hint=hint)

    for node in spec.nodes:
        check_node(node.name, node.slots)
    if sum(node.slots for node in spec.nodes) > SLOTS_MAX or spec.world > SLOTS_MAX:
        refuse("it is too large", f"at most {SLOTS_MAX} slots and ranks are possible")
    if spec.world < 1 or spec.local_world < 1 or spec.world % spec.local_world:
        refuse(
            f"{spec.world} ranks cannot be spread over nodes of {spec.local_world}",
            "the number of ranks is the number of nodes times --nproc-per-node",
        )
    names = [node.name for node in spec.nodes]
    if len(set(names)) != len(names):
        refuse(f"node names {names} are not unique", "give each node a name of its own")
    needed = spec.world // spec.local_world
    if len(spec.nodes) < needed or any(n.slots < spec.local_world for n in spec.nodes[:needed]):
        refuse(
            f"{needed} nodes with {spec.local_world} slots each are needed",
            "add nodes, or lower --nproc-per-node",
        )
    if spec.mode == "transparent" and (spec.understudies or spec.checkpoints or spec.resume):
        refuse(
            "a transparent job has no understudies and no checkpoints of Keepstep's",
            "let the script write its own",
        )
    if spec.mode == "transparent" and any(inject.step >= 0 for inject in spec.inject):
        refuse("its script has no steps to inject faults into", "`keepstep inject` while it runs")
    if not 0 < spec.stall_timeout_ns <= STALL_NS_MAX or not 0 <= spec.spares <= SLOTS_MAX:
        refuse("stall timeout or spares are out of range", "give --stall-timeout in seconds")
    if not 0 <= spec.understudies <= SLOTS_MAX:
        refuse(f"--understudies is {spec.understudies}", f"0 to {SLOTS_MAX} are possible")
    if spec.redundancy == "parity" and (trouble := parity_trouble(spec)):
        refuse(f"--redundancy parity: {trouble}", "--spare-nodes 1, or --redundancy buddy")
    _check_policy(spec, refuse)
    for inject in spec.inject:
        if inject.action != "kill-node" and not 0 <= inject.rank < spec.world:
            refuse(
                f"inject {inject.id}: there is no rank {inject.rank}",
                f"ranks are 0 to {spec.world - 1}",
            )
        if inject.action == "kill-node" and inject.node not in names:
            refuse(
                f"inject {inject.id}: there is no node {inject.node or 'without a name'}",
                f"nodes: {', '.join(names)}",
            )
        _check_inject(inject)
    if len({inject.id for inject in spec.inject}) != len(spec.inject):
        refuse("two injects have the same id", "give each its own id")


def _check_policy(spec: JobSpec, refuse: Callable[[str, str], None]) -> None:
    policy, by = spec.policy, spec.provision
    labels.check_names(policy.within)
    if not 0 <= policy.dedicated <= SLOTS_MAX or abs(policy.priority) > PRIORITY_MAX:
        refuse("spare nodes or priority are out of range", f"priorities are up to {PRIORITY_MAX}")
    if not 0 <= policy.grace_ns <= STALL_NS_MAX or not 0 <= policy.quiet_ns <= STALL_NS_MAX:
        refuse("grace or quiet time are out of range", "give them in seconds")
    if not 0 <= policy.hold_ns <= STALL_NS_MAX:
        refuse("the time to hold for a divergence is out of range", "give it in seconds")
    if policy.on_divergence == "fall-back" and not spec.checkpoints:
        refuse("--on-divergence fall-back: there are no checkpoints", "--checkpoint-dir DIR")
    if not 1.0 < policy.straggler_factor <= 1000.0:
        refuse(
            f"--straggler-factor is {policy.straggler_factor:g}: it must be above 1",
            "at most 1000 times the median are possible",
        )
    if not 0 < policy.straggler_after_ns <= STALL_NS_MAX:
        refuse("the time after which a rank is a straggler is out of range", "give it in seconds")
    cheap = by is not None and any(kind != "preempt" for kind in by.kinds)
    if policy.dedicated and not cheap:
        refuse(
            "a spare node that was used can be replaced by a scheduler only",
            "allow a reservation or idle nodes, or keep no pool",
        )


def _check_inject(spec: InjectSpec) -> None:
    if spec.point not in POINTS:
        raise UsageError(
            f"inject {spec.id}: unknown point {spec.point!r}", hint="one of " + ", ".join(POINTS)
        )
    if not 0 <= spec.seconds <= INJECT_S_MAX:
        raise UsageError(
            f"inject {spec.id}: {spec.seconds:g} seconds",
            hint=f"0 to {INJECT_S_MAX:g} are possible",
        )


def check_open(job: Job) -> None:
    if job.ended is not None:
        raise UsageError(
            f"job {job.id} has ended ({job.ended.state})", hint="`keepstep status` lists jobs"
        )


def check_running(job: Job) -> None:
    check_open(job)
    if job.mode != "running":
        raise UsageError(
            f"job {job.id} is still starting", hint="try again when `keepstep status` says running"
        )


def _rank(job: Job, rank: int) -> Worker:
    worker = job.owner(rank)
    if not 0 <= rank < job.spec.world or worker is None:
        raise UsageError(
            f"job {job.id} has no rank {rank}", hint=f"its ranks are 0 to {job.spec.world - 1}"
        )
    return worker


def _node(job: Job, name: str) -> Node:
    node = job.nodes.get(name)
    if node is None:
        known = ", ".join(job.nodes)
        raise UsageError(f"job {job.id} has no node {name!r}", hint=f"its nodes are {known}")
    return node


def _target(job: Job, target: str) -> tuple[Node, int | None]:
    name, slash, slot = target.partition("/")
    node = _node(job, name)
    if not slash:
        return node, None
    if not slot.isascii() or not slot.isdigit() or int(slot) >= node.slots:
        raise UsageError(
            f"node {name} has no slot {slot!r}",
            hint=f"its slots are {name}/0 to {name}/{node.slots - 1}",
        )
    return node, int(slot)


def _moving(job: Job) -> set[int]:
    ranks = {rank for incident in job.incidents for rank in incident.pending}
    if job.attempt is not None and not job.attempt.committed:
        ranks |= set(job.attempt.moving)
    return ranks | set(job.dead())


def check_migrate(job: Job, request: Migrate) -> None:
    check_running(job)
    if not request.ranks or len(set(request.ranks)) != len(request.ranks):
        raise UsageError("name each rank to migrate once", hint="--rank 2 --rank 3")
    for rank in request.ranks:
        if _rank(job, rank).done:
            raise UsageError(f"rank {rank} has finished", hint="nothing is left to migrate")
        if rank in _moving(job):
            raise UsageError(f"rank {rank} is already being moved", hint="see `keepstep incidents`")


def migrate(job: Job, out: Out, request: Migrate) -> None:
    check_migrate(job, request)
    open_incident(
        job,
        out,
        trigger="planned",
        cause="migrate",
        victims=request.ranks,
        reason=request.reason,
    )


def leave(job: Job, out: Out, worker: Worker, cause: str, reason: str) -> None:
    """Nobody asked for it: the rank's place is not good enough, and nothing may start there."""
    node = job.nodes[worker.node]
    target = node.name if node.slots == 1 else worker.place
    _taint(job, out, target, reason)
    open_incident(
        job,
        out,
        trigger="planned",
        cause=cause,
        victims=[worker.rank],
        reason=reason,
        target=target,
    )


def check_drain(job: Job, request: Drain) -> list[int]:
    """The ranks that would move."""
    check_running(job)
    node = _node(job, request.node)
    if node.state == "dead":
        raise UsageError(f"node {node.name} is dead", hint="its ranks are replaced anyway")
    ranks = _ranks_in(job, node, None)
    if ranks and not set(ranks) - _moving(job):
        raise UsageError(
            f"all ranks of {node.name} are already being moved", hint="see `keepstep incidents`"
        )
    return sorted(set(ranks) - _moving(job))


def drain(job: Job, out: Out, request: Drain) -> None:
    ranks = check_drain(job, request)
    node, reason = job.nodes[request.node], request.reason
    _taint(job, out, node.name, f"drain: {reason}" if reason != "drain" else reason)
    if not ranks:
        reason = f"{reason}; no rank runs on {node.name}"
    incident = open_incident(
        job, out, trigger="planned", cause="drain", victims=ranks, reason=reason, target=node.name
    )
    if not ranks:
        # No Swap follows, with which others would get another buddy.
        for _, owner in job.owning():
            if owner.buddy == node.name and owner.usable and not owner.done:
                tell_buddy(job, out, owner)
                node.copied_until = out.now
        close_incident(job, out, incident, "RESOLVED", "")


def _ranks_in(job: Job, node: Node, slot: int | None) -> list[int]:
    return [
        worker.rank
        for worker in job.owners_on(node.name)
        if worker.usable and not worker.done and slot in (None, worker.slot)
    ]


def _taint(job: Job, out: Out, target: str, reason: str) -> None:
    apply_taint(job, target, reason)
    out.record(Tainted(job=job.id, at_ns=out.now, target=target, reason=reason))
    node, slot = _target(job, target)
    for worker in list(job.placed_on.get(node.name, ())):
        if slot in (None, worker.slot) and worker.role == "newcomer" and worker.usable:
            newcomer_failed(job, out, worker, f"{worker.place} was tainted: {reason}")


def _seen(job: Job, out: Out, node: Node, signal: str, detail: str) -> None:
    out.record(
        SignalSeen(
            job=job.id, at_ns=out.now, node=node.name, worker="", signal=signal, detail=detail
        )
    )


def note(job: Job, out: Out, request: Note) -> None:
    check_open(job)
    node, _ = _target(job, request.target)
    detail = f"{request.target}: {request.reason}"
    # Detectors repeat themselves; what is on show already needs no second line.
    if not any(shown.text == f"signal {request.signal}: {detail}" for shown in job.notes):
        _seen(job, out, node, request.signal, detail)


def taint(job: Job, out: Out, request: Taint) -> None:
    check_open(job)
    node, slot = _target(job, request.target)
    if not request.reason:
        raise UsageError("a taint needs a reason", hint="--reason TEXT")
    _seen(job, out, node, "taint", f"{request.target}: {request.reason}")
    _taint(job, out, request.target, request.reason)
    ranks = sorted(set(_ranks_in(job, node, slot)) - _moving(job))
    if ranks and job.mode == "running":
        breaker.move_away(job, out, request.target, ranks, request.reason)


def path_noticed(job: Job, out: Out, name: str, message: PathNoticed) -> None:
    """An agent judges its own node's network; what follows is as for any other detector."""
    if message.taint and not job.nodes[name].taints:
        reason = f"{message.kind}: {message.reason}"
        taint(job, out, Taint(job=job.id, target=name, reason=reason))
    else:
        said = Note(job=job.id, target=name, signal=message.kind, reason=message.reason)
        note(job, out, said)


def retry_deferred(job: Job, out: Out) -> None:
    """The breaker's minute is over: the oldest taints that are still there come first."""
    for target, reason in list(job.deferred.items()):
        node, slot = _target(job, target)
        ranks = sorted(set(_ranks_in(job, node, slot)) - _moving(job))
        if not ranks:
            del job.deferred[target]
            continue
        breaker.move_away(job, out, target, ranks, reason)
        if target in job.deferred:
            return


def untaint(job: Job, out: Out, request: Untaint) -> None:
    check_open(job)
    node, slot = _target(job, request.target)
    tainted = node.taints if slot is None else node.slot_taints.get(slot)
    if not tainted:
        raise UsageError(
            f"{request.target} is not tainted", hint="`keepstep status --json` lists taints"
        )
    apply_taint(job, request.target, None)
    job.deferred.pop(request.target, None)
    job.capacity.yields.pop(request.target, None)
    out.record(Untainted(job=job.id, at_ns=out.now, target=request.target))
    for incident in list(job.incidents):
        running = job.attempt is not None and job.attempt.incident is incident
        if incident.target == request.target and not running:
            close_incident(
                job, out, incident, "ABORTED", f"{request.target} was untainted before the move"
            )


def inject(job: Job, out: Out, request: InjectNow) -> None:
    check_open(job)
    spec = request.inject
    if spec.id in job.injects:
        raise UsageError(f"inject {spec.id} exists already", hint="give it another id")
    _check_inject(spec)
    if spec.action == "kill-node":
        name = spec.node or (_rank(job, spec.rank).node if spec.rank >= 0 else "")
        node = _node(job, name)
        if node.state != "connected":
            raise UsageError(f"node {name} is {node.state}", hint="it cannot be killed now")
        if spec.step < 0:
            job.injects[spec.id] = spec
            processes.inject_fired(job, out, spec.id, f"{name} killed")
            out.send(name, KillNode())
        else:
            job.injects[spec.id] = msgspec.structs.replace(spec, node=name)
        return
    worker = _rank(job, spec.rank)
    if not worker.usable:
        raise UsageError(f"rank {spec.rank} is dead", hint="wait until it is replaced")
    job.injects[spec.id] = spec
    if spec.step >= 0 or spec.action == "device-error":
        step = spec.step if spec.step >= 0 else worker.version + 1
        processes.arm_now(out, worker, spec.id, spec.action, step, spec.point)
    else:
        processes.inject_fired(job, out, spec.id, f"{spec.action} of {worker.id}")
        processes.signal_now(out, worker, spec.action, spec.seconds)


def proceed(job: Job, out: Out, request: ProceedAnyway) -> None:
    check_open(job)
    divergence.proceed(job, out, request.by)


def cancel(job: Job, out: Out, request: Cancel) -> None:
    check_open(job)
    if not 0 <= request.exit_code <= 255:
        raise UsageError(f"{request.exit_code} is no exit code", hint="0 to 255 are possible")
    if not request.checkpoint or not stopping.begin(job, out, request):
        end_job(job, out, "cancelled", request.exit_code, request.reason)
