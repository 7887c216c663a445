"""Connections whose peer has not shown who it is: how many there may be, and which one goes.

Theory of operation
-------------------
Whoever reaches a port may connect and say nothing, or say it one byte at a time. Each such
connection costs a descriptor, so their number is bounded. A bound that turns *newcomers* away is a
gift to strangers: they fill it and nobody else gets in. Here the newcomer always gets in, and the
connection that goes is the oldest one of the address that has most. A peer of ours shows its token
in the first milliseconds; a stranger that wants it gone has to open as many connections as the
bound allows in that time, and from an address of its own even that is of no use.

The bound is a share of what the process may open, so the rest is there for peers that are known,
whatever strangers do. Known peers leave this count, and no stranger can end their connections.
"""

from __future__ import annotations

import errno
import resource
from typing import Generic, TypeVar

K = TypeVar("K")

PENDING_MAX = 4096
PENDING_MIN = 16
SHOWN_S_MAX = 10.0  # from the connection to the token, however the bytes trickle in

# accept() has no descriptor or no memory for one more; the connection stays in the queue.
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def share_of_descriptors(part: int, most: int = PENDING_MAX) -> int:
    """One `part`-th of what this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return max(PENDING_MIN, min(most, soft // part))


class Pending(Generic[K]):
    """Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._addresses: dict[str, dict[K, None]] = {}  # both in the order of coming
        self._address_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def __contains__(self, key: K) -> bool:
        return key in self._address_of

    def enter(self, key: K, address: str) -> K | None:
        """Returns who has to go for it."""
        gone = self.pick() if len(self) >= self.limit else None
        self._address_of[key] = address
        self._addresses.setdefault(address, {})[key] = None
        return gone

    def leave(self, key: K) -> bool:
        """It is known now, or has ended; False: it was not here."""
        address = self._address_of.pop(key, None)
        if address is None:
            return False
        same = self._addresses[address]
        del same[key]
        if not same:
            del self._addresses[address]
        return True

    def pick(self) -> K | None:
        """Takes out the one that goes first."""
        if not self._addresses:
            return None
        most = max(self._addresses, key=lambda address: len(self._addresses[address]))
        key = next(iter(self._addresses[most]))
        self.leave(key)
        return key

    def pick_half(self) -> list[K]:
        """Those that go when the process has no descriptor left."""
        return [key for _ in range((len(self) + 1) // 2) if (key := self.pick()) is not None]
