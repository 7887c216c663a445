"""The process groups of this rank: solo or real, aborted, staged beside the old ones, swapped.

Theory of operation
-------------------
Rank and size of a group never change in Keepstep, only the processes behind them. So the user's
`ProcessGroup` objects live as long as the job, and this module exchanges the c10d *Backend*
inside each of them, always in the order of the group names, which is the same on all ranks:

    real --abort()--> broken --go_solo()--> solo --swap(staged)--> real
    real -------------------------------------------swap(staged)--> real   (planned)
    solo (a newcomer starts here) ------------------swap(staged)--> real

`install` replaces the one name under which distributed_c10d makes gloo backends, so that a
newcomer's init_process_group, new_group and DeviceMesh get solo backends and ask nobody.

gloo has no abort: its `abort()` does nothing, and an operation that waits for a living peer
waits until the timeout. What works, from any thread, is to shut its connected sockets down
(never a listener: gloo terminates the process). To know these sockets for sure, each backend is
built on a device of our own whose listening address we note, and the members tell each other
these addresses through the store beforehand. A socket belongs to gloo if its local address is
our listener or its peer is a member's listener. Nothing is remembered by file descriptor: gloo
closes descriptors by itself, and the numbers are reused.

A backend's destructor runs its queue empty and joins its threads. Once it has returned nothing
of the old generation can write into a gradient any more; go_solo and swap therefore insist that
theirs was the last reference.

Threads: abort() from any; stage() in a builder thread; everything else in the main thread.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from keepstep import native
from keepstep.errors import LocalProtocolError, PermanentError, UsageError

FENCE = "keepstep-fence"
RELEASE_TIMEOUT_S = 10.0

Address = tuple[str, int]

_ext: Any = None
_RealGloo: Any = getattr(c10d, "ProcessGroupGloo", None)
_lock = threading.Lock()  # guards the five below; never held while anything blocks
_solo = False
_refusal = ""
_aborts = 0
_meshes: set[_Mesh] = set()  # all: installed, staged and being built
_installed: set[_Mesh] = set()

_device_lock = threading.Lock()
_fence: _Fence | None = None
_ddp: weakref.WeakSet[DistributedDataParallel] | None = None
_ddp_rebuilt: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class _Mesh:
    """How to recognise the sockets of one backend (or of a store client that is being used)."""

    def __init__(self, outgoing: Iterable[Address] = ()) -> None:
        self.incoming: frozenset[Address] = frozenset()
        self.outgoing: frozenset[Address] = frozenset(outgoing)


class _Group(NamedTuple):
    name: str
    pg: Any


# --------------------------------------------------------------------------------------- install


def install(solo: bool) -> None:
    """Patch distributed_c10d; before the user's script runs. A newcomer starts solo."""
    global _ext, _solo
    with _lock:
        _solo = solo
    if _ext is not None:
        return
    if _RealGloo is None:
        raise UsageError("this torch has no gloo backend", hint="install a build with USE_GLOO=1")
    _ext = native.load_extension()
    # Lazy connections would appear after we have looked, and unknown to us could not be aborted.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    c10d_any: Any = c10d
    c10d_any.ProcessGroupGloo = _Gloo
    dist.ProcessGroupGloo = _Gloo  # type: ignore[misc,assignment]
    _patch_rendezvous(c10d_any)
    _patch_logger()
    os.register_at_fork(after_in_child=_after_fork)


class _GlooMeta(type):
    def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        chosen = (*args, *kwargs.values())[0] if args or kwargs else timedelta(minutes=30)
        timeout = chosen if isinstance(chosen, timedelta) else chosen._timeout
        if solo():
            return _solo_backend(rank, size, timeout)
        mesh = _Mesh()
        backend = _connect(store, rank, size, timeout, mesh)
        with _lock:
            _installed.add(mesh)
        return backend

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (_RealGloo, _ext.SoloBackend))

    def __getattr__(cls, name: str) -> Any:
        return getattr(_RealGloo, name)


