"""What happens if nothing happens. Every wait of the core has a row here.

`timers` is computed from the facts each time, so a timer can neither be forgotten nor outlive its
reason; `deadline()` is the earliest row, and a Wake carries out the rows whose time has come.
Times derive from the one knob, `stall_timeout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from keepstep.core import (
    balance,
    breaker,
    checkpoints,
    divergence,
    priorities,
    provision,
    stopping,
    understudies,
)
from keepstep.core.facts import SECOND, Attempt, Node, Worker
from keepstep.core.faults import (
    ALL_SILENT_NS,
    FENCE_SLACK_NS,
    give_up_node,
    lose_node,
    newcomer_failed,
    ranks_on,
    retry_stage,
    stage_failed,
)
from keepstep.core.incidents import end_job, warn
from keepstep.core.migration import EXIT_GAVE_UP
from keepstep.core.operator import retry_deferred
from keepstep.core.phases import has_copied, members
from keepstep.core.phases import newcomers as newcomers_of
from keepstep.core.planned import fail_move
from keepstep.core.ranks import Tally
from keepstep.core.start import JOIN_SPARES_NS, attach_is_late, start_is_slow, store_failed
from keepstep.core.state import Job, Out
from keepstep.core.together import aside
from keepstep.model.agent_messages import KillWorker

LEAVE_NS = 10 * SECOND
KILL_AGAIN_NS = 5 * SECOND
STORE_NS = 15 * SECOND
PARK_NS = 300 * SECOND
JOIN_NS = 60 * SECOND

Timer = tuple[int, str, str]  # when, what, about whom


def timers(job: Job) -> list[Timer]:
    if job.ended is not None:
        return []
    rows: list[Timer] = []
    for node in job.nodes.values():
        if node.state == "disconnected":
            rows += _gone_timer(job, node)
        elif node.state == "unreachable":
            rows += _fenced_timer(job, node)
    for worker in job.watched.values():
        if not worker.alive or job.nodes[worker.node].state != "connected":
            continue
        if worker.killed_at is not None:
            rows.append((worker.killed_at + KILL_AGAIN_NS, "kill", worker.id))
        elif worker.role == "leaver":
            rows.append((worker.leave_at + LEAVE_NS, "leave", worker.id))
        elif worker.role == "spare" and not worker.parked:
            rows.append((worker.started_at + max(PARK_NS, job.stall_ns), "park", worker.id))
        elif worker.role == "understudy" and worker.ready is None:
            due = understudies.due(job, worker, PARK_NS)
            rows += [(due, "rehearse", worker.id)] if due is not None else []
    stop_by = stopping.deadline(job)
    if stop_by is not None:
        rows.append((stop_by, "stop", ""))
    if job.rejoin_until is not None:
        rows.append((job.rejoin_until, "rejoin", ""))
    if job.divergence is not None:  # whatever else there is to do waits
        return rows + _divergence_timers(job)
    if job.mode in ("waiting", "opening", "starting"):
        rows += _start_timers(job)
    deferred = breaker.deadline(job)
    if deferred is not None and job.mode == "running" and not job.replayed:
        rows.append((deferred, "breaker", ""))
    balance_at = balance.deadline(job)
    if balance_at is not None:
        rows.append((balance_at, "balance", ""))
    save_at = checkpoints.deadline(job)
    if save_at is not None:
        rows.append((save_at, "settle", ""))
    if job.judge_at is not None:
        rows.append((job.judge_at, "stalls", ""))
    if job.attempt is not None:
        rows += _attempt_timers(job, job.attempt)
    if not job.replayed:
        rows += provision.timers(job)
    return rows


def _divergence_timers(job: Job) -> list[Timer]:
    found = job.divergence
    due = divergence.deadline(job)
    if due is None or found is None:
        return []
    return [(due, "divergence", "")] if found.text else [(due, "settle", "")]


def _gone_timer(job: Job, node: Node) -> list[Timer]:
    """A node without its stream is not a dead node. As long as training gets on its ranks take part
    in it; and if no rank is in reach, nobody could be rebuilt from anything: then we wait. But not
    for ever if training stands (somebody is known to be dead, and not only given up: those whom we
    do not hear may all train together) and there is a checkpoint."""
    if not ranks_on(job, node.name):
        return [(node.gone_at + job.stall_ns, "node", node.name)]
    if job.fallen:
        return [(node.gone_at + job.stall_ns, "node", node.name)]
    owners = (worker for worker in job.rank_owners() if worker.usable and not worker.done)
    silent_ns = job.stall_ns
    if not any(job.nodes[worker.node].state == "connected" for worker in owners):
        if job.saves.newest is None or all(w.alive or w.done for w in job.watched_owners()):
            return []
        silent_ns += ALL_SILENT_NS
    return [(max(node.gone_at, job.progress_at) + silent_ns, "node", node.name)]


def _fenced_timer(job: Job, node: Node) -> list[Timer]:
    """Its ranks can make a step only together with all others. If some live and none of those is in
    reach, all may train on, this node's too; whoever comes back first shows it, and is aborted."""
    states = {job.nodes[worker.node].state for worker in job.rank_owners() if worker.usable}
    if states and "connected" not in states:
        return []
    stands_ns = job.stall_ns + FENCE_SLACK_NS
    return [(max(node.fenced_at, job.progress_at + stands_ns), "fenced", node.name)]


