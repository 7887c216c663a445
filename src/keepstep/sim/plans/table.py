"""The table of single faults: phase x kind of migration x actor x kind of fault.

A cell's name is its four words (`HOLD/planned/source/crash`). `impossible` says which cells cannot
exist, and why; every other cell must be seen to strike in its phase.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.times import MS, SECOND

PHASES = ("RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME", "RETIRE")
MIGRATIONS = ("planned", "pre-emptive", "unplanned")
ACTORS = ("victim", "source", "spare", "bystander", "agent", "orchestrator", "link", "partition")
KINDS = ("crash", "hang", "pause", "slow-down")
PROCESSES = ("victim", "source", "spare", "bystander")

Cell = tuple[str, str, str, str]


def impossible(cell: Cell) -> str:
    """Why there is no such cell; empty if there is."""
    phase, migration, actor, _ = cell
    if actor == "victim" and migration == "unplanned":
        return "the victim of an unplanned migration is dead before it begins"
    if actor == "victim" and phase in ("RESUME", "RETIRE"):
        return "the victim has left when all ranks have swapped"
    return ""


def cells() -> Iterator[Cell]:
    for phase in PHASES:
        for migration in MIGRATIONS:
            for actor in ACTORS:
                for kind in KINDS:
                    if not impossible((phase, migration, actor, kind)):
                        yield (phase, migration, actor, kind)


def length_ns(actor: str, kind: str, draw: random.Random) -> int:
    """How long it lasts: pauses stay below the limits at which anybody counts as lost, hangs of
    what is not a process go beyond them."""
    if kind == "pause":
        return draw.randrange(SECOND, 4 * SECOND)
    if kind == "slow-down":
        return draw.randrange(3 * SECOND, 10 * SECOND)
    if kind == "hang" and actor not in PROCESSES:
        return draw.randrange(15 * SECOND, 60 * SECOND)
    if kind == "crash" and actor == "orchestrator":
        return draw.randrange(SECOND // 2, 15 * SECOND)
    if kind == "crash" and actor == "partition":
        return draw.randrange(15 * SECOND, 70 * SECOND)
    if kind in ("stalled", "all-stalled"):
        return draw.randrange(SECOND // 10, 5 * SECOND)
    return draw.randrange(15 * SECOND, 60 * SECOND) if kind == "blackout" else 0


def plan_cell(cell: Cell, seed: int) -> Plan:
    phase, migration, actor, kind = cell
    draw = random.Random(f"{'/'.join(cell)} {seed}")
    delay = 0 if draw.random() < 0.5 or phase == "COMMIT" else draw.randrange(300 * MS)
    if phase in ("REWIRE", "RETIRE"):
        delay //= 100  # they are over in a moment
    fault = Fault(actor, kind, phase=phase, delay_ns=delay, length_ns=length_ns(actor, kind, draw))
    return Plan(
        seed=seed,
        migration=migration,
        # With a parked spare an unplanned migration is through with RESERVE at once.
        spares=0 if phase == "RESERVE" and migration == "unplanned" else 2,
        notice_ns=draw.choice((SECOND // 2, 2 * SECOND, 8 * SECOND)),
        faults=(fault,),
    )
