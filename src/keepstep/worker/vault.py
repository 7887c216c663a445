"""A rank's line to the vault that keeps its state (keepstep.core.agent.vault), and the way back.

The main thread says what is to be kept and goes on; a sender thread has the socket for itself,
reads the memory that it was given, hashes it and sends it. So nothing is copied, and a view must
not be written to before it was read: every put gives a ticket, and `wait_read` waits for it.
How far the main thread may run ahead is bounded in bytes. A put that comes so early that its
memory may be written to meanwhile is copied by the sender, which keeps the digest of what it sent:
the caller compares, and puts it again if need be.

Nothing of the network is raised by a put, which may be called in the middle of a backward pass. A
line that breaks takes no more, all its tickets count as read, and the next `sync` says why. What
was put since the last `sync` that returned may be lost then: `open` tells which version the vault
can bring all units to.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NoReturn

import msgspec
import xxhash

from keepstep.adapters.transport.blocking import PIECE_BYTES, Frames, landing, pieces, shut
from keepstep.adapters.transport.stream import configure
from keepstep.errors import KeepstepError, PermanentError, RemoteProtocolError, UsageError
from keepstep.model import vault as v
from keepstep.model import wire
from keepstep.model.messages import Address
from keepstep.worker import peers
from keepstep.worker.statefile import DigestMismatch

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 10.0  # an agent whose machine vanished never closes the connection
QUEUE_BYTES = 1 << 30  # of the caller's own memory
SMALL_BYTES = 64 << 10  # packed together when sent
CHUNK_BYTES = 4 << 20  # sent within the socket's timeout; worth to be handed to another thread

View = bytes | bytearray | memoryview

_replies: msgspec.msgpack.Decoder[v.VaultReply] = msgspec.msgpack.Decoder(v.VaultReply)
_serials = itertools.count(1)  # of this process: a later connection drives out an earlier one


class VaultLacks(PermanentError):
    """The vault cannot bring all units to the version that was asked for."""


@dataclass(frozen=True, slots=True)
class _Item:
    ticket: int
    message: v.VaultPut | v.VaultTruncate | v.VaultSync
    views: Sequence[memoryview] = ()
    size: int = 0
    early: bool = False

    def digests(self) -> list[bytes]:
        return [xxhash.xxh3_128_digest(view) for view in self.views]

    def framed(self, digests: list[bytes]) -> bytes:
        message = self.message
        if isinstance(message, v.VaultPut):
            message = msgspec.structs.replace(message, digests=digests)
        return wire.frame(message)


class VaultLine:
    """Used by one thread at a time; `interrupt` frees it from any thread."""

    def __init__(
        self,
        address: Address,
        token: str,
        rank: int,
        generation: int,
        queue_bytes: int = QUEUE_BYTES,
        group: Sequence[int] = (),
        own: bool = False,
    ) -> None:
        """`group`: ranks whose parity is kept, instead of what this one puts. `own`: it is the
        vault of the rank's own agent."""
        self.address, self.rank, self.generation = address, rank, generation
        self._group, self._own = list(group), own
        self._token = token
        self._queue_bytes = queue_bytes
        self._turn = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._queued = 0  # bytes, what is being sent included
        self._last = 0  # ticket given
        self._read = 0  # ticket whose memory is not needed any more
        self._connection: socket.socket | None = None
        self._sender: threading.Thread | None = None
        self._interrupted = False
        self._error: Exception | None = None
        self._scratch = bytearray()  # of the sender
        self._early: dict[int, bytes] = {}  # ticket -> digest

    # ----------------------------------------------------------------- opening and ending

    def open(
        self, layout: bytes, units: Collection[int], reserve: int, *, fresh: bool = False
    ) -> int:
        """Anew, if it was open. Returns the newest version that the vault can bring all units to,
        or -1. `reserve`: bytes to be held at most: bases, a second one of each unit that is sent
        between two fences, and the log. Raises OSError, UsageError if there is not enough memory,
        PermanentError if a later generation has the vault, or it holds another layout."""
        self.close()
        connection = peers.connect(self.address, CONNECT_TIMEOUT_S)
        configure(connection)
        connection.settimeout(SILENCE_S)
        with self._turn:
            self._connection = connection
            self._interrupted, self._error = False, None
        ask = v.VaultOpen(
            token=self._token,
            rank=self.rank,
            generation=self.generation,
            serial=next(_serials),
            layout=layout,
            units=sorted(units),
            reserve=reserve,
            fresh=fresh,
            own=self._own,
            group=self._group,
        )
        frames = Frames(connection, _replies)
        try:
            connection.sendall(wire.frame(ask))
            reply = frames.receive()
            if not isinstance(reply, v.VaultOpened):
                raise_refusal(reply, self.rank)
        except BaseException:
            self.close()
            raise
        self._sender = threading.Thread(
            target=self._send_all, args=(connection, frames), name="keepstep-vault", daemon=True
        )
        self._sender.start()
        return reply.reaches

    @property
    def broken(self) -> bool:
        """It takes nothing any more: to be opened again."""
        with self._turn:
            return self._sender is None or self._error is not None or self._interrupted

    def interrupt(self) -> None:
        """Whoever waits here stops waiting; the line is to be opened again."""
        with self._turn:
            if self._connection is not None:
                self._interrupted = True
                shut(self._connection)

    def close(self) -> None:
        """What was not sent yet is dropped; afterwards nothing here looks at it any more."""
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

    # ----------------------------------------------------------------- what is to be kept

    def put_base(self, unit: int, version: int, tensors: Sequence[View]) -> int:
        return self._put("base", unit, version, tensors)

    def put_grad(self, unit: int, version: int, view: View, *, early: bool = False) -> int:
        """`early`: the memory may be written to at any time; see `digest_sent`."""
        return self._put("grad", unit, version, [view], early)

    def put_absent(self, unit: int, version: int) -> int:
        return self._put("absent", unit, version, [])

    def note(self, version: int, data: bytes) -> int:
        return self._put("note", 0, version, [data])

    def truncate(self, version: int) -> None:
        """Steps from `version` on did not happen."""
        self._enqueue(v.VaultTruncate(version=version))

    def sync(self, version: int, aborted: Callable[[], bool]) -> None:
        """At the fence of step `version`: returns when all that was put is stored. Raises OSError
        when the line is lost or interrupted, and what `open` raises."""
        if aborted():  # it may have come before there was anything to interrupt
            raise ConnectionAbortedError("writing to the vault was aborted")
        ticket = self._enqueue(v.VaultSync(version=version))
        with self._turn:
            self._turn.wait_for(lambda: self._read >= ticket)
            error, interrupted = self._error, self._interrupted
        if error is None:
            return
        if isinstance(error, KeepstepError):
            raise error
        if interrupted:
            raise ConnectionAbortedError("writing to the vault was aborted") from error
        where = f"{self.address.host}:{self.address.port}"
        raise ConnectionError(f"rank {self.rank} lost its vault at {where}: {error}") from error

    def drained(self) -> bool:
        """Nothing that was put is still to be read."""
        with self._turn:
            return self._read == self._last

    @property
    def last(self) -> int:
        """The ticket that was given last."""
        return self._last

    def wait_read(self, ticket: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._read >= ticket)

    def digest_sent(self, ticket: int) -> bytes | None:
        """Of an early put since the last fence, when it was read; None if the line broke."""
        with self._turn:
            self._turn.wait_for(lambda: self._read >= ticket)
            return self._early.get(ticket) if self._error is None else None

    # ----------------------------------------------------------------- sending

    def _put(
        self, kind: v.Kind, unit: int, version: int, data: Sequence[View], early: bool = False
    ) -> int:
        views = [_flat(one) for one in data]
        sizes = [len(view) for view in views]
        put = v.VaultPut(kind=kind, unit=unit, version=version, sizes=sizes)
        return self._enqueue(put, views, sum(sizes), early)

    def _enqueue(
        self,
        message: v.VaultPut | v.VaultTruncate | v.VaultSync,
        views: Sequence[memoryview] = (),
        size: int = 0,
        early: bool = False,
    ) -> int:
        with self._turn:
            self._turn.wait_for(
                lambda: not self._queued or self._queued + size <= self._queue_bytes
            )
            self._last += 1
            if self._sender is None or self._error is not None:
                self._error = self._error or ConnectionError("the line is not open")
                self._read = self._last
                return self._last
            self._queue.append(_Item(self._last, message, views, size, early))
            self._queued += size
            self._turn.notify_all()
            return self._last

    def _send_all(self, connection: socket.socket, frames: Frames[v.VaultReply]) -> None:
        packed = bytearray()
        try:
            while (item := self._next()) is not None:
                self._send(connection, item, packed)
                if isinstance(item.message, v.VaultSync):
                    reply = frames.receive()
                    if reply != v.VaultSynced(version=item.message.version):
                        raise_refusal(reply, self.rank)
                    self._early.clear()
                with self._turn:
                    self._read = item.ticket
                    self._queued -= item.size
                    self._turn.notify_all()
        except Exception as error:  # whatever it is, the main thread must not wait for ever
            with self._turn:
                self._error = self._error or error
                self._forget_queue()

    def _next(self) -> _Item | None:
        with self._turn:
            self._turn.wait_for(lambda: self._queue or self._error is not None)
            if self._error is not None:
                self._forget_queue()
                return None
            return self._queue.popleft()

    def _forget_queue(self) -> None:
        self._queue.clear()
        self._queued, self._read = 0, self._last
        self._turn.notify_all()

    def _send(self, connection: socket.socket, item: _Item, packed: bytearray) -> None:
        """What is small waits in `packed` for company, as long as there is more to send."""
        if item.early:
            item = replace(item, views=[self._copied(view) for view in item.views])
        digests = item.digests()
        if item.early:
            self._early[item.ticket] = digests[0]
        packed += item.framed(digests)
        for view in item.views:
            if len(view) < SMALL_BYTES:
                packed += view
                continue
            connection.sendall(packed)
            packed.clear()
            for part in pieces(view, CHUNK_BYTES):
                connection.sendall(part)
        awaited = isinstance(item.message, v.VaultSync) or not self._queue
        if awaited or len(packed) >= SMALL_BYTES:
            connection.sendall(packed)
            packed.clear()

    def _copied(self, view: memoryview) -> memoryview:
        """One at a time. Copied by a foreign function, which leaves the interpreter to others."""
        if len(self._scratch) < len(view):
            self._scratch = bytearray(len(view))
        copy = memoryview(self._scratch)[: len(view)]
        if len(view):
            ctypes.memmove(_address(copy), _address(view), len(view))
        return copy


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _flat(data: View) -> memoryview:
    view = memoryview(data)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# ------------------------------------------------------------------------------------ way back


