"""Which memory CUDA's driver has taken for its snapshot of a process, and having that moved.

The driver's own thread in the process allocates it. All others are stopped meanwhile, so that what
is new afterwards is the driver's, and nobody else touches it before the driver is asked to restore.
Malloc's arenas are left out, because others may get parts of them later, and processes with another
malloc altogether. If anything is unclear, nothing is found, and CRIU moves it.

Whoever moves it is a thread in the process that reads and writes files (native/gpu/areas.cpp).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from keepstep.agent.kernel_namespaces import checked, libc
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

STOW, STOWED = "areas-stow", "areas-stowed"
FETCH, FETCHED = "areas-fetch", "areas-fetched"
GOOD, LOST = "good", "it did not come back"
OTHER_MALLOCS = ("jemalloc", "tcmalloc", "mimalloc")

Area = tuple[int, int]


class Mapping(NamedTuple):
    start: int
    end: int
    rights: str
    name: str  # also of what is no file

    @property
    def plain(self) -> bool:
        """Memory of this process alone."""
        return self.rights == "rw-p" and not self.name


libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


# ------------------------------------------------------------------------------------------ threads


def threads(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/task")}


def thread_of(pid: int, number: int) -> int | None:
    """A thread that may be named as its own namespace does, as it is named here; None if that is
    not clear."""
    found = []
    for one in threads(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/task/{one}/status").read_text()
            inner = next((x.split()[-1] for x in status.splitlines() if x.startswith("NSpid:")), "")
            if number == one or str(number) == inner:
                found.append(one)
    return found[0] if len(found) == 1 else None


@contextlib.contextmanager
def others_stopped(pid: int, thread: int) -> Iterator[None]:
    """All threads of the process but one. They go on at the end of this, but for one that did not
    stop in time (TransientError): it goes on at the end of the caller's process. Only for callers
    with one thread: the kernel minds who has stopped them. OSError: not permitted."""
    stopped: dict[int, int] = {}  # thread -> the signal that it was about to get
    try:
        while new := threads(pid) - {thread, *stopped}:
            for one in new:
                stopped[one] = 0
                with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
                    checked(libc.ptrace(PTRACE_SEIZE, one, None, None))
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


def mappings(pid: int) -> list[Mapping]:
    """In the order of addresses."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in place.split("-"))
        found.append(Mapping(start, end, rights, name[0] if name else ""))
    return found


def new_areas(before: list[Mapping], after: list[Mapping], new_threads: bool) -> list[Area]:
    """What was not mapped at all and is plain memory now; a new area may have grown together with
    an old one, or with an arena."""
    if any(malloc in one.name for one in after for malloc in OTHER_MALLOCS):
        return []
    found: list[Area] = []
    none = Mapping(0, 0, "", "")
    for previous, one, follower in zip([none, *after], after, [*after[1:], none]):
        guarded = previous.end == one.start and previous.rights == "---p"
        if not one.plain or (new_threads and guarded):  # it may be a stack
            continue
        at, end = one.start, max(one.start, min(one.end, _arena(one, follower)))
        for old in before:
            if old.end <= at or old.start >= end:
                continue
            found.append((at, max(at, old.start)))
            at = old.end
        found.append((at, max(at, end)))
    return [(start, end) for start, end in found if end - start >= AREA_MIN]


def _arena(one: Mapping, follower: Mapping) -> int:
    """Where an arena of glibc begins that this ends with: of its room, the rest cannot be used yet.
    Or its own end, if it does not look like one."""
    if follower.start == one.end and follower.rights == "---p" and not follower.end % ARENA_BYTES:
        return follower.end - ARENA_BYTES
    aligned = one.start % ARENA_BYTES == one.end % ARENA_BYTES == 0
    return one.start if aligned else one.end


# ------------------------------------------------------------------------------------------- orders


Lives = Callable[[], bool]


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def stow(folder: Path, areas: list[Area], seconds_max: float, lives: Lives) -> str:
    """Into files in that folder. What was wrong: then everything is where it was. TransientError:
    nobody knows (`fetch` finds out)."""
    lines = "".join(f"{start:x} {end:x}\n" for start, end in areas)
    with _troubles():
        _order(folder, STOW, lines)
        error = _wait(lambda: _answer(folder, STOWED), STOW, seconds_max, lives)
        if LOST in error:
            raise TransientError(f"the driver's memory is lost: {error}")
        if error == GOOD:
            (folder / STOWED).unlink()
            return ""
        _forget(folder)
        return error


def stowed(folder: Path) -> bool:
    """Or about to be."""
    return (folder / STOW).exists()


def fetch(folder: Path, seconds_max: float, lives: Lives) -> None:
    """TransientError: the process is of no use."""

    def answer() -> str:
        late = _answer(folder, STOWED)  # to an order that nobody waited for any more
        if late not in ("", GOOD):
            return late if LOST in late else GOOD  # all is where it was
        return _answer(folder, FETCHED)

    with _troubles():
        _order(folder, FETCH, "")
        error = _wait(answer, FETCH, seconds_max, lives)
        if error != GOOD:
            raise TransientError(f"the driver's memory did not come back: {error}")
        _forget(folder)


@contextlib.contextmanager
def _troubles() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransientError(f"the driver's memory cannot be moved: {error}") from error


def _order(folder: Path, name: str, words: str) -> None:
    made = folder / f"{name}~"
    made.write_text(words)
    made.rename(folder / name)


def _answer(folder: Path, name: str) -> str:
    """Empty: there is none yet."""
    try:
        return (folder / name).read_text()
    except FileNotFoundError:
        return ""


def _wait(answer: Callable[[], str], name: str, seconds_max: float, lives: Lives) -> str:
    end = time.monotonic() + seconds_max
    while not (words := answer()):
        if time.monotonic() > end:
            raise TransientError(f"the process did not answer {name} in {seconds_max:.0f} s")
        if not lives():
            raise TransientError(f"the process has ended before {name}")
        time.sleep(LOOK_S)
    return words


def _forget(folder: Path) -> None:
    for name in (FETCH, FETCHED, STOWED, STOW):
        (folder / name).unlink(missing_ok=True)
