"""The process groups of this rank: solo or real, aborted, staged beside the old ones, swapped.

Theory of operation
-------------------
Rank and size of a group never change in Keepstep, only the processes behind them. So the user's
`ProcessGroup` objects live as long as the job, and this module exchanges the c10d *Backend*
inside each of them, always in the order of the group names, which is the same on all ranks:

    real --abort()--> broken --go_solo()--> solo --swap(staged)--> real
    real -------------------------------------------swap(staged)--> real   (planned)
    solo (a newcomer starts here) ------------------swap(staged)--> real

What the user's script creates is made solo or real by frontend.py.

A gloo backend's destructor runs its queue empty and joins its threads. Once it has returned
nothing of the old generation can write into a gradient any more; go_solo and swap therefore insist
that theirs was the last reference. What gloo does not end by itself when its connections are cut,
is ended by us (gloo_waits.cpp). NCCL's are aborted instead, and the device drained.

Threads: abort() from any; stage() in a builder thread; everything else in the main thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as _C
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from keepstep.errors import LocalProtocolError, PermanentError
from keepstep.worker.device import cuda, guard
from keepstep.worker.groups import existing, frontend, gloo, nccl, reducers
from keepstep.worker.groups import fence as fences
from keepstep.worker.groups.fence import Fence

RELEASE_TIMEOUT_S = 10.0
LOOK_S = 0.02
RENDEZVOUS_TIMEOUT_S = 7 * 86_400.0  # ended by abort() or the end of the store, not by a clock

_ext: Any = None
_aborts = 0
_fence: Fence | None = None


def install(solo: bool) -> None:
    """Before the user's script runs. A newcomer starts solo."""
    global _ext
    if _ext is None:
        os.register_at_fork(after_in_child=gloo.after_fork)
        os.register_at_fork(after_in_child=fences.after_fork)
    frontend.install(solo)
    frontend.on_ddp_built = reducers.forget
    _ext = frontend.ext


# ------------------------------------------------------------------------------------ the groups


def solo() -> bool:
    return frontend.solo


def destroyed() -> bool:
    """No process group exists (any more)."""
    return not c10d._world.pg_map


def names() -> list[str]:
    return [group.name for group in existing.all_groups()]


def members() -> dict[str, list[int]]:
    """The global ranks of every group that this rank is in."""
    ranks = c10d._world.pg_group_ranks
    return {name: sorted(ranks[pg]) for name, pg in existing.all_groups()}


def alone_operations() -> int:
    """How many collectives this process has made in solo mode that would have met others."""
    found = [b for _, pg in existing.all_groups() if pg.size() > 1 for _, b in _ext.backends(pg)]
    return sum(getattr(backend, "operations", 0) for backend in found)


def leave_stores() -> None:
    """In solo mode: no group keeps a connection to a store. `swap` brings the next one."""
    for pg in list(c10d._world.pg_map):
        store = _C.HashStore()
        c10d._world.pg_map[pg] = (c10d._world.pg_map[pg][0], store)
        _ext.replace_store(pg, store)


def finish_collectives() -> None:
    """All ranks stand at the same place, so whatever is in flight was begun by all of them. A
    barrier comes behind it."""
    for _, pg in existing.all_groups():
        if any(str(backend.name()) == "gloo" for _, backend in existing.backends(pg)):
            pg.barrier().wait()
    cuda.drain()


def install_destroy() -> None:
    """The last owner of a ProcessGroup is often a DDP reducer, whose destructor holds the
    interpreter's lock while gloo's threads are joined; one of them may wait for that very lock to
    drop its last operation. So backends are taken out, and dropped without the lock, before."""
    original = c10d.destroy_process_group

    def destroy(group: Any = None) -> None:
        whole = group is None or group is c10d.GroupMember.WORLD
        for name, pg in existing.all_groups():
            if whole or pg is group:
                for wanted in existing.recipes(pg):
                    if wanted.backend == "gloo":
                        old = [(name, _replace(pg, wanted.kind, existing.alone(wanted)))]
                        _release(old, [])
                pg._set_group_name(name)
        if whole:
            gloo.forget(gloo.installed())
        original(group)

    modules: tuple[Any, ...] = (c10d, torch.distributed)
    for module in modules:
        module.destroy_process_group = destroy


def before_destroy(action: Callable[[], None]) -> None:
    """`action` comes before the script takes its groups down. What it takes down is kept until the
    process ends: a reducer that were its last owner could wait for ever (`install_destroy`)."""
    original = c10d.destroy_process_group
    kept: list[Any] = []

    @functools.wraps(original)
    def destroy(group: Any = None) -> None:
        action()
        kept.extend(pg for _, pg in existing.all_groups())
        original(group)

    modules: tuple[Any, ...] = (c10d, torch.distributed)
    for module in modules:
        module.destroy_process_group = destroy


def refuse_new_groups(message: str) -> None:
    """From now on creating a process group raises UsageError(message)."""
    frontend.refusal = message