class _Gloo(metaclass=_GlooMeta):
    """Stands in for distributed_c10d.ProcessGroupGloo: callable, testable, never instantiated."""


def _solo_backend(rank: int, size: int, timeout: timedelta) -> Any:
    backend = _ext.SoloBackend(rank, size, "gloo")
    backend.options._timeout = timeout  # the real backend that follows takes it over
    return backend


def _patch_rendezvous(module: Any) -> None:
    rendezvous, barrier = module.rendezvous, module._store_based_barrier
    helper, debug_level = module._new_process_group_helper, module.get_debug_level

    def rendezvous_or_alone(url: str, rank: int = -1, world_size: int = -1, **kw: Any) -> Any:
        if not solo():
            yield from rendezvous(url, rank, world_size, **kw)
            return
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        yield dist.HashStore(), rank, world_size

    def barrier_unless_alone(*args: Any, **kw: Any) -> Any:
        return None if solo() else barrier(*args, **kw)

    def helper_unless_refused(*args: Any, **kw: Any) -> Any:
        if _refusal:
            raise UsageError(_refusal, hint="create process groups before the first step")
        return helper(*args, **kw)

    def debug_level_without_wrapper() -> Any:
        # DETAIL wraps backends in a class that accepts nothing but a genuine gloo backend.
        level = debug_level()
        return dist.DebugLevel.INFO if solo() and level == dist.DebugLevel.DETAIL else level

    module.rendezvous = rendezvous_or_alone
    module._store_based_barrier = barrier_unless_alone
    module._new_process_group_helper = helper_unless_refused
    module.get_debug_level = debug_level_without_wrapper


def _patch_logger() -> None:
    # DDP's constructor logs: c10d::Logger static_casts the backend of a group whose default type
    # is GLOO to ProcessGroupGloo, which is a crash for any other class.
    logger: Any = dist.Logger
    original = logger.set_construction_data_and_log
    kinds = dist.ProcessGroup.BackendType

    def without_cast(*args: Any, **kw: Any) -> Any:
        if not solo():
            return original(*args, **kw)
        groups = [pg for pg, (backend, _) in c10d._world.pg_map.items() if backend == "gloo"]
        for pg in groups:
            pg._set_default_backend(kinds.UNDEFINED)
        try:
            return original(*args, **kw)
        finally:
            for pg in groups:
                pg._set_default_backend(kinds.GLOO)

    logger.set_construction_data_and_log = without_cast


# --------------------------------------------------------------------------------------- sockets


def _address(raw: Any) -> Address:
    return str(raw[0]).removeprefix("::ffff:"), int(raw[1])


def _tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process, as (fd, duplicate): the duplicate cannot be reused
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
            inet = sock.family in (socket.AF_INET, socket.AF_INET6)
            if inet and sock.type == socket.SOCK_STREAM:
                yield int(entry), sock


def _listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shutdown(meshes: Iterable[_Mesh]) -> int:
    incoming: set[Address] = set()
    outgoing: set[Address] = set()
    for mesh in meshes:
        incoming |= mesh.incoming
        outgoing |= mesh.outgoing
    if not incoming and not outgoing:
        return 0
    count = 0
    for _, sock in _tcp_sockets():
        with contextlib.suppress(OSError):
            if _listening(sock):
                continue
            peer = _address(sock.getpeername())  # raises unless connected
            if peer in outgoing or _address(sock.getsockname()) in incoming:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _after_fork() -> None:
    """A forked child (DataLoader worker) must not keep the connections of a dead rank alive.

    The numbers stay taken by /dev/null: gloo's copies of them must not hit something else."""
    global _lock
    _lock = threading.Lock()
    meshes = list(_meshes)
    incoming = frozenset[Address]().union(*(mesh.incoming for mesh in meshes))
    outgoing = frozenset[Address]().union(*(mesh.outgoing for mesh in meshes))
    if not incoming and not outgoing:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for fd, sock in _tcp_sockets():
        with contextlib.suppress(OSError):
            local = _address(sock.getsockname())
            listening = _listening(sock)
            if local in incoming or (not listening and _address(sock.getpeername()) in outgoing):
                os.dup2(null, fd, inheritable=False)
    os.close(null)
    _meshes.clear()
    _installed.clear()


