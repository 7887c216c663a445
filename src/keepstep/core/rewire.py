"""From COMMIT on: the new placement holds, and everybody is brought to it. Only forward.

`commit` writes the record; the swaps go out in the same outcome, after it is durable. A rank
whose script has ended needs no groups and is left alone. See phases.py for the whole table.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.incidents import close_incident
from keepstep.core.phases import has_held, mark, members, newcomers
from keepstep.core.processes import arm, close_stores, give_buddy
from keepstep.core.state import Attempt, Incident, Job, Out, Worker
from keepstep.core.timeline import source_sentence
from keepstep.model.messages import Forget, Leave, Swap
from keepstep.model.records import Committed


def commit(job: Job, out: Out, attempt: Attempt) -> None:
    incident = attempt.incident
    moves = [move_sentence(job, attempt, rank) for rank in sorted(attempt.newcomers)]
    copies = [w.copied for w in newcomers(job, attempt) if w.copied is not None]
    version = max((w.held.version for w in members(job, attempt) if w.held), default=-1)
    for rank, worker_id in sorted(attempt.newcomers.items()):
        old = job.owner(rank)
        if old is not None and old.usable:
            old.role = "leaver"
            old.leave_at = out.now
        job.owners[rank] = worker_id
        newcomer = job.workers[worker_id]
        newcomer.role = "rank"
        newcomer.attached = True
        newcomer.redundant = old.redundant if old is not None else newcomer.redundant
        newcomer.version = max(newcomer.version, version)
        job.causes.pop(rank, None)
    attempt.committed_at = out.now
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
            placement=dict(sorted(job.owners.items())),
            moves=moves,
        )
    )
    for worker in job.seated():
        worker.stalled = None
        worker.resync = False
        if worker.id in attempt.newcomers.values():
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
    generation = attempt.generation
    for worker in job.seated():
        if worker.done or not worker.usable or worker.swapped >= generation:
            continue
        if worker.swap is None or worker.swap.generation != generation:
            buddy = give_buddy(job, out, worker)
            worker.swap = Swap(generation=generation, buddy=buddy, solo=attempt.solo)
        out.ask(worker, "swap", generation, worker.swap)
    owners = [worker for worker in job.seated() if not worker.done]
    for phase, gate in FORWARD:
        if not gate(owners, generation):
            mark(attempt, out, phase)
            return
    mark(attempt, out, "RETIRE")
    retire(job, out, attempt)


def has_resumed(worker: Worker, generation: int) -> bool:
    return worker.resumed is not None and worker.resumed.generation == generation


def all_swapped(owners: list[Worker], generation: int) -> bool:
    """Every rank whose script goes on uses the new connections."""
    return all(worker.swapped >= generation for worker in owners)


def all_resumed(owners: list[Worker], generation: int) -> bool:
    """Every such rank has passed its first fence of the new generation."""
    return all(has_resumed(worker, generation) for worker in owners)


# The phases behind COMMIT and their gates; those in front of it stand in phases.py.
FORWARD: tuple[tuple[str, Callable[[list[Worker], int], bool]], ...] = (
    ("REWIRE", all_swapped),
    ("RESUME", all_resumed),
)


def retire(job: Job, out: Out, attempt: Attempt) -> None:
    job.attempt = None
    # Not before: a process that ends and gives its memory back takes time from the first step.
    for worker in job.workers.values():
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
    close_incident(job, out, incident, "RESOLVED", f"{what}, no step lost")
    job.reason = ""


def forget_dead(job: Job, out: Out) -> None:
    """Nobody needs the dead workers' side state any more."""
    for node in job.nodes.values():
        gone = [
            w.id for w in job.there.get(node.name, ()) if not w.alive and "forget" not in w.asked
        ]
        if gone and out.send(node.name, Forget(workers=gone)):
            for worker in gone:
                job.workers[worker].asked["forget"] = (job.generation, out.now)


def settle_committed_planned(job: Job, out: Out, incident: Incident, by: str) -> None:
    """A planned move that was committed when a fault came: its part is done."""
    if incident.pending:
        incident.also(f"interrupted by {by}")
        return
    close_incident(job, out, incident, "RESOLVED", f"moved; before the first step {by} followed")


def held_ticks(job: Job, attempt: Attempt) -> set[int]:
    return {
        w.held.tick for w in members(job, attempt) if w.held is not None and has_held(w, attempt)
    }
