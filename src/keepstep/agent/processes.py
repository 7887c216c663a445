"""Starting processes with a control socket and a page: by the agent itself, or by a keeper.

`Processes` is what the rest of the agent knows. With `OwnProcesses` workers are the agent's
children and die with it. With `keeper_client.KeptProcesses` they are the children of a keeper and
outlive the agent for a while; see keeper.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from keepstep.agent.page import create_page
from keepstep.agent.process_sessions import kill_group, leads_session, sweep_session

logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One process to be started. `greeting` is the first thing it reads."""

    worker: str
    slot: int
    rank: int
    command: Sequence[str]
    env: Mapping[str, str]
    log: str
    greeting: bytes


@dataclass
class Process:
    pid: int
    control: socket.socket
    page_fd: int
    pidfd: int = -1  # -1: it was gone before it could be pinned

    def signal(self, number: int) -> None:
        """To this one process, never to another that got its number."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """The page and the socket belong to others by now."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


Exited = Callable[[str, int], None]  # worker, code as in subprocess


class Processes(Protocol):
    exited: Exited  # called when a process is reaped and nothing of its group is left

    @property
    def session(self) -> int:
        """Whoever ends this session has ended all of the node's workers."""

    def start(self, order: Order) -> Process:
        """Raises OSError or KeepstepError if there is no process afterwards."""

    def kill(self, worker: str, number: int) -> None:
        """A signal to its whole process group, while that exists."""

    def note(self, worker: str, rank: int) -> None:
        """Remember that a spare has become a rank."""

    def drop(self, worker: str) -> None:
        """Forget an ended one."""

    def linked(self, up: bool) -> None:
        """The orchestrator is in reach, or not."""

    def end(self) -> None:
        """SIGKILL to whatever is left, now."""


def spawn(order: Order) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """The process, our end of its control socket, and its page."""
    ours, theirs = socket.socketpair()
    page_fd = create_page(order.worker)
    try:
        ours.sendall(order.greeting)
        fds = {
            "KEEPSTEP_CONTROL_FD": str(theirs.fileno()),
            "KEEPSTEP_PAGE_FD": str(page_fd),
        }
        with theirs, Path(order.log).open("ab") as output:
            process = subprocess.Popen(
                list(order.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**order.env, **fds},
                pass_fds=(theirs.fileno(), page_fd),
                process_group=0,
            )
    except BaseException:
        ours.close()
        os.close(page_fd)
        raise
    return process, ours, page_fd


class OwnProcesses:
    """Children of this very process. Started from its main thread only: the death signal that
    workers set for themselves fires when the *thread* that made them ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.exited: Exited = lambda worker, code: None
        self._loop = loop
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def session(self) -> int:
        return os.getsid(0)

    def start(self, order: Order) -> Process:
        process, control, page_fd = spawn(order)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:  # out of descriptors: a process that can not be watched must not run
            kill_group(process.pid, signal.SIGKILL)
            process.wait()
            control.close()
            os.close(page_fd)
            raise
        self._running[order.worker] = process
        self._loop.add_reader(pidfd, self._ended, order.worker, pidfd)
        return Process(process.pid, control, page_fd, pidfd)

    def kill(self, worker: str, number: int) -> None:
        if worker in self._running:
            kill_group(self._running[worker].pid, number)

    def note(self, worker: str, rank: int) -> None:
        """Nobody else needs to know."""

    def drop(self, worker: str) -> None:
        """Nothing is kept here."""

    def linked(self, up: bool) -> None:
        """Nobody else needs to know."""

    def end(self) -> None:
        for process in self._running.values():
            kill_group(process.pid, signal.SIGKILL)
        end_own_session()

    def _ended(self, worker: str, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        process = self._running.pop(worker)
        # Still a zombie, which keeps the number of the group from being reused.
        kill_group(process.pid, signal.SIGKILL)
        self.exited(worker, process.wait())


def end_own_session() -> None:
    # Only a session of its own is the agent's to end; started by hand it may share a shell's.
    if leads_session() and not sweep_session(os.getsid(0)):
        logger.error("some processes of this session could not be ended")
