"""Framed message streams on asyncio: what agents, the orchestrator and blob servers talk over.

One `Stream` is one connection. Three properties matter to its users:

- `send` never waits. It queues in order, and a peer that does not read until `unsent_bytes_max`
  is reached is cut off: a slow peer costs a bounded amount of memory and nobody else's time.
  Whoever can wait (a blob server answering one request at a time) awaits `drain` after it.
- `receive` may be cancelled at any point (a deadline around it) without losing the frame border.
- Whatever the peer does ends in one of two errors, and the connection is closed by then:
  `StreamClosed` (gone, may come back) or `RemoteProtocolError` (does not speak our protocol).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from keepstep.errors import RemoteProtocolError, TransientError
from keepstep.model.messages import Address
from keepstep.model.wire import FRAME_BYTES_MAX, HEADER, body_length, decode, frame

T = TypeVar("T")

UNSENT_BYTES_MAX = 2 * FRAME_BYTES_MAX
READ_BUFFER_BYTES = 1 << 20

# A peer whose machine vanished sends no FIN: the kernel gives up on it after about this long,
# idle (keepalive probes) or not (unacknowledged data).
SILENT_PEER_S = 20
HANDSHAKE_S_MAX = 10.0  # of TLS

logger = logging.getLogger(__name__)


class StreamClosed(TransientError):
    """The connection has ended, by either side or by the network."""


async def read_message(
    reader: asyncio.StreamReader,
    decoder: msgspec.msgpack.Decoder[T],
    limit: int = FRAME_BYTES_MAX,
) -> T:
    """One message from a bare reader. EOF raises `asyncio.IncompleteReadError`."""
    length = body_length(await reader.readexactly(HEADER.size), limit)
    return decode(decoder, await reader.readexactly(length))


class Stream(Generic[T]):
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
        *,
        limit: int = FRAME_BYTES_MAX,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
    ) -> None:
        self.limit = limit  # of one frame; a server raises it once it knows the peer
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._unsent_bytes_max = unsent_bytes_max
        self._length: int | None = None  # of the frame whose header was read already
        self.peer = _peer_name(writer)
        self.certificate = writer.get_extra_info("peercert")  # verified; None without TLS
        configure(writer.get_extra_info("socket"))

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    def send(self, message: Any) -> None:
        """Queue `message` behind those sent before; raises StreamClosed, never waits."""
        self.send_framed(frame(message))

    def send_framed(self, framed: bytes) -> None:
        """The same for what goes to many peers and was framed once."""
        if self._writer.is_closing():
            raise StreamClosed(f"stream to {self.peer} is closed")
        if self._writer.transport.get_write_buffer_size() > self._unsent_bytes_max:
            self.abort()
            raise StreamClosed(
                f"{self.peer} has not read for more than {self._unsent_bytes_max} bytes"
            )
        self._writer.write(framed)

    async def drain(self) -> None:
        """Wait until the peer keeps up again."""
        try:
            await self._writer.drain()
        except OSError as error:
            self.abort()
            raise StreamClosed(f"stream to {self.peer} broke: {error}") from error

    async def receive(self) -> T:
        try:
            if self._length is None:
                header = await self._reader.readexactly(HEADER.size)
                self._length = body_length(header, self.limit)
            body = await self._reader.readexactly(self._length)
            self._length = None
            return decode(self._decoder, body)
        except asyncio.IncompleteReadError as error:
            self.close()
            cut = " inside a frame" if error.partial or self._length is not None else ""
            raise StreamClosed(f"{self.peer} closed the stream{cut}") from error
        except OSError as error:
            self.abort()
            raise StreamClosed(f"stream from {self.peer} broke: {error}") from error
        except RemoteProtocolError:
            self.abort()
            raise

    def close(self) -> None:
        """Close after what was sent is written; idempotent, does not wait."""
        self._writer.close()

    def abort(self) -> None:
        """Close now; what is not written yet is dropped."""
        self._writer.transport.abort()

    async def wait_closed(self, timeout_s: float = 1.0) -> None:
        """Wait until the last bytes are handed to the kernel, or drop them after a while."""
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_s)
        except (TimeoutError, OSError):
            self.abort()


async def connect(
    address: Address,
    decoder: msgspec.msgpack.Decoder[T],
    *,
    limit: int = FRAME_BYTES_MAX,
    timeout_s: float = 5.0,
    tls: tuple[ssl.SSLContext, str] | None = None,
) -> Stream[T]:
    """`tls`: the context, and the name that the server's certificate must bear."""
    context, name = tls if tls is not None else (None, None)
    opening = asyncio.open_connection(
        address.host, address.port, limit=READ_BUFFER_BYTES, ssl=context, server_hostname=name
    )
    try:
        reader, writer = await asyncio.wait_for(opening, timeout_s)
    except (TimeoutError, OSError) as error:
        what = str(error) or "timed out"
        raise StreamClosed(f"cannot connect to {address.host}:{address.port}: {what}") from error
    return Stream(reader, writer, decoder, limit=limit)


async def serve(
    handler: Callable[[Stream[T]], Awaitable[None]],
    decoder: msgspec.msgpack.Decoder[T],
    host: str,
    port: int = 0,
    *,
    limit: int = FRAME_BYTES_MAX,
    connections_max: int = 1024,
    tls: ssl.SSLContext | None = None,
) -> asyncio.Server:
    """Run `handler` for each connection. Its errors end that connection and nothing else."""
    connections = 0

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        stream = Stream(reader, writer, decoder, limit=limit)
        if connections >= connections_max:
            logger.warning("refused %s: %d connections are open", stream.peer, connections)
            stream.abort()
            return
        connections += 1
        try:
            await handler(stream)
        except StreamClosed as error:
            logger.debug("%s", error)
        except RemoteProtocolError as error:
            logger.warning("dropped %s: %s", stream.peer, error)
        except asyncio.CancelledError:
            # The server goes down. Python 3.11 would log a cancelled handler as an error.
            stream.abort()
        except Exception:
            logger.exception("handler of %s failed", stream.peer)
        finally:
            connections -= 1
            stream.close()
            await stream.wait_closed()

    return await asyncio.start_server(
        accept,
        host,
        port,
        limit=READ_BUFFER_BYTES,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_S_MAX if tls is not None else None,
    )


def listening_address(server: asyncio.Server) -> Address:
    host, port = server.sockets[0].getsockname()[:2]
    return Address(host, port)


def _peer_name(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "peer"


def configure(sock: Any) -> None:
    """No waiting for more to send, and an end of peers that have vanished."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # the peer may be gone already
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_PEER_S // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_PEER_S // 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_PEER_S * 1000)