@dataclass(frozen=True)
class Fetched:
    layout: bytes
    # unit -> version of its base, its tensors, and the gradient of each step from there on
    units: dict[int, tuple[int, list[memoryview], dict[int, memoryview | None]]]
    notes: dict[int, bytes]  # those that there are
    bytes: int


def fetch(address: Address, token: str, rank: int, version: int, base: int = -1) -> Fetched:
    """What brings all units of `rank` to `version`, with bases of version `base` if that is given.
    Raises OSError, VaultLacks, DigestMismatch."""
    ask = v.VaultFetch(token=token, rank=rank, version=version, base=base)
    with asking(address, ask) as frames:
        reply = frames.receive()
        if not isinstance(reply, v.VaultFetched):
            raise_refusal(reply, rank)
        landed = _Landing(frames, reply, rank)
        with landed.checking():
            units = {one.unit: _unit(landed, one) for one in reply.units}
            notes = {
                step: bytes(landed.take(size, digest, f"note {step}"))
                for step, size, digest in reply.notes
            }
        return Fetched(reply.layout, units, notes, landed.total)


def _unit(
    landed: _Landing, one: v.VaultUnit
) -> tuple[int, list[memoryview], dict[int, memoryview | None]]:
    tensors = [
        landed.take(size, digest, f"base {one.version} of unit {one.unit}")
        for size, digest in zip(one.sizes, one.digests, strict=True)
    ]
    log = {
        step: landed.take(size, digest, f"gradient {step} of unit {one.unit}") if digest else None
        for step, size, digest in one.log
    }
    return one.version, tensors, log


