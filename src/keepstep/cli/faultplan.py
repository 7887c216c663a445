"""Which faults a rehearsal makes, and in which of its runs (pure).

One fault of every kind, at the first and at the last rank: each point of a step, between two steps,
in a section, at the end of an epoch, a planned move. What the script does not have (sections, an
epoch that ends within the rehearsed steps) is named as left out.

Several faults share a run, one after another, because starting a job costs more than a fault. Each
keeps some steps for itself: the job must have taken a step since the last one before the next may
come, and while a planned move is prepared training goes on.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import msgspec

from keepstep.cli.rehearsal import Trace

FIRST_STEP = 2  # before it buckets and optimizer state are not settled
STEPS_KILLED = 3
STEPS_MOVED = 6


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    what: str  # for people
    action: Literal["kill", "migrate"]
    rank: int
    step: int  # version at which it happens
    point: str = ""  # of a kill

    @property
    def steps(self) -> int:
        return STEPS_MOVED if self.action == "migrate" else STEPS_KILLED


class Wish(NamedTuple):
    what: str
    action: Literal["kill", "migrate"]
    rank: int
    point: str
    steps: tuple[int, ...]  # at one of these


class Shape(NamedTuple):
    """What there is to disturb in a script."""

    steps: int
    sections: tuple[int, ...]  # versions at which a section is called
    ends: tuple[int, ...]  # last steps of epochs


class Plan(NamedTuple):
    runs: list[list[Fault]]
    left_out: list[str]  # with the reason


def shape(trace: Trace) -> Shape:
    entries = [line for line in trace.ranks.get(0, []) if line.kind == "entry"]
    steps = [line for line in entries if line.step]
    ends = []
    for line, after in itertools.pairwise(steps):
        another = line.where[:-1] != after.where[:-1]
        if another or (after.where and after.where[-1] < line.where[-1]):
            ends.append(line.version)
    sections = tuple(sorted({line.version for line in entries if not line.step}))
    return Shape(trace.steps(), sections, tuple(ends))


_IN_A_STEP = {
    "before_forward": "at the beginning of a step",
    "in_backward": "in backward",
    "before_fence": "after backward",
    "in_fence": "where ranks agree",
    "in_optimizer": "in the optimizer's update",
    "after_step": "between two steps",
}


def wishes(found: Shape, world: int, *, quick: bool) -> tuple[list[Wish], list[str]]:
    """In the order of their importance, and what cannot be had."""
    first, last = 0, world - 1
    both = [first, last] if world > 1 and not quick else [last]
    anywhere = tuple(range(FIRST_STEP, found.steps - 1))
    ends = tuple(v for v in found.ends if FIRST_STEP <= v < found.steps - 1)
    sections = tuple(v for v in found.sections if v >= FIRST_STEP)
    left_out, asked = [], []
    if not ends:
        left_out.append(f"an epoch's end: none within {found.steps} steps (--steps takes more)")
    if not sections:
        left_out.append("sections: none was called")
    points = ("in_backward", "in_optimizer", "after_step") if quick else tuple(_IN_A_STEP)
    for at, point in enumerate(points):
        if point == "after_step" and quick and ends:
            continue
        for rank in both if not quick else [(first, last)[at % 2]]:
            asked.append(Wish(f"kill {_IN_A_STEP[point]}", "kill", rank, point, anywhere))
    if ends:
        asked.append(Wish("kill after an epoch's last step", "kill", last, "after_step", ends))
        if not quick:
            after = tuple(v + 1 for v in ends)
            asked.append(
                Wish("kill in an epoch's first step", "kill", first, "before_forward", after)
            )
    if sections:
        asked += [
            Wish("kill in a section", "kill", rank, "in_section", sections)
            for rank in (both if not quick else [first])
        ]
    asked += [Wish("planned move", "migrate", rank, "", anywhere) for rank in both]
    if ends and not quick:
        before = tuple(max(v - 1, FIRST_STEP) for v in ends)
        asked.append(Wish("planned move over an epoch's end", "migrate", first, "", before))
    return asked, left_out


def plan(found: Shape, world: int, *, quick: bool) -> Plan:
    """Each wish in the first run that has room for it; what is bound to few steps goes first."""
    asked, left_out = wishes(found, world, quick=quick)
    runs: list[list[Fault]] = []
    numbered = list(enumerate(asked, 1))
    for number, wish in sorted(numbered, key=lambda one: (len(one[1].steps), one[0])):
        if not _place(runs, number, wish, found.steps):
            left_out.append(
                f"{wish.what} of rank {wish.rank}: {found.steps} steps are too few (--steps)"
            )
    return Plan([sorted(run, key=lambda one: one.step) for run in runs], left_out)


def _place(runs: list[list[Fault]], number: int, wish: Wish, steps: int) -> bool:
    own = STEPS_MOVED if wish.action == "migrate" else STEPS_KILLED
    for run in [*runs, []]:
        for step in wish.steps:
            # Steps must be left for it; a section may be the last thing that the script does.
            if step + own > steps and wish.point != "in_section":
                break
            if all(step + own <= one.step or one.step + one.steps <= step for one in run):
                fault = Fault(
                    id=f"fault-{number}",
                    what=wish.what,
                    action=wish.action,
                    rank=wish.rank,
                    step=step,
                    point=wish.point,
                )
                if not run:
                    runs.append(run)
                run.append(fault)
                return True
    return False
