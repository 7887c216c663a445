"""NCCL backends: connected beside the ones in use, aborted behind a deadline, dropped unseen.

Unlike gloo, NCCL has an abort that works, from any thread. It waits for the device, though, and
with several communicators for kernels of the others, so all are aborted at the same time, each in
a thread of its own. What does not come back in time ends the process (cuda.deadline).

Detection never relies on torch's watchdog: whoever waits for a dead peer waits until the agents'
Abort. A communicator that has failed by itself (its network gave up) is asked for that while its
kernels are waited for: they would wait for ever. Whoever waits inside of CUDA, for a number that a
kernel computes for instance, cannot ask: a thread does, and tells. The environment set in
__main__.py keeps the watchdog from ending the process meanwhile.

ncclCommInitRank cannot be interrupted. So a backend first waits in the store, where it can, until
all members are there; if one of them dies in the fraction of a second that connecting then takes,
the thread that builds may stay behind in it. It holds nothing that anybody else needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from keepstep.worker.device import cuda

NCCL_SUCCESS, NCCL_IN_PROGRESS = 0, 7

RealNccl: Any = getattr(c10d, "ProcessGroupNCCL", None)

DROP_S_MAX = 10.0
WATCH_S = 0.25
WATCH_PATIENCE_S = 1.0  # whoever asks by himself does so more often, and can say more
WATCH_AGAIN_S = 5.0

used = False  # there was a backend in this process, at some time
_lock = threading.Lock()  # guards the three below; never held while anything blocks
_backends: dict[int, Any] = {}  # by id: in use, staged and being built
_aborts: dict[int, threading.Thread] = {}
_drops: list[threading.Thread] = []


def is_real(backend: Any) -> bool:
    return RealNccl is not None and isinstance(backend, RealNccl)


def options(timeout: timedelta, like: Any = None) -> Any:
    """Fresh options, with what a user may have chosen in `like`. A communicator is never split
    from another one (frontend.py)."""
    fresh = RealNccl.Options()
    if isinstance(like, RealNccl.Options):
        fresh.is_high_priority_stream = like.is_high_priority_stream
        fresh.config = like.config
        fresh.global_ranks_in_group = like.global_ranks_in_group
        fresh.group_name = like.group_name
    fresh._timeout = timeout
    return fresh


def build(store: Any, rank: int, size: int, chosen: Any) -> Any:
    """A backend that connects when it is first used."""
    global used
    used = True
    backend = RealNccl(store, rank, size, chosen)
    cuda.ask_in_waits(failed)
    with _lock:
        _backends[id(backend)] = backend
    return backend


def connect(store: Any, rank: int, size: int, chosen: Any, stop: Callable[[], bool]) -> Any:
    """A backend whose communicator is connected on the device of this rank."""
    if store.add("keepstep/here", 1) == size:
        store.set("keepstep/all", "")
    store.wait(["keepstep/all"])
    with cuda.exclusive:
        backend = build(store, rank, size, chosen)
        try:
            backend._set_sequence_number_for_group()
            touch(backend, stop)
        except BaseException:
            drop([backend])
            del backend
            raise
    return backend


def touch(backend: Any, stop: Callable[[], bool]) -> None:
    """Connect: NCCL does that in the first operation of each kind. On a stream of its own, behind
    nothing that the user has queued."""
    device = cuda.home or torch.device("cuda", torch.cuda.current_device())
    new_stream: Any = torch.cuda.Stream  # untyped in torch
    with torch.cuda.device(device), torch.cuda.stream(new_stream(device)):
        one = torch.ones(1, device=device)
        everyone = torch.empty(backend.size(), device=device)
        for work in (backend.allreduce([one]), backend._allgather_base(everyone, one)):
            work.wait()
        done = cuda.new_event()
        done.record()
        cuda.wait_for(done, stop)


@cache
def _library() -> Any:
    """The one that torch has loaded; None: it is part of torch, and cannot be asked."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    except (OSError, AttributeError):
        return None
    return library


def failed() -> str:
    """What is wrong with a communicator that nobody has begun to abort."""
    library = _library()
    with _lock:  # an abort can not begin meanwhile, and free what is asked
        for key, backend in _backends.items() if library is not None else ():
            pointer = getattr(backend, "_comm_ptr", None)
            if key in _aborts or pointer is None:
                continue
            error = ctypes.c_int(0)
            with contextlib.suppress(RuntimeError):  # not connected yet
                comm = pointer()
                if not comm or library.ncclCommGetAsyncError(comm, ctypes.byref(error)) != 0:
                    continue
            if error.value not in (NCCL_SUCCESS, NCCL_IN_PROGRESS):
                words = library.ncclGetErrorString(error.value).decode(errors="replace")
                return f"NCCL: {words}"
    return ""


def watch(tell: Callable[[str], None]) -> None:
    """From now on `tell` is called, in a thread of its own, if a communicator fails by itself."""
    if cuda.home is not None:
        _thread("nccl", _watch, cuda.home, tell).start()


def _watch(home: torch.device, tell: Callable[[str], None]) -> None:
    """Until somebody aborts the communicator: the word may be lost with the agent's stream."""
    since = told = 0.0
    torch.cuda.set_device(home)  # it is the current device whose communicator is asked
    while True:
        time.sleep(WATCH_S)
        reason, now = failed(), time.monotonic()
        if not reason:
            since = 0.0
            continue
        since = since or now
        if now - since > WATCH_PATIENCE_S and now - told > WATCH_AGAIN_S:
            told = now
            tell(reason)


def abort() -> None:
    """Begin to abort every backend. Any thread; returns at once, and may be called again."""
    with _lock:
        for key, backend in _backends.items():
            if key not in _aborts:
                _aborts[key] = thread = _thread("abort", _abort_in_time, backend)
                thread.start()


def _thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    return threading.Thread(target=target, args=args, name=f"keepstep-{name}", daemon=True)


def _abort(backend: Any) -> None:
    # It may answer with the very error that it is asked to get rid of.
    with contextlib.suppress(RuntimeError):
        backend.abort()


def _abort_in_time(backend: Any) -> None:
    with cuda.deadline(cuda.DEADLINE_S, "an NCCL communicator is not aborted"):
        _abort(backend)


def wait_until_aborted() -> None:
    with _lock:
        threads = list(_aborts.values())
    for thread in threads:
        thread.join()  # each has its deadline


def wait_until_dropped() -> None:
    """Before a snapshot of the process: their destructors still use the device. Not for ever: a
    snapshot that they are in the way of fails, and the process goes on."""
    with _lock:
        threads = list(_drops)
    until = time.monotonic() + DROP_S_MAX
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def drop(gone: list[Any]) -> None:
    """Let go of backends that nobody uses. They are aborted (without peers it is the only way to
    end one), and their destructors wait for torch's watchdog, which may take a minute after an
    error: so nobody waits for that, and the list becomes the thread's, with the last references."""
    keys = list(map(id, gone))
    with _lock:
        pending = [_aborts.pop(key, None) for key in keys]
        for key in keys:
            _backends.pop(key, None)
    if gone:
        thread = _thread("drop", _drop, gone, pending)
        with _lock:
            _drops[:] = [one for one in _drops if one.is_alive()] + [thread]
            thread.start()


def _drop(gone: list[Any], pending: list[threading.Thread | None]) -> None:
    for backend, thread in zip(gone, pending, strict=True):
        if thread is not None:
            thread.join()
        else:  # idle at a boundary: nothing of the others keeps it waiting
            with cuda.exclusive:
                _abort(backend)
    del backend
    gone.clear()