def _connect(store: Any, rank: int, size: int, timeout: timedelta, mesh: _Mesh) -> Any:
    """A real gloo backend; `mesh` becomes known to abort() before anything can block."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with _device_lock:
        before = {fd for fd, _ in _tcp_sockets()}
        devices = [_RealGloo.create_device(interface=name) for name in interfaces]
        devices = devices or [_RealGloo.create_default_device()]
        mesh.incoming = frozenset(
            _address(sock.getsockname())
            for fd, sock in _tcp_sockets()
            if fd not in before and _listening(sock)
        )
    options = _RealGloo._Options()
    options._devices = devices
    options._threads = 2 * len(devices)
    options._timeout = timeout
    with _lock:
        _meshes.add(mesh)
    try:
        if size > 1:
            mesh.outgoing = frozenset(_exchange(store, rank, size, mesh.incoming))
        return _RealGloo(store, rank, size, options)
    except BaseException:
        with _lock:
            _meshes.discard(mesh)
        raise


def _exchange(store: Any, rank: int, size: int, own: frozenset[Address]) -> Iterator[Address]:
    # Counted, because a script may destroy its groups and build them again in the same store.
    turn = store.add(f"keepstep/turn/{rank}", 1)
    store.set(f"keepstep/listen/{turn}/{rank}", json.dumps(sorted(own)))
    others = [f"keepstep/listen/{turn}/{peer}" for peer in range(size) if peer != rank]
    for value in store.multi_get(others):
        yield from (_address(entry) for entry in json.loads(value))


# ------------------------------------------------------------------------------------ the groups


def solo() -> bool:
    return _solo


def destroyed() -> bool:
    """No process group exists (any more)."""
    return not c10d._world.pg_map


def names() -> list[str]:
    return [group.name for group in _groups()]


def refuse_new_groups(message: str) -> None:
    """From now on creating a process group raises UsageError(message)."""
    global _refusal
    _refusal = message


def abort() -> None:
    """Make every operation on every group fail now, here and at the peers; also a stage()."""
    global _aborts
    with _lock:
        _aborts += 1
        meshes = list(_meshes)
    _shutdown(meshes)


def _groups() -> list[_Group]:
    world = c10d._world
    return sorted(_Group(str(world.pg_names[pg]), pg) for pg in list(world.pg_map))


def _require_gloo(groups: list[_Group]) -> None:
    for name, pg in groups:
        for _, backend in _ext.backends(pg):
            kind = str(backend.name())
            if kind != "gloo":
                raise UsageError(
                    f"backend {kind} of group {name} is not supported yet",
                    hint='use init_process_group("gloo")',
                )


def go_solo() -> None:
    """Leave all peers: afterwards nothing of the old groups can touch this process's memory."""
    global _solo, _fence
    groups = _groups()
    _require_gloo(groups)
    with _lock:
        already, _solo = _solo, True
        meshes = list(_installed)
    _shutdown(meshes)  # queued operations must fail for the destructors to return
    old: list[tuple[str, Any]] = []
    if _fence is not None:
        old.append((FENCE, _fence.backend))
        _fence = None
    if not already:
        for name, pg in groups:
            desc = pg.group_desc
            for kind in _kinds(pg):
                fresh = _solo_backend(pg.rank(), pg.size(), _timeout(pg, kind))
                old.append((name, _replace(pg, kind, fresh)))
            pg._set_group_name(name)
            pg._set_group_desc(desc)
    _release(old)
    _forget(meshes)


def _kinds(pg: Any) -> list[Any]:
    return [kind for kind, _ in _ext.backends(pg)]


def _timeout(pg: Any, kind: Any) -> timedelta:
    for found, backend in _ext.backends(pg):
        if found == kind:
            with contextlib.suppress(AttributeError):
                return backend.options._timeout  # type: ignore[no-any-return]
    return timedelta(minutes=30)


