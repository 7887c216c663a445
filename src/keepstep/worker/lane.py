"""One connection of a rank's line to its vault (vault.py), with the thread that sends over it.

Whoever puts gets a ticket and goes on; tickets are read in the order in which they were given.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NoReturn

import msgspec
import xxhash

from keepstep.adapters.transport.blocking import Frames, pieces, shut
from keepstep.adapters.transport.stream import configure
from keepstep.errors import PermanentError, RemoteProtocolError, UsageError
from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.model.messages import Address
from keepstep.worker import extension, peers
from keepstep.worker.statefile import DigestMismatch

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 10.0  # an agent whose machine vanished never closes the connection
SMALL_BYTES = 64 << 10  # packed together when sent
CHUNK_BYTES = 4 << 20  # sent within the socket's timeout; worth to be handed to another thread
BATCH_BYTES = 4 << 20  # sent before anybody is told: each word to another thread costs it time

View = bytes | bytearray | memoryview

replies: msgspec.msgpack.Decoder[v.VaultReply] = msgspec.msgpack.Decoder(v.VaultReply)


class VaultLacks(PermanentError):
    """The vault cannot bring all units to the version that was asked for."""


@dataclass(slots=True)
class Item:
    message: v.VaultPuts | v.VaultSync
    views: list[memoryview] = field(default_factory=list)
    size: int = 0
    ticket: int = 0

    def add(self, unit: int, views: list[memoryview]) -> None:
        assert isinstance(self.message, v.VaultPuts)
        sizes = [len(view) for view in views]
        self.message.units.append(unit)
        self.message.sizes.append(sizes)
        self.views += views
        self.size += sum(sizes)


class Lane:
    """Used by one thread at a time; `interrupt` frees it from any thread."""

    def __init__(
        self, address: Address, rank: int, queue_bytes: int, batch_bytes: int = BATCH_BYTES
    ) -> None:
        self._address, self._rank = address, rank
        self._queue_bytes, self.batch_bytes = queue_bytes, batch_bytes
        self._turn = threading.Condition()
        self._queue: deque[Item] = deque()
        self._queued = 0  # bytes, what is being sent included
        self._last = 0  # ticket given
        self._read = 0  # ticket whose memory is not needed any more
        self._connection: socket.socket | None = None
        self._sender: threading.Thread | None = None
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
        frames = Frames(connection, replies)
        connection.sendall(wire.frame(ask))
        reply = frames.receive()
        if not isinstance(reply, v.VaultOpened):
            raise_refusal(reply, self._rank)
        self._sender = threading.Thread(
            target=self._send_all, args=(connection, frames), name="keepstep-vault", daemon=True
        )
        self._sender.start()
        return reply

    @property
    def broken(self) -> bool:
        with self._turn:
            return self._sender is None or self._error is not None or self._interrupted

    def interrupt(self) -> None:
        with self._turn:
            if self._connection is not None:
                self._interrupted = True
                shut(self._connection)

    def close(self) -> None:
        self.interrupt()
        with self._turn:
            self._error = self._error or ConnectionError("the line was closed")
            self._turn.notify_all()
        if self._sender is not None:
            self._sender.join()
            self._sender = None
        with self._turn:
            connection, self._connection = self._connection, None
            self._interrupted = False
        if connection is not None:
            connection.close()

    # ----------------------------------------------------------------- what is to be sent

    def enqueue(self, items: Sequence[Item]) -> None:
        """Gives each of them its ticket."""
        size = sum(item.size for item in items)
        with self._turn:
            self._turn.wait_for(
                lambda: not self._queued or self._queued + size <= self._queue_bytes
            )
            for item in items:
                self._last += 1
                item.ticket = self._last
            if self._sender is None or self._error is not None:
                self._error = self._error or ConnectionError("the line is not open")
                self._read = self._last
                return
            self._queue.extend(items)
            self._queued += size
            self._turn.notify_all()

    @property
    def last(self) -> int:
        """The ticket that was given last."""
        return self._last

    def wait_read(self, ticket: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._read >= ticket)

    def drained(self) -> bool:
        with self._turn:
            return self._read == self._last

    def failure(self) -> tuple[Exception, bool] | None:
        """What ended it, and whether it was interrupted."""
        with self._turn:
            return (self._error, self._interrupted) if self._error is not None else None

    # ----------------------------------------------------------------- the sender

    def _send_all(self, connection: socket.socket, frames: Frames[v.VaultReply]) -> None:
        try:
            while batch := self._next():
                self._send(connection, batch)
                last = batch[-1].message
                if isinstance(last, v.VaultSync):
                    reply = frames.receive()
                    if reply != v.VaultSynced(version=last.version):
                        raise_refusal(reply, self._rank)
                with self._turn:
                    self._read = batch[-1].ticket
                    self._queued -= sum(item.size for item in batch)
                    self._turn.notify_all()
        except Exception as error:  # whatever it is, the main thread must not wait for ever
            with self._turn:
                self._error = self._error or error
                self._forget_queue()

    def _next(self) -> list[Item]:
        """What is told of together: nothing behind a sync. Empty: it is over."""
        batch: list[Item] = []
        with self._turn:
            self._turn.wait_for(lambda: self._queue or self._error is not None)
            if self._error is not None:
                self._forget_queue()
                return batch
            size = 0
            while self._queue and size < self.batch_bytes:
                batch.append(self._queue.popleft())
                size += batch[-1].size
                if isinstance(batch[-1].message, v.VaultSync):
                    break
        return batch

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._queued, self._read = 0, self._last
        self._turn.notify_all()

    def _send(self, connection: socket.socket, batch: Sequence[Item]) -> None:
        """Native code hashes and sends it: whenever a thread wants the interpreter back, the main
        thread may have to wait."""
        native = extension.load()
        views: list[memoryview] = [view for item in batch for view in item.views]
        if native.can_digest():
            digests = iter(native.digests(views))
        else:
            digests = map(xxhash.xxh3_128_digest, views)
        said: list[View] = []
        for item in batch:
            message = item.message
            if isinstance(message, v.VaultPuts):
                some = list(islice(digests, len(item.views)))
                message = msgspec.structs.replace(message, digests=some)
            said += [wire.frame(message), *item.views]
        if isinstance(connection, ssl.SSLSocket):
            _send_packed(connection, said)
        elif error := native.send_all(connection.fileno(), said, SILENCE_S):
            raise OSError(error, os.strerror(error))


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
