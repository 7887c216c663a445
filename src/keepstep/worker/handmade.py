"""Updates made by hand: parameters that change inside a step in which no optimizer ran.

The fence of a step stands in front of its first optimizer update. `p.data -= lr * p.grad` has no
such place: a retry would make it again, on top of itself, and neither version counters nor hooks of
torch see a change through `p.data`. So in the first steps of a site the parameters' bytes are
compared, at its entry and where the function has returned without an update.

Of a large tensor a sample is read: an update changes nearly all of it. Later, one call in
CHECK_EVERY is looked at, of a site that has returned without an update before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch.nn.parameter import is_lazy

from keepstep.errors import UsageError
from keepstep.worker import shards
from keepstep.worker.digest import digest
from keepstep.worker.state import dense, memory

FIRST_STEPS = 3
CHECK_EVERY = 256
WHOLE_BYTES_MAX = 1 << 20
SAMPLE_BYTES = 4 << 10
SAMPLES = 16


def fingerprint(tensor: torch.Tensor) -> bytes:
    """Equal for equal content. Of more than WHOLE_BYTES_MAX, SAMPLES pieces are read."""
    part = shards.local(tensor).detach()
    if part.nbytes > WHOLE_BYTES_MAX and dense(part):
        flat = part.as_strided((part.numel(),), (1,), part.storage_offset())
        length = SAMPLE_BYTES // part.element_size()
        stride = (flat.numel() - length) // (SAMPLES - 1)
        starts = [i * stride for i in range(SAMPLES)]
        part = torch.cat([flat[start : start + length] for start in starts])
    if part.device.type == "cpu" and dense(part):
        return xxhash.xxh3_128_digest(memory(part))
    return digest(part)


class HandmadeUpdates:
    """`entry` at the begin of a step, `refuse` where its function returned without an update."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._calls: dict[str, int] = {}
        self._without_update: set[str] = set()  # sites that returned without one
        self._before: dict[str, bytes] | None = None

    def entry(self, site: str) -> None:
        calls = self._calls.get(site, 0)
        self._calls[site] = calls + 1
        later = site in self._without_update and calls % CHECK_EVERY == 0
        looked_at = calls < FIRST_STEPS or later
        self._before = self._fingerprints(self._parameters) if looked_at else None

    def refuse(self, site: str) -> None:
        before, self._before = self._before, None
        self._without_update.add(site)
        if not before:
            return
        after = self._fingerprints(before)
        changed = [name for name, seen in before.items() if after.get(name, seen) != seen]
        if changed:
            raise UsageError(
                f"{len(changed)} parameters (first: {changed[0]}) were changed inside step "
                f"{site!r} although no optimizer made an update",
                hint="make updates with an optimizer that is attached: a step is committed in "
                "front of its first optimizer.step()",
            )

    def _fingerprints(self, names: Iterable[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            parameter = self._parameters[name]
            if parameter.requires_grad and not is_lazy(parameter):
                found[name] = fingerprint(parameter)
        return found
