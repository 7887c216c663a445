"""From facts to unplanned attempts: what broke, and who takes the rank over.

`broken` is the question asked after every event: do the ranks that are alive still match what is
going on? If not, `recover_from` opens or widens the incident and starts the next attempt. It does
not matter in which phase the previous one was.
"""

from __future__ import annotations

from keepstep.core.facts import SECOND, Attempt, Incident, Worker
from keepstep.core.fallback import EXIT_FELL_BACK, fall_back, further_back
from keepstep.core.incidents import (
    close_incident,
    end_job,
    open_incident,
    warn,
    widen_incident,
)
from keepstep.core.migration import (
    EXIT_GAVE_UP,
    NEWCOMERS_MAX,
    STAGE_FAILURES_MAX,
    STAGE_PATIENCE_NS,
    blame_script,
    start_attempt,
)
from keepstep.core.phases import all_staged, newcomers
from keepstep.core.planned import fail_move
from keepstep.core.processes import node_lost
from keepstep.core.rewire import settle_committed_planned
from keepstep.core.state import Job, Out
from keepstep.core.triage import hang_culprits, name_ranks, uneven_steps
from keepstep.model.records import SignalSeen

# How long an agent may believe in a stream that is gone, and how late it may look.
SILENT_NS = 25 * SECOND
ALL_SILENT_NS = 120 * SECOND
FENCE_SLACK_NS = 2 * SECOND


def broken(job: Job) -> bool:
    attempt = job.attempt
    if attempt is None or attempt.kind == "planned" or attempt.committed:
        return bool(job.dead()) or job.alarm is not None
    job.alarm = None  # its Report will say it again
    if attempt.kind == "resume":
        return False
    host = job.nodes.get(attempt.store_node)
    if attempt.store is None and host is not None and host.state in ("unreachable", "dead"):
        return True
    return attempt.members != job.live() or set(attempt.moving) != set(job.dead())


def recover_from(job: Job, out: Out) -> None:
    """Start an attempt for everything that is broken now."""
    if not job.live():
        _wait_after_all(job, out)
    dead, live = job.dead(), job.live()
    previous = job.attempt
    cause, reason = _cause(job, dead)
    incident = job.unplanned()
    if incident is None:
        incident = open_incident(
            job, out, trigger="unplanned", cause=cause, victims=dead, reason=reason
        )
    elif set(dead) - set(incident.victims) or job.alarm is not None or _again(previous, dead):
        if incident.cause in ("connection", "user", "undone-move"):
            incident.cause = cause  # the exceptions were the effect of this
        widen_incident(job, out, incident, cause, dead, reason)
    job.alarm = None
    reuse = _leave_attempt(job, out, previous, incident, dead)
    if dead and job.transparent:
        if not blame_script(job, out, dead):
            _lose_transparent(job, out, reason)
        return
    if dead and not live:
        if not blame_script(job, out, dead):
            _fall_back(job, out, dead)
        return
    start_attempt(job, out, "unplanned", incident, dead, reuse, reason)


def _again(previous: Attempt | None, dead: list[int]) -> bool:
    return previous is not None and (previous.committed or not set(dead) <= set(previous.moving))


def _cause(job: Job, dead: list[int]) -> tuple[str, str]:
    causes = [job.causes[rank] for rank in dead if rank in job.causes]
    if causes:
        sentences = list(dict.fromkeys(why for _, why in causes))
        return causes[-1][0], "; ".join(sentences)
    if job.alarm is not None:
        return job.alarm
    if dead:
        return "process-exit", f"{name_ranks(dead)} died"
    return "connection", "the attempt is repeated with the same members"


def _leave_attempt(
    job: Job, out: Out, previous: Attempt | None, incident: Incident, dead: list[int]
) -> dict[int, str]:
    """What of the previous attempt's newcomers can still be used, and what becomes of a planned
    incident whose attempt it was."""
    by = f"incident {incident.id}"
    for other in list(job.incidents):
        if other.trigger == "unplanned" or other is incident:
            continue
        was_pending = bool(other.pending)
        other.pending = [rank for rank in other.pending if rank not in dead]
        mine = previous is not None and previous.incident is other
        if mine and previous is not None and previous.committed:
            settle_committed_planned(job, out, other, by)
        elif was_pending and not other.pending:
            close_incident(job, out, other, "RESOLVED", f"its ranks died and are moved by {by}")
        elif mine:
            other.also(f"put off by {by}")
    reuse: dict[int, str] = {}
    if previous is None or previous.committed:
        return reuse
    for worker in newcomers(job, previous):
        if worker.usable and worker.rank in dead:
            reuse[worker.rank] = worker.id
        elif worker.alive:
            worker.role = "unwanted"
            out.kill(worker)
    return reuse


