"""What a worker says, as facts. Nothing is decided here except who is to be believed.

Answers count only from whom they were asked and for the current attempt's generation; a newcomer's
Arrived and Ready count for any generation, because its process outlives attempts.
"""

from __future__ import annotations

from keepstep.core import checkpoints, divergence, start, stopping, understudies
from keepstep.core.facts import Attempt, Worker
from keepstep.core.fallback import fall_back, further_back
from keepstep.core.faults import newcomer_failed, repeat_attempt, stage_failed
from keepstep.core.incidents import end_job, warn
from keepstep.core.migration import (
    EXIT_GAVE_UP,
    NEWCOMERS_MAX,
    checkpoint_path,
    group_trouble,
    sources_for,
)
from keepstep.core.phases import has_held, has_reported
from keepstep.core.planned import fail_move
from keepstep.core.processes import (
    inject_fired,
    look_again,
    replace_buddy,
    replace_parity,
    signal_now,
)
from keepstep.core.state import Job, Out
from keepstep.core.triage import headline
from keepstep.model.messages import (
    Arrived,
    Attached,
    BuddyLost,
    Checkpointed,
    CheckpointFailed,
    Copied,
    CopyFailed,
    Diverged,
    Done,
    Failure,
    Held,
    InjectFired,
    Parked,
    Ready,
    Report,
    Restored,
    Resumed,
    Saved,
    SaveFailed,
    Sealed,
    Staged,
    StageFailed,
    Swapped,
    WorkerMessage,
)
from keepstep.model.records import CheckpointWritten

CAUSES = {
    "comm": "connection",
    "device": "device-error",
    "user": "user",
    "usage": "user",
    "undone": "undone-move",
}


def worker_said(job: Job, out: Out, worker: Worker, said: WorkerMessage) -> None:
    if isinstance(said, Parked):
        if worker.role in ("spare", "understudy"):
            worker.parked = said.where or "unknown"
    elif worker.role == "understudy":
        understudies.said(job, out, worker, said)
    elif isinstance(said, Diverged):
        if worker.role in ("rank", "newcomer"):
            divergence.said(job, out, worker, said)
    elif isinstance(said, InjectFired):
        _inject_fired(job, out, worker, said)
    elif isinstance(said, BuddyLost):
        if said.parity is not None:
            if worker.role == "rank":
                replace_parity(job, out, worker, said.parity, said.error)
        elif worker.role in ("rank", "newcomer"):
            replace_buddy(job, out, worker, said.error)
    elif worker.role == "newcomer":
        _newcomer_said(job, out, worker, said)
    elif worker.role == "rank":
        _rank_said(job, out, worker, said)


def _newcomer_said(job: Job, out: Out, worker: Worker, said: WorkerMessage) -> None:
    attempt = job.attempt
    if attempt is None or attempt.newcomers.get(worker.rank) != worker.id:
        return
    timeline = attempt.incident.timeline
    if isinstance(said, Attached):
        _newcomer_attached(job, out, worker, said)
    elif isinstance(said, Arrived):
        worker.arrived = True
    elif isinstance(said, Ready):
        if worker.ready is None:
            worker.arrived, worker.ready = True, said
            if worker.presumed < 0:  # an understudy did all that before it was needed
                timeline.ready(said)
    elif isinstance(said, Failure):
        why = f"{worker.id} raised {headline(said.error)} while joining"
        _tell(job, out, attempt, why)
        newcomer_failed(job, out, worker, why)
    elif isinstance(said, Staged | StageFailed):
        _staged(job, out, attempt, worker, said)
    elif isinstance(said, Restored):
        timeline.restored(said)
    elif isinstance(said, Copied):
        if said.generation == attempt.generation and attempt.tick is not None:
            worker.copied = said
            timeline.copied(said)
    elif isinstance(said, CopyFailed) and (
        said.generation == attempt.generation or not worker.arrived
    ):
        _copy_failed(job, out, attempt, worker, said)


def _newcomer_attached(job: Job, out: Out, worker: Worker, said: Attached) -> None:
    worker.attached, worker.redundant, worker.groups = True, said.redundant, said.members
    trouble = group_trouble(job, worker.rank, said.members)
    if trouble:
        newcomer_failed(job, out, worker, trouble)


