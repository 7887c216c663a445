"""The workers of this node, from start to Forget.

    start -> alive --its exit is told--> dead, page kept --Forget--> gone

When one exits, its process group is killed before it is reaped, so that no DataLoader child
outlives it (processes.py); then what it said last is passed on, and then its exit is told, with
the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.agent.channel import WorkerChannel
from keepstep.agent.keeper import KeptWorker
from keepstep.agent.page import PageReader
from keepstep.agent.process_tree import inner_pid
from keepstep.agent.processes import Order, OwnProcesses, Process, Processes
from keepstep.agent.worker_environment import worker_environment, worker_settings
from keepstep.errors import UsageError
from keepstep.model.agent_messages import StartWorker, WorkerExited
from keepstep.model.commands import Assign, Buddy, Welcome, WorkerCommand, WorkerSettings
from keepstep.model.messages import Address, Restored, TlsFiles, WorkerMessage
from keepstep.model.wire import frame
from keepstep.native import libcuda, segments

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
    tls: TlsFiles | None
    bind: str
    blobs: Address
    stall_timeout_ns: int
    logs: Path
    command: Sequence[str]  # the script and its arguments are appended
    environ: Mapping[str, str]  # what workers inherit
    network: Path | None = None  # where the network plugin's words are heard


@dataclass
class NodeWorker:
    name: str
    slot: int
    rank: int
    process: Process
    page: PageReader
    log: Path
    channel: WorkerChannel | None = None
    exited: WorkerExited | None = None
    killed_because: str = ""
    nested: bool = False  # the process is a capsule, and the script runs inside
    inner: int = 0
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def script_pid(self) -> int:
        """Of the process that runs the script."""
        if self.nested and not self.inner:
            self.inner = inner_pid(self.pid) or 0
        return self.inner or self.pid

    def signal_script(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.script_pid, number)


def _segments(start: StartWorker) -> Path | None:
    """What lets a rank move its device memory itself; without it the driver does, more slowly. Also
    where no rank is yet: one that comes has it mapped."""
    if not (start.transparent and libcuda.present()):
        return None
    try:
        return segments.ensure()
    except UsageError as error:
        logger.warning("moves of GPU ranks will be slow: %s", error)
        return None


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
        on_said: Callable[[NodeWorker, WorkerMessage], None],
        on_exited: Callable[[WorkerExited], None],
        processes: Processes,
    ) -> None:
        self._setting = setting
        self._processes = processes
        processes.exited = self._ended
        self._on_said = on_said
        self._on_exited = on_exited
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, NodeWorker] = {}  # in order of their start
        self._idle = asyncio.Event()
        self._idle.set()

    def get(self, name: str) -> NodeWorker | None:
        return self._workers.get(name)

    def live(self) -> list[NodeWorker]:
        return [worker for worker in self._workers.values() if worker.exited is None]

    def retained(self) -> list[NodeWorker]:
        """Dead ones whose side state is still held."""
        return [w for w in self._workers.values() if w.exited is not None and w.page.open]

    def pages(self, rank: int) -> list[PageReader]:
        """Pages of all workers of `rank`, alive and dead, youngest first."""
        found = [w.page for w in self._workers.values() if w.rank == rank and w.page.open]
        return found[::-1]

    def start(self, start: StartWorker) -> NodeWorker:
        """Raises KeepstepError or OSError if there is no process afterwards."""
        setting = self._setting
        log = setting.logs / f"{check_name(start.worker)}.log"
        env = worker_environment(
            setting.environ,
            start,
            job=setting.job,
            bind=setting.bind,
            network=setting.network,
            segments=_segments(start),
        )
        order = Order(
            worker=start.worker,
            slot=start.slot,
            rank=start.rank,
            command=[*self._capsule(start), *setting.command, *start.script],
            env=env,
            log=str(log),
            greeting=self._greeting(start, worker_settings(env, start)),
        )
        process = self._processes.start(order)
        worker = self._take(start.worker, start.slot, start.rank, process, log)
        worker.nested = start.transparent
        logger.info("started %s (rank %d) as pid %d", worker.name, worker.rank, worker.pid)
        return worker

    def _capsule(self, start: StartWorker) -> Sequence[str]:
        if not start.transparent:
            return ()
        if not isinstance(self._processes, OwnProcesses):
            raise UsageError(
                "ranks of a transparent job cannot be kept for the next agent",
                hint="start this agent without --adopt",
            )
        return (sys.executable, "-m", "keepstep.agent.capsule")

    def restored(self, worker: NodeWorker, said: Restored) -> None:
        """A process from elsewhere is at the other end of the line now, with a page of its own."""
        worker.inner = 0
        try:
            page = os.open(f"/proc/{worker.script_pid}/fd/{said.page}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.kill(worker, f"its page cannot be read: {error}")
            return
        worker.page.close()
        worker.page = PageReader(page)
        logger.info(
            "%s was restored as pid %d: %d MiB, dump %.2f s, stream %.2f s, restore %.2f s",
            worker.name,
            worker.script_pid,
            said.image_bytes >> 20,
            said.dump_ns / 1e9,
            said.stream_ns / 1e9,
            said.restore_ns / 1e9,
        )
        self.tell(worker, self._welcome(worker.name))

    def adopt(self, kept: KeptWorker, process: Process) -> NodeWorker:
        """One that an earlier agent of this node has started."""
        worker = self._take(kept.worker, kept.slot, kept.rank, process, Path(kept.log))
        if kept.code is None:
            logger.info("adopted %s (rank %d), pid %d", worker.name, worker.rank, worker.pid)
        else:
            self._ended(kept.worker, kept.code)
        return worker

    def _take(self, name: str, slot: int, rank: int, process: Process, log: Path) -> NodeWorker:
        worker = NodeWorker(name, slot, rank, process, PageReader(process.page_fd), log)
        self._workers[name] = worker
        self._idle.clear()
        worker.channel = WorkerChannel(
            self._loop,
            process.control,
            on_message=lambda said: self._on_said(worker, said),
            on_broken=lambda why: self.kill(worker, why),
            on_end=lambda: self._muted(worker),
        )
        return worker

    def tell(self, worker: NodeWorker, command: WorkerCommand) -> None:
        if isinstance(command, Assign) and not command.presumed:
            worker.rank = command.rank
            self._processes.note(worker.name, worker.rank)
        if worker.channel is not None:
            worker.channel.send(command)

    def kill(self, worker: NodeWorker, because: str = "") -> None:
        """SIGKILL its process group. The exit is told when it has happened."""
        if worker.exited is not None:
            return
        if because and not worker.killed_because:
            worker.killed_because = because
            logger.warning("killing %s: %s", worker.name, because)
        self._processes.kill(worker.name, signal.SIGKILL)

    def signal(self, worker: NodeWorker, number: int, resume_after_ns: int) -> None:
        if worker.exited is not None:
            return
        logger.info("signal %d to %s", number, worker.name)
        strike = worker.signal_script if worker.nested else worker.process.signal
        strike(number)
        if number == signal.SIGSTOP and resume_after_ns > 0:
            resume = self._loop.call_later(resume_after_ns / 1e9, strike, signal.SIGCONT)
            worker.timers.append(resume)

    def forget(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None:
            return
        if worker.exited is None:
            logger.warning("asked to forget %s, which is alive", name)
            return
        worker.page.close()
        self._processes.drop(name)
        del self._workers[name]

    def had(self, rank: int) -> bool:
        """A process of this rank is here, or was until it died and is not forgotten: what the node
        keeps of the rank may be all that there is."""
        return any(worker.rank == rank for worker in self._workers.values())

    async def stop(self, grace_ns: int, finished: bool = False) -> bool:
        """End all, politely first (`finished`: they are ending by themselves). True when none
        is left."""
        for worker in [] if finished else self.live():
            self._processes.kill(worker.name, signal.SIGTERM)
            self._processes.kill(
                worker.name, signal.SIGCONT
            )  # a stopped process would not see SIGTERM
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

    def _welcome(
        self,
        worker: str,
        checkpoints: str = "",
        settings: WorkerSettings = WorkerSettings(),  # noqa: B008 (frozen)
    ) -> Welcome:
        setting = self._setting
        return Welcome(
            job=setting.job,
            node=setting.node,
            worker=worker,
            token=setting.token,
            blobs=setting.blobs,
            stall_timeout_ns=setting.stall_timeout_ns,
            interface=setting.bind,
            tls=setting.tls,
            checkpoints=checkpoints,
            settings=settings,
        )

    def _greeting(self, start: StartWorker, settings: WorkerSettings) -> bytes:
        welcome = self._welcome(start.worker, start.checkpoints, settings)
        if start.rank < 0:
            return frame(welcome)
        return frame(welcome) + frame(Buddy(address=start.buddy, parity=start.parity))

    def _muted(self, worker: NodeWorker) -> None:
        """Its socket has ended; normally the process is about to as well."""
        if worker.exited is None:
            why = "it closed its control socket and did not end"
            worker.timers.append(self._loop.call_later(MUTE_GRACE_S, self.kill, worker, why))

    def _ended(self, name: str, code: int) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.exited is not None:
            return
        if worker.channel is not None:
            worker.channel.drain()
        worker.process.close()
        for timer in worker.timers:
            timer.cancel()
        tail = log_tail(worker.log, worker.killed_because)
        last = worker.page.sample()
        worker.exited = WorkerExited(
            worker=worker.name,
            rank=worker.rank,
            code=code,
            tail=tail,
            version=last.version if last is not None else 0,
            tick=last.tick if last is not None else 0,
        )
        logger.info("%s (rank %d) ended with %d", worker.name, worker.rank, code)
        if worker.rank < 0:
            worker.page.close()  # a spare has no side state
        if not self.live():
            self._idle.set()
        self._on_exited(worker.exited)


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
