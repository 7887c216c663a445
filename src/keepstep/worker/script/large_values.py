"""What is known about large tensors and arrays while they live, by their identity.

The graph lets go of what the script may want to free, and finds it again at the next entry. So what
is known about such a block (blocks.py) is kept here, and nothing here keeps the block alive.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from keepstep.worker.device import cuda

RECORDS_MAX: Final = 4096
UNCOUNTED: Final = -1  # the version of what has no counter


class HostCopy:
    """A tensor on its way to the host."""

    def __init__(self, target: torch.Tensor, version: int) -> None:
        self.version = version
        self._copy = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
        self._copy.copy_(target.detach(), non_blocking=True)
        self._event = cuda.new_event()
        cuda.record(self._event)

    def read(self) -> torch.Tensor:
        self._event.synchronize()
        return self._copy


class BlockRecord:
    def __init__(self, target: Any) -> None:
        self.ref = weakref.ref(target)
        self.version = version_of(target)
        self.content = b""
        self.changing = False
        self.uncounted = self.version == UNCOUNTED  # its counter does not tell
        self.raw: Any = None
        self.fetched: HostCopy | None = None


class BlockRecords:
    def __init__(self) -> None:
        self._known: dict[int, BlockRecord] = {}

    def of(self, target: Any) -> BlockRecord | None:
        """None: there are too many."""
        found = self._known.get(id(target))
        if found is not None and found.ref() is target:
            return found
        if len(self._known) >= RECORDS_MAX:
            self._known = {n: one for n, one in self._known.items() if one.ref() is not None}
            if len(self._known) >= RECORDS_MAX:
                return None
        found = self._known[id(target)] = BlockRecord(target)
        return found


def version_of(target: Any) -> int:
    if isinstance(target, torch.Tensor) and not target.is_inference():
        return target._version
    return UNCOUNTED
