"""Side state held on this node, and the server that hands it out.

Two sources answer a BlobGet: progress pages of this node's workers, alive or dead and not yet
forgotten, and copies that ranks of other nodes have put here as their buddy. A copy is
acknowledged only when it is stored, because the sender's fence stands on that answer: every rank
of the job waits for the slowest answer of all.

Threads: each connection has one, which stores and acknowledges without the event loop. Pages
belong to the loop's thread, so it is asked for whatever is not a put. Copies are under a lock.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from keepstep.adapters.transport.blocking import Frames, shut
from keepstep.adapters.transport.stream import HANDSHAKE_S_MAX, SILENT_PEER_S, configure
from keepstep.adapters.transport.tls import server_context
from keepstep.agent.images import Images
from keepstep.agent.page import PageReader
from keepstep.agent.vault import Vault
from keepstep.core.agent.blobs import BlobStore
from keepstep.errors import RemoteProtocolError
from keepstep.model.image import ImageRequest
from keepstep.model.messages import (
    SERIAL_BITS,
    Address,
    BlobConfirm,
    BlobData,
    BlobGet,
    BlobMissing,
    BlobOk,
    BlobPut,
    BlobRefused,
    BlobReply,
    BlobRequest,
    TlsFiles,
)
from keepstep.model.page import INIT_TICK
from keepstep.model.vault import VaultRequest
from keepstep.model.wire import frame

CONNECTIONS_MAX = 1024
BACKLOG = 128
FIRST_REQUEST_S = 10.0  # a connection that has not shown the token by then is closed
LOOP_S_MAX = 10.0  # longer than the event loop is ever busy
_SEND_TIMEOUT = struct.pack("ll", SILENT_PEER_S, 0)

logger = logging.getLogger(__name__)


class BlobServer:
    """`pages(rank)` gives the pages of this node's workers of that rank, youngest first."""

    def __init__(
        self,
        token: str,
        pages: Callable[[int], Sequence[PageReader]],
        tls: TlsFiles | None = None,
        images: Images | None = None,
    ) -> None:
        self._token = token.encode()
        self._tls = server_context(tls, clients=True) if tls is not None else None
        self._pages = pages
        self.vault = Vault(self._token)  # served on the same port
        self._images = images  # likewise
        self._decoder: msgspec.msgpack.Decoder[BlobRequest | VaultRequest | ImageRequest]
        self._decoder = msgspec.msgpack.Decoder(BlobRequest | VaultRequest | ImageRequest)
        self._lock = threading.Lock()
        self._copies = BlobStore()
        self._how: dict[int, dict[int, tuple[bool, int]]] = {}  # rank -> tick -> ahead, serial
        self._writers: dict[int, int] = {}  # rank -> number of the connection that put last
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._closed = False

    async def start(self, host: str, port: int = 0) -> Address:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener, self._loop = listener, asyncio.get_running_loop()
        threading.Thread(
            target=self._accept, args=(listener,), name="keepstep-blobs", daemon=True
        ).start()
        return Address(*listener.getsockname()[:2])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        if self._listener is not None:
            shut(self._listener)
            self._listener.close()
        for connection in connections:
            shut(connection)

    # ----------------------------------------------------------------- threads

    def _accept(self, listener: socket.socket) -> None:
        for number in itertools.count(1):
            try:
                connection, peer = listener.accept()
            except OSError:
                if self._closed:
                    return
                logger.exception("accepting failed; going on")
                time.sleep(0.1)  # out of file descriptors: nothing tells when there is one again
                continue
            name = f"{peer[0]}:{peer[1]}"
            with self._lock:
                taken = not self._closed and len(self._connections) < CONNECTIONS_MAX
                if taken:
                    self._connections.add(connection)
            if not taken:
                logger.warning("refused %s: closed, or too many connections are open", name)
                connection.close()
                continue
            threading.Thread(
                target=self._run, args=(connection, name, number), name="keepstep-blob", daemon=True
            ).start()

    def _run(self, connection: socket.socket, peer: str, number: int) -> None:
        """One connection to its end. Its errors end it and nothing else."""
        try:
            configure(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            if self._tls is not None:
                connection = self._encrypted(self._tls, connection)
                connection.do_handshake()
            self._serve(connection, peer, number)
        except OSError as error:
            logger.debug("blob connection of %s ended: %s", peer, error)
        except RemoteProtocolError as error:
            logger.warning("dropped %s: %s", peer, error)
        except Exception:
            logger.exception("blob connection of %s failed", peer)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _encrypted(self, tls: ssl.SSLContext, accepted: socket.socket) -> ssl.SSLSocket:
        accepted.settimeout(HANDSHAKE_S_MAX)
        connection = tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # the accepted one is an empty shell now
            self._connections.discard(accepted)
            self._connections.add(connection)
            if self._closed:
                shut(connection)
        return connection

    def _serve(self, connection: socket.socket, peer: str, number: int) -> None:
        frames = Frames(connection, self._decoder)
        try:
            request = frames.receive(time.monotonic() + FIRST_REQUEST_S)
        except TimeoutError as error:
            raise RemoteProtocolError("no request came") from error
        connection.settimeout(None)
        while True:
            if isinstance(request, VaultRequest):
                self.vault.serve(connection, frames, request)
                return
            if isinstance(request, ImageRequest):
                if self._images is not None:
                    self._images.serve(connection, request)
                return
            if isinstance(request, BlobConfirm):
                self.confirm(request)
                request = frames.receive()
                continue
            if isinstance(request, BlobPut):
                reply = self.answer(request, number)
            else:
                future = asyncio.run_coroutine_threadsafe(self._from_pages(request), self._loop)
                reply = future.result(LOOP_S_MAX)
            connection.sendall(frame(reply))
            if isinstance(reply, BlobRefused):
                logger.warning("refused a blob request of %s: %s", peer, reply.error)
                return
            request = frames.receive()

    # ----------------------------------------------------------------- requests

    async def _from_pages(self, request: BlobGet) -> BlobReply:
        return self.answer(request)

    def confirm(self, request: BlobConfirm) -> None:
        if not hmac.compare_digest(request.token.encode(), self._token):
            raise RemoteProtocolError("wrong token")
        with self._lock:
            how = self._how.get(request.rank, {})
            if request.tick in how:
                how[request.tick] = (False, how[request.tick][1])

    def forget(self, before: int) -> None:
        """Drop what ranks of generations before this one have put here."""
        with self._lock:
            for rank, how in self._how.items():
                for tick in [t for t, (_, serial) in how.items() if serial >> SERIAL_BITS < before]:
                    self._copies.drop(rank, tick)
                    del how[tick]
        self.vault.forget_before(before)

    def answer(self, request: BlobPut | BlobGet, connection: int = 0) -> BlobReply:
        """`connection` counts up: what a rank had sent over one that it has given up may be read
        after what it has put over the next, and must not take its place."""
        if not hmac.compare_digest(request.token.encode(), self._token):
            return BlobRefused(error="wrong token")
        if not isinstance(request, BlobPut):
            return self._get(request)
        rank, tick = request.rank, request.tick
        if tick < INIT_TICK or rank < 0:
            return BlobRefused(error=f"no such side state: {rank}/{tick}")
        with self._lock:
            if connection < self._writers.get(rank, 0):
                return BlobRefused(error=f"rank {rank} has opened another connection since")
            self._writers[rank] = connection
            self._copies.put(rank, tick, request.data)
            how = {**self._how.get(rank, {}), tick: (request.ahead, request.serial)}
            self._how[rank] = {kept: how[kept] for kept in self._copies.ticks(rank)}
        return BlobOk()

    def _get(self, request: BlobGet) -> BlobReply:
        pages = self._pages(request.rank)
        own = [blob for page in pages if (blob := page.blob(request.tick)) is not None]
        with self._lock:
            copy = self._copies.get(request.rank, request.tick)
            copied = self._copies.ticks(request.rank)
            how = self._how.get(request.rank, {})
        # max keeps the first of equals: the youngest worker's, and a page before a copy.
        best = max(own, key=lambda blob: blob[0], default=None)
        if best is not None and (copy is None or best[0] >= copy[0]):
            return BlobData(tick=best[0], data=best[1], own=True)
        if copy is not None:
            ahead, serial = how[copy[0]]
            return BlobData(tick=copy[0], data=copy[1], own=False, ahead=ahead, serial=serial)
        held = {tick for page in pages for tick in page.ticks()}
        return BlobMissing(held=sorted(held | set(copied)))
