"""gloo backends whose connections are known, so that they can be cut from any thread.

gloo has no abort: its `abort()` does nothing, and an operation that waits for a living peer
waits until the timeout. What works is to shut its connected sockets down (never a listener: gloo
terminates the process). To know these sockets for sure, each backend is built on a device of our
own whose listening address we note, and the members tell each other these addresses through the
store beforehand. A socket belongs to gloo if its local address is our listener or its peer is a
member's listener. Nothing is remembered by file descriptor: gloo closes descriptors by itself,
and the numbers are reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

Address = tuple[str, int]

RealGloo: Any = getattr(c10d, "ProcessGroupGloo", None)

_lock = threading.Lock()  # guards the two below; never held while anything blocks
_meshes: set[Mesh] = set()  # all: installed, staged and being built
_installed: set[Mesh] = set()
_listeners = threading.Lock()  # held by whoever opens a listener


class Mesh:
    """How to recognise the sockets of one backend (or of a store client that is being used)."""

    def __init__(self, outgoing: Iterable[Address] = ()) -> None:
        self.incoming: frozenset[Address] = frozenset()
        self.outgoing: frozenset[Address] = frozenset(outgoing)


def watch(mesh: Mesh) -> None:
    with _lock:
        _meshes.add(mesh)


def forget(meshes: Iterable[Mesh]) -> None:
    with _lock:
        _meshes.difference_update(meshes)
        _installed.difference_update(meshes)


def install(meshes: Iterable[Mesh]) -> None:
    with _lock:
        _installed.update(meshes)


def installed() -> list[Mesh]:
    with _lock:
        return list(_installed)


def watched() -> list[Mesh]:
    with _lock:
        return list(_meshes)


def address(raw: Any) -> Address:
    return str(raw[0]).removeprefix("::ffff:"), int(raw[1])


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    return ((fd, sock) for fd, sock in inet_sockets() if sock.type == socket.SOCK_STREAM)


def inet_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every inet socket of this process, as (fd, duplicate): the duplicate cannot be reused
    for something else between looking at it and acting on it."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            copy = os.dup(int(entry))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield int(entry), sock


def _listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def shutdown(meshes: Iterable[Mesh]) -> int:
    count = 0
    for sock in _connections(meshes):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def connected(meshes: Iterable[Mesh]) -> bool:
    """Their backends have connections that they have not closed."""
    return any(True for _ in _connections(meshes))


def _connections(meshes: Iterable[Mesh]) -> Iterator[socket.socket]:
    incoming: set[Address] = set()
    outgoing: set[Address] = set()
    for mesh in meshes:
        incoming |= mesh.incoming
        outgoing |= mesh.outgoing
    if not incoming and not outgoing:
        return
    for _, sock in tcp_sockets():
        try:
            peer = None if _listening(sock) else address(sock.getpeername())
            ours = peer in outgoing or address(sock.getsockname()) in incoming
        except OSError:  # not connected
            continue
        if peer is not None and ours:
            yield sock


def after_fork() -> None:
    """A forked child (DataLoader worker) must not keep the connections of a dead rank alive."""
    global _lock, _listeners
    _lock, _listeners = threading.Lock(), threading.Lock()
    meshes = list(_meshes)
    incoming = frozenset[Address]().union(*(mesh.incoming for mesh in meshes))
    outgoing = frozenset[Address]().union(*(mesh.outgoing for mesh in meshes))
    if not incoming and not outgoing:
        return
    ours = []
    for fd, sock in tcp_sockets():
        with contextlib.suppress(OSError):
            local = address(sock.getsockname())
            listening = _listening(sock)
            if local in incoming or (not listening and address(sock.getpeername()) in outgoing):
                ours.append(fd)
    forget_sockets(ours)
    _meshes.clear()
    _installed.clear()


def forget_sockets(numbers: Iterable[int]) -> None:
    """The numbers stay taken by /dev/null: the library's copies of them must not hit something
    else."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in list(numbers):
        os.dup2(null, number, inheritable=False)
    os.close(null)


def listen(bind: str) -> socket.socket:
    """A listener of our own, which cannot be taken for one of gloo's. Its queue is long: a peer
    that finds it full, of strangers maybe, tries again after a second at the earliest."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with _listeners:
        return socket.create_server((bind, 0), family=family, backlog=1024)


def _listener_inodes() -> dict[int, Address]:
    """By inode: other threads open and close sockets, and their numbers are taken again at once,
    while this one looks around."""
    return {
        os.fstat(sock.fileno()).st_ino: address(sock.getsockname())
        for _, sock in tcp_sockets()
        if _listening(sock)
    }


def connect(store: Any, rank: int, size: int, timeout: timedelta, mesh: Mesh) -> Any:
    """A real gloo backend; `mesh` becomes known to abort() before anything can block."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with _listeners:
        before = _listener_inodes()
        # Not lazily: a connection that is made later could not be cut before.
        devices = [RealGloo.create_device(interface=n, lazy_init=False) for n in interfaces]
        devices = devices or [RealGloo.create_default_device(lazy_init=False)]
        found = _listener_inodes()
    mesh.incoming = frozenset(found[inode] for inode in found.keys() - before.keys())
    if len(mesh.incoming) < len(devices):  # its operations could not be aborted
        raise RuntimeError(f"{len(devices)} gloo devices listen at {sorted(mesh.incoming)}")
    options = RealGloo._Options()
    options._devices = devices
    options._threads = 2 * len(devices)
    options._timeout = timeout
    watch(mesh)
    try:
        if size > 1:
            mesh.outgoing = frozenset(_exchange(store, rank, size, mesh.incoming))
        return RealGloo(store, rank, size, options)
    except BaseException:
        forget([mesh])
        raise


def _exchange(store: Any, rank: int, size: int, own: frozenset[Address]) -> Iterator[Address]:
    # Counted, because a script may destroy its groups and build them again in the same store.
    turn = store.add(f"keepstep/turn/{rank}", 1)
    store.set(f"keepstep/listen/{turn}/{rank}", json.dumps(sorted(own)))
    others = [f"keepstep/listen/{turn}/{peer}" for peer in range(size) if peer != rank]
    for value in store.multi_get(others):
        yield from (address(entry) for entry in json.loads(value))
