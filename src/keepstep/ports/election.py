"""Who leads, as everybody can see it.

An election beside the store's lease (ports.ledger): it chooses who is to take the lease, and shows
it where people look. It is no fence: who believes to lead and does not is stopped by the store.
"""

from __future__ import annotations

from typing import Protocol


class Election(Protocol):
    def campaign(self) -> str:
        """Lead if nobody does, or go on leading; to be repeated often. Returns who leads instead,
        "" if we do. Raises TransientError if nobody can be asked, UsageError if we never can."""

    def resign(self) -> None:
        """So that nobody has to wait; a courtesy, never raises."""
