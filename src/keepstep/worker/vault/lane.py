"""One connection of a rank's line to its vault (vault.py), with the thread that sends over it.

Whoever puts gets a ticket and goes on; tickets are read in the order in which they were given. The
thread is native and does without Python's interpreter: whenever a thread wants that back, the main
thread may have to wait. Where the connection is encrypted, or the machine has no libxxhash, Python
hashes and sends, in the same thread.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import xxhash

from keepstep.adapters.transport.blocking import Frames, pieces, shut
from keepstep.adapters.transport.stream import configure
from keepstep.errors import KeepstepError, PermanentError, RemoteProtocolError, UsageError
from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.model.messages import Address
from keepstep.worker.device import extension
from keepstep.worker.line import peers
from keepstep.worker.state.statefile import DigestMismatch

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 10.0  # an agent whose machine vanished never closes the connection
SMALL_BYTES = 64 << 10  # packed together when sent
CHUNK_BYTES = 4 << 20  # sent within the socket's timeout; worth to be handed to another thread
BATCH_BYTES = 4 << 20  # sent before anybody is told: each word to another thread costs it time
DIGEST_BYTES = 16
DIGEST_MARK = b"\xc4\x10"  # so begin bytes of this length in msgpack
_NO_DIGEST = bytes(DIGEST_BYTES)

View = bytes | bytearray | memoryview

replies: msgspec.msgpack.Decoder[v.VaultReply] = msgspec.msgpack.Decoder(v.VaultReply)


class VaultLacks(PermanentError):
    """The vault cannot bring all units to the version that was asked for."""


@dataclass(slots=True)
class Chunk:
    """Of several units, or of slices, what one message tells."""

    units: list[int] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    size: int = 0

    def add(self, unit: int, views: list[memoryview]) -> None:
        sizes = [len(view) for view in views]
        self.units.append(unit)
        self.sizes.append(sizes)
        self.views += views
        self.size += sum(sizes)

    def header(self, kind: v.Kind, version: int) -> bytes:
        """Whoever sends it puts the digests where they belong: they are its last bytes."""
        message = v.VaultPuts(
            kind=kind,
            version=version,
            units=self.units,
            sizes=self.sizes,
            digests=[_NO_DIGEST] * len(self.views),
        )
        return wire.frame(message)


class Lane:
    """Opened, closed and asked by one thread. Others may put; `interrupt` frees it from any."""

    def __init__(self, address: Address, rank: int, batch_bytes: int = BATCH_BYTES) -> None:
        self._sender: Any = None  # native; first, so that it ends before what it sends is dropped
        self._address, self._rank = address, rank
        self.batch_bytes = batch_bytes
        self._turn, self._putting = threading.Lock(), threading.Lock()
        self._connection: socket.socket | None = None
        self._frames: Frames[v.VaultReply] | None = None
        self._held: deque[tuple[int, list[memoryview]]] = deque()  # by ticket, until it was read
        self._asked: deque[int] = deque()  # versions that the vault has not answered for
        self._last = 0  # ticket given
        self._interrupted = False
        self._error: Exception | None = None

    # ----------------------------------------------------------------- opening and ending

    def open(self, ask: v.VaultOpen) -> v.VaultOpened:
        """It is closed. Raises OSError, and what `raise_refusal` raises."""
        connection = peers.connect(self._address, CONNECT_TIMEOUT_S)
        configure(connection)
        connection.settimeout(SILENCE_S)
        with self._turn:
            self._connection = connection
            self._interrupted, self._error = False, None
        self._frames = Frames(connection, replies)
        connection.sendall(wire.frame(ask))
        reply = self._frames.receive()
        if not isinstance(reply, v.VaultOpened):
            raise_refusal(reply, self._rank)
        native = extension.load()
        alone = native.can_digest() and not isinstance(connection, ssl.SSLSocket)
        self._sender = native.Sender(
            connection.fileno(),
            SILENCE_S,
            self.batch_bytes,
            self._last,
            None if alone else self._send,
        )
        return reply

    @property
    def broken(self) -> bool:
        return self._interrupted or self.failure() is not None

    def interrupt(self) -> None:
        with self._turn:
            if self._connection is not None:
                self._interrupted = True
                shut(self._connection)

    def close(self) -> None:
        self.interrupt()
        if self._sender is not None:
            self._sender.close()
        with self._putting:
            self._sender = None
            self._held.clear()
        self._asked.clear()
        with self._turn:
            connection, self._connection = self._connection, None
            self._interrupted, self._error = False, None
        if connection is not None:
            connection.close()

    # ----------------------------------------------------------------- what is to be sent

    def enqueue(self, kind: v.Kind, version: int, chunk: Chunk) -> int:
        """Its ticket."""
        return self._put(chunk.header(kind, version), chunk.views)

    def ask(self, version: int) -> None:
        self._asked.append(version)
        self._put(wire.frame(v.VaultSync(version=version)), [])

    def _put(self, header: bytes, views: list[memoryview]) -> int:
        with self._putting:
            if self._sender is None:
                self._last += 1
                return self._last
            self._let_go()
            self._last = self._sender.put(header, views)
            self._held.append((self._last, views))
            return self._last

    def _let_go(self) -> None:
        read = self._sender.read
        while self._held and self._held[0][0] <= read:
            self._held.popleft()

    @property
    def last(self) -> int:
        """The ticket that was given last."""
        return self._last

    def wait_read(self, ticket: int) -> None:
        if self._sender is not None:
            self._sender.wait_read(ticket)

    def drained(self) -> bool:
        return self._sender is None or self._sender.read == self._last

    def wait_answered(self) -> None:
        """All that was asked, or it failed."""
        self.wait_read(self._last)
        with self._putting:
            if self._sender is not None:
                self._let_go()
        while self._asked and self._frames is not None and self._may_answer():
            try:
                reply = self._frames.receive()
                version = self._asked.popleft()
                if reply != v.VaultSynced(version=version):
                    raise_refusal(reply, self._rank)
            except (OSError, KeepstepError) as error:
                self._error = error

    def _may_answer(self) -> bool:
        """Who has closed the connection may have said why."""
        if self._sender is None or self._error is not None:
            return False
        return not self._sender.failed or self._sender.error in (errno.EPIPE, errno.ECONNRESET)

    def failure(self) -> tuple[Exception, bool] | None:
        """What ended it, and whether it was interrupted."""
        sender, error = self._sender, self._error
        if error is None and sender is None:
            error = ConnectionError("the line is not open")
        elif error is None and sender.failed:
            error = OSError(sender.error, os.strerror(sender.error))
        return (error, self._interrupted) if error is not None else None

    # ----------------------------------------------------------------- what native code cannot do

    def _send(self, batch: list[tuple[bytes, list[memoryview]]]) -> bool:
        """In the sender's thread."""
        try:
            assert self._connection is not None
            _send_packed(self._connection, [part for item in batch for part in _digested(*item)])
        except Exception as error:
            self._error = error
            return False
        return True


