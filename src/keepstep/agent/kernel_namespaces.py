"""A PID and a mount namespace of its own for each rank that may move, and who minds it there."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keepstep.model.image import CAPSULE

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
MS_BIND = 1 << 12
MS_PRIVATE_ALL = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _die_with(parent: int) -> None:
    """`parent` is a pidfd."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([parent], [], [], 0)[0]:
        os._exit(1)
    os.close(parent)


def nested(enter: Callable[[], int]) -> int:
    """Fork the first process of new namespaces. There `enter` starts or wakes the rank and returns
    its number; here the number of that first process is returned."""
    own = os.pidfd_open(os.getpid())
    checked(libc.unshare(CLONE_NEWPID | CLONE_NEWNS))
    first = os.fork()
    if first:
        os.close(own)
        return first
    try:
        _die_with(own)
        _settle_in()
        _mind(enter())
    except BaseException as error:
        os.write(2, f"keepstep: capsule: {error}\n".encode())
    os._exit(1)


def _settle_in() -> None:
    """The files of a process must have been opened in its own mount namespace to be dumped. And
    named sockets between its processes must not meet those of its former self."""
    checked(libc.mount(b"none", b"/", None, MS_PRIVATE_ALL, None))
    checked(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    own_folder(CAPSULE)
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(os.readlink(f"/proc/self/fd/{number}"), flags)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)


def own_folder(path: str) -> None:
    """An empty one that only this mount namespace sees."""
    Path(path).mkdir(parents=True, exist_ok=True)
    options = b"mode=0700,size=100%"  # what was on a GPU lands here
    place = path.encode()
    if libc.mount(b"tmpfs", place, b"tmpfs", 0, options + b",huge=within_size") != 0:
        checked(libc.mount(b"tmpfs", place, b"tmpfs", 0, options))


def _mind(rank: int) -> NoReturn:
    """Reap what comes until the rank ends, and end like it. A signal of the agent to the group of
    the capsule is for the rank."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(rank, received))
    while True:
        pid, status = os.wait()
        if pid == rank:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def ended(child: int) -> bool:
    """It can still be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for(first: int) -> NoReturn:
    """As the agent's child: end as the rank did."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    killed = -code if code < 0 else code - 128
    if 0 < killed < signal.NSIG:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), killed if killed != signal.SIGINT else signal.SIGTERM)
    os._exit(code & 0xFF)


def trouble() -> str:
    """Why no capsule can be made here; empty if it can."""
    child = os.fork()
    if child == 0:
        try:
            checked(libc.unshare(CLONE_NEWPID | CLONE_NEWNS))
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"namespaces cannot be made: {os.strerror(number)}" if number else ""


def bind(folder: Path, place: str) -> None:
    """Let `folder` be seen at `place`, which comes into being, too."""
    Path(place).mkdir()
    checked(libc.mount(str(folder).encode(), place.encode(), None, MS_BIND, None))
