"""What only this rank has goes where it outlives it, before the fence: side state to the own agent
(shared memory) and to a buddy, shards without a replica to a vault.

If the buddy is lost, the rank asks for another one, and waits as in a hold; an Abort ends that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from keepstep.errors import UsageError
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK, late_tick
from keepstep.worker.line import blobs
from keepstep.worker.line.ahead import Ahead
from keepstep.worker.state import codec
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.vault.redundancy import Redundancy

BUDDY_AGAIN_S: Final = 5  # until a lost buddy is tried again, if nobody has named another one


class Publisher:
    def __init__(self, rank: RankFacts, redundancy: Redundancy) -> None:
        self._rank = rank
        self._redundancy = redundancy
        self._line = blobs.BuddyLine(rank.welcome.token)
        self.ahead = Ahead()

    def interrupt(self) -> None:
        """From another thread: whoever waits here stops waiting."""
        self._line.interrupt()
        self._redundancy.interrupt()

    def publish(self, tick: int, data: bytes) -> None:
        """To the own agent (shared memory) and, acknowledged, to the buddy. Raises OSError or
        ConnectionAbortedError when an Abort interrupts it: the fence is then not reached."""
        self.ahead.wait()
        self._line.generation = self._rank.generation
        self._rank.page.publish(tick, data)

        def put(address: m.Address | None) -> None:
            if address is not None:
                init = self._rank.page.held(INIT_TICK)
                self._line.put(address, self._rank.rank, tick, data, self._rank.aborted, init)

        self._at_buddy(put)

    def store_shards(self, updating: bool) -> None:
        """State that no other rank has begins to go where it outlives this one; as `publish`."""
        if not self._redundancy.needed:
            return
        try:
            self._at_buddy(lambda address: self._redundancy.publish(address, updating))
        except UsageError as error:  # there is not enough memory at the only place that is left
            self._redundancy.suspend(str(error))

    def await_shards(self, updating: bool, let_go: Callable[[], None]) -> None:
        """It is there. If not, another place is looked for, which the device shall not wait for:
        `let_go` sees to that."""
        if not self._redundancy.needed:
            return

        def again(address: m.Address | None) -> None:
            self._redundancy.publish(address, updating)
            self._redundancy.confirm(let_go)

        try:
            try:
                self._redundancy.confirm(let_go)
            except OSError:
                let_go()
                self._at_buddy(again)
        except UsageError as error:
            self._redundancy.suspend(str(error))

    def _at_buddy(self, action: Callable[[m.Address | None], None]) -> None:
        try:
            while not self._acted(action):
                pass
        finally:
            if self._rank.page.get("asked_ns"):
                self._rank.page.set("hold", 0)
                self._rank.page.set("asked_ns", 0)

    def _acted(self, action: Callable[[m.Address | None], None]) -> bool:
        """False: another buddy was asked for, or it is time to try the same again."""
        address = self._rank.channel.inbox.buddy
        if self._rank.aborted():
            raise ConnectionAbortedError("publishing was aborted")
        try:
            action(address)
        except OSError as error:
            if self._rank.aborted():
                raise ConnectionAbortedError("publishing was aborted") from error
            self._rank.channel.send(m.BuddyLost(generation=self._rank.generation, error=str(error)))
            self._wait_for_other_buddy(address)
            return False
        return True

    def send_late(self, late: dict[str, Any]) -> None:
        """What became known when the transaction had ended: not acknowledged."""
        tick = late_tick(self._rank.tick + 1)
        data = codec.dumps_inline(late)
        self._rank.page.publish(tick, data)
        address = self._rank.channel.inbox.buddy
        if address is not None:
            self._line.send_late(address, self._rank.rank, tick, data)

    def sends_ahead(self) -> bool:
        """Whether the side state goes to the buddy while the last backward pass of a step runs.
        What lies on another device is not waited for, and what the user saves by a function of his
        is saved in his thread."""
        if self._rank.channel.inbox.buddy is None or not self.ahead.worthwhile():
            return False
        return not any(o.per_rank for o in self._rank.objects.values()) and all(
            tensor.device.type == "cpu" for tensor in self._rank.cells.tensors()
        )

    def send_ahead(self, make: Callable[[], bytes]) -> None:
        """The last backward pass of a step begins: what `make` gives goes on its way."""
        address, tick = self._rank.channel.inbox.buddy, self._rank.tick + 1
        if address is None:
            return

        def send() -> bytes:
            data = make()
            self._line.send_ahead(address, self._rank.rank, tick, data)
            return data

        self.ahead.begin(send)

    def _wait_for_other_buddy(self, old: m.Address | None) -> None:
        """It waits for a command, as in a hold, and shows that it has not come to a stop."""
        inbox = self._rank.channel.inbox
        for _ in range(BUDDY_AGAIN_S):
            self._rank.page.set("asked_ns", time.monotonic_ns())
            self._rank.page.set("hold", 1)
            if self._rank.channel.wait_until(
                lambda: inbox.buddy != old or self._rank.aborted(), 1.0
            ):
                return

    def republish(self) -> None:
        """After a swap the buddy may be new: give it what it would need now."""
        for tick in (INIT_TICK, self._rank.tick, late_tick(self._rank.tick)):
            data = self._rank.page.held(tick)
            if data is not None:
                self.publish(tick, data)
