"""The device of this rank: waiting for it, draining it, preparing it, and what it may not do.

On CUDA a collective that has "returned" is only queued, and one that was aborted lets its stream
go on with whatever is in the buffers. So nothing that depends on a collective is believed before
an event behind it is complete *and* the abort flag, read afterwards, is clear.

Everything here does nothing in a process whose model is not on a GPU.

Threads: `home` is set by the main thread at attach; the rest is the main thread's, except
`deadline`, which is for any.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keepstep.errors import UsageError

DEADLINE_S = 30.0  # for a device or a communicator to let go
SPIN_S = 200e-6  # a fence is usually waited for much longer or not at all
PAUSE_S = 20e-6

home: torch.device | None = None
# Held by whoever makes others wait for the device, or the device wait for the host (guard.py).
exclusive = threading.Lock()

LOOK_S = 50e-3  # between two questions whether a communicator has failed

_event: Any = None
_trouble: Callable[[], str] = str  # nothing: ""


def settle_in(parameters: Iterable[torch.Tensor]) -> None:
    """The device of the model is this rank's; it belongs to the slot, not to the rank."""
    global home
    home = next((p.device for p in parameters if p.device.type == "cuda"), None)


def ask_in_waits(trouble: Callable[[], str]) -> None:
    """Why what is waited for will never happen, or nothing."""
    global _trouble
    _trouble = trouble


def wait_for_queue(stop: Callable[[], bool]) -> None:
    """Until all that is queued on the current stream is done. ConnectionAbortedError if `stop`
    says so before that, ConnectionResetError if a communicator has failed."""
    global _event
    if home is None:
        return
    if _event is None:
        _event = new_event()
    _event.record(torch.cuda.current_stream(home))
    wait_for(_event, stop)


def new_event(timing: bool = False) -> Any:
    make: Any = torch.cuda.Event  # untyped in torch
    return make(enable_timing=timing)


def record(event: Any) -> None:
    event.record(torch.cuda.current_stream(home))


def wait_for(event: Any, stop: Callable[[], bool]) -> None:
    began = time.perf_counter()
    spin_until, look_at = began + SPIN_S, began + LOOK_S
    while not event.query():
        if stop():
            raise ConnectionAbortedError("aborted while the device was at work")
        now = time.perf_counter()
        if now > look_at:
            look_at = now + LOOK_S
            if reason := _trouble():
                raise ConnectionResetError(
                    f"Connection lost while the device was at work: {reason}"
                )
        if now > spin_until:
            time.sleep(PAUSE_S)


def drain() -> None:
    """Nothing that was queued so far touches memory after this. An aborted collective lets go in
    milliseconds; a device that does not is broken, and its rank with it."""
    if home is not None:
        with deadline(DEADLINE_S, f"{home} is still at work"):
            torch.cuda.synchronize(home)


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Ends the process with a last word if the block takes longer: whatever waits in there can
    not be interrupted, and a dead rank is replaced while one that hangs only holds the others."""
    timer = threading.Timer(seconds, _give_up, (seconds, what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float, what: str) -> None:
    os.write(2, f"keepstep: {what} after {seconds:g} s: this process ends itself\n".encode())
    os._exit(1)


# --------------------------------------------------------------------------------------- spare


def warm_up(slot: int) -> None:
    """A spare's context and math library: seconds that would else be part of a recovery. When it
    parks, not before: until then the script may still choose what it sees of the machine."""
    if not torch.cuda.is_available():
        return
    index = slot if slot < torch.cuda.device_count() else 0
    device = torch.device("cuda", torch.cuda.current_device() if _chosen() else index)
    with torch.cuda.device(device):
        for dtype in (torch.float32, torch.bfloat16):
            square = torch.ones(32, 32, device=device, dtype=dtype)
            square @ square
        torch.cuda.synchronize(device)


def _chosen() -> bool:
    """The script has set its device already."""
    cuda: Any = torch.cuda  # untyped in part
    return bool(cuda.is_initialized()) and cuda.current_device() != 0


# ---------------------------------------------------------------------------------------- graphs


def refuse_graphs(step: Callable[[], str]) -> None:
    """`step` names the step in progress, or nothing."""
    graph: Any = torch.cuda.CUDAGraph
    for name in ("capture_begin", "replay"):
        setattr(graph, name, _refusing(getattr(graph, name), step))


def _refusing(method: Callable[..., Any], step: Callable[[], str]) -> Callable[..., Any]:
    def checked(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if site := step():
            raise UsageError(
                f"a CUDA graph inside step {site!r}: it hides collectives and updates from "
                "Keepstep, and keeps the communicators it was captured with",
                hint='run the step without CUDA graphs (torch.compile: not mode="reduce-overhead")',
            )
        return method(graph, *args, **kwargs)

    return checked
