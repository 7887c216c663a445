"""Framed messages on blocking sockets, for threads that have one connection each.

A message that is waited for in a thread of its own is there sooner than one that wakes an event
loop: the loop's machinery is cold in the caches after milliseconds of somebody else's work.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from keepstep.errors import RemoteProtocolError
from keepstep.model.wire import FRAME_BYTES_MAX, HEADER, body_length, decode

T = TypeVar("T")

READ_BYTES = 64 << 10
READ_BYTES_MAX = 1 << 20  # memory is taken as it fills, never on a peer's word
PIECE_BYTES = 1 << 20  # of raw bytes that are looked at while they are in the cache
MAPPED_BYTES_MIN = 1 << 20


class Frames(Generic[T]):
    """The messages that come from one socket. It reads ahead: a small frame is one system call."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._buffer = bytearray()

    def receive(self, deadline: float | None = None) -> T:
        """`deadline` (time.monotonic) is one for the whole message, however it trickles in.
        Raises OSError when none came, RemoteProtocolError for one that is none."""
        self._fill(HEADER.size, deadline)
        end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]), FRAME_BYTES_MAX)
        self._fill(end, deadline)
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return decode(self._decoder, body)

    def receive_first(self, deadline: float, known: Callable[[bytes], bool], limit: int) -> T:
        """The first message of a peer that nothing is known about. One of more than `limit` bytes
        is read on, and then without a deadline, only if its beginning shows who sends it."""
        self._fill(HEADER.size, deadline)
        size = body_length(bytes(self._buffer[: HEADER.size]), FRAME_BYTES_MAX)
        self._fill(HEADER.size + min(size, limit), deadline)
        if size > limit:
            if not known(bytes(self._buffer[HEADER.size : HEADER.size + limit])):
                raise RemoteProtocolError(
                    f"a first frame of {size} bytes that does not begin with the token"
                )
            self._sock.settimeout(None)
        return self.receive(None if size > limit else deadline)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with bytes that are no frame."""
        done = min(len(view), len(self._buffer))
        view[:done] = self._buffer[:done]
        del self._buffer[:done]
        while done < len(view):
            count = self._sock.recv_into(view[done:])
            if count == 0:
                raise ConnectionError("the peer closed the connection inside raw bytes")
            done += count

    def _fill(self, count: int, deadline: float | None) -> None:
        while (missing := count - len(self._buffer)) > 0:
            if deadline is not None:
                self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._sock.recv(min(max(missing, READ_BYTES), READ_BYTES_MAX))
            if not part:
                cut = " inside a frame" if self._buffer else ""
                raise ConnectionError(f"the peer closed the connection{cut}")
            self._buffer += part


def pieces(view: memoryview, size: int = PIECE_BYTES) -> Iterator[memoryview]:
    return (view[start : start + size] for start in range(0, len(view), size))


def landing(size: int) -> memoryview:
    """Memory to receive into. The kernel gives it page by page as it fills, and gets it back when
    it is dropped; a bytearray would first be written with zeros, and stay with the allocator."""
    if size < MAPPED_BYTES_MIN:
        return memoryview(bytearray(size))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def relay(line: socket.socket, local: socket.socket) -> None:
    """Pass bytes on in both directions until either side ends; both are shut then. In one thread,
    because an encrypted socket is not to be read and written by two at once."""
    with contextlib.suppress(OSError):
        while True:
            waiting = isinstance(line, ssl.SSLSocket) and line.pending() > 0
            ready = [line] if waiting else select.select([line, local], [], [])[0]
            for source in ready:
                part = source.recv(PIECE_BYTES)
                if not part:
                    break
                (local if source is line else line).sendall(part)
            else:
                continue
            break
    shut(line)
    shut(local)


def shut(sock: socket.socket) -> None:
    """End both directions, from any thread. An SSLSocket's own shutdown() first forgets that it
    is encrypted, and a thread that writes at that moment would write plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
