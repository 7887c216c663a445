"""Periodic checkpoints: when one is taken, and when it is complete.

Theory of operation. When one is due, a single rank is told to raise a word in its next fence. All
ranks hear the word in the same fence, so they take their parts at the same boundary without any
other message, and write them beside training. A part is its rank's own business: nobody waits for
anybody, no process group is used, and no fault can stop more than the part of the rank it hits.

    due --Snapshot to one rank--> all take their parts --Saved from each--> Seal to one rank
        --Sealed--> on record

Only what is on record counts. One that is not complete is worth nothing: an attempt drops it (a
rank that dies, or that learns of its step by COMMIT and not by the fence, never takes its part),
and so does a rank whose disk is full. The next one is asked for with a larger number, and what the
old one left on disk is removed by those who wrote it, or by whoever seals the next.
"""

from __future__ import annotations

from keepstep.core.facts import SECOND, Worker
from keepstep.core.incidents import warn
from keepstep.core.ranks import Tally
from keepstep.core.saves import Complete, Saving
from keepstep.core.state import Job, Out
from keepstep.model.commands import Seal, Snapshot
from keepstep.model.messages import Saved, SaveFailed, Sealed
from keepstep.model.records import CheckpointSealed

AGAIN_NS = 60 * SECOND  # after one that failed


def advance(job: Job, out: Out) -> None:
    """Nothing else is going on."""
    saves = job.saves
    if not job.spec.checkpoints or job.mode != "running" or job.somebody_done():
        return
    if saves.now is not None:
        if saves.now.parts.left == 0:
            _seal(job, out, saves.now)
        if not saves.now.late and out.now >= saves.now.asked_at + saves.interval_ns:
            saves.now.late = True
            saves.put_off += 1
            waited_s = (out.now - saves.now.asked_at) // SECOND
            warn(
                job,
                out,
                f"a checkpoint is still being written after {waited_s} s, the next one is put off: "
                f"{saves.now.parts.left} of {job.spec.world} parts are missing",
            )
    elif saves.due_at is None:
        saves.due_at = out.now + saves.interval_ns
    elif out.now >= saves.due_at:
        _ask(job, out)


def deadline(job: Job) -> int | None:
    """When `advance` has something to do that no event tells of."""
    saves = job.saves
    busy = job.attempt is not None or job.replayed or job.mode != "running"
    if not job.spec.checkpoints or busy or job.somebody_done():
        return None
    if saves.now is None:
        return saves.due_at
    return saves.now.asked_at + saves.interval_ns if not saves.now.late else None


def _listener(job: Job) -> Worker | None:
    found = (w for w in job.rank_owners() if w.ordinary and job.nodes[w.node].state == "connected")
    return next(found, None)


def _ask(job: Job, out: Out) -> None:
    saves, worker = job.saves, _listener(job)
    if worker is None:
        saves.due_at = out.now + SECOND
        return
    # Larger than any that an orchestrator before a restart has used.
    saves.number = max(saves.number + 1, out.now)
    saves.due_at = None
    saves.now = Saving(
        number=saves.number, asked_at=out.now, worker=worker.id, parts=Tally(job.spec.world)
    )
    out.tell(worker, Snapshot(generation=job.generation, number=saves.number))


def _seal(job: Job, out: Out, saving: Saving) -> None:
    sealer = job.workers.get(saving.sealer)
    if sealer is not None and sealer.usable:
        return
    worker = _listener(job)
    if worker is None or saving.tick is None:
        return
    saving.sealer = worker.id
    before = job.saves.newest.path if job.saves.newest is not None else job.spec.resume
    keep = [before] if before else []
    seal = Seal(number=saving.number, tick=saving.tick, world=job.spec.world, keep=keep)
    out.tell(worker, seal)


def said(job: Job, out: Out, worker: Worker, message: Saved | SaveFailed | Sealed) -> None:
    saving = job.saves.now
    if saving is None or message.number != saving.number:
        return  # of one that was given up
    if isinstance(message, SaveFailed):
        warn(job, out, f"rank {worker.rank} could not write its checkpoint: {message.error}")
        drop(job, out.now + min(job.saves.interval_ns, AGAIN_NS))
    elif isinstance(message, Saved):
        if saving.tick not in (None, message.tick):
            warn(job, out, f"parts of ticks {saving.tick} and {message.tick} make no checkpoint")
            drop(job, out.now)
            return
        saving.tick, saving.version = message.tick, message.version
        while saving.back:
            _ask_again(job, out, saving, saving.back.pop(0))
        saving.snapshot_ns = max(saving.snapshot_ns, message.snapshot_ns)
        saving.write_ns = max(saving.write_ns, message.write_ns)
        saving.parts.note(worker.rank)
    elif saving.tick is not None and saving.parts.left == 0:
        _sealed(job, out, saving, saving.tick, message.path)


def _sealed(job: Job, out: Out, saving: Saving, tick: int, path: str) -> None:
    complete = Complete(path=path, tick=tick, version=saving.version, at=out.now)
    job.saves.sealed(complete, saving.snapshot_ns, saving.write_ns)
    out.record(
        CheckpointSealed(
            job=job.id,
            at_ns=out.now,
            path=path,
            tick=tick,
            version=saving.version,
            snapshot_ns=saving.snapshot_ns,
            write_ns=saving.write_ns,
        )
    )
    drop(job, max(out.now, saving.asked_at + job.saves.interval_ns))


def drop(job: Job, next_at: int) -> None:
    job.saves.now, job.saves.due_at = None, next_at


def interrupted(job: Job, now: int) -> None:
    """An attempt begins. What is complete but for its seal stays; anything else would wait for a
    part that may never come, and is asked for again when the attempt is over."""
    saving = job.saves.now
    if saving is not None and saving.parts.left:
        drop(job, now)


def agent_joined(job: Job, out: Out, name: str) -> None:
    """What was told or said may be lost with the stream. Whoever has said it says it again."""
    saving = job.saves.now
    if saving is None:
        return
    if any(worker.id == saving.sealer for worker in job.owners_on(name)):
        saving.sealer = ""
    if saving.tick is None:
        saving.back.append(name)  # whether there is a part to be spoken of is not known yet
    _ask_again(job, out, saving, name)


def _ask_again(job: Job, out: Out, saving: Saving, name: str) -> None:
    if job.attempt is not None:
        return
    command = Snapshot(generation=job.generation, number=saving.number)
    for worker in job.owners_on(name):
        due = worker.id == saving.worker or saving.tick is not None
        if due and worker.usable and saving.parts.lacks(worker.rank):
            out.tell(worker, command)
