"""Side state on the wire: publishing to the buddy, fetching a dead rank's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import msgspec

from keepstep.adapters.transport.blocking import Frames, shut
from keepstep.errors import PermanentError, TransientError
from keepstep.model import blob_messages, wire
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK
from keepstep.worker.line import peers

_decoder: msgspec.msgpack.Decoder[blob_messages.BlobReply] = msgspec.msgpack.Decoder(
    blob_messages.BlobReply
)
CONNECT_TIMEOUT_S = 5.0
ACK_TIMEOUT_S = 10.0  # a buddy whose machine vanished never closes the connection
PATIENCE_S = 5.0
RETRY_S = 0.2


def _ask(connection: socket.socket, request: blob_messages.BlobRequest) -> blob_messages.BlobReply:
    connection.sendall(wire.frame(request))
    return Frames(connection, _decoder).receive()


class BuddyLine:
    """The connection to the buddy's agent, used by one thread at a time; `interrupt` frees it
    from any thread."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._address: m.Address | None = None
        self._connection: socket.socket | None = None
        self._frames: Frames[blob_messages.BlobReply]
        self._interrupted = False
        self._ahead: tuple[int, bytes] | None = None  # sent, and its answer not read yet
        self.generation = 0
        self._unread = 0  # answers to `send_late`
        self._sent = 0
        self._lock = threading.Lock()

    def put(
        self,
        address: m.Address,
        rank: int,
        tick: int,
        data: bytes,
        interrupted: Callable[[], bool],
        init: bytes | None = None,
    ) -> None:
        """Returns when the buddy has it; raises OSError when it cannot be had. `init` is the
        rank's init record: a buddy that is new, or was started anew, gets it first."""
        if address != self._address or self._interrupted:
            self.close()
        if self._connection is None:
            self._connect(address)
            if interrupted():  # it may have come before there was anything to interrupt
                raise ConnectionAbortedError("publishing was aborted")
            if init is not None and tick >= 0:
                self.put(address, rank, INIT_TICK, init, interrupted)
        ahead, self._ahead = self._ahead, None
        guessed = ahead == (tick, data)
        try:
            if not guessed:
                self._send(rank, tick, data)
            unread, self._unread = self._unread, 0
            due = (ahead is not None) + (not guessed) + unread
            replies = [self._frames.receive() for _ in range(due)]
            if guessed and self._connection is not None:
                confirm = blob_messages.BlobConfirm(token=self._token, rank=rank, tick=tick)
                self._connection.sendall(wire.frame(confirm))
        except OSError:
            self.close()
            raise
        for reply in replies:
            if not isinstance(reply, blob_messages.BlobOk):
                raise PermanentError(f"buddy refused side state of rank {rank}: {reply}")

    def send_ahead(self, address: m.Address, rank: int, tick: int, data: bytes) -> None:
        """The first half of a put, if that needs no new connection. Errors are left to the put."""
        if address != self._address or self._ahead is not None or self._interrupted:
            return
        try:
            self._send(rank, tick, data, ahead=True)
            self._ahead = (tick, data)
        except OSError:
            self.close()

    def send_late(self, address: m.Address, rank: int, tick: int, data: bytes) -> None:
        """A put whose answer is read with that of the next one. Errors are left to that."""
        if address != self._address or self._ahead is not None or self._interrupted:
            return
        try:
            self._send(rank, tick, data)
            self._unread += 1
        except OSError:
            self.close()

    def _connect(self, address: m.Address) -> None:
        connection = peers.connect(address, CONNECT_TIMEOUT_S)
        connection.settimeout(ACK_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._connection, self._address = connection, address
            self._frames = Frames(connection, _decoder)

    def _send(self, rank: int, tick: int, data: bytes, ahead: bool = False) -> None:
        assert self._connection is not None
        self._sent += 1
        # A later process of the same rank has a later generation.
        serial = (max(self.generation, 0) << blob_messages.SERIAL_BITS) + self._sent
        request = blob_messages.BlobPut(
            token=self._token, rank=rank, tick=tick, data=data, ahead=ahead, serial=serial
        )
        self._connection.sendall(wire.frame(request))

    def interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._interrupted = True
                shut(self._connection)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._address = self._ahead = None
            self._unread = 0
            self._interrupted = False


class HoldersUnreachable(TransientError):
    """Nobody who answered has it, but not everybody answered: it need not be lost."""


def fetch(
    holders: list[m.Address],
    token: str,
    rank: int,
    tick: int,
    *,
    patience_s: float = PATIENCE_S,
    everybody: bool = True,
) -> blob_messages.BlobData | None:
    """As fetch_surely, but None also when some did not answer at all. What it is used for most, a
    position, is the same in a guess."""
    try:
        return fetch_surely(holders, token, rank, tick, patience_s, everybody=everybody)
    except HoldersUnreachable:
        return None


def fetch_surely(
    holders: list[m.Address],
    token: str,
    rank: int,
    tick: int,
    patience_s: float = PATIENCE_S,
    *,
    everybody: bool = False,
) -> blob_messages.BlobData | None:
    """None means that everybody was asked and no one has it. Those that cannot be reached are
    asked again for a while: an agent that is started anew comes back with its workers' pages.

    A copy that was sent ahead of its fence may be a guess that the rank has put right since, with
    another buddy. It counts only if all answer, and if `holders` are all nodes that could have a
    later one (`everybody`); of several the last one put counts."""
    deadline = time.monotonic() + patience_s
    silent = list(holders)
    best: blob_messages.BlobData | None = None
    while silent:
        asked, silent = silent, []
        for holder in asked:
            try:
                with peers.connect(holder, CONNECT_TIMEOUT_S) as line:
                    reply = _ask(line, blob_messages.BlobGet(token=token, rank=rank, tick=tick))
            except OSError:
                silent.append(holder)
                continue
            if isinstance(reply, blob_messages.BlobData):
                if reply.own or not reply.ahead:
                    return reply
                best = max(best or reply, reply, key=lambda one: (one.tick, one.serial))
        if silent and time.monotonic() >= deadline:
            names = ", ".join(f"{holder.host}:{holder.port}" for holder in silent)
            raise HoldersUnreachable(f"side state {tick} of rank {rank}: no answer from {names}")
        if silent:
            time.sleep(RETRY_S)  # a peer's recovery gives no sign that could be waited for
    return best if everybody else None