def _replace(pg: Any, kind: Any, fresh: Any) -> Any:
    old = _ext.replace_backend(pg, kind, fresh)
    with contextlib.suppress(AttributeError):  # not every torch gives every backend options
        fresh.options.global_ranks_in_group = old.options.global_ranks_in_group
        fresh.options.group_name = old.options.group_name
    return old


def _release(old: list[tuple[str, Any]]) -> None:
    """Drop backends, whose destructors then wait for their last operation."""
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    collected = False
    kept: set[str] = set()
    while old:
        name, backend = old.pop()
        # One reference in C++ (the Python object's) and two in Python (name and argument).
        while _ext.use_count(backend) > 1 or sys.getrefcount(backend) > 2:
            if time.monotonic() > deadline:
                kept.add(name)
                break
            if not collected:
                collected = bool(gc.collect() or True)  # an exception's frames may be in a cycle
            time.sleep(0.001)
        del backend
    if kept:
        raise PermanentError(
            f"backends of groups {', '.join(sorted(kept))} are still in use elsewhere in the "
            f"process after {RELEASE_TIMEOUT_S:.0f} s",
            hint="do not keep the result of ProcessGroup._get_backend()",
        )


def _forget(meshes: Iterable[_Mesh]) -> None:
    with _lock:
        _meshes.difference_update(meshes)
        _installed.difference_update(meshes)


# --------------------------------------------------------------------------------- stage and swap


