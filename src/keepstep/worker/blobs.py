"""Side state on the wire: publishing to the buddy, fetching a dead rank's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import msgspec

from keepstep.errors import PermanentError
from keepstep.model import messages as m
from keepstep.model import wire
from keepstep.worker import peers

_decoder: msgspec.msgpack.Decoder[m.BlobReply] = msgspec.msgpack.Decoder(m.BlobReply)
CONNECT_TIMEOUT_S = 5.0
PATIENCE_S = 5.0
RETRY_S = 0.2


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    while done < count:
        part = connection.recv_into(view[done:])
        if part == 0:
            raise ConnectionError("blob server closed the connection")
        done += part
    return bytes(data)


def _ask(connection: socket.socket, request: m.BlobRequest) -> m.BlobReply:
    connection.sendall(wire.frame(request))
    length = wire.body_length(_receive(connection, wire.HEADER.size))
    return wire.decode(_decoder, _receive(connection, length))


class BuddyLine:
    """The main thread's connection to the buddy's agent; `interrupt` frees it from any thread."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._address: m.Address | None = None
        self._connection: socket.socket | None = None
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
        if address != self._address:
            self.close()
        if self._connection is None:
            connection = peers.connect(address, CONNECT_TIMEOUT_S)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connection, self._address = connection, address
            if interrupted():  # it may have come before there was anything to interrupt
                raise ConnectionAbortedError("publishing was aborted")
            if init is not None and tick >= 0:
                self.put(address, rank, -1, init, interrupted)
        try:
            request = m.BlobPut(token=self._token, rank=rank, tick=tick, data=data)
            reply = _ask(self._connection, request)
        except OSError:
            self.close()
            raise
        if not isinstance(reply, m.BlobOk):
            raise PermanentError(f"buddy refused side state of rank {rank}: {reply}")

    def interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                peers.shut(self._connection)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._address = None


def fetch(
    holders: list[m.Address],
    token: str,
    rank: int,
    tick: int,
    *,
    patience_s: float = PATIENCE_S,
) -> m.BlobData | None:
    """Ask every holder in turn; None when no one has it. Those that do not answer are asked
    again for a while: an agent that is started anew comes back with its workers' pages."""
    deadline, silent = time.monotonic() + patience_s, list(holders)
    while True:
        asked, silent = silent, []
        for holder in asked:
            try:
                with peers.connect(holder, CONNECT_TIMEOUT_S) as line:
                    reply = _ask(line, m.BlobGet(token=token, rank=rank, tick=tick))
            except OSError:
                silent.append(holder)
                continue
            if isinstance(reply, m.BlobData):
                return reply
        if not silent or time.monotonic() > deadline:
            return None
        time.sleep(RETRY_S)
