"""The worker processes of this node, from start to Forget.

    start -> alive --exit seen on the pidfd--> dead, page kept --Forget--> gone

Workers are started from the agent's main thread only: the death signal that they set for
themselves fires when the *thread* that made them ends. When one exits, in this order:

1. what it said last is passed on;
2. its process group is killed, so that no DataLoader child outlives it. The worker is still a
   zombie then, which keeps the number of the group from being reused;
3. it is reaped and its exit is told, with the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.agent.channel import Channel
from keepstep.agent.environment import worker_environment
from keepstep.agent.page import PageReader, create_page
from keepstep.agent.session import kill_group
from keepstep.errors import UsageError
from keepstep.model.messages import (
    Address,
    Assign,
    Buddy,
    StartWorker,
    Welcome,
    WorkerCommand,
    WorkerExited,
    WorkerMessage,
)

TAIL_LINES = 40
TAIL_BYTES = 8 << 10
MUTE_GRACE_S = 10.0  # a worker that closed its control socket has this long to end

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """What is equal for all workers of the node."""

    job: str
    node: str
    token: str
    bind: str
    blobs: Address
    stall_timeout_ns: int
    logs: Path
    command: Sequence[str]  # the script and its arguments are appended


@dataclass
class Worker:
    name: str
    slot: int
    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    page: PageReader
    log: Path
    channel: Channel | None = None
    exited: WorkerExited | None = None
    killed_because: str = ""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid


def check_name(name: str) -> str:
    """Names become parts of file names."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"bad name {name!r}", hint="use letters, digits, '.', '_' and '-'")
    return name


