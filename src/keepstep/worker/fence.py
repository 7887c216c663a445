"""The commit fence on the wire: every rank learns that every rank has got here, and with what.

Theory of operation
-------------------
In round k a rank sends all it knows to rank + 2^k and waits for what rank - 2^k knows, so that
after ceil(log2 N) rounds everyone has heard of everyone. Words are combined by least and greatest;
hearing of a rank twice then changes nothing, and N need not be a power of two. Each round has
connections of its own: a rank that is already in the next fence can not be mistaken for one that
is still in this.

It does not use the process groups: gloo's all-reduce takes 2(N - 1) hops and hands the work to
another thread and back, for 80 bytes.

Threads: `interrupt` from any, also while `connect` waits; everything else in one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from keepstep.errors import LocalProtocolError
from keepstep.worker import gloo

WORDS = 5
CONNECT_TIMEOUT_S = 60.0
_MESSAGE = struct.Struct(f"<{2 * WORDS}q")
_HELLO = struct.Struct("<16sQ")  # cookie of the listener, round

_lock = threading.Lock()
_all: weakref.WeakSet[Fence] = weakref.WeakSet()


class Fence:
    def __init__(self, rank: int, size: int, bind: str) -> None:
        self._rank, self._size = rank, size
        self._rounds = (size - 1).bit_length()
        self._interrupted = False
        self._sockets: list[socket.socket] = []
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []
        self._cookie = secrets.token_bytes(16)
        self._listener = gloo.listen(bind)
        self._address = (bind, self._listener.getsockname()[1])
        with _lock:
            _all.add(self)
        self._own(self._listener)

    def _own(self, sock: socket.socket) -> socket.socket:
        with _lock:
            self._sockets.append(sock)
            interrupted = self._interrupted
        if interrupted:
            raise ConnectionAbortedError("the fence was aborted while it was being built")
        return sock

    # ------------------------------------------------------------------ building

    def connect(self, store: Any, timeout_s: float) -> None:
        """Find the neighbours through the store and connect; `interrupt` frees whoever waits."""
        self._listener.settimeout(timeout_s)
        place = json.dumps([*self._address, self._cookie.hex()])
        store.set(f"fence/{self._rank}", place)
        for step in range(self._rounds):
            peer = (self._rank + (1 << step)) % self._size
            host, port, cookie = json.loads(store.get(f"fence/{peer}"))
            sock = self._own(socket.create_connection((host, port), CONNECT_TIMEOUT_S))
            sock.sendall(_HELLO.pack(bytes.fromhex(cookie), step))
            self._outgoing.append(_ready(sock))
        incoming: dict[int, socket.socket] = {}
        while len(incoming) < self._rounds:
            sock, turn = self._accept()
            if turn is not None and turn not in incoming:
                incoming[turn] = _ready(sock)
        self._incoming = [incoming[step] for step in range(self._rounds)]
        self._listener.close()

    def _accept(self) -> tuple[socket.socket, int | None]:
        """A stranger's connection is closed and costs nothing but its time limit."""
        sock = self._own(self._listener.accept()[0])
        sock.settimeout(CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                cookie, step = _HELLO.unpack(hello)
                if secrets.compare_digest(cookie, self._cookie) and step < self._rounds:
                    return sock, step
        sock.close()
        return sock, None

    # ------------------------------------------------------------------ meeting

    def meet(self, words: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Least and greatest of every word over all ranks; ConnectionError when aborted or when
        a rank is gone."""
        low = high = tuple(words)
        if len(low) != WORDS:
            raise LocalProtocolError(f"a fence of {len(low)} words")
        for step in range(self._rounds):
            try:
                self._outgoing[step].sendall(_MESSAGE.pack(*low, *high))
                data = self._incoming[step].recv(_MESSAGE.size, socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionResetError(f"Connection lost in the fence: {error}") from None
            if len(data) != _MESSAGE.size:
                peer = (self._rank - (1 << step)) % self._size
                raise ConnectionResetError(f"Connection closed in the fence by rank {peer}")
            heard = _MESSAGE.unpack(data)
            low = tuple(map(min, low, heard[:WORDS]))
            high = tuple(map(max, high, heard[WORDS:]))
        return low, high

    # ------------------------------------------------------------------ ending

    def interrupt(self) -> None:
        with _lock:
            self._interrupted = True
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        for sock in self._sockets:
            sock.close()


def _ready(sock: socket.socket) -> socket.socket:
    sock.settimeout(None)  # a fence ends by passing or by an interruption, never by a clock
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def addresses() -> set[gloo.Address]:
    """The local ends of all connections of fences."""
    with _lock:
        sockets = [sock for fence in _all for sock in fence._sockets]
    found = set()
    for sock in sockets:
        with contextlib.suppress(OSError):
            found.add(gloo.address(sock.getsockname()))
    return found


def interrupt_all() -> None:
    """Free whoever is in a fence or builds one."""
    with _lock:
        fences = list(_all)
    for fence in fences:
        fence.interrupt()


def after_fork() -> None:
    """A forked child (DataLoader worker) must not keep a dead rank's connections alive."""
    global _lock
    _lock = threading.Lock()
    for fence in list(_all):
        for sock in fence._sockets:
            sock.close()
    _all.clear()
