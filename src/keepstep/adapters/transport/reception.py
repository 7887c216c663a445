"""Accepting on an event loop: who has not shown who it is gets a deadline and no more than a share.

`asyncio.Server` accepts whatever comes, knows nothing of a connection before its TLS handshake is
over, and stops accepting for a second whenever descriptors run out. Here a connection is counted
from `accept()` on. Until the server says `Visitor.admit`, it has one deadline for everything
(handshake, head and body of a request) and may be dropped for a later one (see `pending`).
Afterwards nothing here touches it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable

from keepstep.adapters.transport.blocking import shut
from keepstep.adapters.transport.pending import EXHAUSTED, SHOWN_S_MAX, Pending

ACCEPTS_PER_TURN = 32  # the loop has other work too
EXHAUSTED_S = 0.1
TLS_SHUTDOWN_S_MAX = 5.0
TOLD_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Visitor:
    """One accepted connection."""

    def __init__(self, reception: Reception, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.transport: asyncio.BaseTransport | None = None
        self._reception = reception
        self._timer: asyncio.TimerHandle | None = None

    def admit(self) -> None:
        """The peer has shown who it is; may be said again."""
        self.leave()

    def leave(self) -> None:
        """The connection has ended."""
        self._reception.pending.leave(self)
        self._stop_waiting()

    def expect(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._timer = loop.call_later(seconds, self._late)

    def drop(self) -> None:
        self._stop_waiting()
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        else:
            shut(self.sock)  # ends the handshake

    def _late(self) -> None:
        if self._reception.pending.leave(self):
            self._reception.tell(1)
            self.drop()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Reception:
    """`meet` makes the protocol of a connection. That calls `admit` when it knows its peer, and
    `leave` when the connection is lost."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        meet: Callable[[Visitor], asyncio.Protocol],
        *,
        limit: int,
        tls: ssl.SSLContext | None = None,
        shown_s_max: float = SHOWN_S_MAX,
    ) -> None:
        self.pending: Pending[Visitor] = Pending(limit)
        self._name = name
        self._listener = listener
        self._meet = meet
        self._tls = tls
        self._shown_s_max = shown_s_max
        self._greetings: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._dropped = 0
        self._told_at = 0.0
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """No further connections; those of strangers end."""
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
        self._listener.close()
        while (visitor := self.pending.pick()) is not None:
            visitor.drop()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._greetings, return_exceptions=True)

    def tell(self, dropped: int) -> None:
        """In numbers and now and then: a line for each would be one more thing to fill up."""
        self._dropped += dropped
        now = time.monotonic()
        if now >= self._told_at + TOLD_EVERY_S:
            self._told_at = now
            log.warning(
                "%s: dropped %d connections that did not show who they are",
                self._name,
                self._dropped,
            )

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._cannot(error)
                return
            self._let_in(sock, str(peer[0]))

    def _cannot(self, error: OSError) -> None:
        """The connection is still in the queue and the loop would come here at once again."""
        gone = self.pending.pick_half() if error.errno in EXHAUSTED else []
        for visitor in gone:
            visitor.drop()  # its descriptor is free in the loop's next turn
        if gone:
            self.tell(len(gone))
            return
        log.error("%s: cannot accept: %s", self._name, error)
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(EXHAUSTED_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _let_in(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        visitor = Visitor(self, sock, address)
        gone = self.pending.enter(visitor, address)
        if gone is not None:
            self.tell(1)
            gone.drop()
        visitor.expect(self._loop, self._shown_s_max)
        task = self._loop.create_task(self._greet(visitor))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, visitor: Visitor) -> None:
        encrypted = self._tls is not None
        try:
            visitor.transport, _ = await self._loop.connect_accepted_socket(
                lambda: self._meet(visitor),
                visitor.sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._shown_s_max if encrypted else None,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S_MAX if encrypted else None,
            )
        except OSError as error:
            log.debug("%s: no connection with %s: %s", self._name, visitor.address, error)
            visitor.leave()
            visitor.sock.close()
        except BaseException:
            visitor.leave()
            visitor.sock.close()
            raise