def _start_timers(job: Job) -> list[Timer]:
    rows: list[Timer] = []
    if job.mode == "waiting":
        if job.ranks_joined_at:
            rows.append((job.ranks_joined_at + JOIN_SPARES_NS, "settle", ""))
        if job.waits_for_nodes():
            rows.append((job.submitted_at + max(JOIN_NS, job.stall_ns), "join", ""))
    if job.mode == "opening" and job.store_asked_at:
        rows.append((job.store_asked_at + STORE_NS, "start-store", ""))
    if job.start_fault is not None:
        rows.append((job.start_fault[0] + SECOND, "settle", ""))
    if job.mode == "starting" and job.attempt is None:
        if job.attach_since is not None:
            rows.append((job.attach_since + job.build_ns, "attach", ""))
        elif not job.start_warned and not all(w.attached for _, w in job.owning()):
            rows.append((job.ranks_started_at + job.build_ns, "slow-start", ""))
    return rows


def _attempt_timers(job: Job, attempt: Attempt) -> list[Timer]:
    rows: list[Timer] = []
    if attempt.committed_at is not None:
        owners = job.spec.world - sum(worker.done for worker in job.watched_owners())
        late = attempt.swaps.left - sum(
            worker.done and attempt.swaps.lacks(worker.rank) for worker in job.watched_owners()
        )
        return _late_rows(job, attempt, "swap", attempt.swaps, late < owners)
    if attempt.no_checkpoint and attempt.checkpoint_failed_at:
        rows.append((attempt.checkpoint_failed_at + job.build_ns, "checkpoint", ""))
    if attempt.incident.give_up:
        rows.append((attempt.incident.give_up_at + job.build_ns, "give-up", ""))
    elif attempt.retry_at is not None:
        rows.append((attempt.retry_at, "retry", ""))
    elif attempt.store is None and attempt.store_asked_at:
        if job.nodes[attempt.store_node].state == "connected":  # else it is asked again later
            rows.append((attempt.store_asked_at + STORE_NS, "store", ""))
    elif attempt.staged_at and not attempt.solo and not _all_asked_staged(job, attempt):
        rows.append((attempt.staged_at + job.build_ns, "stage", ""))
    if attempt.kind == "unplanned":
        rows += _member_timers(job, attempt)
    if attempt.kind == "planned" and attempt.holding and attempt.tick is None:
        rows.append((attempt.hold_at + max(job.build_ns, 4 * job.stall_ns), "hold", ""))
    for worker in newcomers_of(job, attempt):
        if not worker.usable:
            continue
        if not worker.arrived:
            rows.append((worker.assigned_at + job.build_ns, "newcomer", worker.id))
        elif worker.ready is None and worker.positioned_at is not None:
            rows.append((worker.positioned_at + job.build_ns, "newcomer", worker.id))
        elif worker.ready is not None and not has_copied(worker, attempt):
            rows += _since(job, worker, "copy", attempt, job.build_ns, "newcomer")
    return rows


def _member_timers(job: Job, attempt: Attempt) -> list[Timer]:
    what, tally = ("abort", attempt.reports) if attempt.reports.left else ("decide", attempt.holds)
    return _late_rows(job, attempt, what, tally, tally.left < len(attempt.members))


def _late_rows(
    job: Job, attempt: Attempt, what: str, tally: Tally, somebody_answered: bool
) -> list[Timer]:
    """Whoever was asked alone has a row of its own. All others were asked at the same time, so one
    row is enough; it is there as long as one of them is late."""
    reply_ns = _reply_ns(job, somebody_answered)
    rows: list[Timer] = []
    if tally.left:
        for worker in aside(job, attempt):
            if tally.lacks(worker.rank) and not (attempt.committed and worker.done):
                rows += _since(job, worker, what, attempt, reply_ns, "member")
    told = attempt.told.get(what)
    if told is not None and next(_late_together(job, attempt, tally), None) is not None:
        rows.append((told.at + reply_ns, "members", ""))
    return rows


def _late_together(job: Job, attempt: Attempt, tally: Tally) -> Iterator[Worker]:
    for rank in tally.missing():
        worker = job.workers[job.owners[rank]]
        if not worker.ordinary or worker.id in attempt.alone:
            continue
        if job.nodes[worker.node].state == "connected":
            yield worker


def _reply_ns(job: Job, somebody_answered: bool) -> int:
    """If nobody answers, all streams may be dead and not known to be, or the one agent behind which
    all of them are is stopped. Fencing all of them would lose what they hold, and training stands
    anyway: so they are given much more time."""
    return job.reply_ns if somebody_answered else job.reply_ns + ALL_SILENT_NS


