"""The phases of an attempt, as a table of gates: how ranks get from one generation to the next.

Theory of operation. An attempt has a fixed set of members (ranks with a living owner) and a set
of moving ranks that newcomers take over. Whoever else dies, answers wrongly or not at all ends
the attempt, never the incident: the next attempt starts with the next generation, and whatever
still speaks of the old one is ignored. Newcomers that are good keep their process and what they
have built.

Phases and their gates stand in `PHASES` below, those after COMMIT in rewire.py. The first gate that
is shut tells the phase. In RETIRE old stores and side state are dropped and spares refilled.

Within a phase everything that can be asked for is asked at once (rows, in this order):

    command     to                       as soon as                           answered by
    Abort       members, newcomers       at once (unplanned)                  Report (members)
    OpenStore   an agent not hit         at once                              StoreOpened
    Assign      a parked spare           a moving rank has no newcomer        Arrived
    Decide      members                  all have reported, tick is on record Held
    Stage       members, newcomers       store open, newcomers there, decided Staged
    Position    newcomers                arrived and tick known               Ready
    Hold        members                  planned: all ready and staged        Held
    Copy        newcomers                ready, all members hold              Copied
    Checkpoint  members                  all hold and no spare can come       Checkpointed
    Swap        everyone                 Committed is on record               Swapped, Resumed
    Leave       leavers                  all have resumed                     WorkerExited

Before Committed everything can be undone; after it, only forward: a fault then is the next
attempt's, in which the newcomers are ranks like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from keepstep.core.facts import Attempt, Kind, Worker
from keepstep.core.state import Job, Out


def mark(attempt: Attempt, out: Out, phase: str) -> None:
    attempt.phase = phase
    attempt.incident.timeline.mark(phase, out.now)


def members(job: Job, attempt: Attempt) -> list[Worker]:
    owners = map(job.owners.__getitem__, attempt.members)
    return list(map(job.workers.__getitem__, owners))


def newcomers(job: Job, attempt: Attempt) -> list[Worker]:
    return [job.workers[worker] for _, worker in sorted(attempt.newcomers.items())]


# ------------------------------------------------------------------ gates


def has_reported(worker: Worker, attempt: Attempt) -> bool:
    return worker.report is not None and worker.report.generation == attempt.generation


def has_held(worker: Worker, attempt: Attempt) -> bool:
    held = worker.held
    if held is None or held.generation != attempt.generation:
        return False
    return attempt.kind == "planned" or held.tick == attempt.tick


def has_copied(worker: Worker, attempt: Attempt) -> bool:
    return worker.copied is not None and worker.copied.generation == attempt.generation


def all_filled(job: Job, attempt: Attempt) -> bool:
    """Every moving rank has a newcomer."""
    return all(rank in attempt.newcomers for rank in attempt.moving)


def all_ready(job: Job, attempt: Attempt) -> bool:
    """Every newcomer has found its position and warmed up."""
    return all_filled(job, attempt) and all(w.ready is not None for w in newcomers(job, attempt))


def all_held(job: Job, attempt: Attempt) -> bool:
    """Every member holds at the tick that was decided (planned: at one and the same tick)."""
    return attempt.tick is not None and attempt.holds.left == 0


def all_staged(job: Job, attempt: Attempt) -> bool:
    """Everybody who stays or joins has built the connections of the new generation."""
    if attempt.solo:
        return True
    joined = all(w.staged == attempt.generation for w in newcomers(job, attempt))
    return all_filled(job, attempt) and joined and attempt.stages.left == 0


def all_copied(job: Job, attempt: Attempt) -> bool:
    """Every newcomer has the state of that tick, with equal digests on both ends."""
    return all_filled(job, attempt) and all(has_copied(w, attempt) for w in newcomers(job, attempt))


def all_fenced(job: Job, attempt: Attempt) -> bool:
    """Never two owners: a victim's process is known to be gone before its rank lives again."""
    if attempt.kind == "planned":
        return True
    owners = (job.owner(rank) for rank in attempt.moving)
    return not any(worker.alive for worker in owners if worker is not None)


Gate = Callable[[Job, Attempt], bool]
PHASES: dict[Kind | Literal["transparent"], tuple[tuple[str, tuple[Gate, ...]], ...]] = {
    "unplanned": (
        ("RESERVE", (all_filled,)),
        ("HOLD", (all_held, all_ready)),
        ("COPY", (all_copied, all_staged, all_fenced)),
    ),
    "planned": (
        ("RESERVE", (all_ready, all_staged)),
        ("HOLD", (all_held,)),
        ("COPY", (all_copied,)),
    ),
    "transparent": (  # planned, in a job whose ranks move as images
        ("RESERVE", (all_ready,)),
        ("HOLD", (all_held,)),
        ("COPY", (all_copied, all_staged)),
    ),
    "resume": (
        ("RESERVE", (all_filled,)),
        ("HOLD", (all_ready,)),
        ("COPY", (all_copied, all_staged)),
    ),
}


def phase_now(job: Job, attempt: Attempt) -> str:
    transparent = job.transparent and attempt.kind == "planned"
    for phase, gates in PHASES["transparent" if transparent else attempt.kind]:
        if not all(gate(job, attempt) for gate in gates):
            return phase
    return "COMMIT"
