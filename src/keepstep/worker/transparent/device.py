"""What a rank of a transparent job has on a GPU: named, moved out of the way, and brought back.

The driver's snapshot of a process copies device memory at a small part of the speed of the link. So
the rank copies what torch has allocated itself, into files in its capsule, and gives the memory
back; the addresses stay reserved. The driver then finds little more than a context. The library
that can do this (native/gpu) is loaded into the process by its capsule; without it, and for
allocations that it has not seen, the driver's snapshot takes everything.

What the driver takes into the process's memory is moved by a thread of that library, too, which
hears from the agent by files: the process cannot do it, because it waits for the driver.

Everything here is for the main thread, except `describe` and `wait_until_back`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Any, Literal

import torch

from keepstep.errors import PermanentError
from keepstep.model.image import PARTS, PARTS_FOLDER
from keepstep.worker.device import cuda

ERROR_BYTES = 500
NVIDIA = "/dev/nvidia"

_library = ctypes.CDLL(None)
_here = hasattr(_library, "keepstep_segments_save")
_areas: Any = _library if _here else None
_away = False
_awaited = False
_clearing: threading.Thread | None = None
_here_again = threading.Event()
_here_again.set()


def find_library(path: str) -> None:
    """Where it is not loaded, without being asked for memory: the script wants none from it
    (KEEPSTEP_OFFLOAD=0)."""
    global _areas
    if not _here and path:
        with contextlib.suppress(OSError):
            _areas = ctypes.CDLL(path)


def kind() -> Literal["", "cuda", "hip"]:
    """Of GPU that the script has in use."""
    module: Any = torch.cuda  # untyped in part
    if not module.is_initialized():
        return ""
    return "hip" if torch.version.hip else "cuda"


def settle_in() -> None:
    """Threads that build groups do not know which device the script has chosen."""
    if kind():
        cuda.home = torch.device("cuda", torch.cuda.current_device())


def after_fork() -> None:
    """In a child, a loader's worker for instance. It can never use the device, but has everything
    open and mapped that its parent has; nobody could dump it so."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(NVIDIA):
                found.append(int(name))
    if not found:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in found:
        os.dup2(null, number, inheritable=False)
    os.close(null)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, path = line.split(maxsplit=5)
        if path.startswith(NVIDIA):
            start, end = (int(number, 16) for number in where.split("-"))
            _library.munmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start))


def describe() -> dict[str, Any]:
    """Fields of Inspected."""
    if not kind():
        return {}
    device = cuda.home or torch.device("cuda", torch.cuda.current_device())
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "device": kind(),
        "gpu": str(getattr(properties, "uuid", "")),
        "gpu_bytes": torch.cuda.memory_reserved(device),
        "offloads": _bytes()[0] > 0,
    }


def trouble() -> list[str]:
    """What no snapshot holds, as far as the runtime was asked for it."""
    if not kind() or not _here:
        return []
    managed, shared = ctypes.c_int(), ctypes.c_int()
    _library.keepstep_segments_calls(ctypes.byref(managed), ctypes.byref(shared))
    found = []
    if managed.value:
        found.append("the script has managed memory (UVM), which the driver cannot save")
    if shared.value:
        found.append("the script shares device memory with other processes (CUDA IPC)")
    return found


def _bytes() -> tuple[int, int]:
    """Of segments: all, and those that are on the device."""
    known, present = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    if _here:
        _library.keepstep_segments_bytes(ctypes.byref(known), ctypes.byref(present))
    return known.value, present.value


def offload(move: bool) -> bool:
    """Before the driver's snapshot: what is cached is given back in any case. False: there is
    nothing that could be moved, or it shall stay. PermanentError: it failed, and everything is
    where it was."""
    if _away and move:
        return True  # for a move that came to nothing; the files are all there is of it
    come_back()
    if _clearing is not None:
        _clearing.join()
    torch.cuda.synchronize(cuda.home)
    torch.cuda.empty_cache()
    if not move or not _bytes()[0]:
        return False
    os.makedirs(PARTS_FOLDER, mode=0o700, exist_ok=True)
    _clear()
    try:
        _save()
    except PermanentError:
        known, present = _bytes()
        if present < known:  # not before all of it was written
            _leave()
            come_back()
        _clear()
        raise
    _leave()
    return True


def watch_areas() -> bool:
    """From now on what the driver takes can be moved. False: there is nobody who could."""
    if _areas is None:
        return False
    os.makedirs(PARTS_FOLDER, mode=0o700, exist_ok=True)
    return bool(_areas.keepstep_areas_watch(PARTS_FOLDER.encode(), PARTS, PARTS) == 0)


def _leave() -> None:
    global _away
    _away = True
    _here_again.clear()


def come_back() -> None:
    """At once if nothing is away. PermanentError: it cannot be had back."""
    global _away, _clearing
    if _away:
        _load()
        _away = False
        _here_again.set()
        # Nobody needs to wait for that: to give back gigabytes of files takes seconds.
        _clearing = threading.Thread(target=_clear, name="keepstep-clear", daemon=True)
        _clearing.start()


def wait_until_back() -> None:
    """For threads that compute on the device: what they allocate might have no memory behind it."""
    global _awaited
    if not _here_again.is_set():
        _awaited = True
        _here_again.wait()
        _awaited = False


def awaited() -> bool:
    """Somebody wants to compute: the main thread is to make it come back."""
    return _awaited


def _clear() -> None:
    """The folder itself may be where another one is mounted, and has the driver's parts besides."""
    for number in range(PARTS):
        Path(PARTS_FOLDER, f"part-{number}").unlink(missing_ok=True)


def _save() -> None:
    _told(_library.keepstep_segments_save, PARTS)


def _load() -> None:
    _told(_library.keepstep_segments_load)


def _told(call: Any, *parts: int) -> None:
    error = ctypes.create_string_buffer(ERROR_BYTES)
    if call(PARTS_FOLDER.encode(), *parts, error, ctypes.c_size_t(ERROR_BYTES)) != 0:
        raise PermanentError(f"what is on the GPU could not be moved: {error.value.decode()}")
