"""Which worlds there are: cells of the table, named stories, and worlds drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from keepstep.core.placement import parity_trouble
from keepstep.errors import UsageError
from keepstep.sim.plans.stories import STORIES
from keepstep.sim.plans.stories_machines import MACHINES, SEVERAL
from keepstep.sim.plans.stories_rare import APART, FALL_BACK
from keepstep.sim.plans.table import (
    ACTORS,
    KINDS,
    MIGRATIONS,
    PHASES,
    cells,
    impossible,
    length_ns,
    plan_cell,
)
from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.times import MS, SECOND


def draw_plan(seed: int) -> tuple[str, Plan]:
    """The world of a seed: half of them from the table or a story, half thrown together. Every
    fourth has understudies beside its spares, every eighth shards and parities; in one of two
    hundred there are several jobs."""
    if random.Random(f"several {seed}").random() < 0.005:
        return find_plan(seed, SEVERAL)
    if random.Random(f"fallback {seed}").random() < 0.03:
        name, plan = find_plan(seed, FALL_BACK)
    else:
        name, plan = _draw(seed)
        understudies = random.Random(f"understudies {seed}").choice((0, 0, 0, 0, 0, 0, 2, 3))
        plan = replace(plan, understudies=plan.understudies or understudies)
    parity = random.Random(f"parity {seed}").random() < 0.125 and not parity_trouble(plan.spec())
    return name, replace(plan, parity=plan.parity or parity)


def _draw(seed: int) -> tuple[str, Plan]:
    draw = random.Random(f"world {seed}")
    dice = draw.random()
    if dice < 0.3:
        cell = draw.choice(list(cells()))
        return "/".join(cell), plan_cell(cell, seed)
    if dice < 0.55:
        name = draw.choice(sorted(STORIES.keys() - APART))
        return name, STORIES[name](seed, draw)
    ranks, per_node = draw.choice(((8, 2), (8, 2), (8, 4), (12, 3), (12, 2), (16, 4)))
    migration = draw.choice(("", "planned", "pre-emptive", "unplanned", "unplanned"))
    count = draw.choice((1, 1, 2, 2, 3))
    faults = tuple(_any_fault(draw, migration) for _ in range(count))
    late = tuple(draw.choice((0, 0, draw.randrange(20 * SECOND))) for _ in range(3))
    plan = Plan(
        seed=seed,
        ranks=ranks,
        per_node=per_node,
        spare_nodes=draw.choice((1, 2, 2, 3)),
        spares=draw.choice((1, 2, 2, 3)),
        step_ns=draw.choice((200, 300, 400)) * MS,
        copy_ns=draw.choice((100, 500, 3000)) * MS,
        jitter_ns=draw.choice((800_000, 800_000, 30 * MS, 100 * MS)),
        notice_ns=draw.choice((SECOND // 2, 2 * SECOND, 8 * SECOND)),
        late_nodes=late,
        migration=migration,
        faults=faults,
    )
    return "random", plan


OTHER_FAULTS = (
    ("detector", "stalled"),
    ("detector", "taint"),
    ("operator", "migrate"),
    ("operator", "drain"),
    ("orchestrator", "record"),
    ("orchestrator", "effect"),
    ("orchestrator", "full"),
    ("orchestrator", "blackout"),
    ("bystander", "device"),
    ("provider", "refuse"),
)


def _any_fault(draw: random.Random, migration: str) -> Fault:
    if draw.random() < 0.75:
        actor, kind = draw.choice(ACTORS), draw.choice(KINDS)
    else:
        actor, kind = draw.choice(OTHER_FAULTS)
    if actor == "victim" and migration in ("", "unplanned"):
        actor = "bystander"  # there is no victim that could be hit
    length = length_ns(actor, kind, draw)
    if draw.random() < 0.5:
        phase = draw.choice(PHASES)
        delay = draw.choice((0, draw.randrange(SECOND)))
        return Fault(actor, kind, phase=phase, delay_ns=delay, length_ns=length)
    return Fault(actor, kind, at_ns=draw.randrange(10 * SECOND), length_ns=length)


def find_plan(seed: int, name: str) -> tuple[str, Plan]:
    """`name` is a cell, a story, or empty for whatever the seed gives."""
    if not name:
        return draw_plan(seed)
    stories = {**STORIES, **MACHINES}
    if name in stories:
        return name, stories[name](seed, random.Random(f"{name} {seed}"))
    parts = name.split("/")
    valid = (
        len(parts) == 4
        and parts[0] in PHASES
        and parts[1] in MIGRATIONS
        and parts[2] in ACTORS
        and parts[3] in KINDS
    )
    if not valid:
        raise UsageError(
            f"there is no scenario {name!r}",
            hint="PHASE/MIGRATION/ACTOR/FAULT, e.g. HOLD/planned/source/crash, or one of "
            + ", ".join(sorted(stories)),
        )
    cell = (parts[0], parts[1], parts[2], parts[3])
    why = impossible(cell)
    if why:
        raise UsageError(f"{name} cannot happen", hint=why)
    return name, plan_cell(cell, seed)
