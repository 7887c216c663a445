"""Side state held on this node, and the server that hands it out.

Two sources answer a BlobGet: progress pages of this node's workers, alive or dead and not yet
forgotten, and copies that ranks of other nodes have put here as their buddy. A copy is
acknowledged only when it is stored, because the sender's fence stands on that answer: every rank
of the job waits for the slowest answer of all.

A first request is read beyond its first bytes only if these show the token: whoever has none can
make nobody wait or reserve memory, and has to go when there are many of its kind (`pending`).

Threads: each connection has one, which stores and acknowledges without the event loop. Pages
belong to the loop's thread, so it is asked for whatever is not a put. Copies are under a lock.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from keepstep.adapters.transport.blocking import Frames
from keepstep.adapters.transport.pending import SHOWN_S_MAX, share_of_descriptors
from keepstep.adapters.transport.stream import HANDSHAKE_S_MAX, SILENT_PEER_S, configure
from keepstep.adapters.transport.threads import Caller, ThreadServer
from keepstep.adapters.transport.tls import server_context
from keepstep.agent.images import Images
from keepstep.agent.page import PageReader
from keepstep.agent.vault import Vault
from keepstep.core.agent.blobs import BlobStore
from keepstep.errors import RemoteProtocolError
from keepstep.model.blob_messages import (
    SERIAL_BITS,
    BlobConfirm,
    BlobData,
    BlobGet,
    BlobMissing,
    BlobOk,
    BlobPut,
    BlobRefused,
    BlobReply,
    BlobRequest,
)
from keepstep.model.image import ImageRequest
from keepstep.model.messages import Address, TlsFiles
from keepstep.model.page import INIT_TICK, is_late
from keepstep.model.vault import VaultRequest
from keepstep.model.wire import frame, leading_token

CONNECTIONS_MAX = 1024
PENDING_SHARE, PENDING_MAX = 8, 256  # of the descriptors; threads of strangers
BACKLOG = 1024
FIRST_REQUEST_S = SHOWN_S_MAX  # a connection that has not shown the token by then is closed
FIRST_BYTES_MAX = 4096  # of a request whose token is not known to be right
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
        self._server: ThreadServer | None = None

    async def start(self, host: str, port: int = 0) -> Address:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._loop = asyncio.get_running_loop()
        self._server = ThreadServer(
            "keepstep-blobs",
            listener,
            self._serve,
            pending_max=share_of_descriptors(PENDING_SHARE, PENDING_MAX),
            connections_max=CONNECTIONS_MAX,
        )
        return Address(*listener.getsockname()[:2])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def connections(self) -> int:
        return self._server.connections if self._server is not None else 0

    # ----------------------------------------------------------------- threads

    def _serve(self, caller: Caller) -> None:
        configure(caller.sock)
        caller.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        deadline = time.monotonic() + FIRST_REQUEST_S
        if self._tls is not None:
            self._encrypt(self._tls, caller)
        frames = Frames(caller.sock, self._decoder)
        try:
            request = frames.receive_first(deadline, self._begins_with_token, FIRST_BYTES_MAX)
        except TimeoutError as error:
            raise RemoteProtocolError("no request came") from error
        if self._is_token(getattr(request, "token", "")):
            caller.admit()
        if isinstance(request, VaultRequest):
            self.vault.serve(caller.sock, frames, request)
        elif isinstance(request, ImageRequest):
            if self._images is not None:
                self._images.serve(caller.sock, request)
        else:
            self._serve_blobs(caller, frames, request)

    def _encrypt(self, tls: ssl.SSLContext, caller: Caller) -> None:
        caller.sock.settimeout(HANDSHAKE_S_MAX)
        caller.wrap(
            lambda sock: tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        )
        assert isinstance(caller.sock, ssl.SSLSocket)
        caller.sock.do_handshake()

    def _serve_blobs(
        self,
        caller: Caller,
        frames: Frames[BlobRequest | VaultRequest | ImageRequest],
        request: BlobRequest | VaultRequest | ImageRequest,
    ) -> None:
        """Requests for blobs, until one is refused: whoever gets beyond the first has the token."""
        while True:
            if isinstance(request, BlobConfirm):
                self.confirm(request)
                request = frames.receive()
                continue
            if isinstance(request, BlobGet) and self._is_token(request.token):
                future = asyncio.run_coroutine_threadsafe(self._from_pages(request), self._loop)
                reply = future.result(LOOP_S_MAX)
            elif isinstance(request, BlobPut | BlobGet):
                reply = self.answer(request, caller.number)
            else:
                raise RemoteProtocolError(f"{type(request).__name__} came among blobs")
            caller.sock.sendall(frame(reply))
            if isinstance(reply, BlobRefused):
                logger.warning("refused a blob request of %s: %s", caller.peer, reply.error)
                return
            request = frames.receive()

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)

    def _begins_with_token(self, beginning: bytes) -> bool:
        return self._is_token(leading_token(beginning) or "")

    # ----------------------------------------------------------------- requests

    async def _from_pages(self, request: BlobGet) -> BlobReply:
        return self.answer(request)

    def confirm(self, request: BlobConfirm) -> None:
        if not self._is_token(request.token):
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
        if not self._is_token(request.token):
            return BlobRefused(error="wrong token")
        if not isinstance(request, BlobPut):
            return self._get(request)
        rank, tick = request.rank, request.tick
        if (tick < INIT_TICK and not is_late(tick)) or rank < 0:
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