class StagedGroups:
    """Real backends of a generation, built beside the ones in use."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._aborts = _aborts
        self._backends: dict[tuple[str, Any], Any] = {}
        self._stores: dict[str, Any] = {}
        self._fence: Any = None
        self._meshes: list[_Mesh] = []

    @property
    def aborted(self) -> bool:
        return self._aborts != _aborts

    def discard(self) -> None:
        """Drop everything. Any thread; idempotent."""
        meshes, self._meshes = self._meshes, []
        backends, self._backends = self._backends, {}
        fence, self._fence = self._fence, None
        self._stores = {}
        _forget(meshes)
        del backends, fence

    def _check(self) -> None:
        if self.aborted:
            raise RuntimeError(f"generation {self.generation} was aborted while being staged")

    def _connect(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        self._check()
        mesh = _Mesh()
        backend = _connect(store, rank, size, timeout, mesh)
        self._meshes.append(mesh)
        backend._set_sequence_number_for_group()
        return backend


def stage(
    generation: int, host: str, port: int, rank: int, world: int, timeout_s: float
) -> StagedGroups:
    """Build real backends for all groups of this rank, and a fence. Runs in a builder thread.

    All members do this at the same time; abort(), the end of the store or the timeout end it."""
    staged = StagedGroups(generation)
    groups = _groups()
    _require_gloo(groups)
    timeout = timedelta(seconds=timeout_s)
    # While it is being built, abort() also cuts the connection to the store.
    client_mesh = _Mesh(_resolve(host, port))
    with _lock:
        _meshes.add(client_mesh)
    try:
        staged._check()
        client = _client(host, port, timeout)
        for name, pg in groups:
            store = dist.PrefixStore(f"keepstep/{generation}/{name}", client)
            for kind in _kinds(pg):
                backend = staged._connect(store, pg.rank(), pg.size(), timeout)
                backend._set_default_timeout(_timeout(pg, kind))
                staged._backends[name, kind] = backend
            staged._stores[name] = dist.PrefixStore(f"keepstep/{generation}/store/{name}", client)
        store = dist.PrefixStore(f"keepstep/{generation}/{FENCE}", client)
        staged._fence = staged._connect(store, rank, world, timeout)
        staged._check()
        return staged
    except BaseException:
        staged.discard()
        raise
    finally:
        _forget([client_mesh])


def _resolve(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [_address(entry[4]) for entry in found]


def _client(host: str, port: int, timeout: timedelta) -> Any:
    return dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


def swap(staged: StagedGroups) -> None:
    """Put the staged backends in place, leave solo mode, drop the old ones."""
    global _solo, _fence
    staged._check()
    groups = _groups()
    wanted = {(name, kind) for name, pg in groups for kind in _kinds(pg)}
    if wanted != set(staged._backends):
        raise LocalProtocolError(
            f"groups changed since generation {staged.generation} was staged: "
            f"{sorted({name for name, _ in wanted ^ set(staged._backends)})}"
        )
    old: list[tuple[str, Any]] = []
    for name, pg in groups:
        desc = pg.group_desc
        for kind in _kinds(pg):
            old.append((name, _replace(pg, kind, staged._backends.pop((name, kind)))))
        # The name is kept in the backend, and functional collectives find the group by it.
        pg._set_group_name(name)
        pg._set_group_desc(desc)
        store = staged._stores[name]
        c10d._world.pg_map[pg] = (c10d._world.pg_map[pg][0], store)
        _ext.replace_store(pg, store)
    if _fence is not None:
        old.append((FENCE, _fence.backend))
    _fence, staged._fence = _Fence(staged._fence), None
    with _lock:
        _solo = False
        dropped = list(_installed)
        _installed.clear()
        _installed.update(staged._meshes)
    staged._meshes = []
    _shutdown(dropped)
    _release(old)
    _forget(dropped)


# ----------------------------------------------------------------------------------------- fence


class _Fence:
    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.options = dist.AllreduceOptions()
        self.timeout_s = -1.0


def build_first_fence(host: str, port: int, rank: int, world: int, timeout_s: float) -> None:
    """Generation 0, on ranks whose groups are real from the start: only the fence is missing."""
    global _fence
    timeout = timedelta(seconds=timeout_s)
    store = dist.PrefixStore(f"keepstep/0/{FENCE}", _client(host, port, timeout))
    mesh = _Mesh()
    _fence = _Fence(_connect(store, rank, world, timeout, mesh))
    with _lock:
        _installed.add(mesh)


def fence(values: list[int], timeout_s: float) -> list[int]:
    """Sum over all ranks. RuntimeError when aborted or when a peer is gone."""
    current = _fence
    if current is None:
        raise RuntimeError("there is no fence: the groups are solo")
    if current.timeout_s != timeout_s:
        current.options.timeout = timedelta(seconds=timeout_s)
        current.timeout_s = timeout_s
    # A fresh tensor each time: a failed all-reduce may still write into the one it was given.
    tensor = torch.tensor(values, dtype=torch.int64)
    current.backend.allreduce([tensor], current.options).wait()
    return tensor.tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- DDP


def ddp_modules(refresh: bool = False) -> list[DistributedDataParallel]:
    """All DistributedDataParallel instances. Looked for once, unless `refresh`."""
    global _ddp
    if _ddp is None or refresh:
        # type() and not isinstance: lazy proxies answer isinstance by importing things.
        _ddp = weakref.WeakSet(
            thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
        )
    return list(_ddp)


def reset_ddp(rebuilt: bool) -> None:
    """Make every reducer forget the backward that was interrupted. Call in solo mode.

    DDP moves its parameters to other buckets once, in the forward after its first backward, and
    buckets decide the order of additions. `rebuilt` says that the job is past that point (it has
    committed a step). A reducer that has recorded its first backward but not yet acted on it then
    does so here, where the collective inside is local: resetting would throw the record away and
    leave it with other buckets than its peers have. If the job has not committed a step, the
    record belongs to a backward that will run again, and is dropped. (A newcomer to a job at
    version 0 must for the same reason warm up with at most one step.)
    """
    for module in ddp_modules():
        reducer: Any = module.reducer
        should_rebuild = bool(_ext.reducer_should_rebuild(reducer))
        if not should_rebuild:
            _ddp_rebuilt.add(module)  # _reset_state forgets that it ever happened
        complete = _ext.reducer_pending(reducer) == _ext.reducer_size(reducer)
        if rebuilt and should_rebuild and complete and module not in _ddp_rebuilt:
            reducer._rebuild_buckets()
            _ddp_rebuilt.add(module)
        reducer._reset_state()
