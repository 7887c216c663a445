"""The server of the vault: connections that the blob server accepted, in their threads.

What is kept and for how long stands in keepstep.core.agent.vault. Here bytes are received, always
into memory of their own: what is stored is never written again, so a fetch sends it without the
lock, whatever comes in meanwhile. A put is acknowledged by the next VaultSync, after its digest was
found right.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import xxhash

from keepstep.adapters.transport.blocking import PIECE_BYTES, Frames, landing, pieces
from keepstep.core.agent.vault import Piece, Refusal, Shelf, VaultStore
from keepstep.errors import RemoteProtocolError
from keepstep.model.vault import (
    VaultFetch,
    VaultForget,
    VaultForgotten,
    VaultOpen,
    VaultOpened,
    VaultPut,
    VaultRequest,
    VaultSync,
    VaultSynced,
    VaultTruncate,
)
from keepstep.model.wire import frame

TENSORS = {"grad": 1, "absent": 0, "note": 1}  # of a put; a base has any number
SMALL_BYTES = 64 << 10  # packed together when sent

logger = logging.getLogger(__name__)


def available_memory() -> int:
    return int(psutil.virtual_memory().available)


class Vault:
    def __init__(self, token: bytes, available: Callable[[], int] = available_memory) -> None:
        self._token = token
        self._available = available
        self._store = VaultStore()
        self._lock = threading.Lock()

    def held(self) -> dict[int, tuple[int, int]]:
        """rank -> bytes that are held, bytes that are reserved."""
        with self._lock:
            return self._store.held()

    def forget(self, rank: int) -> None:
        with self._lock:
            self._store.forget(rank)

    def forget_before(self, generation: int) -> None:
        with self._lock:
            self._store.forget_before(generation)

    def serve(self, connection: socket.socket, frames: Frames[Any], first: VaultRequest) -> None:
        """One connection to its end, from its first message on."""
        if not isinstance(first, VaultOpen | VaultFetch | VaultForget):
            raise RemoteProtocolError(f"{type(first).__name__} came before VaultOpen")
        try:
            if not hmac.compare_digest(first.token.encode(), self._token):
                raise Refusal("token", "wrong token")
            match first:
                case VaultOpen():
                    self._write(connection, frames, first)
                case VaultFetch():
                    self._send(connection, first)
                case VaultForget():
                    with self._lock:
                        self._store.forget(first.rank, first.generation)
                    connection.sendall(frame(VaultForgotten()))
        except Refusal as refusal:
            logger.warning("refused the vault of rank %d: %s", first.rank, refusal)
            connection.sendall(frame(refusal.reply))

    def _write(self, connection: socket.socket, frames: Frames[Any], ask: VaultOpen) -> None:
        with self._lock:
            shelf = self._store.open(ask, self._available())
            opened = VaultOpened(reaches=self._store.reaches(shelf), held=shelf.held)
        connection.sendall(frame(opened))
        refusal: Refusal | None = None
        while True:
            request = frames.receive()
            try:
                if refusal is not None:
                    _skip(frames, request)
                elif isinstance(request, VaultPut):
                    self._put(frames, shelf, request)
                else:
                    self._mark(shelf, request)
            except Refusal as error:
                refusal = error
            if isinstance(request, VaultSync):
                if refusal is not None:
                    raise refusal
                connection.sendall(frame(VaultSynced(version=request.version)))

    def _mark(self, shelf: Shelf, request: VaultRequest) -> None:
        with self._lock:
            match request:
                case VaultSync():
                    self._store.settle(shelf, request.version - 1)
                case VaultTruncate():
                    self._store.truncate(shelf, request.version)
                case _:
                    raise RemoteProtocolError(f"{type(request).__name__} came after VaultOpen")

    def _put(self, frames: Frames[Any], shelf: Shelf, put: VaultPut) -> None:
        _check(put)
        try:
            with self._lock:
                self._store.admit(shelf, put)
        except Refusal:
            _skip(frames, put)
            raise
        try:
            memory, start, stored = landing(sum(put.sizes)), 0, []
            for size in put.sizes:
                stored.append(_received(frames, memory[start : start + size]))
                start += size
            if [piece.digest for piece in stored] != put.digests:
                what = f"the {put.kind} {put.version} of unit {put.unit} of rank {shelf.rank}"
                raise Refusal("digest", f"{what} arrived with another digest")
            with self._lock:
                self._store.keep(shelf, put, tuple(stored))
        finally:
            with self._lock:
                self._store.done(shelf, put)

    def _send(self, connection: socket.socket, ask: VaultFetch) -> None:
        with self._lock:
            fetched, stored = self._store.fetch(ask.rank, ask.version)
        packed = bytearray(frame(fetched))
        for piece in stored:
            if len(piece.data) < SMALL_BYTES:
                packed += piece.data
            if len(piece.data) >= SMALL_BYTES or len(packed) >= SMALL_BYTES:
                connection.sendall(packed)
                packed = bytearray()
            if len(piece.data) >= SMALL_BYTES:
                connection.sendall(piece.data)
        connection.sendall(packed)


def _received(frames: Frames[Any], view: memoryview) -> Piece:
    digest = xxhash.xxh3_128()
    for part in pieces(view):
        frames.receive_into(part)
        digest.update(part)
    return Piece(view, digest.digest())


def _check(put: VaultPut) -> None:
    right = (
        put.version >= 0
        and len(put.sizes) == len(put.digests) == TENSORS.get(put.kind, len(put.sizes))
        and all(size >= 0 for size in put.sizes)
    )
    if not right:
        raise RemoteProtocolError(f"a put of kind {put.kind} that makes no sense")


def _skip(frames: Frames[Any], request: VaultRequest) -> None:
    if isinstance(request, VaultPut):
        _check(request)
        left = sum(request.sizes)
        scratch = memoryview(bytearray(min(left, PIECE_BYTES)))
        while left > 0:
            frames.receive_into(scratch[:left])
            left -= min(left, len(scratch))
