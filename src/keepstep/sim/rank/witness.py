"""A rank whose witness finds, in a fence, that numbers differ.

The numbers of a world never differ (rules/trained.py compares every commit), so the finding is a
pretence of all ranks at the tick that the world names. Each process that comes to the fence of that
tick finds it anew, also in a retry: what was accepted once must be let pass again.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.model import messages as m
from keepstep.sim.rank.shards import SimKeeper


class Doubter(SimKeeper):
    findings = 0  # of its witness

    def doubt(self, tick: int, go_on: Callable[[], None]) -> None:
        """`go_on` at once, or when somebody has said Proceed."""
        if self.world.ills.differs_at != tick:
            go_on()
            return
        self.findings += 1
        self.go("diverged")
        finding = self.world.ills.finding
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
            self.world.rules.went_on(self.id)
            self.go("fence")
            go_on()

        self.run(self.recovering.diverged(word, joining=False), answered)

    def _interrupted(self, kind: str, in_fence: bool) -> None:
        raise NotImplementedError

    def _table(self) -> dict[str, str]:
        last = self.rank == self.world.plan.ranks - 1
        values = {"one": "other" if last else "same", "all": f"value {self.rank}"}
        shown = self.world.ills.finding.shown
        return {"all|weight": values[shown], "all|bias": "same"} if shown else {}
