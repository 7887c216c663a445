"""Where records become durable, and who may write them.

A ledger has one writer at a time. The right to write is a *lease*, and every lease has a *token*,
an integer in the store that grows by one whenever the lease is taken. `append` is checked against
the token in the same transaction, so an orchestrator that was stopped, cut off or believed dead
can not write one more record after another has taken over, whatever any clock says. Clocks decide
only how soon somebody may take over, and only the store's own clock is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from keepstep.model.messages import Address
from keepstep.model.records import Record


class Ledger(Protocol):
    def append(self, records: Sequence[Record]) -> None:
        """Returns only when they are durable.

        Raises StoreUnavailable if that is not known: `LedgerStore.load` settles what is there.
        Raises NotActive if the lease is lost: nothing was written."""

    def read(self) -> Iterator[Record]: ...

    def close(self) -> None: ...


class LedgerMember(msgspec.Struct, frozen=True, kw_only=True):
    """One orchestrator process of those that share a ledger."""

    id: str  # chosen by the operator, unique at any time
    instance: str  # of this process; a restart under the same id has another one
    url: str
    stream: Address


class OfficeLease(Protocol):
    @property
    def lease_s(self) -> float | None:
        """How long a lease lives without `renew`; None: as long as its process."""

    def enroll(self, me: LedgerMember) -> str:
        """Become known. Returns the secret that all who share the ledger use as token ("": none
        is kept here). Raises UsageError if the id belongs to another process that is alive."""

    def acquire(self, *, take: bool = True) -> LedgerMember:
        """Take the lease if it is free, or only be seen. Returns whoever has it now, which may be
        somebody else."""

    def renew(self) -> list[LedgerMember]:
        """Go on holding it. Returns all who are enrolled. Raises NotActive if it was taken."""

    def release(self) -> None:
        """Give it back, if it is held, so that nobody has to wait; a courtesy, never raises."""


class LedgerStore(Ledger, OfficeLease, Protocol):
    @property
    def name(self) -> str:
        """For people; no secret is part of it."""

    def load(self) -> list[Record]:
        """Everything, its chain checked. Later appends continue from what was found."""