class Workers:
    def __init__(
        self,
        setting: Setting,
        *,
        on_said: Callable[[Worker, WorkerMessage], None],
        on_exited: Callable[[WorkerExited], None],
    ) -> None:
        self._setting = setting
        self._on_said = on_said
        self._on_exited = on_exited
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, Worker] = {}  # in order of their start
        self._idle = asyncio.Event()
        self._idle.set()

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def live(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.exited is None]

    def retained(self) -> list[Worker]:
        """Dead ones whose side state is still held."""
        return [w for w in self._workers.values() if w.exited is not None and w.page.open]

    def pages(self, rank: int) -> list[PageReader]:
        """Pages of all workers of `rank`, alive and dead, youngest first."""
        found = [w.page for w in self._workers.values() if w.rank == rank and w.page.open]
        return found[::-1]

    def start(self, start: StartWorker) -> Worker:
        """Raises UsageError or OSError if there is no process afterwards."""
        setting = self._setting
        log = setting.logs / f"{check_name(start.worker)}.log"
        ours, theirs = socket.socketpair()
        page = PageReader(page_fd := create_page(start.worker))
        try:
            with theirs, log.open("ab") as output:
                process = subprocess.Popen(
                    [*setting.command, *start.script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=worker_environment(
                        os.environ,
                        start,
                        job=setting.job,
                        control_fd=theirs.fileno(),
                        page_fd=page_fd,
                        bind=setting.bind,
                    ),
                    pass_fds=(theirs.fileno(), page_fd),
                    process_group=0,
                )
            pidfd = _pidfd(process)
        except BaseException:
            ours.close()
            page.close()
            raise
        worker = Worker(start.worker, start.slot, start.rank, process, pidfd, page, log)
        self._workers[start.worker] = worker
        self._idle.clear()
        worker.channel = Channel(
            self._loop,
            ours,
            on_message=lambda said: self._on_said(worker, said),
            on_broken=lambda why: self.kill(worker, why),
            on_end=lambda: self._muted(worker),
        )
        self._loop.add_reader(pidfd, self._exited, worker)
        self._greet(worker, start)
        logger.info("started %s (rank %d) as pid %d", worker.name, worker.rank, worker.pid)
        return worker

    def tell(self, worker: Worker, command: WorkerCommand) -> None:
        if isinstance(command, Assign):
            worker.rank = command.rank
        if worker.channel is not None:
            worker.channel.send(command)

    def kill(self, worker: Worker, because: str = "") -> None:
        """SIGKILL its process group. The exit is told when it has happened."""
        if worker.exited is not None:
            return
        if because and not worker.killed_because:
            worker.killed_because = because
            logger.warning("killing %s: %s", worker.name, because)
        kill_group(worker.pid, signal.SIGKILL)

    def signal(self, worker: Worker, number: int, resume_after_ns: int) -> None:
        if worker.exited is not None:
            return
        logger.info("signal %d to %s", number, worker.name)
        signal.pidfd_send_signal(worker.pidfd, number)
        if number == signal.SIGSTOP and resume_after_ns > 0:
            resume = self._loop.call_later(
                resume_after_ns / 1e9, signal.pidfd_send_signal, worker.pidfd, signal.SIGCONT
            )
            worker.timers.append(resume)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            worker = self._workers.get(name)
            if worker is None:
                continue
            if worker.exited is None:
                logger.warning("asked to forget %s, which is alive", name)
                continue
            worker.page.close()
            del self._workers[name]

    async def stop(self, grace_ns: int, finished: bool = False) -> bool:
        """End all, politely first (`finished`: they are ending by themselves). True when none
        is left."""
        for worker in [] if finished else self.live():
            kill_group(worker.pid, signal.SIGTERM)
            kill_group(worker.pid, signal.SIGCONT)  # a stopped process would not see SIGTERM
        if not await self._wait_idle(grace_ns / 1e9):
            for worker in self.live():
                self.kill(worker, "it did not end in time when the job was stopped")
        return await self._wait_idle(10.0)

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _greet(self, worker: Worker, start: StartWorker) -> None:
        setting = self._setting
        welcome = Welcome(
            job=setting.job,
            node=setting.node,
            worker=worker.name,
            token=setting.token,
            blobs=setting.blobs,
            stall_timeout_ns=setting.stall_timeout_ns,
            interface=setting.bind,
        )
        self.tell(worker, welcome)
        if start.rank >= 0:
            self.tell(worker, Buddy(address=start.buddy))

    def _muted(self, worker: Worker) -> None:
        """Its socket has ended; normally the process is about to as well."""
        if worker.exited is None:
            why = "it closed its control socket and did not end"
            worker.timers.append(self._loop.call_later(MUTE_GRACE_S, self.kill, worker, why))

    def _exited(self, worker: Worker) -> None:
        self._loop.remove_reader(worker.pidfd)
        if worker.channel is not None:
            worker.channel.drain()
        kill_group(worker.pid, signal.SIGKILL)
        code = worker.process.wait()
        os.close(worker.pidfd)
        for timer in worker.timers:
            timer.cancel()
        tail = log_tail(worker.log, worker.killed_because)
        worker.exited = WorkerExited(worker=worker.name, rank=worker.rank, code=code, tail=tail)
        logger.info("%s (rank %d) ended with %d", worker.name, worker.rank, code)
        if worker.rank < 0:
            worker.page.close()  # a standby has no side state
        if not self.live():
            self._idle.set()
        self._on_exited(worker.exited)


def _pidfd(process: subprocess.Popen[bytes]) -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # out of descriptors: a process that can not be watched must not run
        kill_group(process.pid, signal.SIGKILL)
        process.wait()
        raise


def log_tail(log: Path, remark: str = "") -> str:
    """The last lines of a worker's log and, behind them, why the agent ended it if it did."""
    last = f"keepstep agent: killed this process: {remark}"[: TAIL_BYTES // 2] if remark else ""
    room = TAIL_BYTES - len(last.encode()) - 1
    text = ""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - room))
        text = file.read(room).decode(errors="ignore")
    lines = text.splitlines()[-TAIL_LINES:]
    return "\n".join([*lines, last] if last else lines)
