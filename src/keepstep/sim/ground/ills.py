"""What ails a world besides its processes and links: places, stores, answers, numbers.

Only faults set these; the parts of the world look here before they do what may fail.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import get_args

from keepstep.model import messages as m


@dataclass(frozen=True, slots=True)
class Finding:
    """What the witness of all ranks finds."""

    witness: m.Witness = "replicas"
    agreed: bool = True  # it is known when all agreed
    shown: str = "one"  # that "one" rank differs, or "all" do, or "": nothing

    @classmethod
    def draw(cls, dice: random.Random) -> Finding:
        witness = dice.choice(get_args(m.Witness))
        return cls(witness, dice.random() < 0.8, dice.choice(("one", "one", "all", "")))


@dataclass(slots=True)
class Ills:
    spawn_failures: int = 0  # of the processes that are started next
    store_failure: str = ""  # of the next store to be opened: "refuse" or "mute"
    echoes: bool = False  # old answers arrive once more in the next attempt
    dragged: dict[str, int] = field(default_factory=dict)  # place -> how much slower a rank is
    were_dragged: set[str] = field(default_factory=set)
    bad_slots: dict[str, int] = field(default_factory=dict)  # place -> how many were started there
    differs_at: int | None = None  # witnesses find a difference in the fence of this tick
    finding: Finding = field(default_factory=Finding)

    def spawn_fails(self) -> bool:
        fails = self.spawn_failures > 0
        self.spawn_failures -= fails
        return fails

    def store_fails(self) -> str:
        failure, self.store_failure = self.store_failure, ""
        return failure

    def drag(self, place: str, times: int) -> None:
        self.dragged[place] = times
        self.were_dragged.add(place)

    def mend_places(self) -> None:
        self.bad_slots.clear()
        self.dragged.clear()