def _all_asked_staged(job: Job, attempt: Attempt) -> bool:
    """True as well if nobody of those who are missing could be asked."""
    missing = (job.workers[job.owners[rank]] for rank in attempt.stages.missing())
    joining = (w for w in newcomers_of(job, attempt) if w.staged != attempt.generation)
    late = chain(missing, joining)
    return all(job.asked_at(w, "stage", attempt.generation) is None for w in late)


def _since(job: Job, worker: Worker, what: str, attempt: Attempt, ns: int, row: str) -> list[Timer]:
    asked_at = job.asked_at(worker, what, attempt.generation)
    if asked_at is None or not worker.usable:
        return []
    if job.nodes[worker.node].state != "connected":
        return []  # it is asked again when its agent is back, or lost with its node
    return [(asked_at + ns, row, worker.id)]


def fire(job: Job, out: Out) -> None:
    """Carry out what is due. One row may make the next ones pointless: look anew each time."""
    for _ in range(1000 + 4 * len(job.workers)):
        due = [row for row in timers(job) if row[0] <= out.now and row[1] != "settle"]
        if not due:
            return
        _, what, subject = min(due)
        _fire_one(job, out, what, subject)
        if job.ended is not None:
            return
    raise AssertionError("timers of a job do not come to rest")


def _fire_one(job: Job, out: Out, what: str, subject: str) -> None:
    attempt = job.attempt
    if what == "node":
        give_up_node(job, out, subject, "did not come back within the stall timeout")
    elif what == "fenced":
        lose_node(job, out, subject, "did not come back, and must have ended its ranks")
    elif what in ("kill", "leave", "park", "rehearse", "member", "newcomer"):
        _fire_worker(job, out, what, job.workers[subject])
    elif what == "join":
        absent = [node.name for node in job.nodes.values() if node.state == "absent"]
        for name in absent:
            lose_node(job, out, name, "never joined")
    elif what == "breaker":
        job.preempted = [one for one in job.preempted if one[0] + breaker.WINDOW_NS > out.now]
        retry_deferred(job, out)
    elif what == "stop":
        stopping.late(job, out)
    elif what == "divergence":
        divergence.late(job, out)
    elif what == "balance":
        balance.look(job, out)
    elif what == "rejoin":
        job.rejoin_until = None
    elif what == "stalls":
        job.judge_at = None
    elif what == "spare":
        provision.late(job, out)
    elif what == "yield":
        priorities.grace_is_over(job, out, subject)
    elif what == "ask-again":
        job.capacity.again_at = 0
    elif what == "start-store":
        store_failed(job, out, f"{job.store_node} did not open the store in time")
    elif what == "attach":
        attach_is_late(job, out)
    elif what == "slow-start":
        start_is_slow(job, out)
    elif attempt is not None:
        if what == "members":
            _fire_members(job, out, attempt)
        elif what == "store":
            stage_failed(job, out, attempt, f"{attempt.store_node} did not open the store in time")
        elif what == "retry":
            retry_stage(job, out, attempt)
        elif what == "stage":
            stage_failed(job, out, attempt, "not all ranks had their new groups in time")
        elif what == "hold":
            fail_move(job, out, attempt, "not all ranks came to hold in time")
        elif what == "checkpoint":
            attempt.checkpoint_failed_at = 0
            for worker in members(job, attempt):
                worker.asked.pop("checkpoint", None)  # whoever has not written is asked again
        elif what == "give-up":
            end_job(job, out, "failed", EXIT_GAVE_UP, attempt.incident.give_up)


def _fire_worker(job: Job, out: Out, what: str, worker: Worker) -> None:
    if what == "kill":
        worker.killed_at = out.now
        out.send(worker.node, KillWorker(worker=worker.id))
    elif what == "leave":
        out.kill(worker)
    elif what == "park":
        warn(job, out, f"spare {worker.id} in {worker.place} never asked for its rank")
        worker.role = "unwanted"
        job.nodes[worker.node].crashes[worker.slot] = (
            job.nodes[worker.node].crashes.get(worker.slot, 0) + 1
        )
        out.kill(worker)
    elif what == "rehearse":
        understudies.late(job, out, worker)
    elif what == "newcomer":
        newcomer_failed(job, out, worker, f"{worker.id} was not ready in time")
    else:
        _fence_late(job, out, worker)


def _fire_members(job: Job, out: Out, attempt: Attempt) -> None:
    if attempt.committed:
        tally = attempt.swaps
    else:
        tally = attempt.reports if attempt.reports.left else attempt.holds
    for worker in list(_late_together(job, attempt, tally)):
        _fence_late(job, out, worker)


def _fence_late(job: Job, out: Out, worker: Worker) -> None:
    late = f"rank {worker.rank} ({worker.id}) did not answer in time and was fenced"
    job.causes[worker.rank] = ("hang", late)
    out.kill(worker)
