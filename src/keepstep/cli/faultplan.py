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

from keepstep.cli.rehearsal import RunTrace

FIRST_STEP = 2  # before it buckets and optimizer state are not settled
STEPS_KILLED = 3
STEPS_MOVED = 6


class FaultLine(msgspec.Struct, frozen=True, kw_only=True):
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


class FaultPlan(NamedTuple):
    runs: list[list[FaultLine]]
    left_out: list[str]  # with the reason


def shape(trace: RunTrace) -> Shape:
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


class _Places(NamedTuple):
    """Versions at which a fault may happen."""

    anywhere: tuple[int, ...]
    ends: tuple[int, ...]  # in the last step of an epoch
    sections: tuple[int, ...]


def _places(found: Shape) -> _Places:
    return _Places(
        tuple(range(FIRST_STEP, found.steps - 1)),
        tuple(v for v in found.ends if FIRST_STEP <= v < found.steps - 1),
        tuple(v for v in found.sections if v >= FIRST_STEP),
    )


def wishes(found: Shape, world: int) -> list[Wish]:
    """All that there is to try, in the order of importance."""
    places = _places(found)
    first, last = 0, world - 1
    both = (first, last) if world > 1 else (first,)
    asked = [
        Wish(f"kill {where}", "kill", rank, point, places.anywhere)
        for point, where in _IN_A_STEP.items()
        for rank in both
    ]
    asked += [Wish("planned move", "migrate", rank, "", places.anywhere) for rank in both]
    if places.sections:
        asked += [
            Wish("kill in a section", "kill", rank, "in_section", places.sections) for rank in both
        ]
    if places.ends:
        after = tuple(v + 1 for v in places.ends)
        before = tuple(max(v - 1, FIRST_STEP) for v in places.ends)
        asked += [
            Wish("kill after an epoch's last step", "kill", last, "after_step", places.ends),
            Wish("kill in an epoch's first step", "kill", first, "before_forward", after),
            Wish("planned move over an epoch's end", "migrate", first, "", before),
        ]
    return asked


def quick_wishes(found: Shape, world: int) -> list[Wish]:
    """The most telling ones, few enough for one run."""
    places = _places(found)
    first, last = 0, world - 1
    asked = []
    # A section at the end of an epoch is both at once.
    at_end = tuple(v for v in places.sections if v - 1 in places.ends)
    if places.sections:
        at = at_end or places.sections
        asked.append(Wish("kill in a section", "kill", first, "in_section", at))
    if places.ends and not at_end:
        asked.append(
            Wish("kill after an epoch's last step", "kill", last, "after_step", places.ends)
        )
    else:
        asked.append(Wish("kill between two steps", "kill", last, "after_step", places.anywhere))
    asked += [
        Wish(f"kill {_IN_A_STEP['in_backward']}", "kill", last, "in_backward", places.anywhere),
        Wish(f"kill {_IN_A_STEP['in_optimizer']}", "kill", first, "in_optimizer", places.anywhere),
        Wish("planned move", "migrate", last, "", places.anywhere),
    ]
    return asked


def plan(found: Shape, world: int, *, quick: bool) -> FaultPlan:
    """Each wish in the first run that has room for it; what is bound to few steps, or takes many,
    goes first."""
    left_out = []
    if not _places(found).ends:
        left_out.append(f"an epoch's end: none within {found.steps} steps (--steps takes more)")
    if not _places(found).sections:
        left_out.append("sections: none was called")
    asked = quick_wishes(found, world) if quick else wishes(found, world)
    runs: list[list[FaultLine]] = []
    numbered = list(enumerate(asked, 1))
    numbered.sort(key=lambda one: (len(one[1].steps), one[1].action != "migrate"))
    for number, wish in numbered:
        if not _place(runs, number, wish, found.steps, runs_max=1 if quick else len(asked)):
            why = f"{found.steps} steps are too few" + (" for one run" if quick else "")
            left_out.append(f"{wish.what} of rank {wish.rank}: {why} (--steps)")
    return FaultPlan([sorted(run, key=lambda one: one.step) for run in runs], left_out)


def _place(
    runs: list[list[FaultLine]], number: int, wish: Wish, steps: int, *, runs_max: int
) -> bool:
    own = STEPS_MOVED if wish.action == "migrate" else STEPS_KILLED
    for run in [*runs, []][:runs_max]:
        for step in wish.steps:
            # Steps must be left for it; a section may be the last thing that the script does.
            if step + own > steps and wish.point != "in_section":
                break
            if all(step + own <= one.step or one.step + one.steps <= step for one in run):
                fault = FaultLine(
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
