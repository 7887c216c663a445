"""The server of the vault: connections that the blob server accepted, in their threads.

What is kept and for how long stands in keepstep.core.agent.vault, and for parities, which are
written in the same way, in keepstep.core.agent.parity. Here bytes are received, always
into memory of their own: what somebody holds is never written again, so a fetch sends it without
the lock, whatever comes in meanwhile. A put is acknowledged by the next VaultSync, after its digest
was found right.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import psutil  # type: ignore[import-untyped]
import xxhash

from keepstep.adapters.transport.blocking import PIECE_BYTES, Frames, pieces
from keepstep.agent.landings import Landings
from keepstep.core.agent.parity import ParityStore
from keepstep.core.agent.vault import Pieces, Refusal, StoredPiece, VaultStore
from keepstep.errors import RemoteProtocolError
from keepstep.model.vault import (
    VaultFetch,
    VaultForget,
    VaultForgotten,
    VaultOpen,
    VaultOpened,
    VaultPut,
    VaultPuts,
    VaultRequest,
    VaultSync,
    VaultSynced,
)
from keepstep.model.wire import frame

TENSORS = {"grad": 1, "absent": 0, "note": 1}  # of a put; a base has any number
SMALL_BYTES = 64 << 10  # packed together when sent

logger = logging.getLogger(__name__)


def available_memory() -> int:
    return int(psutil.virtual_memory().available)


def yield_cores() -> None:
    """Ranks of this node compute. The calling thread drives none of them from its core whenever
    something comes in."""
    with contextlib.suppress(OSError):  # a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class KeptShelf(Protocol):
    rank: int

    @property
    def held(self) -> int: ...


S = TypeVar("S", bound=KeptShelf)


class Store(Protocol[S]):
    def open(self, ask: VaultOpen, available: int) -> S: ...
    def reaches(self, shelf: S, /) -> int: ...
    def admit(self, shelf: S, put: VaultPut, /) -> None: ...
    def done(self, shelf: S, put: VaultPut, /) -> None: ...
    def keep(self, shelf: S, put: VaultPut, pieces: Pieces, /) -> None: ...
    def drop_before(self, shelf: S, oldest: int, /) -> None: ...


@dataclass
class VaultRoom(Generic[S]):
    """A store and its lock: adding to a parity takes longer than keeping what has come."""

    store: Store[S]
    lock: threading.Lock = field(default_factory=threading.Lock)


class Vault:
    def __init__(self, token: bytes, available: Callable[[], int] = available_memory) -> None:
        self._token = token
        self._available = available
        self._store, self._parity = VaultStore(), ParityStore()
        self._shelves, self._groups = VaultRoom(self._store), VaultRoom(self._parity)
        self._landings = Landings(lambda: self._store.promised() + self._parity.promised())

    def held(self) -> dict[int, tuple[int, int]]:
        """rank -> bytes that are held, bytes that are reserved."""
        with self._shelves.lock:
            return self._store.held()

    def held_of_parities(self) -> dict[tuple[int, ...], tuple[int, int]]:
        with self._groups.lock:
            return self._parity.held()

    def left(self, rank: int) -> None:
        with self._shelves.lock:
            self._store.left(rank)
        self._landings.trim()

    def forget_before(self, generation: int) -> None:
        with self._shelves.lock, self._groups.lock:
            self._store.forget_before(generation)
            self._parity.forget_before(generation)
        self._landings.trim()

    def serve(self, connection: socket.socket, frames: Frames[Any], first: VaultRequest) -> None:
        """One connection to its end, from its first message on."""
        if not isinstance(first, VaultOpen | VaultFetch | VaultForget):
            raise RemoteProtocolError(f"{type(first).__name__} came before VaultOpen")
        try:
            if not hmac.compare_digest(first.token.encode(), self._token):
                raise Refusal("token", "wrong token")
            match first:
                case VaultOpen() if first.group:
                    self._write(connection, frames, first, self._groups)
                case VaultOpen():
                    self._write(connection, frames, first, self._shelves)
                case VaultFetch():
                    self._fetch(connection, first)
                case VaultForget():
                    self._forget(first)
                    connection.sendall(frame(VaultForgotten()))
        except Refusal as refusal:
            logger.warning("refused the vault of rank %d: %s", first.rank, refusal)
            connection.sendall(frame(refusal.reply))

    def _write(
        self, connection: socket.socket, frames: Frames[Any], ask: VaultOpen, room: VaultRoom[S]
    ) -> None:
        with self._shelves.lock, self._groups.lock:  # they share the memory
            others = self._store.promised() if ask.group else self._parity.promised()
            # What waits to be used again is promised already.
            available = self._available() + self._landings.waiting
            shelf = room.store.open(ask, available - others)
            opened = VaultOpened(reaches=room.store.reaches(shelf), held=shelf.held)
        connection.sendall(frame(opened))
        yield_cores()
        refusal: Refusal | None = None
        while True:
            request = frames.receive()
            for one in _puts(request) if isinstance(request, VaultPuts) else [request]:
                try:
                    if refusal is not None:
                        _skip(frames, one)
                    elif isinstance(one, VaultPut):
                        self._put(frames, room, shelf, one)
                    else:
                        self._mark(room, shelf, one)
                except Refusal as error:
                    refusal = error
            if isinstance(request, VaultSync):
                if refusal is not None:
                    raise refusal
                connection.sendall(frame(VaultSynced(version=request.version)))

    def _mark(self, room: VaultRoom[S], shelf: S, request: VaultRequest) -> None:
        if not isinstance(request, VaultSync):
            raise RemoteProtocolError(f"{type(request).__name__} came after VaultOpen")
        with room.lock:
            room.store.drop_before(shelf, request.version - 1)

    def _put(self, frames: Frames[Any], room: VaultRoom[S], shelf: S, put: VaultPut) -> None:
        _check(put)
        try:
            with room.lock:
                room.store.admit(shelf, put)
        except Refusal:
            _skip(frames, put)
            raise
        try:
            memory, start, stored = self._landings.take(sum(put.sizes)), 0, []
            for size in put.sizes:
                stored.append(_received(frames, memory[start : start + size]))
                start += size
            if [piece.digest for piece in stored] != put.digests:
                what = f"the {put.kind} {put.version} of unit {put.unit} of rank {shelf.rank}"
                raise Refusal("digest", f"{what} arrived with another digest")
            with room.lock:
                room.store.keep(shelf, put, tuple(stored))
        finally:
            with room.lock:
                room.store.done(shelf, put)

    def _fetch(self, connection: socket.socket, ask: VaultFetch) -> None:
        if ask.parity:
            with self._groups.lock:
                parity, segments = self._parity.fetch(ask.rank, ask.version, ask.base)
            _send(connection, frame(parity), segments)
            return
        with self._shelves.lock:
            fetched, stored = self._store.fetch(ask.rank, ask.version, ask.base)
        _send(connection, frame(fetched), (piece.data for piece in stored))

    def _forget(self, ask: VaultForget) -> None:
        if ask.parity:
            with self._groups.lock:
                self._parity.forget(ask.rank, ask.generation)
        else:
            with self._shelves.lock:
                self._store.forget(ask.rank, ask.generation)
        self._landings.trim()


def _send(connection: socket.socket, announced: bytes, views: Iterable[memoryview]) -> None:
    packed = bytearray(announced)
    for view in views:
        if len(view) < SMALL_BYTES:
            packed += view
        if len(view) >= SMALL_BYTES or len(packed) >= SMALL_BYTES:
            connection.sendall(packed)
            packed = bytearray()
        if len(view) >= SMALL_BYTES:
            connection.sendall(view)
    connection.sendall(packed)


def _received(frames: Frames[Any], view: memoryview) -> StoredPiece:
    digest = xxhash.xxh3_128()
    for part in pieces(view):
        frames.receive_into(part)
        digest.update(part)
    return StoredPiece(view, digest.digest())


def _puts(request: VaultPuts) -> list[VaultPut]:
    try:
        return list(request.each())
    except ValueError as error:
        raise RemoteProtocolError(f"puts that make no sense: {error}") from error


def _check(put: VaultPut) -> None:
    right = (
        put.version >= 0
        and len(put.sizes) == len(put.digests) == TENSORS.get(put.kind, len(put.sizes))
        and all(size >= 0 for size in put.sizes)
    )
    if not right:
        raise RemoteProtocolError(f"a put of kind {put.kind} that makes no sense")


def _skip(frames: Frames[Any], request: VaultRequest | VaultPut) -> None:
    if isinstance(request, VaultPut):
        _check(request)
        left = sum(request.sizes)
        scratch = memoryview(bytearray(min(left, PIECE_BYTES)))
        while left > 0:
            frames.receive_into(scratch[:left])
            left -= min(left, len(scratch))
