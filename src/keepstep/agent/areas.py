"""Which memory CUDA's driver has taken for its snapshot of a process, and having that moved.

The driver's own thread in the process allocates it. All others are stopped meanwhile, so that what
is new afterwards is the driver's, and nobody else touches it before the driver is asked to restore.
Malloc's arenas are left out: others may get parts of them later.

Whoever moves it is a thread in the process that reads and writes files (native/gpu/areas.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

from keepstep.agent.namespaces import checked, libc
from keepstep.errors import TransientError

AREA_MIN = 4 << 20
ARENA_BYTES = 64 << 20  # glibc's arenas begin at multiples of this
STOP_S_MAX = 2.0
LOOK_S = 0.001

PTRACE_DETACH = 17
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
EVENT_STOP = 128
WALL = 0x40000000

STOW, FETCH = "areas-stow", "areas-fetch"
LOST = "it did not come back"
ANSWERS = {STOW: "areas-stowed", FETCH: "areas-fetched"}

Area = tuple[int, int]

libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


# ------------------------------------------------------------------------------------------ threads


def thread_of(pid: int, number: int) -> int | None:
    """A thread that may be named as its own namespace does, as it is named here."""
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/task/{name}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            if number in (int(name), int(line.split()[-1])):
                return int(name)
    return None


@contextlib.contextmanager
def others_stopped(pid: int, thread: int) -> Iterator[None]:
    """All threads of the process but one. They go on at the end of this, or of the caller. Only for
    a caller with one thread: the kernel minds who has stopped them. OSError: not permitted."""
    stopped: dict[int, int] = {}  # thread -> the signal that it was about to get
    try:
        while new := {int(n) for n in os.listdir(f"/proc/{pid}/task")} - {thread, *stopped}:
            for one in new:
                try:
                    checked(libc.ptrace(PTRACE_SEIZE, one, None, None))
                except ProcessLookupError:  # it has ended
                    stopped[one] = 0
                    continue
                stopped[one] = _stop(one)
        yield
    finally:
        for one, number in stopped.items():
            libc.ptrace(PTRACE_DETACH, one, None, number)


def _stop(thread: int) -> int:
    checked(libc.ptrace(PTRACE_INTERRUPT, thread, None, None))
    end = time.monotonic() + STOP_S_MAX
    while True:
        found, status = os.waitpid(thread, WALL | os.WNOHANG)
        if found:
            waits = os.WIFSTOPPED(status) and status >> 16 != EVENT_STOP
            return os.WSTOPSIG(status) if waits else 0
        if time.monotonic() > end:
            raise TransientError(f"thread {thread} does not stop")
        time.sleep(LOOK_S / 10)


# ------------------------------------------------------------------------------------------- memory


def mappings(pid: int) -> list[tuple[Area, bool]]:
    """In the order of addresses; whether it is plain memory of this process alone."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in place.split("-"))
        found.append(((start, end), rights == "rw-p" and inode == "0" and not name))
    return found


def new_areas(before: list[tuple[Area, bool]], after: list[tuple[Area, bool]]) -> list[Area]:
    """What was not mapped at all and is plain memory now; a new area may have grown together with
    an old one."""
    found: list[Area] = []
    for (start, end), plain in after:
        if not plain:
            continue
        at = start
        for (old, old_end), _ in before:
            if old_end <= at or old >= end:
                continue
            found.append((at, max(at, old)))
            at = old_end
        found.append((at, max(at, end)))
    return [(a, b) for a, b in found if b - a >= AREA_MIN and a % ARENA_BYTES]


# ------------------------------------------------------------------------------------------- orders


def stow(folder: Path, areas: list[Area], seconds_max: float) -> str:
    """Into files in that folder. What was wrong: then everything is where it was."""
    lines = "".join(f"{start:x} {end:x}\n" for start, end in areas)
    error = _order(folder, STOW, lines, seconds_max)
    if LOST in error:
        raise TransientError(error)
    if error:
        (folder / STOW).unlink()
    return error


def stowed(folder: Path) -> bool:
    """Or about to be."""
    return (folder / STOW).exists()


def fetch(folder: Path, seconds_max: float) -> None:
    """TransientError: the process is of no use."""
    error = _order(folder, FETCH, "", seconds_max)
    for name in (STOW, FETCH):
        (folder / name).unlink(missing_ok=True)
    if error:
        raise TransientError(f"the driver's memory did not come back: {error}")


def _order(folder: Path, name: str, words: str, seconds_max: float) -> str:
    made, reply = folder / f"{name}~", folder / ANSWERS[name]
    made.write_text(words)
    made.rename(folder / name)
    end = time.monotonic() + seconds_max
    while not reply.exists():
        if time.monotonic() > end:
            raise TransientError(f"the process did not answer {name} in {seconds_max:.0f} s")
        time.sleep(LOOK_S)
    error = reply.read_text()
    reply.unlink()
    return error