class _Landing:
    """One block of memory for all that was announced, filled in the order it comes. It is hashed
    by another thread: receiving is what one core can just do."""

    def __init__(self, frames: Frames[v.VaultReply], announced: v.VaultFetched, rank: int) -> None:
        sizes = [size for unit in announced.units for size in unit.sizes]
        sizes += [size for unit in announced.units for _, size, _ in unit.log]
        sizes += [size for _, size, _ in announced.notes]
        if min(sizes, default=0) < 0:
            raise RemoteProtocolError(f"the vault of rank {rank} announced a negative size")
        self.total = sum(sizes)
        self._frames, self._rank, self._done = frames, rank, 0
        self._memory = landing(self.total)
        self._hasher = ThreadPoolExecutor(1, "keepstep-hash")
        self._checks: list[tuple[xxhash.xxh3_128, bytes, str]] = []

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        with self._hasher:
            yield
        for digest, expected, what in self._checks:
            if digest.digest() != expected:
                raise DigestMismatch(
                    self._rank, f"{what} of rank {self._rank} left the vault with another digest"
                )

    def take(self, size: int, expected: bytes, what: str) -> memoryview:
        view = self._memory[self._done : self._done + size]
        self._done += size
        digest = xxhash.xxh3_128()
        for part in pieces(view, CHUNK_BYTES):
            self._frames.receive_into(part)
            if size >= PIECE_BYTES:
                self._hasher.submit(digest.update, part)  # in this order: it is one thread
            else:
                digest.update(part)
        self._checks.append((digest, expected, what))
        return view


def forget(address: Address, token: str, rank: int, generation: int, parity: bool = False) -> None:
    """Free the memory of a vault that is not this rank's any more, or of its group's parity."""
    ask = v.VaultForget(token=token, rank=rank, generation=generation, parity=parity)
    with asking(address, ask) as frames:
        reply = frames.receive()
        if not isinstance(reply, v.VaultForgotten):
            raise_refusal(reply, rank)


@contextlib.contextmanager
def asking(
    address: Address, request: v.VaultFetch | v.VaultForget
) -> Iterator[Frames[v.VaultReply]]:
    with peers.connect(address, CONNECT_TIMEOUT_S) as connection:
        configure(connection)
        connection.settimeout(SILENCE_S)
        connection.sendall(wire.frame(request))
        yield Frames(connection, _replies)


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