def _digested(header: bytes, views: list[memoryview]) -> list[View]:
    step = len(DIGEST_MARK) + DIGEST_BYTES
    digests = b"".join(DIGEST_MARK + xxhash.xxh3_128_digest(view) for view in views)
    return [header[: len(header) - step * len(views)] + digests, *views]


def _send_packed(connection: socket.socket, views: Sequence[View]) -> None:
    """What is small waits for company."""
    packed = bytearray()
    for view in views:
        if len(view) < SMALL_BYTES:
            packed += view
            continue
        connection.sendall(packed)
        packed.clear()
        for part in pieces(memoryview(view), CHUNK_BYTES):
            connection.sendall(part)
    connection.sendall(packed)


def raise_refusal(reply: v.VaultReply, rank: int) -> NoReturn:
    if not isinstance(reply, v.VaultRefused):
        raise RemoteProtocolError(f"the vault of rank {rank} answered {type(reply).__name__}")
    match reply.reason:
        case "memory":
            raise UsageError(reply.error, hint=reply.hint)
        case "lacks":
            raise VaultLacks(reply.error, hint=reply.hint)
        case "digest":
            raise DigestMismatch(rank, reply.error)
    raise PermanentError(f"the vault refused rank {rank}: {reply.error}", hint=reply.hint)
