"""From submitted to training.

Until every rank has attached no step has been made, so nothing is worth migrating: a death then
starts all ranks again from scratch under the next generation. Exceptions need a moment's patience
(`start_fault`): when a rank is killed, its neighbours raise, and what they raise often reaches
us before the news of the death.

    waiting --all agents joined--> opening --StoreOpened--> starting --all attached--> running
       ^                                                       |
       `------------------------ a death ----------------------'

A resumed job has no ranks to start: `world` spares are started and become newcomers of an
attempt without members whose state comes from the checkpoint (migration.py). So does one that fell
back (fallback.py), in its own incident.
"""

from __future__ import annotations

from keepstep.core import fallback, placement
from keepstep.core.facts import SECOND, Worker
from keepstep.core.incidents import (
    close_incident,
    end_job,
    open_incident,
    warn,
    widen_incident,
)
from keepstep.core.migration import EXIT_GAVE_UP, EXIT_USAGE, EXIT_USER, start_attempt
from keepstep.core.processes import close_stores, start_worker
from keepstep.core.state import Job, Out
from keepstep.core.triage import group_mismatch, headline, name_ranks
from keepstep.model.agent_messages import OpenStore, StoreOpened
from keepstep.model.messages import Failure
from keepstep.model.records import JobStarted, StartBegun

BY_SCRIPT = {"user": EXIT_USER, "usage": EXIT_USAGE}  # the latter says more
RESTARTS_MAX = 3
STORE_FAILURES_MAX = 3
JOIN_SPARES_NS = 2 * SECOND
STARTED_AGAIN = "started again from scratch: no step had been made"


def advance_start(job: Job, out: Out) -> None:
    if job.mode == "waiting":
        _begin(job, out)
    elif job.mode == "opening":
        node = job.nodes[job.store_node]
        if node.state in ("unreachable", "dead"):
            job.mode = "waiting"
            _begin(job, out)
        elif job.store_asked_at == 0 and out.send(
            node.name, OpenStore(generation=job.generation_max)
        ):
            job.store_asked_at = out.now
    elif job.mode == "starting":
        _watch(job, out)


