"""Stories that are only told if they are named: machines from a scheduler, and several jobs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.times import SECOND

SCHEDULER = "scheduler"
SEVERAL = "several-jobs"
MASS = "mass"  # an actor: two nodes at once, which only worlds of several jobs have


def scheduler_story(seed: int, draw: random.Random) -> Plan:
    """Nodes are lost or drained, there is no spare, and a scheduler is asked for some. Meanwhile
    the orchestrator may be restarted. Some jobs keep a pool, or stay within racks, or lose all of
    their state and go back to a checkpoint."""
    faults = [Fault("agent", "crash", at_ns=draw.randrange(2 * SECOND), length_ns=300 * SECOND)]
    if draw.random() < 0.5:
        at = draw.randrange(30 * SECOND)
        faults.append(Fault("orchestrator", draw.choice(("crash", "effect")), at_ns=at))
    if draw.random() < 0.3:
        faults.append(Fault("agent", "crash", at_ns=draw.randrange(20, 60) * SECOND))
    plan = Plan(
        seed=seed,
        migration=draw.choice(("", "planned")),
        spare_nodes=0,
        spares=0,
        answers=tuple(draw.choices(("give", "refuse", "late", "silent"), k=4)),
        faults=tuple(faults),
    )
    kind = ("", "pool", "racks", "fall-back")[seed % 4]
    if kind == "pool":
        return replace(plan, spare_nodes=1, spares=2, pool=1)
    if kind == "racks":
        return replace(plan, spare_nodes=draw.randrange(2), spares=2, racks=2)
    if kind == "fall-back":
        at = draw.randrange(5, 15) * SECOND
        lost = Fault("everyone", "crash", at_ns=at)
        return replace(plan, migration="", checkpoint_ns=SECOND, faults=(*plan.faults, lost))
    return plan


def several_jobs(seed: int, draw: random.Random) -> Plan:
    """Two or three jobs lose nodes at the same time or one after the other; some machines are free.
    The orchestrator may be restarted meanwhile."""
    together = draw.random() < 0.5
    trade = draw.random() < 0.5  # the first has what others may take, and nothing is free
    plans = []
    for number in range(draw.choice((2, 2, 3))):
        at = 2 * SECOND if together else draw.randrange(40 * SECOND)
        lost = draw.choice((1, 1, 2)) if number else int(not trade)
        wide = draw.random() < 0.5  # four nodes, of which two are lost at once
        crash = Fault(MASS if wide else "agent", "crash", at_ns=at)
        plan = Plan(
            seed=seed,
            job=f"j{number}",
            per_node=2 if wide else 4,
            spare_nodes=draw.choice((0, 0, 1)),
            spares=draw.choice((0, 4)),
            step_ns=SECOND,
            migration="",
            answers=("give",),
            priority=number if trade else draw.choice((0, 0, 1, 2)),
            preempts=trade or draw.random() < 0.7,
            faults=(crash,) * min(lost, 1),
        )
        if lost == 2:
            again = Fault("agent", "crash", at_ns=at + draw.randrange(40, 80) * SECOND)
            plan = replace(plan, faults=(*plan.faults, again))
        plans.append(plan)
    if draw.random() < 0.3:
        kind = draw.choice(("crash", "effect", "record"))
        away = Fault("orchestrator", kind, at_ns=draw.randrange(80 * SECOND), length_ns=SECOND)
        plans[0] = replace(plans[0], faults=(*plans[0].faults, away))
    return replace(
        plans[0], beside=tuple(plans[1:]), free=0 if trade else draw.choice((0, 0, 1, 2))
    )


MACHINES: dict[str, Callable[[int, random.Random], Plan]] = {
    SCHEDULER: scheduler_story,
    SEVERAL: several_jobs,
}
