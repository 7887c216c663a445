"""Moving a rank's state from held ranks to a newcomer.

A held rank opens a StateServer (serving.py); a newcomer pulls. The tensors are split into batches
(small ones packed together) that the streams take from one queue per class, so that faster sources
serve more. On the same host the newcomer reads the source's memory with process_vm_readv and asks
only for the digests; whether "the same host" is true is tested by reading a random probe, because
process numbers mean nothing across containers. What belongs on a GPU goes there while it arrives.
Every tensor is hashed on both ends: on the device where it is on one.

A source that is lost gives its unfinished batches back to the others. Tensors of registered
objects come from the source whose meta is used: their number may differ between ranks.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from keepstep.errors import PermanentError, RemoteProtocolError, TransientError
from keepstep.model.commands import Source
from keepstep.worker.device import cuda, vm
from keepstep.worker.device.digest import digest
from keepstep.worker.line import peers
from keepstep.worker.state.pieces import Pieces, raw, receive_into
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.serving import (
    SILENCE_S,
    Digests,
    Fetch,
    FetchedState,
    Open,
    Opened,
    ServedCheck,
    TransferRefused,
    of_one_source,
    read_frame,
    replies,
    send,
)
from keepstep.worker.state.statefile import DigestMismatch
from keepstep.worker.state.tensors import memory

__all__ = ["DigestMismatch", "PullResult", "SourceLost", "SourceRefused", "pull"]

BATCH_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # copied and hashed while it is in the cache
STREAMS_MAX = 4


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
            send(self.sock, Open(token=token, tick=tick))
            self.opened: Opened = self._reply(Opened)
        except BaseException:
            self.sock.close()
            raise
        self.direct = _memory_is_readable(self.opened)
        self._pieces: Pieces | None = None

    def _reply(self, kind: type[Any]) -> Any:
        reply = read_frame(self.sock, replies)
        if isinstance(reply, TransferRefused):
            raise SourceRefused(self.rank, f"rank {self.rank} refused the copy: {reply.error}")
        if not isinstance(reply, kind):
            raise RemoteProtocolError(f"rank {self.rank} answered with {type(reply).__name__}")
        return reply

    def copy(self, names: list[str], landing: dict[str, torch.Tensor]) -> int:
        on_device = [name for name in names if _lands_on_device(landing[name])]
        rest = [name for name in names if not _lands_on_device(landing[name])]
        addresses = self.opened.addresses
        near = [name for name in rest if self.direct and name in addresses]
        far = [name for name in rest if not (self.direct and name in addresses)]
        if near:
            send(self.sock, ServedCheck(names=near))  # hashed there while we copy and hash here
            self._agree(near, [self._from_memory(addresses[n], memory(landing[n])) for n in near])
        if far:
            send(self.sock, Fetch(names=far))
            self._agree(far, self._from_socket([memory(landing[name]) for name in far]))
        if on_device:
            send(self.sock, Fetch(names=on_device, device=True))
            label = on_device[0] + f" and {len(on_device) - 1} more" * (len(on_device) > 1)
            self._agree([label], [self._to_device([landing[name] for name in on_device])])
        return sum(landing[name].nbytes for name in names)

    def _agree(self, names: list[str], here: list[bytes]) -> None:
        theirs = self._reply(Digests).digests
        for name, mine, there in zip(names, here, theirs, strict=True):
            if mine != there:
                raise DigestMismatch(
                    self.rank, f"{name} from rank {self.rank} arrived with another digest"
                )

    def digests(self, names: list[str], device: bool) -> list[bytes]:
        send(self.sock, ServedCheck(names=names, device=device))
        found: list[bytes] = self._reply(Digests).digests
        return found

    def _from_socket(self, views: list[memoryview]) -> list[bytes]:
        self._announced([len(view) for view in views])
        digests = []
        for view in views:
            digest = xxhash.xxh3_128()
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                receive_into(self.sock, piece)
                digest.update(piece)
            digests.append(digest.digest())
        return digests

    def _announced(self, sizes: list[int]) -> None:
        fetched: FetchedState = self._reply(FetchedState)
        if fetched.sizes != sizes:
            raise RemoteProtocolError(f"rank {self.rank} has tensors of other sizes")

    def _to_device(self, tensors: list[torch.Tensor]) -> bytes:
        sizes = [tensor.nbytes for tensor in tensors]
        self._announced(sizes)
        pieces = self._pieces = self._pieces or Pieces(tensors[0].device)
        with pieces.turn():
            alone = len(tensors) == 1
            block = raw(tensors[0]) if alone else pieces.empty(sum(sizes))
            pieces.receive(self.sock, block)
            if not alone:
                for tensor, part in zip(tensors, torch.split(block, sizes), strict=True):
                    raw(tensor).copy_(part)
            return pieces.digest(block)

    def _from_memory(self, remote: int, view: memoryview) -> bytes:
        digest = xxhash.xxh3_128()
        local = ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0
        for start in range(0, len(view), PIECE_BYTES):
            length = min(PIECE_BYTES, len(view) - start)
            vm.read(self.opened.pid, remote + start, local + start, length)
            digest.update(view[start : start + length])
        return digest.digest()


def _lands_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


@dataclass
class _Work:
    landing: dict[str, torch.Tensor]
    layouts: dict[str, bytes]
    queues: dict[str, deque[list[str]]] = field(default_factory=dict)  # by class
    copied: int = 0
    used: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    lost: dict[int, str] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  # of these, whom no connection has reached
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
    lost: set[int] | None = None,
    batch_bytes: int = BATCH_BYTES,
    timeout_s: float = SILENCE_S,
) -> PullResult:
    """Fill `state` with that of `tick`, finish_import included, but for what no source has.

    `lost`: ranks that did not answer in this attempt; more may come. None is waited for twice,
    unless nobody else has what it has.

    Raises SourceLost, DigestMismatch, SourceRefused, or UsageError if the models differ."""
    wanted = state.classes()
    lost = set() if lost is None else lost
    # Most useful first; of equally useful ones in the order given.
    remaining = sorted(
        _worth_asking(sources, wanted, lost),
        key=lambda s: -len(wanted.intersection(s.classes or wanted)),
    )
    while True:
        links = _open(remaining, wanted, tick, token, timeout_s, lost)
        remaining = [source for source in remaining if source.rank not in lost]
        landing = state.prepare_import([link.opened.meta for link in links], on_device=True)
        cuda.drain()  # nothing that made these tensors comes after the copies
        layouts: dict[str, bytes] = {}
        for link in links:
            layouts = {**link.opened.layouts, **layouts}
        work = _Work(landing, layouts)
        first = links[0]
        try:
            own = [name for name in landing if of_one_source(name)]
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
        lost.update(work.silent - work.used.keys())
        missing = frozenset(state.missing)
        state.finish_import()
        return PullResult(work.copied, work.used, missing)


def _worth_asking(sources: list[Source], wanted: frozenset[str], lost: set[int]) -> list[Source]:
    """All but the lost ones, which are asked again for what no other has."""
    answering = [source for source in sources if source.rank not in lost]
    missing = wanted.difference(*(source.classes or wanted for source in answering))
    return [s for s in sources if s in answering or missing.intersection(s.classes or wanted)]


def _open(
    sources: list[Source],
    wanted: frozenset[str],
    tick: int,
    token: str,
    timeout_s: float,
    lost: set[int],
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
            lost.add(source.rank)
            continue
        lost.discard(source.rank)
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
        if of_one_source(name):
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
    names.sort(key=lambda name: _lands_on_device(work.landing[name]))
    on_device = [name for name in names if _lands_on_device(work.landing[name])]
    on_host = names[: len(names) - len(on_device)]
    mine = [xxhash.xxh3_128_digest(memory(work.landing[name])) for name in on_host]
    mine += [digest(raw(work.landing[name])) for name in on_device]
    try:
        link = _Link(others[0], token, tick, timeout_s)
        with link.sock:
            theirs = link.digests(on_host, False) + link.digests(on_device, True)
    except OSError:
        return  # its loss is somebody else's business
    for name, here, there in zip(names, mine, theirs, strict=True):
        if here != there:
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
    except OSError as error:
        with work.lock:
            work.lost[source.rank] = f"rank {source.rank}: {error}"
            work.silent.add(source.rank)
        return
    except BaseException as error:
        with work.lock:
            work.error = work.error or error
        return
    try:
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
