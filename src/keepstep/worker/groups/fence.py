"""The commit fence on the wire: every rank learns that every rank has got here, and with what.

Theory of operation
-------------------
In round k a rank sends all it knows to rank + 2^k and waits for what rank - 2^k knows, so that
after ceil(log2 N) rounds everyone has heard of everyone. Words are combined by least and greatest;
hearing of a rank twice then changes nothing, and N need not be a power of two. Each round has
connections of its own: a rank that is already in the next fence can not be mistaken for one that
is still in this.

The words fit into any socket's buffer, so a rank sends first and reads then. Tables may not fit:
they are sent and read at the same time, or all ranks would send, and none would read. Of tables
that are only compared (`extremes`), too, the least and greatest travel: however many ranks there
are, a message has every name once. `gather` brings what each rank has, and grows with the ranks.

Whoever reaches the listener may connect to it. All connections are heard at once, and one that has
not shown the listener's cookie may have to go for a later one (adapters.transport.pending): a
stranger, silent or slow, holds nobody up.

It does not use the process groups: gloo's all-reduce takes 2(N - 1) hops and hands the work to
another thread and back, for 128 bytes.

Threads: `interrupt` from any, also while `connect` waits; everything else in one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from keepstep.adapters.transport.pending import EXHAUSTED, Pending
from keepstep.errors import LocalProtocolError
from keepstep.worker.groups import gloo

WORDS = 11
GATHERED_BYTES_MAX = 64 << 20  # of one message
READ_BYTES = 1 << 20  # at once
STRANGERS_MAX = 64  # whose connections are open while it is built
CONNECT_TIMEOUT_S = 60.0
_MESSAGE = struct.Struct(f"<{2 * WORDS}q")
_LENGTH = struct.Struct("<Q")
_HELLO = struct.Struct("<16sQ")  # cookie of the listener, round

_pieces = msgspec.msgpack.Decoder(dict[int, bytes])
_extremes = msgspec.msgpack.Decoder(tuple[dict[str, str], dict[str, str]])

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
        place = json.dumps([*self._address, self._cookie.hex()])
        store.set(f"fence/{self._rank}", place)
        for step in range(self._rounds):
            peer = (self._rank + (1 << step)) % self._size
            host, port, cookie = json.loads(store.get(f"fence/{peer}"))
            sock = self._own(socket.create_connection((host, port), CONNECT_TIMEOUT_S))
            sock.sendall(_HELLO.pack(bytes.fromhex(cookie), step))
            self._outgoing.append(_ready(sock))
        incoming = _Gathering(self, timeout_s).members()
        self._incoming = [_ready(incoming[step]) for step in range(self._rounds)]
        self._listener.close()

    def _disown(self, sock: socket.socket) -> None:
        with _lock:
            self._sockets.remove(sock)
            sock.close()

    def turn_of(self, hello: bytes) -> int | None:
        """The round that a member connects for; None: a stranger."""
        cookie, step = _HELLO.unpack(hello)
        known = secrets.compare_digest(cookie, self._cookie)
        return int(step) if known and step < self._rounds else None

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

    def gather(self, mine: bytes) -> list[bytes]:
        """What every rank has brought, in the order of ranks; errors as `meet`."""
        known = {self._rank: mine}
        for step in range(self._rounds):
            known |= _pieces.decode(self._exchange(step, msgspec.msgpack.encode(known)))
        return [known[rank] for rank in sorted(known)]

    def extremes(self, mine: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
        """Least and greatest under every name, over all ranks that have it; errors as `meet`."""
        low, high = dict(mine), dict(mine)
        for step in range(self._rounds):
            higher = {name: value for name, value in high.items() if value != low[name]}
            data = self._exchange(step, msgspec.msgpack.encode((low, higher)))
            least, higher = _extremes.decode(data)
            for name, value in least.items():
                low[name] = min(low.get(name, value), value)
            for name, value in (least | higher).items():
                high[name] = max(high.get(name, value), value)
        return low, high

    def _exchange(self, step: int, data: bytes) -> bytes:
        """Send to one neighbour while the other is heard."""
        outgoing, incoming = self._outgoing[step], self._incoming[step]
        left, heard = memoryview(_LENGTH.pack(len(data)) + data), bytearray()
        try:
            with selectors.PollSelector() as selector:  # takes no descriptor
                selector.register(outgoing, selectors.EVENT_WRITE)
                selector.register(incoming, selectors.EVENT_READ)
                while selector.get_map():
                    for key, _ in selector.select():
                        with contextlib.suppress(BlockingIOError):
                            if key.fileobj is outgoing:
                                left = left[outgoing.send(left, socket.MSG_DONTWAIT) :]
                                ended = not left
                            else:
                                heard += _part(incoming, _missing(heard))
                                ended = not _missing(heard)
                            if ended:
                                selector.unregister(key.fileobj)
        except (OSError, ValueError) as error:  # ValueError: the sockets have been closed
            raise ConnectionResetError(f"Connection lost in the fence: {error}") from None
        return bytes(heard[_LENGTH.size :])

    # ------------------------------------------------------------------ ending

    def interrupt(self) -> None:
        with _lock:
            self._interrupted = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        for sock in self._sockets:
            sock.close()


class _Gathering:
    """Accepts until there is a connection for each round."""

    def __init__(self, fence: Fence, timeout_s: float) -> None:
        self._fence, self._timeout_s = fence, timeout_s
        self._pending: Pending[socket.socket] = Pending(STRANGERS_MAX)
        self._heard: dict[socket.socket, bytes] = {}  # of each that is pending
        self._members: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def members(self) -> dict[int, socket.socket]:
        """By round. TimeoutError: none came for so long; an interruption is an OSError too."""
        listener = self._fence._listener
        listener.setblocking(False)
        deadline, found = time.monotonic() + self._timeout_s, 0
        with self._selector:
            self._selector.register(listener, selectors.EVENT_READ)
            while len(self._members) < self._fence._rounds:
                if len(self._members) > found:
                    deadline, found = time.monotonic() + self._timeout_s, len(self._members)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the fence: not all ranks have connected")
                for key, _ in self._selector.select(left_s):
                    sock = key.fileobj
                    if sock is listener:
                        self._accept(listener)
                    elif sock in self._heard:  # not dropped in this very turn
                        self._hear(sock)  # type: ignore[arg-type]
            for stranger in list(self._heard):
                self._drop(stranger)
        return self._members

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, peer = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            crowd = self._pending.pick_half() if error.errno in EXHAUSTED else []
            for stranger in crowd:
                self._drop(stranger)
            if not crowd:  # no descriptor even so, or interrupted
                raise
            return
        sock = self._fence._own(accepted)
        sock.setblocking(False)
        gone = self._pending.enter(sock, str(peer[0]))
        if gone is not None:
            self._drop(gone)
        self._heard[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, sock: socket.socket) -> None:
        heard = self._heard[sock]
        try:
            part = sock.recv(_HELLO.size - len(heard))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._heard[sock] = heard = heard + part
        if part and len(heard) < _HELLO.size:
            return
        turn = self._fence.turn_of(heard) if len(heard) == _HELLO.size else None
        if turn is None or turn in self._members:
            self._drop(sock)
            return
        self._forget(sock)
        self._members[turn] = sock

    def _drop(self, sock: socket.socket) -> None:
        self._forget(sock)
        self._fence._disown(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._pending.leave(sock)
        del self._heard[sock]
        self._selector.unregister(sock)


def _missing(heard: bytearray) -> int:
    """How much of a message is still to come, or of its length if that is not yet known. What lies
    behind it belongs to the next fence."""
    if len(heard) < _LENGTH.size:
        return _LENGTH.size - len(heard)
    (length,) = _LENGTH.unpack_from(heard)
    if length > GATHERED_BYTES_MAX:
        raise ConnectionResetError(f"a peer announced {length} bytes in the fence")
    return _LENGTH.size + int(length) - len(heard)


def _part(sock: socket.socket, missing: int) -> bytes:
    """What has come; BlockingIOError if nothing has."""
    part = sock.recv(min(missing, READ_BYTES), socket.MSG_DONTWAIT)
    if not part:
        raise ConnectionResetError("Connection closed in the fence")
    return part


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
