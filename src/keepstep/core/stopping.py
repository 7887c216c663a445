"""An end that was asked for, with a checkpoint of where the job stood.

Theory of operation. Whoever ends a job that writes checkpoints would lose the steps since the last
one, although every rank is alive and well. So all ranks are asked to hold, as for a planned move:
they stop at the same boundary. Each writes its part of a just-in-time checkpoint beside the
periodic ones, and when the last part is there the job ends. `--resume` on the directory of
checkpoints finds it, because it is the newest.

It is bounded: after `Job.build_ns` the job ends with what there is. A fault meanwhile is recovered
from as ever, and the ranks are asked again; a job that cannot hold (no step was made, scripts have
ended, numbers differ between ranks) ends at once.
"""

from __future__ import annotations

from keepstep.core.facts import SECOND, Attempt, Worker
from keepstep.core.incidents import end_job, warn
from keepstep.core.saves import Stopping
from keepstep.core.state import Job, Out
from keepstep.model.commands import Checkpoint, Hold
from keepstep.model.job import Cancel
from keepstep.model.messages import Checkpointed, CheckpointFailed, Held
from keepstep.model.records import CheckpointWritten, StopBegun


def begin(job: Job, out: Out, request: Cancel) -> bool:
    """False: there is nothing to write, or no way to."""
    if job.stopping is not None:
        return True  # asked twice; who cannot wait says so
    able = job.spec.checkpoints and job.mode == "running" and not job.transparent
    if not able or job.divergence is not None or job.somebody_done() or not job.live():
        return False
    job.stopping = Stopping(request.reason, request.exit_code, out.now)
    return True


def deadline(job: Job) -> int | None:
    if job.stopping is None or job.replayed:
        return None
    return job.stopping.since + job.build_ns


def late(job: Job, out: Out) -> None:
    stopping = job.stopping
    assert stopping is not None
    waited_s = (out.now - stopping.since) // SECOND
    _end(job, out, f"no checkpoint could be written within {waited_s} s")


def advance(job: Job, out: Out) -> None:
    """Called while no attempt is under way."""
    stopping = job.stopping
    assert stopping is not None
    if job.somebody_done():
        _end(job, out, "no checkpoint was written: the script has ended on some ranks")
        return
    if stopping.failed:
        _end(job, out, f"no checkpoint was written: {stopping.failed}")
        return
    if stopping.generation < job.generation_max:  # the first time, or after a recovery
        stopping.generation = job.new_generation()
        stopping.held.clear()
        stopping.written.clear()
        out.record(
            StopBegun(
                job=job.id,
                at_ns=out.now,
                generation=stopping.generation,
                reason=stopping.reason,
                exit_code=stopping.exit_code,
            )
        )
    owners = [worker for worker in job.rank_owners() if worker.usable]
    for worker in owners:
        if worker.rank not in stopping.held:
            hold = Hold(generation=stopping.generation)
            out.ask(worker, "stop", stopping.generation, hold)
    if len(stopping.held) == job.spec.world:
        _write(job, out, stopping, owners)


def held_already(job: Job, out: Out, attempt: Attempt) -> None:
    """No spare is left, and the ranks have written their state for that: there is no other wait."""
    tick = attempt.tick
    written = tick is not None and job.checkpoint_tick == tick
    if job.stopping is not None and job.ended is None and attempt.no_spare and written:
        _end(job, out, f"the state of tick {tick} is in {job.checkpoint}")


def _write(job: Job, out: Out, stopping: Stopping, owners: list[Worker]) -> None:
    tick, version = max(stopping.held.values())
    newest = job.saves.newest
    if newest is not None and newest.tick == tick:
        _end(job, out, f"the state of step {newest.version} is in {newest.path}")
        return
    path = f"{job.spec.checkpoints}/checkpoint-{tick}-stop"
    if len(stopping.written) == job.spec.world:
        job.checkpoint, job.checkpoint_tick = path, tick
        out.record(CheckpointWritten(job=job.id, at_ns=out.now, path=path, tick=tick))
        _end(job, out, f"the state of step {version} is in {path}")
        return
    lead = min(worker.rank for worker in owners)
    for worker in owners:
        command = Checkpoint(
            generation=stopping.generation,
            path=path,
            lead=worker.rank == lead,
            tick=tick,
            world=job.spec.world,
        )
        if worker.rank not in stopping.written:
            out.ask(worker, "stop-checkpoint", stopping.generation, command)


def said(
    job: Job, out: Out, worker: Worker, message: Held | Checkpointed | CheckpointFailed
) -> None:
    stopping = job.stopping
    if stopping is None or message.generation != stopping.generation:
        return
    if isinstance(message, Held):
        worker.version = max(worker.version, message.version)
        stopping.held[worker.rank] = (message.tick, message.version)
    elif isinstance(message, Checkpointed):
        stopping.written.add(worker.rank)
    else:
        stopping.failed = f"rank {worker.rank} could not write its part: {message.error}"
        warn(job, out, stopping.failed)


def _end(job: Job, out: Out, what: str) -> None:
    stopping = job.stopping
    assert stopping is not None
    end_job(job, out, "cancelled", stopping.exit_code, f"{stopping.reason}; {what}")


def replayed(job: Job, record: StopBegun) -> None:
    job.generation_max = max(job.generation_max, record.generation)
    job.stopping = Stopping(record.reason, record.exit_code, record.at_ns)
