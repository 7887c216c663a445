"""A rank whose witness finds, in a fence, that numbers differ.

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
        self.go("diverged")
        finding = self.world.finding
        word = m.Diverged(
            generation=self.generation,
            tick=self.tick,
            version=self.version,
            agreed=self.version if finding.agreed else -1,
            witness=finding.witness,
            site="train_step",
            table=self._table(),
            number=self.findings,
        )

        def answered(accepted: bool) -> None:
            if not accepted:
                self._interrupted("comm", True)
                return
            self.world.checker.went_on(self)
            self.go("fence")
            go_on()

        self.run(self.recovering.diverged(word, joining=False), answered)

    def _interrupted(self, kind: str, in_fence: bool) -> None:
        raise NotImplementedError

    def _table(self) -> dict[str, str]:
        last = self.rank == self.world.plan.ranks - 1
        values = {"one": "other" if last else "same", "all": f"value {self.rank}"}
        shown = self.world.finding.shown
        return {"all|weight": values[shown], "all|bias": "same"} if shown else {}
