"""From COMMIT on: the new placement holds, and everybody is brought to it. Only forward.

`commit` writes the record; the swaps go out in the same outcome, after it is durable. A rank
whose script has ended needs no groups and is left alone. See phases.py for the whole table.
"""

from __future__ import annotations

from keepstep.core import parities
from keepstep.core.facts import Attempt, Incident, Worker
from keepstep.core.incidents import close_incident
from keepstep.core.phases import Gate, mark, newcomers
from keepstep.core.processes import arm, close_stores, give_buddy, swap_of
from keepstep.core.ranks import Tally
from keepstep.core.state import Job, Out
from keepstep.core.timeline import source_sentence
from keepstep.core.together import aside, tell_ranks
from keepstep.model.agent_messages import Forget
from keepstep.model.commands import Leave, Swap
from keepstep.model.records import Committed


def commit(job: Job, out: Out, attempt: Attempt) -> None:
    incident = attempt.incident
    moves = [move_sentence(job, attempt, rank) for rank in sorted(attempt.newcomers)]
    copies = [w.copied for w in newcomers(job, attempt) if w.copied is not None]
    version = attempt.held_version
    for rank, worker_id in sorted(attempt.newcomers.items()):
        old = job.owner(rank)
        if old is not None and old.usable:
            old.role = "leaver"
            old.leave_at = out.now
            if job.transparent:  # stopped, and to be heard of no more
                out.kill(old)
        job.owners[rank] = worker_id
        newcomer = job.workers[worker_id]
        newcomer.role = "rank"
        newcomer.attached = True
        if old is not None:
            newcomer.redundant, newcomer.kept_bytes = old.redundant, old.kept_bytes
        newcomer.version = max(newcomer.version, version)
        job.causes.pop(rank, None)
    attempt.committed_at = out.now
    attempt.rewiring(job.spec.world)
    job.generation = attempt.generation
    job.master = attempt.store or job.master
    incident.generation = attempt.generation
    incident.committed = attempt.generation
    incident.sticky_tick = None
    incident.stage_failures = 0
    incident.moves += moves
    incident.source = source_sentence(copies) or incident.source
    incident.pending = [rank for rank in incident.pending if rank not in attempt.newcomers]
    out.record(
        Committed(
            job=job.id,
            at_ns=out.now,
            incident=incident.id,
            generation=attempt.generation,
            tick=attempt.tick if attempt.tick is not None else 0,
            placement=dict(sorted(attempt.newcomers.items())),
            moves=moves,
        )
    )
    for worker in job.watched_owners():
        worker.stalled = None
        worker.resync = False
    for worker in newcomers(job, attempt):
        arm(job, out, worker, version)
    job.hang_warned = False
    job.alarm = None
    mark(attempt, out, "COMMIT")
    rewire(job, out, attempt)


def move_sentence(job: Job, attempt: Attempt, rank: int) -> str:
    old = job.owner(rank)
    new = job.workers[attempt.newcomers[rank]]
    return f"rank {rank}: {old.place if old is not None else 'checkpoint'} -> {new.place}"


def rewire(job: Job, out: Out, attempt: Attempt) -> None:
    _swap_row(job, out, attempt)
    for phase, gate in FORWARD:
        if not gate(job, attempt):
            mark(attempt, out, phase)
            return
    mark(attempt, out, "RESUME")  # no phase is left out if the last two answers came together
    mark(attempt, out, "RETIRE")
    retire(job, out, attempt)


def _swap_row(job: Job, out: Out, attempt: Attempt) -> None:
    """Whose buddy stays the same is told with all others, whoever gets another one is told so."""
    generation = attempt.generation
    if "swap" not in attempt.told:
        others = _renew_swaps(job, out, attempt)
        all_alike = Swap(generation=generation, buddy=None, solo=attempt.solo, same_buddy=True)
        attempt.told["swap"] = tell_ranks(out, all_alike, others)
        for worker in others.values():
            attempt.alone[worker.id] = worker
    for worker in aside(job, attempt):
        lacks = worker.usable and not worker.done and worker.swapped < generation
        if lacks and job.asked_at(worker, "swap", generation) is None:
            out.ask(worker, "swap", generation, swap_of(job, out, worker))


def _renew_swaps(job: Job, out: Out, attempt: Attempt) -> dict[str, Worker]:
    """What each rank is to be told if it is told alone; whose buddy is another one now."""
    others: dict[str, Worker] = {}
    for name in job.nodes:
        owners = [w for w in job.owners_on(name) if w.usable and not w.done]
        if not owners:
            continue
        before = [worker.buddy for worker in owners]
        buddy = give_buddy(job, out, owners[0])
        for worker, old in zip(owners, before, strict=True):
            kept, worker.buddy = worker.parity, owners[0].buddy
            parity = parities.give(job, worker)
            worker.swap = Swap(
                generation=attempt.generation, buddy=buddy, solo=attempt.solo, parity=parity
            )
            if old != worker.buddy or kept != worker.parity or not worker.buddy_heard:
                others[worker.id] = worker
                worker.buddy_heard = True
    return others


def has_resumed(worker: Worker, generation: int) -> bool:
    return worker.resumed is not None and worker.resumed.generation == generation


def all_swapped(job: Job, attempt: Attempt) -> bool:
    """Every rank whose script goes on uses the new connections."""
    return not _goes_on(job, attempt.swaps)


def all_resumed(job: Job, attempt: Attempt) -> bool:
    """Every such rank has passed its first fence of the new generation."""
    return not _goes_on(job, attempt.resumes)


def _goes_on(job: Job, missing: Tally) -> bool:
    """Somebody is missing whose script has not ended."""
    return any(not job.workers[job.owners[rank]].done for rank in missing.missing())


# The phases behind COMMIT and their gates; those in front of it stand in phases.py.
FORWARD: tuple[tuple[str, Gate], ...] = (
    ("REWIRE", all_swapped),
    ("RESUME", all_resumed),
)


def retire(job: Job, out: Out, attempt: Attempt) -> None:
    job.attempt = None
    # Not before: a process that ends and gives its memory back takes time from the first step.
    for worker in list(job.watched.values()):
        if worker.role == "leaver" and worker.usable:
            out.ask(worker, "leave", attempt.generation, Leave(generation=attempt.generation))
    close_stores(job, out, keep={job.generation})
    forget_dead(job, out)
    incident = attempt.incident
    if incident.pending:
        incident.also(f"moved: {', '.join(incident.moves)}")
        return  # the next wave
    count = len(incident.moves)
    what = f"{count} rank{'s' if count != 1 else ''} moved" if count else "all ranks reconnected"
    lost = f"{incident.steps_lost} steps lost" if incident.fell_back else "no step lost"
    close_incident(job, out, incident, "RESOLVED", f"{what}, {lost}")
    job.reason = ""


def forget_dead(job: Job, out: Out) -> None:
    """Nobody needs the dead workers' side state any more."""
    gone: dict[str, list[str]] = {}  # by node
    for worker in job.watched.values():
        if not worker.alive and "forget" not in worker.asked:
            gone.setdefault(worker.node, []).append(worker.id)
    for name, ids in gone.items():
        if out.send(name, Forget(workers=ids)):
            for worker_id in ids:
                job.workers[worker_id].asked["forget"] = (job.generation, out.now)


def settle_committed_planned(job: Job, out: Out, incident: Incident, by: str) -> None:
    """A planned move that was committed when a fault came: its part is done."""
    if incident.pending:
        incident.also(f"interrupted by {by}")
        return
    close_incident(job, out, incident, "RESOLVED", f"moved; before the first step {by} followed")
