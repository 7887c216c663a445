"""Whose vault this rank writes to, and the line there.

That is its buddy's, or with a parity (parity.py) the own agent's. When it changes, all bases go to
the new one; the former one is told to forget the rank as soon as the new one has all.
"""

from __future__ import annotations

import contextlib
import threading

from keepstep.errors import KeepstepError
from keepstep.model.messages import Address
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.vault import parity, vault
from keepstep.worker.vault.bases import Bases
from keepstep.worker.vault.inventory import Inventory


class Destination:
    def __init__(
        self, me: RankFacts, inventory: Inventory, bases: Bases, parity: parity.ParityLine | None
    ) -> None:
        self._me = me
        self._inventory, self._bases, self._parity = inventory, bases, parity
        self.line: vault.VaultLine | None = None
        self._former: list[Address] = []  # to forget all when the new one has all

    def address(self, buddy: Address | None) -> Address:
        own = self._me.welcome.blobs
        return own if self._parity is not None else buddy or own

    def connect(self) -> None:
        """Before training begins, so that too little memory is known in time."""
        if self._inventory.units:
            self.open(self.address(self._me.channel.inbox.buddy))
            self.align()

    def reconnect(self) -> None:
        """After a swap: the step that follows can send while it computes. If it fails, the fence
        will find out."""
        if self._inventory.units:
            with contextlib.suppress(OSError, KeepstepError):
                self.open(self.address(self._me.channel.inbox.buddy))
            with contextlib.suppress(OSError, KeepstepError):
                self.align()

    def align(self) -> None:
        """With a parity: all members begin anew, with bases of one version."""
        if self._parity is not None:
            self._bases.anew(realign=True)
            self._parity.open(self._inventory.layout, self._inventory.lanes, self._bases.reserve)

    def open(self, address: Address, fresh: bool = False) -> vault.VaultLine:
        """What the vault has is good until it has something newer."""
        me, units, lanes = self._me, self._inventory.units, self._inventory.lanes
        old, self.line = self.line, None
        if old is not None:
            old.close()
        who = (address, me.welcome.token, me.rank, max(me.generation, 0))
        if self._parity is not None:
            line: vault.VaultLine = parity.Both(self._parity, *who, lanes)
        else:
            own = address == me.welcome.blobs
            line = vault.VaultLine(*who, own=own, lanes=lanes)
        at, layout, reserve = me.version, self._inventory.layout, self._bases.reserve
        reaches = line.open(layout, lanes, reserve, fresh=fresh, version=at)
        same = old is not None and old.address == address
        if not same or reaches < at:
            if at > 0 and not fresh:
                # All bases at once, beside those of an earlier writer until the next fence.
                gradients = sum(self._inventory.gradient_bytes.values())
                more = self._inventory.kept_bytes + gradients
                line.open(layout, lanes, reserve + more, version=at)
            for unit in units:
                unit.confirmed = -1
        for unit in units:
            unit.version = unit.confirmed  # what was on its way may be lost
        self._bases.anew()
        if old is not None and not same:
            self._former.append(old.address)
        self.line = line
        return line

    def took_over(self, holders: list[Address]) -> None:
        """A newcomer: what earlier processes of the rank have left there, with gradients of steps
        that never came to pass, must not be taken for this one's later."""
        if self._parity is None:
            self._former = list(holders)

    def forget_former(self, current: Address) -> None:
        """The current one has all."""
        former, self._former = self._former, []
        if former:
            me = self._me
            old = [address for address in former if address != current]
            _forget_later(old, me.welcome.token, me.rank, max(me.generation, 0))

    def interrupt(self) -> None:
        line = self.line
        if line is not None:
            line.interrupt()
        if self._parity is not None:
            self._parity.interrupt()


def _forget_later(addresses: list[Address], token: str, rank: int, generation: int) -> None:
    """The memory of vaults that are not used any more is freed beside the training."""

    def ask() -> None:
        for address in addresses:
            # Its node may be gone, or another process of this rank may write there.
            with contextlib.suppress(OSError, KeepstepError):
                vault.forget(address, token, rank, generation)

    threading.Thread(target=ask, name="keepstep-forget", daemon=True).start()
