"""One node's agent: it starts, watches and ends the node's workers, and relays.

The agent decides nothing about migrations. It owns facts that only the node can have (a process
ended, a rank stands still, a side state is here) and carries out single commands, each of them
safe to repeat. On its own it decides only to end everything, in three cases: its launcher is gone
(stdin ends), it is told to, or it must fence itself.

Self-fencing: out of reach of the orchestrator *and* without progress for `stall_timeout`, the
node may have been given up and its ranks rebuilt elsewhere; ending them here makes sure that no
rank has two owners. Either condition alone is harmless: a restarting orchestrator does not stop
training, and a stall that the orchestrator can see is its own to judge.

With a keeper (keeper.py) the workers outlive the agent: one that is killed, or whose launcher is
gone, leaves them to its successor, which finds them there and says Hello with all of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.adapters.identity.files import write_private
from keepstep.agent.blobs import BlobServer
from keepstep.agent.keeper_client import KeptProcesses
from keepstep.agent.link import Link
from keepstep.agent.page import PageReader
from keepstep.agent.processes import OwnProcesses, Processes
from keepstep.agent.progress import Rate
from keepstep.agent.session import main_thread_stat
from keepstep.agent.stall import StallDetector, may_stand_still
from keepstep.agent.stores import Stores, native_store_command
from keepstep.agent.workers import START_FAILED, Setting, Worker, Workers
from keepstep.errors import KeepstepError
from keepstep.model.messages import (
    PROTOCOL,
    Address,
    AgentCommand,
    CloseStore,
    Forget,
    Hello,
    KillNode,
    KillWorker,
    OpenStore,
    Progress,
    Signal,
    Stalled,
    StartWorker,
    Stop,
    StopDone,
    Tell,
    TlsFiles,
    WorkerExited,
    WorkerMessage,
    WorkerSaid,
    WorkerStarted,
    WorkerState,
)

PROGRESS_S = 0.25
STOP_GRACE_NS = 2_000_000_000  # for SIGTERM to the agent; Stop brings its own

EXIT_DONE = 0
EXIT_REFUSED = 2
EXIT_FENCED = 3
EXIT_LAUNCHER_GONE = 1
EXIT_KEEPER_LOST = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    orchestrator: Address
    token: str  # for the orchestrator
    job_token: str  # for blobs and state
    job: str
    node: str
    slots: int
    directory: Path
    stall_timeout_ns: int
    bind: str = "127.0.0.1"
    tls: TlsFiles | None = None  # None: everything is on loopback
    keeper: Path | None = None  # folder of the keeper whose children the workers are
    worker_command: Sequence[str] = (sys.executable, "-m", "keepstep.worker")
    store_command: Callable[[], Sequence[str]] = native_store_command


class Agent:
    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._blobs = BlobServer(config.job_token, self._pages, config.tls)
        self._blobs_address = Address(config.bind, 0)
        self._workers: Workers
        self._processes: Processes = OwnProcesses(self._loop)
        self._leaves_workers = False  # to the next agent
        self._detector = StallDetector(config.stall_timeout_ns)
        self._rates: dict[str, Rate] = {}
        self._shown: list[WorkerState] = []
        self._link = Link(
            config.orchestrator,
            hello=self._hello,
            on_connected=self._connected,
            on_command=self._command,
            on_away=lambda: self._processes.linked(False),
            tls=config.tls,
        )
        self._stores = Stores(
            config.bind,
            config.directory / "logs" / f"store-{config.node}.log",
            on_event=self._link.send,
            command=config.store_command,
        )

    async def run(self) -> int:
        """Until the agent has to end; its exit code. Nothing of the node is left then."""
        config = self._config
        if config.keeper is not None:
            self._processes = KeptProcesses(self._loop, config.keeper, self._keeper_lost)
        self._blobs_address = await self._serve_blobs()
        setting = Setting(
            job=config.job,
            node=config.node,
            token=config.job_token,
            tls=config.tls,
            bind=config.bind,
            blobs=self._blobs_address,
            stall_timeout_ns=config.stall_timeout_ns,
            logs=config.directory / "logs",
            command=config.worker_command,
        )
        self._workers = Workers(
            setting, on_said=self._said, on_exited=self._exited, processes=self._processes
        )
        if isinstance(self._processes, KeptProcesses):
            for known, process in self._processes.adopted:
                self._workers.adopt(known, process)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, STOP_GRACE_NS)
        self._watch_launcher()
        tasks = [asyncio.create_task(self._run_link()), asyncio.create_task(self._watch())]
        try:
            return await self._done
        finally:
            for task in tasks:
                task.cancel()
            self._blobs.close()
            if self._leaves_workers and isinstance(self._processes, KeptProcesses):
                self._stores.close_all()
                self._processes.leave()
            else:
                self._end_everything()

    async def _serve_blobs(self) -> Address:
        """Where an earlier agent of the same workers did, if possible: others know it there."""
        bind, keeper = self._config.bind, self._config.keeper
        if keeper is None:
            return await self._blobs.start(bind)
        note = keeper / "blobs.port"
        port = int(note.read_text()) if note.exists() else 0
        try:
            address = await self._blobs.start(bind, port)
        except OSError:
            address = await self._blobs.start(bind)
        write_private(note, str(address.port).encode())
        return address

    # ----------------------------------------------------------------- to the orchestrator

    async def _run_link(self) -> None:
        refused = await self._link.run()
        words = str(
            KeepstepError(f"refused by the orchestrator: {refused.error}", hint=refused.hint)
        )
        logger.error("%s", words)
        print(f"error: {words}", file=sys.stderr, flush=True)
        self._finish(EXIT_REFUSED)

    def _hello(self) -> Hello:
        config = self._config
        return Hello(
            protocol=PROTOCOL,
            token=config.token,
            job=config.job,
            node=config.node,
            pid=os.getpid(),
            session=self._processes.session,
            blobs=self._blobs_address,
            slots=config.slots,
            workers=self._states(time.monotonic_ns()),
            retained=[(worker.name, worker.rank) for worker in self._workers.retained()],
        )

    def _connected(self) -> None:
        self._processes.linked(True)
        self._shown = []
        for report in self._detector.reports():
            self._link.offer(report)

    def _said(self, worker: Worker, said: WorkerMessage) -> None:
        self._link.send(WorkerSaid(worker=worker.name, rank=worker.rank, said=said))

    def _exited(self, exited: WorkerExited) -> None:
        self._detector.forget(exited.worker)
        self._rates.pop(exited.worker, None)
        self._link.send(exited)

    def _states(self, now_ns: int) -> list[WorkerState]:
        states = []
        for worker in self._workers.live():
            sample = worker.page.sample()
            state = WorkerState(
                worker=worker.name, slot=worker.slot, pid=worker.pid, rank=worker.rank
            )
            if sample is not None:
                rate = self._rates.setdefault(worker.name, Rate())
                state = WorkerState(
                    worker=worker.name,
                    slot=worker.slot,
                    pid=worker.pid,
                    rank=worker.rank,
                    generation=sample.generation,
                    version=sample.version,
                    tick=sample.tick,
                    where=sample.where,
                    steps_per_s=rate.observe(now_ns, sample),
                )
            states.append(state)
        return states

    # ----------------------------------------------------------------- from the orchestrator

    def _command(self, command: AgentCommand) -> None:
        match command:
            case StartWorker():
                self._start_worker(command)
            case KillWorker():
                self._kill_worker(command.worker)
            case Tell():
                if worker := self._find(command.worker, "Tell"):
                    self._workers.tell(worker, command.command)
            case Signal():
                if worker := self._find(command.worker, "Signal"):
                    self._workers.signal(worker, command.signal, command.resume_after_ns)
            case OpenStore():
                self._stores.open(command.generation)
            case CloseStore():
                self._stores.close(command.generation)
            case Forget():
                self._workers.forget(command.workers)
            case Stop():
                self._stop(command.grace_ns, command.finished)
            case KillNode():
                self._kill_node()
            case _:
                logger.warning("unexpected %s", type(command).__name__)

    def _find(self, name: str, command: str) -> Worker | None:
        worker = self._workers.get(name)
        if worker is None or worker.exited is not None:
            logger.info("%s for %s, which is not alive", command, name)
            return None
        return worker

    def _start_worker(self, start: StartWorker) -> None:
        worker = self._workers.get(start.worker)
        if worker is not None and worker.exited is not None:
            self._link.send(worker.exited)
            return
        if worker is None:
            try:
                if self._stopping is not None:
                    raise KeepstepError("the node is being stopped")
                worker = self._workers.start(start)
            except (KeepstepError, OSError) as error:
                self._start_failed(start, str(error))
                return
        self._link.send(WorkerStarted(worker=worker.name, slot=worker.slot, pid=worker.pid))

    def _start_failed(self, start: StartWorker, error: str) -> None:
        logger.error("cannot start %s: %s", start.worker, error)
        tail = f"keepstep agent: cannot start this worker: {error}"
        self._link.send(
            WorkerExited(worker=start.worker, rank=start.rank, code=START_FAILED, tail=tail)
        )

    def _kill_worker(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None:
            # Whoever fences waits for this answer, and it is true: there is no such process.
            tail = "keepstep agent: there is no such worker"
            self._link.send(WorkerExited(worker=name, rank=-1, code=-signal.SIGKILL, tail=tail))
        elif worker.exited is not None:
            self._link.send(worker.exited)
        else:
            self._workers.kill(worker)

    # ----------------------------------------------------------------- watching

    def _pages(self, rank: int) -> list[PageReader]:
        return self._workers.pages(rank)

    async def _watch(self) -> None:
        period_s = min(PROGRESS_S, self._config.stall_timeout_ns / 8e9)
        progress_at_ns = 0
        while True:
            await asyncio.sleep(period_s)
            now_ns = time.monotonic_ns()
            try:
                self._look_for_stalls(now_ns)
                if now_ns >= progress_at_ns:
                    progress_at_ns = now_ns + int(PROGRESS_S * 0.9e9)
                    self._show_progress(now_ns)
                if self._must_fence(now_ns):
                    logger.critical("no orchestrator and no progress: fencing this node")
                    self._finish(EXIT_FENCED)
            except Exception:
                logger.exception("watching failed; going on")

    def _look_for_stalls(self, now_ns: int) -> None:
        for worker in self._workers.live():
            sample = worker.page.sample()
            thread = main_thread_stat(worker.pid)
            news = self._detector.observe(
                now_ns,
                worker.name,
                worker.rank,
                sample,
                cpu_ns=thread.cpu_ns if thread is not None else 0,
                stopped=thread is not None and thread.stopped,
            )
            if news is not None:
                logger.info("%s", news)
                # Stalls are told anew after every Hello; that one is over is told only here.
                if isinstance(news, Stalled):
                    self._link.offer(news)
                else:
                    self._link.send(news)

    def _show_progress(self, now_ns: int) -> None:
        states = self._states(now_ns)
        if states != self._shown and self._link.offer(Progress(workers=states)):
            self._shown = states

    def _must_fence(self, now_ns: int) -> bool:
        if self._link.away_ns(now_ns) < self._config.stall_timeout_ns:
            return False
        ranks = []
        for worker in self._workers.live():
            sample = worker.page.sample()
            if sample is None or worker.rank < 0:
                continue
            # A rank that holds waits for the orchestrator and has given up its groups: it can
            # not train behind anybody's back, and its state may be the only one left.
            if sample.hold:
                return False
            if not may_stand_still(sample):
                ranks.append(worker.name)
        return self._detector.all_stalled(ranks)

    # ----------------------------------------------------------------- ending

    def _stop(self, grace_ns: int, finished: bool = False) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_everything(grace_ns, finished))

    async def _stop_everything(self, grace_ns: int, finished: bool) -> None:
        logger.info("stopping")
        try:
            gone = await self._workers.stop(grace_ns, finished)
            self._end_everything()
            if not gone:
                logger.error("some workers could not be ended")
            elif self._link.offer(StopDone()):
                await self._link.close()
        finally:
            self._finish(EXIT_DONE)

    def _finish(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)

    def _end_everything(self) -> None:
        """SIGKILL whatever of this node is left, now."""
        self._stores.close_all()
        self._processes.end()

    def _keeper_lost(self) -> None:
        logger.critical("the keeper has ended, and the workers with it")
        self._finish(EXIT_KEEPER_LOST)

    def _kill_node(self) -> None:
        logger.info("killing this node, as told")
        self._end_everything()
        os.kill(os.getpid(), signal.SIGKILL)

    def _watch_launcher(self) -> None:
        try:
            mode = os.fstat(0).st_mode
        except OSError:
            return
        # Anything else (a terminal, /dev/null) is no launcher's promise to be there.
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            self._loop.add_reader(0, self._read_launcher)

    def _read_launcher(self) -> None:
        try:
            if os.read(0, 4096):
                return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self._loop.remove_reader(0)
        self._leaves_workers = self._config.keeper is not None
        left = "leaving the workers to the next agent" if self._leaves_workers else "ending"
        logger.critical("the launcher is gone: %s", left)
        self._finish(EXIT_LAUNCHER_GONE)