def _rank_said(job: Job, out: Out, worker: Worker, said: WorkerMessage) -> None:
    attempt = job.attempt
    if isinstance(said, Attached):
        _attached(job, out, worker, said)
    elif isinstance(said, Failure):
        _failure(job, out, worker, said)
    elif isinstance(said, Done):
        if not worker.done:
            job.passed_at = out.now
        worker.done = True
        worker.version = max(worker.version, said.version)
        worker.tick = max(worker.tick, said.tick)
    elif isinstance(said, Swapped):
        if attempt is not None and attempt.committed and said.generation == attempt.generation:
            worker.swapped, worker.swapped_at = said.generation, out.now
            attempt.swaps.note(worker.rank)
            attempt.incident.timeline.swapped(said)
    elif isinstance(said, Resumed):
        _resumed(job, out, worker, said)
    elif isinstance(said, Saved | SaveFailed | Sealed):
        checkpoints.said(job, out, worker, said)
    elif attempt is None and isinstance(said, Held | Checkpointed | CheckpointFailed):
        stopping.said(job, out, worker, said)
    elif attempt is not None and not attempt.committed and worker.rank in attempt.members:
        _member_said(job, out, attempt, worker, said)


def _member_said(job: Job, out: Out, attempt: Attempt, worker: Worker, said: WorkerMessage) -> None:
    if isinstance(said, Report):
        if said.generation != attempt.generation or attempt.kind != "unplanned":
            return
        worker.version = max(worker.version, said.version)
        if said.done:
            worker.done, worker.tick = True, said.tick
        if not has_reported(worker, attempt):
            worker.report = said
            attempt.reported.append(worker.rank)
        attempt.reports.note(worker.rank)
        if said.error_kind == "device":
            why = f"rank {worker.rank} raised {headline(said.error)}"
            job.causes[worker.rank] = ("device-error", why)
            out.kill(worker)
    elif isinstance(said, Held):
        if said.generation == attempt.generation:
            worker.held = said
            worker.version = max(worker.version, said.version)
            if said.done:
                worker.done, worker.tick = True, said.tick
            if has_held(worker, attempt):
                if attempt.kind == "planned" and attempt.holds.lacks(worker.rank):
                    job.passed_at = out.now
                attempt.held_ticks.add(said.tick)
                attempt.held_version = max(attempt.held_version, said.version)
            attempt.holds.note(worker.rank, has_held(worker, attempt))
    elif isinstance(said, Staged | StageFailed):
        _staged(job, out, attempt, worker, said)
    elif isinstance(said, CopyFailed) and attempt.kind == "planned":
        if said.generation == attempt.generation:  # there is no boundary that it can hold at
            why = f"rank {worker.rank} cannot hold: {said.error}"
            fail_move(job, out, attempt, why, again=said.reason != "refused")
    elif isinstance(said, Checkpointed):
        _checkpointed(job, out, attempt, worker, said)
    elif isinstance(said, CheckpointFailed) and said.generation == attempt.generation:
        _checkpoint_failed(job, out, attempt, worker, said)


def _staged(
    job: Job, out: Out, attempt: Attempt, worker: Worker, said: Staged | StageFailed
) -> None:
    if said.generation != attempt.generation or attempt.committed:
        return
    if isinstance(said, StageFailed):
        if worker.staged != attempt.generation and not attempt.solo:
            stage_failed(job, out, attempt, f"{worker.id}: {said.error}")
        return
    if job.asked_at(worker, "stage", attempt.generation) is not None:
        worker.staged = said.generation
        if worker.role == "rank":
            attempt.stages.note(worker.rank)


def _attached(job: Job, out: Out, worker: Worker, said: Attached) -> None:
    worker.attached, worker.redundant = True, said.redundant
    worker.groups, worker.kept_bytes = said.members, said.kept_bytes
    for warning in said.warnings:
        warn(job, out, f"rank {worker.rank}: {warning}")


def _failure(job: Job, out: Out, worker: Worker, said: Failure) -> None:
    worker.version = max(worker.version, said.version)
    if job.mode == "starting":
        start.rank_failed(job, out, worker, said)
        return
    if said.generation < job.generation:
        return
    last = headline(said.error)
    why = f"rank {worker.rank} raised {last}" if said.error_kind != "undone" else last
    if said.error_kind == "device":
        job.causes[worker.rank] = ("device-error", why)
        out.kill(worker)
    else:
        worker.raised = said.error if said.error_kind in ("user", "usage") else ""
        worker.refused = said.error_kind == "usage"
        job.alarm = (CAUSES[said.error_kind], why)


def _resumed(job: Job, out: Out, worker: Worker, said: Resumed) -> None:
    if said.generation != job.generation:
        return
    worker.version = max(worker.version, said.version)
    worker.tick = max(worker.tick, said.tick)
    job.progress_at = out.now
    job.nodes[worker.node].crashes.pop(worker.slot, None)
    attempt = job.attempt
    if attempt is None or not attempt.committed or worker.resumed is said:
        return
    if worker.resumed is not None and worker.resumed.generation == said.generation:
        return
    worker.resumed = said
    worker.swapped = max(worker.swapped, said.generation)
    attempt.swaps.note(worker.rank)
    attempt.resumes.note(worker.rank)
    attempt.incident.timeline.resumed(said, worker.swapped_at, out.now)


