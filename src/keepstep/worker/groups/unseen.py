"""Collectives behind the fence that do not come through the front door of torch.distributed.

Functional collectives (DTensor, compiled graphs) and those that C++ starts call the backends
directly. Every backend counts its collectives, so the sum of the counts where the fence was passed
and where the function returned says whether there was one in between, whoever began it. Counting
takes microseconds a group; it is done in a site's first steps, and now and then later.
"""

from __future__ import annotations

from keepstep.errors import UsageError
from keepstep.worker.groups import groups

FIRST_STEPS = 4
CHECK_EVERY = 64


class Unseen:
    """`passed` right behind the fence, `refuse` at the end of the function."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._before: dict[str, int] | None = None

    def passed(self, site: str) -> None:
        calls = self._calls.get(site, 0)
        self._calls[site] = calls + 1
        looked_at = calls < FIRST_STEPS or calls % CHECK_EVERY == 0
        self._before = groups.collectives_made() if looked_at and not groups.solo() else None

    def refuse(self, site: str) -> None:
        before, self._before = self._before, None
        if before is None or groups.solo():
            return
        for name, count in groups.collectives_made().items():
            if count > before.get(name, count):
                raise UsageError(
                    f"collective of group {name} (or several: {count - before[name]}) after the "
                    f"first optimizer update inside step {site!r}",
                    hint="a step is committed when its first update begins: move the collective "
                    "into a @ks.section, or split the step in two (DTensors redistribute by "
                    "collectives: give gradients and optimizer state the placements of their "
                    "parameters)",
                )

    def forget(self) -> None:
        self._before = None