def _begin(job: Job, out: Out) -> None:
    if job.ranks_joined_at and out.now >= job.ranks_joined_at + JOIN_SPARES_NS:
        job.ranks_joined_at = 0  # its timer has rung, and is not to ring again
    if all(node.state == "dead" for node in job.nodes.values()):
        why = "no node is left to start the ranks on"
        if job.fallen and job.asks:
            job.reason = f"waiting: {why}"
            return
        if not fallback.no_room(job, out, why):
            end_job(job, out, "failed", EXIT_GAVE_UP, why)
        return
    leaving = [
        w
        for w in job.workers.values()
        if w.alive and w.role != "spare" and job.nodes[w.node].state != "dead"
    ]
    if leaving:
        return  # being killed: their slots are needed
    homes = job.spec.nodes[: job.spec.world // job.spec.local_world]
    elsewhere = ("absent", "disconnected", "unreachable")
    if any(job.nodes[node.name].state in elsewhere for node in reversed(homes)):
        job.reason = "waiting for the agents to join"
        return
    placed, why = placement.start_slots(job.spec, job.nodes, job.workers.values())
    if placed is None:
        away = any(node.state in ("disconnected", "unreachable") for node in job.nodes.values())
        if away or (job.fallen and job.asks) or not fallback.no_room(job, out, why):
            job.reason = f"waiting: {why}"
        return
    if job.ranks_joined_at is None:
        job.ranks_joined_at = out.now
    if job.waits_for_nodes() and out.now < job.ranks_joined_at + JOIN_SPARES_NS:
        return  # a spare node that joins now is somebody's buddy from the beginning
    job.reason = ""
    if job.resume:
        _begin_resume(job, out, placed)
        return
    if _clear(job, out, placed):
        return
    close_stores(job, out, keep=set())
    store = placement.store_node(job.nodes, (job.bad_store,))
    assert store is not None, "slots are only found on connected nodes"
    job.generation = job.new_generation()
    job.mode = "opening"
    job.store_node = store.name
    job.store_asked_at = out.now
    store.stores.add(job.generation)
    out.record(StartBegun(job=job.id, at_ns=out.now, generation=job.generation, reason=why))
    out.send(store.name, OpenStore(generation=job.generation))


def store_opened(job: Job, out: Out, message: StoreOpened) -> None:
    """All ranks at once; spares follow by refill."""
    if job.mode != "opening" or message.generation != job.generation_max:
        return
    placed, why = placement.start_slots(job.spec, job.nodes, job.workers.values())
    if placed is None:
        job.mode = "waiting"
        job.reason = f"waiting: {why}"
        return
    job.master = message.store
    job.bad_store, job.store_failures = "", 0
    if _clear(job, out, placed):
        job.mode = "waiting"
        return
    job.mode = "starting"
    job.ranks_started_at, job.attach_since = out.now, None
    for incident in job.incidents:
        if incident.cause == "start":
            incident.timeline.mark("RESUME", out.now)
    job.places = {rank: node for rank, (node, _) in placed.items()}
    for rank, (node, slot) in placed.items():
        worker = start_worker(job, out, node, slot, rank, "rank")
        job.owners[rank] = worker.id


def store_failed(job: Job, out: Out, why: str) -> None:
    """Another node may be able to; nothing has been started yet."""
    job.store_failures += 1
    if job.store_failures >= STORE_FAILURES_MAX:
        end_job(job, out, "failed", EXIT_GAVE_UP, why)
        return
    job.bad_store = job.store_node
    job.mode = "waiting"
    job.store_asked_at = 0
    warn(job, out, f"{why}; asking another node")


def _clear(job: Job, out: Out, placed: dict[int, tuple[str, int]]) -> bool:
    """Ranks go before spares. True: some slots have to be emptied first."""
    in_the_way = [w for w in job.spares() if (w.node, w.slot) in placed.values()]
    for worker in in_the_way:
        worker.role = "unwanted"
        out.kill(worker)
    return bool(in_the_way)


def _begin_resume(job: Job, out: Out, placed: dict[int, tuple[str, int]]) -> None:
    job.mode = "starting"
    # Generation 0 is what the page of a process says that has never swapped.
    job.generation = job.generation_max = max(job.generation_max, 0)
    taken = {(w.node, w.slot) for w in job.workers.values() if w.alive}
    for place in placed.values():
        if place not in taken:
            start_worker(job, out, place[0], place[1], -1, "spare")
    ranks = list(range(job.spec.world))
    reason = f"resumed from {job.resume}"
    incident = next((i for i in job.incidents if i.fell_back), None)
    if incident is None:
        incident = open_incident(
            job, out, trigger="planned", cause="resume", victims=ranks, reason=reason
        )
    else:
        widen_incident(job, out, incident, incident.cause, ranks, reason)
    attempt = start_attempt(job, out, "resume", incident, ranks, {}, reason)
    if incident.fell_back and job.saves.newest is not None:
        attempt.held_version = job.saves.newest.version


def _watch_attach(job: Job, out: Out) -> None:
    """Ranks in attach wait for all others, and a rank may take its time to build its model. But a
    script that has ended will never come, and at some point a hang is the better guess."""
    there, missing = job.attaching()
    ended = [rank for rank in missing if job.workers[job.owners[rank]].done]
    if there and ended:
        end_job(
            job,
            out,
            "failed",
            EXIT_USAGE,
            f"the script of {name_ranks(ended)} ended without keepstep.attach while "
            f"{name_ranks(there)} waited in it (hint: every rank must call keepstep.attach)",
        )
    elif not there or not missing:
        job.attach_since = None
    elif job.attach_since is None:
        job.attach_since = out.now


def attach_is_late(job: Job, out: Out) -> None:
    """The ranks that do not come may hang, which another start may cure; not twice."""
    there, missing = job.attaching()
    why = (
        f"{name_ranks(missing)} did not come to keepstep.attach within "
        f"{job.build_ns // SECOND} s after {name_ranks(there)}"
    )
    job.attach_since = None
    job.late_starts += 1
    if job.late_starts == 1:
        for rank in missing:
            out.kill(job.workers[job.owners[rank]])
        restart(job, out, why)
        return
    hint = "every rank must call keepstep.attach; --stall-timeout is how long the others wait"
    end_job(job, out, "failed", EXIT_GAVE_UP, f"{why}, in two starts (hint: {hint})")


def start_is_slow(job: Job, out: Out) -> None:
    """Nobody is in attach yet, so it may well be a long construction: say so, and wait."""
    job.start_warned = True
    _, missing = job.attaching()
    warn(
        job,
        out,
        f"{name_ranks(missing)} did not call keepstep.attach yet, {job.build_ns // SECOND} s after "
        "the start: until then hangs are not seen and nothing is protected",
    )


def _watch(job: Job, out: Out) -> None:
    _watch_attach(job, out)
    if job.ended is not None:
        return
    owners = [worker for _, worker in job.owning()]
    dead = [worker for worker in owners if not worker.usable and not worker.done]
    fault = job.start_fault
    killed = [w for w in dead if w.rank in job.causes]
    if killed:
        _cause, why = job.causes[killed[0].rank]
        restart(job, out, f"{why}, {_how_early(job, out)}")
    elif fault is not None and out.now >= fault[0] + SECOND:
        _, kind, why, traceback = fault
        if kind in BY_SCRIPT:
            job.traceback = traceback
            end_job(job, out, "failed", BY_SCRIPT[kind], f"{why}, before the first step")
        else:
            restart(job, out, why)
    elif job.store_node and job.nodes[job.store_node].state == "dead":
        restart(job, out, f"the store was lost with {job.store_node}")
    elif fault is None and owners and all(w.attached or w.done for w in owners):
        mismatch = group_mismatch({w.rank: w.groups for w in owners if w.groups})
        if mismatch:
            hint = "create the same groups on every rank, in the same order, before attach"
            end_job(job, out, "failed", EXIT_USAGE, f"{mismatch} (hint: {hint})")
        else:
            started(job, out)


def _how_early(job: Job, out: Out) -> str:
    """How far the script is nobody knows; how long it has run is known."""
    began = job.ranks_started_at  # 0: before a restart of the orchestrator
    after = f"{(out.now - began) // SECOND} s after the start and " if began else ""
    return f"{after}before all ranks had called keepstep.attach"


def started(job: Job, out: Out) -> None:
    job.mode = "running"
    job.start_fault = None
    job.reason = ""
    out.record(JobStarted(job=job.id, at_ns=out.now, generation=job.generation))
    for incident in list(job.incidents):
        if incident.cause == "start":
            incident.generation = job.generation
            close_incident(job, out, incident, "RESOLVED", STARTED_AGAIN)


def rank_exited(job: Job, out: Out, worker: Worker, code: int, tail: str) -> None:
    """A rank's process ended before everybody attached (`worker_ended` has noted it)."""
    if worker.killed_at is not None or worker.done:
        return
    if code < 0 or (job.start_fault is not None and job.start_fault[1] not in BY_SCRIPT):
        return  # by a signal: `causes` has it, and it is not the script's own doing
    job.causes.pop(worker.rank, None)
    _fault(job, out, "user", f"rank {worker.rank} exited with code {code}", tail)


def rank_failed(job: Job, out: Out, worker: Worker, message: Failure) -> None:
    if message.error_kind == "device":
        job.causes[worker.rank] = ("device-error", f"rank {worker.rank}: device error")
        out.kill(worker)
        return
    last = headline(message.error)
    _fault(job, out, message.error_kind, f"rank {worker.rank} raised {last}", message.error)


def _fault(job: Job, out: Out, kind: str, why: str, traceback: str) -> None:
    if job.start_fault is None:
        job.start_fault = (out.now, kind, why, traceback)
    elif BY_SCRIPT.get(job.start_fault[1], 0) < BY_SCRIPT.get(kind, 0):
        job.start_fault = (job.start_fault[0], kind, why, traceback)


def restart(job: Job, out: Out, why: str) -> None:
    job.start_fault = job.attach_since = None
    job.start_failures += 1
    dead = job.dead()
    if job.start_failures > RESTARTS_MAX:
        end_job(
            job,
            out,
            "failed",
            EXIT_GAVE_UP,
            f"the ranks were started {RESTARTS_MAX + 1} times and never all attached: {why}",
        )
        return
    incident = next((i for i in job.incidents if i.cause == "start"), None)
    if incident is None:
        incident = open_incident(
            job, out, trigger="unplanned", cause="start", victims=dead, reason=why
        )
    else:
        widen_incident(job, out, incident, "start", dead, why)
    incident.attempts += 1
    incident.timeline.mark("RESERVE", out.now)
    for _, worker in job.owning():
        worker.role = "unwanted"
        out.kill(worker)
    job.owners.clear()
    job.causes.clear()
    close_stores(job, out, keep=set())
    job.mode = "waiting"