LOST = ("side-state-missing", "shards-missing")  # everybody who might have it was asked


def _copy_failed(job: Job, out: Out, attempt: Attempt, worker: Worker, said: CopyFailed) -> None:
    why = f"{worker.id} could not copy ({said.reason}): {said.error}"
    late = said.reason == "position" and worker.presumed >= 0
    if not late:
        _tell(
            job, out, attempt, f"{worker.id} could not copy ({said.reason}): {headline(said.error)}"
        )
    if late:
        # Built too long ago for this script; a spare has no such trouble. That is counted as a
        # failure below, and is none.
        attempt.incident.no_understudies = True
        attempt.incident.failures -= 1
    if attempt.kind == "planned":
        fail_move(job, out, attempt, why, again=said.reason != "refused")
    elif said.reason == "source-lost":
        _other_source(job, out, attempt, worker, said, why)
    elif said.reason == "side-state-unreachable":
        look_again(worker)  # the newcomer has waited; ask those who are there now
    elif said.reason in LOST and attempt.kind == "unplanned" and _away(job):
        worker.lacks_holders = True  # asked again when a node comes back or is known to be dead
    elif said.reason in LOST and attempt.kind == "unplanned":
        # It is lost only if asking again, after whatever was on its way to us about an agent's
        # end, gives the same answer.
        worker.missing += 1
        if worker.missing == 1:
            look_again(worker)
            return
        fall_back(
            job,
            out,
            f"state of rank {worker.rank} at tick {attempt.tick} is lost with its node and its "
            f"buddy: {said.error}",
        )
    elif said.reason in (*LOST, "checkpoint") and further_back(job, out, worker.rank, said.error):
        pass  # this one, and all others, were ended
    elif said.reason in LOST and job.saves.older is None:
        reason = f"{job.resume} cannot be resumed from: {said.error}"
        end_job(job, out, "failed", EXIT_GAVE_UP, reason)
    else:
        newcomer_failed(job, out, worker, why)


def _tell(job: Job, out: Out, attempt: Attempt, why: str) -> None:
    """Beside the job and in the incident, once: else a newcomer that fails looks like a hang."""
    if why not in attempt.incident.reason:
        warn(job, out, why)
        if attempt.kind != "planned":  # fail_move says it there
            attempt.incident.also(why)


def _away(job: Job) -> bool:
    return any(node.state in ("disconnected", "unreachable") for node in job.nodes.values())


def _other_source(
    job: Job, out: Out, attempt: Attempt, worker: Worker, said: CopyFailed, why: str
) -> None:
    """If the source died, its exit is on the way and widens the incident; meanwhile try the
    others. With none left, start over: the connection may have been the trouble."""
    worker.asked.pop("copy", None)
    worker.bad_sources.add(said.source)
    if sources_for(job, attempt, worker):
        return
    worker.bad_sources.clear()
    incident = attempt.incident
    incident.failures += 1
    if incident.failures >= NEWCOMERS_MAX:
        newcomer_failed(job, out, worker, why)
    else:
        repeat_attempt(job, out, attempt, why)


def _checkpointed(job: Job, out: Out, attempt: Attempt, worker: Worker, said: Checkpointed) -> None:
    if said.generation != attempt.generation or attempt.tick is None:
        return
    worker.checkpointed = said.generation
    owners = [job.workers[job.owners[rank]] for rank in attempt.members]
    if job.checkpoint_tick == attempt.tick:
        return
    if all(owner.checkpointed == attempt.generation for owner in owners):
        job.checkpoint = checkpoint_path(job, attempt.tick)
        job.checkpoint_tick = attempt.tick
        attempt.no_checkpoint = ""
        out.record(
            CheckpointWritten(job=job.id, at_ns=out.now, path=job.checkpoint, tick=attempt.tick)
        )


def _checkpoint_failed(
    job: Job, out: Out, attempt: Attempt, worker: Worker, said: CheckpointFailed
) -> None:
    """The state in memory is not touched by it: hold on, and try again after a while."""
    attempt.checkpoint_failed_at = out.now
    why = f"rank {worker.rank} could not write its part of {said.path}: {said.error}"
    if attempt.no_checkpoint == why:
        return
    attempt.no_checkpoint = why
    warn(job, out, why)
    attempt.incident.also(why)


def _inject_fired(job: Job, out: Out, worker: Worker, said: InjectFired) -> None:
    inject = job.injects.get(said.inject)
    detail = f"{worker.id} (rank {worker.rank}) at {said.point} of step {said.version}"
    inject_fired(job, out, said.inject, detail)
    if inject is None:
        return
    if inject.action == "kill":
        worker.injected = True
    if inject.action == "stop" and inject.seconds > 0:
        # The worker can stop itself but not wake up again.
        signal_now(out, worker, "stop", inject.seconds)
