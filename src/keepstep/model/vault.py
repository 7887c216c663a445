"""What a rank and the vault of an agent say to each other, on the port of the blob server.

    VaultOpen      -> VaultOpened, then any of
      VaultPuts      and as many raw bytes as its sizes say; not answered
      VaultSync    -> VaultSynced: all that was sent before it is stored
    VaultFetch     -> VaultFetched, then the raw bytes of everything it lists, in that order
                      or, of a parity, VaultParity and the bytes of its cells
    VaultForget    -> VaultForgotten

The first message tells what a connection is for. Each of them may be answered with VaultRefused,
which ends the connection. A put that is refused is not answered either: what follows is read and
thrown away until the next VaultSync, because a connection that is closed with bytes unread takes
the words of the refusal with it.

A *unit* is a parameter with its optimizer state. Its *base* of version j are its tensors after j
steps; its gradient of version s is what step s applies, and leads from version s to s + 1.

A large unit comes in *slices*, over several connections: each has its share of every tensor and
gradient, and is a unit of its own but in this, that all of them begin with bases of one version.

With a `group` it is not the state of one rank that is kept but the parity of several: see
keepstep.core.agent.parity.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal

import msgspec

from keepstep.model.messages import Message

SLICES = 1 << 20  # slice n of unit u is number u + n * SLICES

Kind = Literal["base", "grad", "absent", "note"]
Reason = Literal["token", "fenced", "layout", "memory", "digest", "lacks"]


class VaultOpen(Message, frozen=True):
    """`rank` begins to write. Of several writers the one with the greatest (generation, serial)
    counts, and the others are refused from then on."""

    token: str
    rank: int
    generation: int
    serial: int  # counts the connections of one process
    layout: bytes  # digest of what the units are; what is stored under another one is of no use
    units: list[int]
    reserve: int  # bytes that may be held at once, what is on its way included
    fresh: bool = False  # throw away what is stored
    version: int | None = None  # of the rank: later bases are of steps that never came to pass
    own: bool = False  # of a rank of this very agent: of no use when the rank has moved away
    group: list[int] = []  # all ranks whose parity is kept here, this one among them


class VaultPut(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one unit: a base's tensors, a gradient, nothing (absent) or a note."""

    kind: Kind
    version: int
    unit: int = 0
    sizes: list[int] = []
    digests: list[bytes] = []  # xxh3_128


class VaultPuts(Message, frozen=True):
    """Of many units. Raw bytes follow: all tensors of the first, all of the second, and so on."""

    kind: Kind
    version: int
    units: list[int]
    sizes: list[list[int]]  # of each
    digests: list[bytes] = []  # of all tensors, one after the other

    def each(self) -> Iterator[VaultPut]:
        """ValueError: it makes no sense."""
        digests = iter(self.digests)
        for unit, sizes in zip(self.units, self.sizes, strict=True):
            some = list(islice(digests, len(sizes)))
            yield VaultPut(
                kind=self.kind, version=self.version, unit=unit, sizes=sizes, digests=some
            )
        if next(digests, None) is not None:
            raise ValueError("more digests than tensors")


class VaultSync(Message, frozen=True):
    """The rank stands at the fence of step `version`, so all others have passed that of the step
    before the last one: nobody will ask for anything older than version - 1."""

    version: int


class VaultFetch(Message, frozen=True):
    """What is needed to bring all units of `rank` to `version`."""

    token: str
    rank: int
    version: int
    base: int = -1  # version that all bases must have; -1: what suits best
    parity: bool = False  # what the parity of its group has of it


class VaultForget(Message, frozen=True):
    """Free what is held of `rank`, unless a later generation has written it."""

    token: str
    rank: int
    generation: int
    parity: bool = False  # the parity of its group


VaultRequest = VaultOpen | VaultPuts | VaultSync | VaultFetch | VaultForget


class VaultOpened(Message, frozen=True):
    """The memory is reserved."""

    reaches: int  # the newest version that all units can be brought to; -1: a base is missing
    held: int  # bytes


class VaultSynced(Message, frozen=True):
    """All that was sent before is stored."""

    version: int


class VaultUnit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    unit: int
    version: int  # of the base
    sizes: list[int]
    digests: list[bytes]
    log: list[tuple[int, int, bytes]]  # version, bytes, digest; no digest: the gradient is absent


class VaultFetched(Message, frozen=True):
    """Of every unit its base and its gradients, then the notes."""

    layout: bytes
    units: list[VaultUnit]
    notes: list[tuple[int, int, bytes]]  # version, bytes, digest


class ParityPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one put of a rank has added to a cell, behind what its puts before have."""

    unit: int
    sizes: list[int]  # none: the gradient is absent
    digests: list[bytes]


class ParityCell(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    kind: Kind  # base, grad or note
    version: int
    size: int
    parts: dict[int, list[ParityPart]]  # rank -> its bytes, in their order


class VaultParity(Message, frozen=True):
    """One base of the rank and what leads from there on, each XORed with that of other ranks."""

    layout: bytes
    bases: list[int]  # versions of all bases that would do, this one first
    cells: list[ParityCell]


class VaultForgotten(Message, frozen=True):
    """Nothing of the rank is held any more."""


class VaultRefused(Message, frozen=True):
    """It was not done, and why."""

    reason: Reason
    error: str
    hint: str = ""


VaultReply = VaultOpened | VaultSynced | VaultFetched | VaultParity | VaultForgotten | VaultRefused
