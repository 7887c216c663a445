"""Moving a rank's state from held ranks to a newcomer.

A held rank opens a StateServer; a newcomer pulls. One connection per source and stream:

    Open(token, tick)   -> Opened(meta, layout, pid, probe, addresses)   or Refused
    Fetch(names)        -> Fetched(sizes), raw bytes, Digests
    Check(names)        -> Digests

The tensors are split into batches (small ones packed together) that the streams take from one queue
per class, so that faster sources serve more. On the same host the newcomer reads the source's
memory with process_vm_readv and asks only for the digests; whether "the same host" is true is
tested by reading a random probe, because process numbers mean nothing across containers. Every
tensor is hashed (xxh3_128) on both ends.

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
from collections import Counter, deque
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
from keepstep.worker import gloo, peers, vm
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


class NotReplicas(PermanentError):
    """Tensors that were taken to be the same on all ranks are not."""


class Open(Message, frozen=True):
    token: str
    tick: int


class Fetch(Message, frozen=True):
    names: list[str]


class Check(Message, frozen=True):
    names: list[str]


class Opened(Message, frozen=True):
    meta: bytes
    layouts: dict[str, bytes]  # class -> digest of names, dtypes, shapes and strides in it
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


def _layouts(export: Exported) -> dict[str, bytes]:
    """Ranks that have a class in common must agree about all of it, but for registered objects."""
    digests: dict[str, Any] = {}
    for name, tensor in export.tensors.items():
        digest = digests.setdefault(export.classes[name], xxhash.xxh3_128())
        if not _of_one_source(name):
            digest.update(f"{name} {describe(tensor)}\n".encode())
    return {name: digest.digest() for name, digest in digests.items()}


def _of_one_source(name: str) -> bool:
    """Fits only the meta it came with."""
    return name.startswith("object/") or "/group/" in name


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
        self._layouts = _layouts(export)
        self._probe = ctypes.create_string_buffer(os.urandom(16), 16)
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = gloo.listen(bind_host)
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
            layouts=self._layouts,
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
    used: dict[int, int]  # rank -> bytes
    missing: frozenset[str]  # no source had these: StateSet.missing


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

    def digests(self, names: list[str]) -> list[bytes]:
        _send(self.sock, Check(names=names))
        found: list[bytes] = self._reply(Digests).digests
        return found

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
    layouts: dict[str, bytes]
    queues: dict[str, deque[list[str]]] = field(default_factory=dict)  # by class
    copied: int = 0
    used: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    lost: dict[int, str] = field(default_factory=dict)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, rank: int, copied: int) -> None:
        with self.lock:
            self.copied += copied
            self.used[rank] = self.used.get(rank, 0) + copied


def pull(
    sources: list[Source],
    tick: int,
    token: str,
    state: StateSet,
    *,
    batch_bytes: int = BATCH_BYTES,
    timeout_s: float = SILENCE_S,
) -> PullResult:
    """Fill `state` with that of `tick`, finish_import included, but for what no source has.

    Raises SourceLost, DigestMismatch, SourceRefused, or UsageError if the models differ."""
    wanted = state.classes()
    # Most useful first; of equally useful ones in the order given.
    remaining = sorted(sources, key=lambda s: -len(wanted.intersection(s.classes or wanted)))
    while True:
        links = _open(remaining, wanted, tick, token, timeout_s)
        landing = state.prepare_import([link.opened.meta for link in links])
        layouts: dict[str, bytes] = {}
        for link in links:
            layouts = {**link.opened.layouts, **layouts}
        work = _Work(landing, layouts)
        first = links[0]
        try:
            own = [name for name in landing if _of_one_source(name)]
            work.count(first.rank, first.copy(own, landing))
        except OSError:  # only this source's objects fit its meta: begin again with another
            for link in links:
                link.sock.close()
            state.abandon_import()
            remaining = [source for source in remaining if source.rank != first.rank]
            if not remaining:
                raise SourceLost(
                    first.rank, f"rank {first.rank} was lost during the copy"
                ) from None
            continue
        work.queues = _queues(landing, state.provided_by(), batch_bytes)
        _copy_all(work, links, remaining, tick, token, timeout_s)
        _compare(work, state, remaining, tick, token, timeout_s)
        missing = frozenset(state.missing)
        state.finish_import()
        return PullResult(work.copied, work.used, missing)


def _open(
    sources: list[Source], wanted: frozenset[str], tick: int, token: str, timeout_s: float
) -> list[_Link]:
    """Links to as many sources as it takes to have all classes; to one at least."""
    links: list[_Link] = []
    last, reason = -1, "there is none"
    left = set(wanted)
    for source in sources:
        if links and (not left or not left.intersection(source.classes or left)):
            continue
        try:
            link = _Link(source, token, tick, timeout_s)
        except OSError as error:
            last, reason = source.rank, str(error)
            continue
        left -= link.opened.layouts.keys()
        links.append(link)
    if not links:
        raise SourceLost(last, f"no source of state can be reached: {reason}")
    return links


def _queues(
    landing: dict[str, torch.Tensor], of: dict[str, str], batch_bytes: int
) -> dict[str, deque[list[str]]]:
    """Largest first, so that no stream is left alone with a large one at the end."""
    queues: dict[str, deque[list[str]]] = {}
    small: dict[str, list[str]] = {}
    filled: Counter[str] = Counter()
    by_size = sorted(landing.items(), key=lambda item: -item[1].nbytes)
    for name, tensor in by_size:
        if _of_one_source(name):
            continue
        queue = queues.setdefault(of[name], deque())
        if tensor.nbytes >= batch_bytes:
            queue.append([name])
            continue
        small.setdefault(of[name], []).append(name)
        filled[of[name]] += tensor.nbytes
        if filled[of[name]] >= batch_bytes:
            queue.append(small.pop(of[name]))
            filled[of[name]] = 0
    for kind, names in small.items():
        queues[kind].append(names)
    return queues


def _copy_all(
    work: _Work,
    opened: list[_Link],
    sources: list[Source],
    tick: int,
    token: str,
    timeout_s: float,
) -> None:
    spare = {link.rank: link for link in opened}
    while any(work.queues.values()):
        left = {kind for kind, queue in work.queues.items() if queue}
        alive = [
            source
            for source in sources
            if source.rank not in work.lost and left.intersection(source.classes or left)
        ]
        if not alive:
            rank, reason = next(reversed(work.lost.items()), (-1, "none has what is left"))
            raise SourceLost(rank, f"all sources were lost during the copy, the last: {reason}")
        # Every source at least once; a few streams are needed to fill the memory's bandwidth, and
        # two to overlap one's copying with another's hashing.
        wanted = max(2, min(STREAMS_MAX, len(os.sched_getaffinity(0))))
        streams = (alive * wanted)[: max(wanted, min(len(alive), STREAMS_MAX))]
        threads = []
        for source in streams:
            args = (work, source, spare.pop(source.rank, None), tick, token, timeout_s)
            threads.append(threading.Thread(target=_stream, args=args, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if work.error is not None:
            raise work.error
    for link in spare.values():
        link.sock.close()


def _compare(
    work: _Work, state: StateSet, sources: list[Source], tick: int, token: str, timeout_s: float
) -> None:
    """Of plain tensors that no wrapper describes it is only presumed that all ranks have the same:
    hear of another rank whether that is still true."""
    names = state.presumed_equal()
    others = [s for s in sources if s.rank not in work.used and s.rank not in work.lost]
    others += [s for s in sources if s.rank in work.used and len(work.used) > 1]
    if not names or not others:
        return
    try:
        link = _Link(others[0], token, tick, timeout_s)
        with link.sock:
            theirs = link.digests(names)
    except OSError:
        return  # its loss is somebody else's business
    for name, there in zip(names, theirs, strict=True):
        if xxhash.xxh3_128_digest(memory(work.landing[name])) != there:
            raise NotReplicas(
                f"{name} differs between ranks (rank {link.rank} has another one than ranks "
                f"{sorted(work.used)}), and nothing says how it is spread",
                hint="wrap the model, or distribute it over a device mesh",
            )


def _stream(
    work: _Work, source: Source, link: _Link | None, tick: int, token: str, timeout_s: float
) -> None:
    batch: list[str] = []
    queue: deque[list[str]] = deque()
    try:
        link = link or _Link(source, token, tick, timeout_s)
        with link.sock:
            for kind, layout in link.opened.layouts.items():
                if kind not in work.queues:
                    continue
                queue = work.queues[kind]
                if layout != work.layouts[kind]:
                    raise SourceRefused(
                        source.rank, f"rank {source.rank} holds another set of tensors"
                    )
                while work.error is None:
                    try:
                        batch = queue.popleft()
                    except IndexError:
                        break
                    copied = link.copy(batch, work.landing)
                    batch = []
                    work.count(source.rank, copied)
    except OSError as error:
        with work.lock:
            work.lost[source.rank] = f"rank {source.rank}: {error}"
            if batch:
                queue.append(batch)
    except BaseException as error:
        with work.lock:
            work.error = work.error or error