def abort() -> None:
    """Make every operation on every group fail now, here and at the peers; also a stage()."""
    global _aborts
    _aborts += 1
    _cut(gloo.watched())
    fences.interrupt_all()
    guard.skip_open()  # the device must not wait for us while communicators wait for it
    nccl.abort()


def _cut(meshes: list[gloo.Mesh]) -> None:
    """No operation of any group may be worth waiting for."""
    gloo.shutdown(meshes)
    _ext.end_waits()


def refuse_unknown() -> None:
    """At attach: every backend can be aborted and replaced."""
    existing.require_known(existing.all_groups())


def collectives_made() -> dict[str, int]:
    """How many every group has begun so far, whoever began them."""
    return {
        name: sum(int(b._get_sequence_number_for_group()) for _, b in existing.backends(pg))
        for name, pg in existing.all_groups()
    }


def go_solo(*, at_boundary: bool = False) -> None:
    """Leave all peers: afterwards nothing of the old groups can touch this process's memory.

    `at_boundary`: nothing is in flight, so nobody has to wait until the old groups are taken down
    (each takes some 10 ms to join its threads, which would be part of a planned pause)."""
    global _fence
    groups = existing.all_groups()
    existing.require_known(groups)
    already, frontend.solo = frontend.solo, True
    meshes = gloo.installed()
    _cut(meshes)  # queued operations must fail for the destructors to return
    if not at_boundary:
        nccl.abort()
        nccl.wait_until_aborted()
        cuda.drain()
    old: list[tuple[str, Any]] = []
    if _fence is not None:
        _fence.close()
        _fence = None
    if not already:
        for name, pg in groups:
            desc = pg.group_desc
            for wanted in existing.recipes(pg):
                old.append((name, _replace(pg, wanted.kind, existing.alone(wanted))))
            pg._set_group_name(name)
            pg._set_group_desc(desc)
    if at_boundary:
        args = (old, meshes)
        threading.Thread(target=_release, args=args, name="keepstep-release", daemon=True).start()
    else:
        _release(old, meshes, end=True)


def _replace(pg: Any, kind: Any, fresh: Any) -> Any:
    old = _ext.replace_backend(pg, kind, fresh)
    with contextlib.suppress(AttributeError):  # not every torch gives every backend options
        fresh.options.global_ranks_in_group = old.options.global_ranks_in_group
        fresh.options.group_name = old.options.group_name
    return old


def _release(old: list[tuple[str, Any]], meshes: list[gloo.Mesh], *, end: bool = False) -> None:
    """Drop backends. The destructors of gloo's then wait for their last operation; NCCL's are
    aborted, or idle at a boundary, and nobody waits for them.

    `end`: operations that are still in flight get an error, those of all groups."""
    theirs = [backend for _, backend in old if nccl.is_real(backend)]
    old[:] = [(name, backend) for name, backend in old if not nccl.is_real(backend)]
    nccl.drop(theirs)
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
        holder = [backend]
        del backend
        if name not in kept:
            _destroy(holder, end)
    if kept:
        raise PermanentError(
            f"backends of groups {', '.join(sorted(kept))} are still in use elsewhere in the "
            f"process after {RELEASE_TIMEOUT_S:.0f} s",
            hint="do not keep the result of ProcessGroup._get_backend()",
        )
    gloo.forget(meshes)


def _destroy(holder: list[Any], end: bool) -> None:
    if not end:
        holder.clear()
        return
    # An operation that was still in the queue may begin to wait while the destructor does.
    done = threading.Event()

    def destroy() -> None:
        holder.clear()
        done.set()

    threading.Thread(target=destroy, name="keepstep-destroy", daemon=True).start()
    while not done.wait(LOOK_S):
        _ext.end_waits()


# --------------------------------------------------------------------------------- stage and swap


