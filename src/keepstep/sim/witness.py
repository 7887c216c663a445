"""A rank whose witness finds, in a fence, that numbers differ: keepstep.worker.recovery.diverged.

The numbers of a world never differ (check.py compares every commit), so the finding is a pretence
of all ranks at the tick that the world names. Each process that comes to the fence of that tick
finds it anew, also in a retry: what was accepted once must be let pass again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from keepstep.model import messages as m
from keepstep.sim.net import SECOND
from keepstep.sim.shards import Keeper


@dataclass(frozen=True, slots=True)
class Finding:
    witness: m.Witness = "replicas"
    agreed: bool = True  # it is known when all agreed
    shown: str = "one"  # that "one" rank differs, or "all" do, or "": nothing

    @classmethod
    def draw(cls, dice: random.Random) -> Finding:
        witness = dice.choice(get_args(m.Witness))
        return cls(witness, dice.random() < 0.8, dice.choice(("one", "one", "all", "")))


class Doubter(Keeper):
    def doubt(self, tick: int, go_on: Callable[[], None]) -> None:
        """`go_on` at once, or when somebody has said Proceed."""
        if self.world.differs_at != tick:
            go_on()
            return
        self.findings += 1
        self.go_on = go_on
        self.go("diverged")
        self._say_diverged()

    def _say_diverged(self) -> None:
        self.hold, self.asked_ns = True, self.world.now
        self.after(5 * SECOND, self._say_diverged)
        finding = self.world.finding
        self.say(
            m.Diverged(
                generation=self.generation,
                tick=self.tick,
                version=self.version,
                agreed=self.version if finding.agreed else -1,
                witness=finding.witness,
                site="train_step",
                table=self._table(),
                number=self.findings,
            )
        )
        self.pump()

    def _table(self) -> dict[str, str]:
        last = self.rank == self.world.plan.ranks - 1
        values = {"one": "other" if last else "same", "all": f"value {self.rank}"}
        shown = self.world.finding.shown
        return {"all|weight": values[shown], "all|bias": "same"} if shown else {}

    def _pump_diverged(self) -> None:
        while self.mode == "diverged" and self.alive:
            command = self._find((m.Proceed, m.Leave, m.Finish))
            if command is None:
                return
            if not isinstance(command, m.Proceed):
                self.exit(0)
            elif command.number == self.findings:
                self.hold, self.asked_ns = False, 0
                self.world.checker.went_on(self)
                self.go("fence")
                self.go_on()