def _fall_back(job: Job, out: Out, dead: list[int]) -> None:
    if job.saves.newest is not None:
        fall_back(job, out, f"no rank is left alive ({name_ranks(dead)} died)")
        return
    version = max((worker.version for _, worker in job.owning()), default=0)
    fall_back(
        job,
        out,
        f"no rank is left alive ({name_ranks(dead)} died): the state of about {version} steps "
        "is lost except for what the script saved itself",
    )


def _lose_transparent(job: Job, out: Out, reason: str) -> None:
    """What was in the process that died is in no other, and the script cannot be led anywhere."""
    end_job(
        job,
        out,
        "fell_back",
        EXIT_FELL_BACK,
        f"{reason}: a transparent job survives planned moves only, what the script saved itself is "
        "left (hint: start it again from there)",
    )


def repeat_attempt(job: Job, out: Out, attempt: Attempt, why: str) -> None:
    """Same members, next generation. Newcomers keep their process."""
    reuse = {w.rank: w.id for w in newcomers(job, attempt) if w.usable}
    moving = list(attempt.moving)
    start_attempt(job, out, attempt.kind, attempt.incident, moving, reuse, why)


def store_failed(job: Job, out: Out, attempt: Attempt, error: str) -> None:
    """A store is needed until the last rank has built its groups. Nobody was told to yet: take
    another. Somebody was: whom it met in the lost one is not known, so all meet in the next."""
    host = attempt.store_node
    if attempt.store is None:
        stage_failed(job, out, attempt, f"{host} could not open a store: {error}")
    elif not all_staged(job, attempt):
        job.bad_store, attempt.store = host, None
        attempt.store_node, attempt.store_asked_at = "", 0
        if attempt.staged_at:
            stage_failed(job, out, attempt, f"{host} lost the store: {error}")


def stage_failed(job: Job, out: Out, attempt: Attempt, why: str) -> None:
    if attempt.store is None and attempt.store_node:
        job.bad_store = attempt.store_node
    if attempt.kind == "planned":
        fail_move(job, out, attempt, why)
        return
    if attempt.retry_at is not None:
        return  # each rank says so
    incident = attempt.incident
    incident.stage_failures += 1
    if incident.stage_failures == 1:
        incident.stage_failed_at = out.now
    tried_ns = out.now - incident.stage_failed_at
    if incident.stage_failures >= STAGE_FAILURES_MAX and tried_ns >= STAGE_PATIENCE_NS:
        incident.give_up = (
            f"new process groups could not be built {incident.stage_failures} times in "
            f"{tried_ns // SECOND} s: {why}"
        )
        incident.give_up_at = out.now
        if attempt.kind == "resume":
            end_job(job, out, "failed", EXIT_GAVE_UP, incident.give_up)
        return
    # The network may need a while; the ranks hold their state meanwhile. The first time it is
    # most likely a process that died in the rendezvous: try again at once.
    wait_ns = SECOND << min(incident.stage_failures - 2, 5) if incident.stage_failures > 1 else 0
    attempt.retry_at = out.now + wait_ns
    attempt.retry_why = f"process groups could not be built: {why}"
    if wait_ns == 0:
        retry_stage(job, out, attempt)


def retry_stage(job: Job, out: Out, attempt: Attempt) -> None:
    repeat_attempt(job, out, attempt, attempt.retry_why)


def newcomer_failed(job: Job, out: Out, worker: Worker, why: str) -> None:
    """Take the next spare. Groups in which it was awaited can never complete, so whoever was
    told to stage starts over with the next generation."""
    worker.role = "unwanted"
    out.kill(worker)
    attempt = job.attempt
    if attempt is None or attempt.newcomers.get(worker.rank) != worker.id or attempt.committed:
        return
    if attempt.kind == "planned":
        fail_move(job, out, attempt, why)
        return
    incident = attempt.incident
    incident.failures += 1
    del attempt.newcomers[worker.rank]
    if incident.failures >= max(NEWCOMERS_MAX, len(attempt.moving) + 2):
        incident.give_up = f"{incident.failures} newcomers failed, the last one: {why}"
        incident.give_up_at = out.now
        if attempt.kind == "resume":
            if not further_back(job, out, worker.rank, why, surely=True):
                end_job(job, out, "failed", EXIT_GAVE_UP, incident.give_up)
            return
    if attempt.staged_at:
        repeat_attempt(job, out, attempt, f"{worker.id} failed: {why}")


def ranks_on(job: Job, name: str) -> list[Worker]:
    """Ranks there that may still run; killing one is no proof of its end. A job that goes back to
    a checkpoint has no owners, but what they were may live."""
    if job.fallen:
        return [w for w in job.placed_on.get(name, ()) if w.alive and w.rank >= 0 and not w.done]
    return [w for w in job.owners_on(name) if w.alive and not w.done]