class StagedGroups:
    """Real backends of a generation, built beside the ones in use."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._aborts = _aborts
        self._backends: dict[tuple[str, Any], Any] = {}
        self._stores: dict[str, Any] = {}
        self._fence: Fence | None = None
        self._meshes: list[gloo.Mesh] = []

    @property
    def aborted(self) -> bool:
        return self._aborts != _aborts

    def discard(self) -> None:
        """Drop everything. Any thread; idempotent."""
        meshes, self._meshes = self._meshes, []
        backends, self._backends = self._backends, {}
        fence, self._fence = self._fence, None
        self._stores = {}
        gloo.forget(meshes)
        theirs = [backend for backend in backends.values() if nccl.is_real(backend)]
        backends.clear()
        nccl.drop(theirs)
        if fence is not None:
            fence.close()

    def _check(self) -> None:
        if self.aborted:
            raise RuntimeError(f"generation {self.generation} was aborted while being staged")

    def _connect(self, wanted: existing.Recipe, store: Any, timeout: timedelta) -> Any:
        self._check()
        rank, size = wanted.rank, wanted.size
        if wanted.backend == "nccl":
            return nccl.connect(store, rank, size, wanted.options, lambda: self.aborted)
        mesh = gloo.Mesh()
        backend = gloo.connect(store, rank, size, timeout, mesh)
        self._meshes.append(mesh)
        backend._set_sequence_number_for_group()
        backend._set_default_timeout(wanted.timeout)
        return backend


def stage(
    generation: int, host: str, port: int, rank: int, world: int, bind: str, timeout_s: float
) -> StagedGroups:
    """Build real backends for all groups of this rank, and a fence. Runs in a builder thread.

    The others may come much later (a newcomer is still building, or there is no spare yet), so
    waiting for them has no limit; abort() or the end of the store end it. `timeout_s` is for
    reaching the store and for connecting once all are there."""
    staged = StagedGroups(generation)
    groups = existing.all_groups()
    existing.require_known(groups)
    timeout = timedelta(seconds=timeout_s)
    # While it is being built, abort() also cuts the connection to the store.
    client_mesh = gloo.Mesh(resolve(host, port))
    gloo.watch(client_mesh)
    try:
        staged._check()
        client = _client(host, port, timeout)
        client.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        for name, pg in groups:
            for wanted in existing.recipes(pg):
                prefix = f"keepstep/{generation}/{name}/{wanted.backend}"
                store = _C.PrefixStore(prefix, client)
                staged._backends[name, wanted.kind] = staged._connect(wanted, store, timeout)
            staged._stores[name] = _C.PrefixStore(f"keepstep/{generation}/store/{name}", client)
        staged._fence = Fence(rank, world, bind)
        staged._check()
        staged._fence.connect(_C.PrefixStore(f"keepstep/{generation}", client), timeout_s)
        client.set_timeout(timeout)
        staged._check()
        return staged
    except BaseException:
        staged.discard()
        raise
    finally:
        gloo.forget([client_mesh])


def resolve(host: str, port: int) -> list[gloo.Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [gloo.address(entry[4]) for entry in found]


def _client(host: str, port: int, timeout: timedelta) -> Any:
    return _C.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)


def swap(staged: StagedGroups) -> None:
    """Put the staged backends in place, leave solo mode, drop the old ones."""
    global _fence
    staged._check()
    groups = existing.all_groups()
    wanted = {(name, kind) for name, pg in groups for kind, _ in existing.backends(pg)}
    if wanted != set(staged._backends):
        raise LocalProtocolError(
            f"groups changed since generation {staged.generation} was staged: "
            f"{sorted({name for name, _ in wanted ^ set(staged._backends)})}"
        )
    dropped = gloo.installed()
    _cut(dropped)
    old: list[tuple[str, Any]] = []
    for name, pg in groups:
        desc = pg.group_desc
        for kind in [kind for kind, _ in existing.backends(pg)]:
            old.append((name, _replace(pg, kind, staged._backends.pop((name, kind)))))
        # The name is kept in the backend, and functional collectives find the group by it.
        pg._set_group_name(name)
        pg._set_group_desc(desc)
        store = staged._stores[name]
        c10d._world.pg_map[pg] = (c10d._world.pg_map[pg][0], store)
        _ext.replace_store(pg, store)
    if _fence is not None:
        _fence.close()
    _fence, staged._fence = staged._fence, None
    frontend.solo = False
    gloo.install(staged._meshes)
    staged._meshes = []
    _release(old, dropped)


# ----------------------------------------------------------------------------------------- fence


def build_first_fence(
    host: str, port: int, rank: int, world: int, bind: str, timeout_s: float
) -> None:
    """Generation 0, on ranks whose groups are real from the start: only the fence is missing, and
    connections that NCCL would make later, when a rank that waits for them can not be freed."""
    global _fence
    began = _aborts
    for _, pg in existing.all_groups():
        for _, backend in existing.backends(pg):
            if nccl.is_real(backend):
                nccl.touch(backend, lambda: _aborts != began)
    client = _client(host, port, timedelta(seconds=timeout_s))
    _fence = Fence(rank, world, bind)
    _fence.connect(_C.PrefixStore("keepstep/0", client), timeout_s)


def fence(words: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Least and greatest of each word over all ranks. OSError or RuntimeError when aborted or when
    a peer is gone."""
    if _fence is None:
        raise RuntimeError("there is no fence: the groups are solo")
    low, high = _fence.meet([*words, *[0] * (fences.WORDS - len(words))])
    return low[: len(words)], high[: len(words)]


def gather(mine: bytes) -> list[bytes]:
    """What every rank has brought, right behind a fence; errors as `fence`."""
    if _fence is None:
        raise RuntimeError("there is no fence: the groups are solo")
    return _fence.gather(mine)


def extremes(mine: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Least and greatest under every name that a rank brings, right behind a fence; errors as
    `fence`."""
    if _fence is None:
        raise RuntimeError("there is no fence: the groups are solo")
    return _fence.extremes(mine)
