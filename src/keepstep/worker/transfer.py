"""Moving a rank's state from held ranks to a newcomer.

A held rank opens a StateServer; a newcomer pulls. One connection per source and stream:

    Open(token, tick)   -> Opened(meta, layout, pid, probe, addresses)   or Refused
    Fetch(names)        -> Fetched(sizes), raw bytes, Digests
    Check(names)        -> Digests

The tensors are split into batches (small ones packed together) that the streams take from one
queue, so that faster sources serve more. On the same host the newcomer reads the source's memory
with process_vm_readv and asks only for the digests; whether "the same host" is true is tested by
reading a random probe, because process numbers mean nothing across containers. Every tensor is
hashed (xxh3_128) on both ends.

A source that is lost gives its unfinished batches back to the others. Tensors of registered
objects come from the source whose meta is used: their number may differ between ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import xxhash

from keepstep.adapters.transport.blocking import shut
from keepstep.errors import PermanentError, RemoteProtocolError, TransientError
from keepstep.model import wire
from keepstep.model.messages import Address, Message, Source
from keepstep.worker import peers, vm
from keepstep.worker.state import Exported, StateSet, dense, describe, memory, on_cpu
from keepstep.worker.statefile import DigestMismatch, read_file, write_file

__all__ = ["DigestMismatch", "PullResult", "SourceLost", "SourceRefused", "StateServer"]
__all__ += ["pull", "read_file", "write_file"]

BATCH_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # copied and hashed while it is in the cache
STREAMS_MAX = 4
SILENCE_S = 15.0


class SourceLost(TransientError):
    """No source is left; `rank` is the one lost last."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message, hint="the incident widens, or the copy is tried again")
        self.rank = rank


class SourceRefused(PermanentError):
    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Open(Message, frozen=True):
    token: str
    tick: int


class Fetch(Message, frozen=True):
    names: list[str]


class Check(Message, frozen=True):
    names: list[str]


class Opened(Message, frozen=True):
    meta: bytes
    layout: bytes  # digest of names, dtypes, shapes and strides that must be equal on all sources
    pid: int
    probe: bytes
    probe_at: int
    addresses: dict[str, int]  # of tensors that can be read where they are


class Fetched(Message, frozen=True):
    sizes: list[int]


class Digests(Message, frozen=True):
    digests: list[bytes]


class Refused(Message, frozen=True):
    error: str


_requests = msgspec.msgpack.Decoder(Open | Fetch | Check)
_replies = msgspec.msgpack.Decoder(Opened | Fetched | Digests | Refused)


def _send(sock: socket.socket, message: Message) -> None:
    sock.sendall(wire.frame(message))


