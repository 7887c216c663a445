"""The agent's end of one worker's control socket.

Not an asyncio stream, for one reason: when a worker dies, what it said last must be read and
passed on *before* its exit is, and at once. `drain` does that synchronously; everything a dead
process wrote is in the socket's buffer by then.

Writing never waits. A worker that is stopped leaves commands in a bounded buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.model.commands import WorkerCommand
from keepstep.model.messages import WorkerMessage
from keepstep.model.wire import HEADER, body_length, decode, frame

FRAME_BYTES_MAX = 4 << 20  # error texts are the largest thing a worker says
UNSENT_BYTES_MAX = 8 << 20
_READ_BYTES = 256 << 10

_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)


class WorkerChannel:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        on_message: Callable[[WorkerMessage], None],
        on_broken: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_broken(why)`: the peer does not speak the protocol or does not read; `on_end`: it
        closed its end. The channel is closed when either is called."""
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._closed = False
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def send(self, command: WorkerCommand) -> None:
        if self._closed:
            return
        data = frame(command)
        if len(self._unsent) + len(data) > UNSENT_BYTES_MAX:
            self._break(f"it left {len(self._unsent)} bytes of commands unread")
            return
        if not self._unsent:
            self._loop.add_writer(self._sock, self._writable)
        self._unsent += data
        self._writable()

    def drain(self) -> None:
        """Take all that has arrived, then close. For a process that has ended."""
        while not self._closed and self._read():
            pass
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()

    def _readable(self) -> None:
        self._read()

    def _read(self) -> bool:
        """One read; False if there was nothing or the end."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return False
        self._received += data
        try:
            self._take_frames()
        except RemoteProtocolError as error:
            self._break(f"it does not speak the worker protocol: {error.message}")
        return True

    def _take_frames(self) -> None:
        while len(self._received) >= HEADER.size:
            length = body_length(bytes(self._received[: HEADER.size]), FRAME_BYTES_MAX)
            end = HEADER.size + length
            if len(self._received) < end:
                return
            message = decode(_decoder, bytes(self._received[HEADER.size : end]))
            del self._received[:end]
            self._on_message(message)

    def _writable(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError, InterruptedError):
                while self._unsent:
                    sent = self._sock.send(self._unsent)
                    del self._unsent[:sent]
        except OSError:
            # Nobody is there to read. The end of the process, or of the stream, tells the rest.
            self._unsent.clear()
        if not self._unsent and not self._closed:
            self._loop.remove_writer(self._sock)

    def _break(self, why: str) -> None:
        self.close()
        self._on_broken(why)
