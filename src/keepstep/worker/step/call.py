"""The step or section that runs: how far it has come. The parts of a transaction share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import KeepstepError
from keepstep.worker.state.objects import Undo
from keepstep.worker.step.finish import Finishing

BARE = " (bare)"  # ends the site of a section without code of the user's: one collective


@dataclass
class Call:
    """A table of facts, set anew at the begin of every transaction: hence so many."""

    site: str = ""  # empty: none runs
    step: bool = False
    function: Any = None
    undo: Undo | None = None
    fenced: bool = False  # the side state is published, or about to be
    in_fence: bool = False
    passed: bool = False
    updating: bool = False  # an update follows the fence
    about_to: str = ""  # the optimizer whose update does
    updated: list[str] = field(default_factory=list)  # optimizers, in the order of their updates
    hold: int = -1  # what the ranks agreed on in the fence
    snapshot: int = -1
    backwards: int = 0
    forwarded: bool = False  # a DDP model's forward for a backward, in this transaction
    result: bytes | None = None  # as published in the fence
    variables: bytes = b""  # of the script, as published in the fence
    refused: KeepstepError | None = None

    warming: bool = False  # a newcomer's warm-up: no fence, no rules
    finishing: Finishing | None = None  # a newcomer makes the rest of a step

    @property
    def bare(self) -> bool:
        return self.site.endswith(BARE)

    def begin(self, site: str, step: bool) -> None:
        self.site, self.step = site, step
        self.fenced = self.passed = self.in_fence = False
        self.refused = None
        self.hold = self.snapshot = -1
        self.backwards = 0
        self.forwarded = False
        self.about_to = ""
        self.updated = []