def give_up_node(job: Job, out: Out, name: str, why: str) -> None:
    """Nobody says that it is dead: its ranks count as dead from now on, but they are known to be
    gone only when its agent, if it lives, must have noticed and ended them. Meanwhile everything
    up to COMMIT is prepared."""
    node = job.nodes[name]
    lost = ranks_on(job, name)
    if not lost:
        lose_node(job, out, name, why)
        return
    joining = [w for w in job.placed_on.get(name, ()) if w.role == "newcomer" and w.usable]
    node.state = "unreachable"
    fence_from = max(node.gone_at + SILENT_NS, job.progress_at)
    node.fenced_at = max(out.now, fence_from + job.stall_ns + FENCE_SLACK_NS)
    warn(job, out, f"{name} {why}: its ranks are replaced when they must have ended")
    for worker in job.placed_on.get(name, ()):
        if worker.usable:
            worker.killed_at = out.now
    for worker in lost:
        reason = f"rank {worker.rank} was on {name}, which {why}"
        job.causes.setdefault(worker.rank, ("node-lost", reason))
    for worker in joining:
        newcomer_failed(job, out, worker, f"{name} {why}")


def _wait_after_all(job: Job, out: Out) -> None:
    """Nodes are given up because others can rebuild their ranks. If these are lost too, what a node
    out of reach has is all there is: its agent spares ranks that hold, and nobody was given their
    ranks. So they are waited for as if the others had been lost first (timers.py says how long)."""
    patience_ns = job.stall_ns + ALL_SILENT_NS
    for node in job.order:
        until = max(node.gone_at, job.progress_at) + patience_ns
        over = job.saves.newest is not None and out.now >= until
        if node.state != "unreachable" or over:
            continue
        given_up = [
            worker
            for worker in job.owners_on(node.name)
            if worker.alive and job.causes.get(worker.rank, ("",))[0] == "node-lost"
        ]
        for worker in given_up:
            worker.killed_at = None
            del job.causes[worker.rank]
        if given_up:
            node.state = "disconnected"
            ranks = name_ranks([worker.rank for worker in given_up])
            warn(job, out, f"{node.name} is waited for: only {ranks} may be left alive")


def lose_node(job: Job, out: Out, name: str, why: str) -> None:
    joining = [w for w in job.placed_on.get(name, ()) if w.role == "newcomer" and w.alive]
    node_lost(job, out, job.nodes[name], why)
    for worker in joining:
        newcomer_failed(job, out, worker, f"{name} {why}")
    attempt = job.attempt
    if attempt is None or attempt.committed or attempt.store is None:
        return
    if attempt.store_node == name and not broken(job):  # else the next attempt has its own
        store_failed(job, out, attempt, why)


IN_STEP = ("compute", "section", "fence")


def check_hang(job: Job, out: Out) -> None:
    """Only when every rank that should progress stands still can the culprit be told."""
    attempt = job.attempt
    if attempt is not None and attempt.kind != "planned" and not attempt.committed:
        return
    stalled = {}
    if attempt is None or attempt.committed:
        owners = job.rank_owners()
    else:  # whoever holds may stand still
        owners = (job.workers[job.owners[rank]] for rank in attempt.holds.missing())
    for worker in owners:
        if not worker.usable or worker.done:
            continue
        if worker.stalled is None:
            return
        stalled[worker.rank] = worker.stalled
    if not stalled:
        return
    if job.passed_at and out.now < job.passed_at + job.stall_ns:
        # The fence behind which the first one holds or has ended was passed by all. Who waited
        # long in it may count as stalled for a moment yet: believe what stands a timeout later.
        job.judge_at = job.passed_at + job.stall_ns
        return
    ended = {worker.rank: worker.tick for worker in job.watched_owners() if worker.done}
    busy = {rank: seen.tick for rank, seen in stalled.items() if seen.where in IN_STEP}
    if uneven := uneven_steps(ended, busy):
        job.alarm = ("user", uneven)  # what the ranks themselves report decides
        return
    ranks, reason = hang_culprits(stalled, job.stall_ns)
    if ranks and set(ranks) == set(job.live()):
        ranks, reason = (), "all ranks are stopped, and none is left to rebuild them from"
    if not ranks:
        if not job.hang_warned:
            warn(job, out, f"training stands still: {reason}")
        job.hang_warned = True
        return
    for rank in ranks:
        worker = job.workers[job.owners[rank]]
        out.record(
            SignalSeen(
                job=job.id,
                at_ns=out.now,
                node=worker.node,
                worker=worker.id,
                signal="hang",
                detail=reason,
            )
        )
        job.causes[rank] = ("hang", reason)
        out.kill(worker)