def _receive(sock: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = sock.recv_into(into[done:])
        if got == 0:
            raise ConnectionError("closed by the peer")
        done += got


def _read_frame(sock: socket.socket, decoder: Any, limit: int = wire.FRAME_BYTES_MAX) -> Any:
    header = bytearray(wire.HEADER.size)
    _receive(sock, memoryview(header))
    body = bytearray(wire.body_length(bytes(header), limit))
    _receive(sock, memoryview(body))
    return wire.decode(decoder, bytes(body))


def _layout(tensors: dict[str, torch.Tensor]) -> bytes:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        if not name.startswith("object/"):
            digest.update(f"{name} {describe(tensor)}\n".encode())
    return digest.digest()


# ---------------------------------------------------------------------------------------- source


class StateServer:
    """Serves one export while the rank holds still. Memory is only read."""

    def __init__(self, bind_host: str, token: str, export: Exported, tick: int) -> None:
        self._token, self._tick, self._export = token, tick, export
        self._ready = {
            name: tensor.detach()
            for name, tensor in export.tensors.items()
            if tensor.device.type == "cpu" and dense(tensor)
        }
        self._layout = _layout(export.tensors)
        self._probe = ctypes.create_string_buffer(os.urandom(16), 16)
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
        self._listener = socket.create_server((bind_host, 0), family=family, backlog=64)
        self.address = Address(bind_host, self._listener.getsockname()[1])
        vm.let_others_read(True)
        self._spawn(self._accept)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="keepstep-state", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                connection = peers.accepted(connection)
            except OSError:
                continue  # gone already
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, RemoteProtocolError), sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(SILENCE_S * 4)  # a client that waits for another source says nothing
            peers.greet(sock)
            if not self._open(sock):
                return
            while True:
                request = _read_frame(sock, _requests)
                unknown = set(getattr(request, "names", [])) - self._export.tensors.keys()
                if unknown or isinstance(request, Open):
                    _send(sock, Refused(error=f"unknown tensors {sorted(unknown)[:3]}"))
                    return
                if isinstance(request, Fetch):
                    self._send_tensors(sock, request.names)
                _send(sock, Digests(digests=[self._digest(name) for name in request.names]))
        with self._lock:
            self._connections.discard(sock)

    def _open(self, sock: socket.socket) -> bool:
        request = _read_frame(sock, _requests, limit=4096)  # nothing is known about the peer yet
        right = isinstance(request, Open) and hmac.compare_digest(
            request.token.encode(), self._token.encode()
        )
        if not right:
            _send(sock, Refused(error="wrong token"))
            return False
        if request.tick != self._tick:
            _send(sock, Refused(error=f"holds tick {self._tick}, not {request.tick}"))
            return False
        addresses = {name: tensor.data_ptr() for name, tensor in self._ready.items()}
        opened = Opened(
            meta=self._export.meta,
            layout=self._layout,
            pid=os.getpid(),
            probe=self._probe.raw,
            probe_at=ctypes.addressof(self._probe),
            addresses=addresses,
        )
        _send(sock, opened)
        return True

    def _tensor(self, name: str) -> torch.Tensor:
        ready = self._ready.get(name)
        if ready is None:  # on a GPU, or not one block: copied when asked for
            ready = self._ready[name] = on_cpu(self._export.tensors[name])
        return ready

    def _digest(self, name: str) -> bytes:
        if name not in self._digests:
            self._digests[name] = xxhash.xxh3_128_digest(memory(self._tensor(name)))
        return self._digests[name]

    def _send_tensors(self, sock: socket.socket, names: list[str]) -> None:
        views = [memory(self._tensor(name)) for name in names]
        _send(sock, Fetched(sizes=[len(view) for view in views]))
        packed = bytearray()
        for view in views:
            if len(view) < 64 << 10:
                packed += view
                continue
            sock.sendall(packed)
            packed = bytearray()
            sock.sendall(view)
        sock.sendall(packed)

    def close(self) -> None:
        """Afterwards nothing here looks at the tensors any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            shut(connection)
        for thread in self._threads:
            thread.join(SILENCE_S)
        vm.let_others_read(False)
        self._ready.clear()


# ------------------------------------------------------------------------------- reading memory


def _memory_is_readable(opened: Opened) -> bool:
    found = ctypes.create_string_buffer(len(opened.probe))
    try:
        vm.read(opened.pid, opened.probe_at, ctypes.addressof(found), len(opened.probe))
    except (OSError, AttributeError):  # not permitted, no such process, no such system call
        return False
    return found.raw == opened.probe


# -------------------------------------------------------------------------------------- newcomer


@dataclass(frozen=True)
class PullResult:
    bytes_copied: int
    sources_used: list[int]


class _Link:
    """One stream from one source."""

    def __init__(self, source: Source, token: str, tick: int, timeout_s: float) -> None:
        self.rank = source.rank
        self.sock = peers.connect(source.serve, timeout_s)
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send(self.sock, Open(token=token, tick=tick))
            self.opened: Opened = self._reply(Opened)
        except BaseException:
            self.sock.close()
            raise
        self.direct = _memory_is_readable(self.opened)

    def _reply(self, kind: type[Any]) -> Any:
        reply = _read_frame(self.sock, _replies)
        if isinstance(reply, Refused):
            raise SourceRefused(self.rank, f"rank {self.rank} refused the copy: {reply.error}")
        if not isinstance(reply, kind):
            raise RemoteProtocolError(f"rank {self.rank} answered with {type(reply).__name__}")
        return reply

    def copy(self, names: list[str], landing: dict[str, torch.Tensor]) -> int:
        addresses = self.opened.addresses
        near = [name for name in names if self.direct and name in addresses]
        far = [name for name in names if not (self.direct and name in addresses)]
        copied = 0
        for wanted, fetch in ((near, False), (far, True)):
            if not wanted:
                continue
            views = [memory(landing[name]) for name in wanted]
            if fetch:
                _send(self.sock, Fetch(names=wanted))
                digests = self._from_socket(views)
            else:
                _send(self.sock, Check(names=wanted))  # hashed there while we copy and hash here
                digests = [
                    self._from_memory(addresses[name], view)
                    for name, view in zip(wanted, views, strict=True)
                ]
            theirs = self._reply(Digests).digests
            for name, here, there in zip(wanted, digests, theirs, strict=True):
                if here != there:
                    raise DigestMismatch(
                        self.rank, f"{name} from rank {self.rank} arrived with another digest"
                    )
            copied += sum(len(view) for view in views)
        return copied

    def _from_socket(self, views: list[memoryview]) -> list[bytes]:
        fetched: Fetched = self._reply(Fetched)
        if fetched.sizes != [len(view) for view in views]:
            raise RemoteProtocolError(f"rank {self.rank} has tensors of other sizes")
        digests = []
        for view in views:
            digest = xxhash.xxh3_128()
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                _receive(self.sock, piece)
                digest.update(piece)
            digests.append(digest.digest())
        return digests

    def _from_memory(self, remote: int, view: memoryview) -> bytes:
        digest = xxhash.xxh3_128()
        local = ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
        for start in range(0, len(view), PIECE_BYTES):
            length = min(PIECE_BYTES, len(view) - start)
            vm.read(self.opened.pid, remote + start, local + start, length)
            digest.update(view[start : start + length])
        return digest.digest()


@dataclass
class _Work:
    landing: dict[str, torch.Tensor]
    layout: bytes
    queue: deque[list[str]] = field(default_factory=deque)
    copied: int = 0
    used: set[int] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def pull(
    sources: list[Source],
    tick: int,
    token: str,
    state: StateSet,
    *,
    batch_bytes: int = BATCH_BYTES,
    timeout_s: float = SILENCE_S,
) -> PullResult:
    """Fill `state` with that of `tick`, finish_import included.

    Raises SourceLost, DigestMismatch, SourceRefused, or UsageError if the models differ."""
    remaining = list(sources)
    while True:
        work, link, remaining = _begin(remaining, tick, token, state, timeout_s)
        objects = [name for name in work.landing if name.startswith("object/")]
        try:
            work.copied += link.copy(objects, work.landing)
        except OSError:  # only this source's objects fit its meta: begin again with another
            link.sock.close()
            state.abandon_import()
            remaining = [source for source in remaining if source.rank != link.rank]
            if not remaining:
                raise SourceLost(link.rank, f"rank {link.rank} was lost during the copy") from None
            continue
        work.used.add(link.rank)
        work.queue.extend(_batches(work.landing, batch_bytes))
        _copy_all(work, link, remaining, tick, token, timeout_s)
        state.finish_import()
        return PullResult(work.copied, sorted(work.used))


def _begin(
    sources: list[Source], tick: int, token: str, state: StateSet, timeout_s: float
) -> tuple[_Work, _Link, list[Source]]:
    """Meta from the first source that can be reached; the sources from there on."""
    last, reason = -1, "there is none"
    for index, source in enumerate(sources):
        try:
            link = _Link(source, token, tick, timeout_s)
        except OSError as error:
            last, reason = source.rank, str(error)
            continue
        landing = state.prepare_import(link.opened.meta)
        return _Work(landing, link.opened.layout), link, sources[index:]
    raise SourceLost(last, f"no source of state can be reached: {reason}")


def _batches(landing: dict[str, torch.Tensor], batch_bytes: int) -> list[list[str]]:
    """Largest first, so that no stream is left alone with a large one at the end."""
    batches: list[list[str]] = []
    small: list[str] = []
    filled = 0
    by_size = sorted(landing.items(), key=lambda item: -item[1].nbytes)
    for name, tensor in by_size:
        if name.startswith("object/"):
            continue
        if tensor.nbytes >= batch_bytes:
            batches.append([name])
            continue
        small.append(name)
        filled += tensor.nbytes
        if filled >= batch_bytes:
            batches.append(small)
            small, filled = [], 0
    return [*batches, small] if small else batches


def _copy_all(
    work: _Work,
    first: _Link,
    sources: list[Source],
    tick: int,
    token: str,
    timeout_s: float,
) -> None:
    spare: _Link | None = first
    while work.queue:
        alive = [source for source in sources if source.rank not in work.lost]
        if not alive:
            rank, reason = next(reversed(work.lost.items()))
            raise SourceLost(rank, f"all sources were lost during the copy, the last: {reason}")
        # Every source at least once; a few streams are needed to fill the memory's bandwidth, and
        # two to overlap one's copying with another's hashing.
        wanted = max(2, min(STREAMS_MAX, len(os.sched_getaffinity(0))))
        streams = (alive * wanted)[: max(wanted, min(len(alive), STREAMS_MAX))]
        threads = []
        for source in streams:
            link, spare = (spare, None) if spare and spare.rank == source.rank else (None, spare)
            args = (work, source, link, tick, token, timeout_s)
            threads.append(threading.Thread(target=_stream, args=args, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if work.error is not None:
            raise work.error


def _stream(
    work: _Work, source: Source, link: _Link | None, tick: int, token: str, timeout_s: float
) -> None:
    batch: list[str] = []
    try:
        link = link or _Link(source, token, tick, timeout_s)
        with link.sock:
            if link.opened.layout != work.layout:
                raise SourceRefused(source.rank, f"rank {source.rank} holds another set of tensors")
            while work.error is None:
                try:
                    batch = work.queue.popleft()
                except IndexError:
                    return
                copied = link.copy(batch, work.landing)
                batch = []
                with work.lock:
                    work.copied += copied
                    work.used.add(source.rank)
    except OSError as error:
        with work.lock:
            work.lost[source.rank] = f"rank {source.rank}: {error}"
            if batch:
                work.queue.append(batch)
    except BaseException as error:
        with work.lock:
            work.error = work.error or error
