"""A rank's part of a parity (keepstep.core.agent.parity); rebuild.py is the way back.

With `--redundancy parity` a rank writes everything twice: to the vault of its own agent, and to
the parity of its group on another node. `Both` is these two lines as if they were one. They are not
alike: without the vault the rank waits in its fence, and without the parity it goes on, because
what is lost then is a node already. It asks for another holder, and the parity begins again where
all members put bases: at versions that are multiples of RENEW, and behind every swap.

Main thread only, but for `interrupt`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from keepstep.errors import KeepstepError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model import vault as v
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.vault.lane import View
from keepstep.worker.vault.vault import Ticket, VaultLine, forget


class ParityLine:
    """To the holder of the parity, whoever that is at present."""

    def __init__(self, me: RankFacts) -> None:
        self._me = me
        self._line: VaultLine | None = None
        self._common = -1  # version of the last bases that all members put; -1: nothing is kept
        self._step: list[Callable[[VaultLine], object]] = []  # puts since the last sync
        self._given_up = -1  # version of a step in which nothing more is added
        self._former: tuple[VaultLine, int] | None = None  # and the version from which on it is
        self._layout, self._lanes, self._reserve = b"", dict[int, int](), 0

    def open(self, layout: bytes, lanes: Mapping[int, int], reserve: int) -> None:
        """Before training begins: UsageError if the holder has too little memory. `lanes`: unit
        or slice -> its lane."""
        same, self._layout = layout == self._layout, layout
        self._lanes, self._reserve = dict(lanes), reserve
        self._common = -1
        where = self._me.channel.inbox.parity
        if where is not None and not (same and self._is_open(where)):
            self._open(where)

    def _is_open(self, where: commands.Parity) -> bool:
        line, generation = self._line, max(self._me.generation, 0)
        return (
            line is not None
            and not line.broken
            and (line.address, line.generation) == (where.holder, generation)
        )

    def _open(self, where: commands.Parity) -> None:
        me, old = self._me, self._line
        self._line = None
        if old is not None:
            old.close()
            if old.address != where.holder and self._former is None:
                self._former = (old, me.version)
        generation = max(me.generation, 0)
        line = VaultLine(
            where.holder,
            me.welcome.token,
            me.rank,
            generation,
            group=where.members,
            lanes=self._lanes,
        )
        line.open(self._layout, self._lanes, self._reserve)
        self._line = line

    def begin(self, version: int) -> None:
        """All members put bases of this version: from here on, all are in the parity."""
        where = self._me.channel.inbox.parity
        self._step.clear()
        self._common = -1
        if where is None or version == self._given_up:
            return
        try:
            if not self._is_open(where):
                self._open(where)
        except (OSError, KeepstepError) as error:
            self._lost(where.holder, error)
            return
        self._common = version

    def give_up(self, version: int) -> None:
        """What it has got in this step is not what the vault will have. Nobody reads it any more;
        it begins again with the next bases of all members."""
        self._common, self._given_up = -1, version
        self._step.clear()
        if self._line is not None:
            self._line.close()

    def put(self, kind: v.Kind, version: int, put: Callable[[VaultLine], object]) -> None:
        """A base that is not of all members is none of the parity's."""
        line = self._line  # the main thread may be about to open another one
        if self._common < 0 or line is None or (kind == "base" and version != self._common):
            return
        self._step.append(put)
        put(line)

    def ask(self, version: int) -> None:
        if self._common >= 0 and self._line is not None:
            self._line.ask(version)

    def synced(self, version: int, aborted: Callable[[], bool]) -> None:
        """Only an Abort is raised (as OSError)."""
        line = self._line
        if self._common < 0 or line is None:
            return
        try:
            try:
                line.synced(version, aborted)
            except OSError:
                if aborted():
                    raise
                self._once_more(line, version, aborted)
        except (OSError, KeepstepError) as error:
            self._step.clear()
            if aborted():
                raise ConnectionAbortedError("writing to the parity was aborted") from error
            self._lost(line.address, error)
            return
        self._step.clear()
        if self._former is not None and version > self._former[1]:
            # All members have reached the fence before this one, with bases at the new holder.
            _forget_later(self._former[0], self._me.welcome.token)
            self._former = None

    def _once_more(self, line: VaultLine, version: int, aborted: Callable[[], bool]) -> None:
        """Connections break. What had come there counts once."""
        line.open(self._layout, self._lanes, self._reserve)
        for put in self._step:
            put(line)
        line.sync(version, aborted)

    def _lost(self, holder: m.Address, error: Exception) -> None:
        self._common = -1
        self._step.clear()
        generation = self._me.generation
        self._me.channel.send(m.BuddyLost(generation=generation, error=str(error), parity=holder))

    def interrupt(self) -> None:
        line = self._line
        if line is not None:
            line.interrupt()

    def wait_read(self) -> None:
        if self._line is not None:
            self._line.wait_all_read()

    def drained(self) -> bool:
        return self._line is None or self._line.drained()


class Both(VaultLine):
    """The vault of the own agent, and all that is put there into the parity as well."""

    def __init__(
        self,
        parity: ParityLine,
        address: m.Address,
        token: str,
        rank: int,
        generation: int,
        lanes: Mapping[int, int],
    ) -> None:
        super().__init__(address, token, rank, generation, own=True, lanes=lanes)
        self._parity = parity

    def put_all(
        self, kind: v.Kind, version: int, data: Mapping[int, Sequence[View]]
    ) -> dict[int, Ticket]:
        self._parity.put(kind, version, lambda line: line.put_all(kind, version, data))
        return super().put_all(kind, version, data)

    def ask(self, version: int) -> None:
        super().ask(version)
        self._parity.ask(version)

    def synced(self, version: int, aborted: Callable[[], bool]) -> None:
        super().synced(version, aborted)
        self._parity.synced(version, aborted)

    def drained(self) -> bool:
        return super().drained() and self._parity.drained()

    def wait_read(self, ticket: Ticket) -> None:
        """The tickets are those of the own line; the parity's are all waited for."""
        super().wait_read(ticket)
        self._parity.wait_read()


def _forget_later(line: VaultLine, token: str) -> None:
    def ask() -> None:
        with contextlib.suppress(OSError, KeepstepError):
            forget(line.address, token, line.rank, line.generation, parity=True)

    threading.Thread(target=ask, name="keepstep-forget", daemon=True).start()
