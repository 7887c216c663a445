"""Side state held on this node, and the server that hands it out.

Two sources answer a BlobGet: progress pages of this node's workers, alive or dead and not yet
forgotten, and copies that ranks of other nodes have put here as their buddy. A copy is
acknowledged only when it is stored, because the sender's fence stands on that answer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence

import msgspec

from keepstep.adapters.transport.stream import Stream, listening_address, serve
from keepstep.adapters.transport.tls import server_context
from keepstep.agent.page import PageReader
from keepstep.core.agent.blobs import BlobStore
from keepstep.errors import RemoteProtocolError
from keepstep.model.messages import (
    Address,
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

CONNECTIONS_MAX = 1024
FIRST_REQUEST_S = 10.0  # a connection that has not shown the token by then is closed

logger = logging.getLogger(__name__)


class BlobServer:
    """`pages(rank)` gives the pages of this node's workers of that rank, youngest first."""

    def __init__(
        self,
        token: str,
        pages: Callable[[int], Sequence[PageReader]],
        tls: TlsFiles | None = None,
    ) -> None:
        self._token = token.encode()
        self._tls = server_context(tls, clients=True) if tls is not None else None
        self._pages = pages
        self._copies = BlobStore()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> Address:
        decoder: msgspec.msgpack.Decoder[BlobRequest] = msgspec.msgpack.Decoder(BlobRequest)
        self._server = await serve(
            self._serve, decoder, host, port, connections_max=CONNECTIONS_MAX, tls=self._tls
        )
        return listening_address(self._server)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def answer(self, request: BlobRequest) -> BlobReply:
        if not hmac.compare_digest(request.token.encode(), self._token):
            return BlobRefused(error="wrong token")
        if isinstance(request, BlobPut):
            if request.tick < INIT_TICK or request.rank < 0:
                return BlobRefused(error=f"no such side state: {request.rank}/{request.tick}")
            self._copies.put(request.rank, request.tick, request.data)
            return BlobOk()
        return self._get(request)

    async def _serve(self, stream: Stream[BlobRequest]) -> None:
        deadline_s: float | None = FIRST_REQUEST_S
        while True:
            try:
                request = await asyncio.wait_for(stream.receive(), deadline_s)
            except TimeoutError as error:
                raise RemoteProtocolError("no request came") from error
            reply = self.answer(request)
            if isinstance(reply, BlobRefused):
                logger.warning("refused a blob request of %s: %s", stream.peer, reply.error)
            stream.send(reply)
            await stream.drain()
            if isinstance(reply, BlobRefused):
                return
            deadline_s = None

    def _get(self, request: BlobGet) -> BlobReply:
        pages = self._pages(request.rank)
        own = [blob for page in pages if (blob := page.blob(request.tick)) is not None]
        copy = self._copies.get(request.rank, request.tick)
        # max keeps the first of equals: the youngest worker's, and a page before a copy.
        best = max(own, key=lambda blob: blob[0], default=None)
        if best is not None and (copy is None or best[0] >= copy[0]):
            return BlobData(tick=best[0], data=best[1], own=True)
        if copy is not None:
            return BlobData(tick=copy[0], data=copy[1], own=False)
        held = {tick for page in pages for tick in page.ticks()}
        return BlobMissing(held=sorted(held | set(self._copies.ticks(request.rank))))
