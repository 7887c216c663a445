"""One node's agent: it starts, watches and ends the node's workers, and relays.

Every decision stands in core/agent/machine.py; this is the shell around it, which knows processes,
sockets, signals and the clock. On its own it only ends when its launcher is gone (stdin ends).

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.adapters.identity.private_files import write_private
from keepstep.agent import preflight
from keepstep.agent.blobs import BlobServer
from keepstep.agent.images import Images
from keepstep.agent.keeper_client import KeptProcesses
from keepstep.agent.link import Link
from keepstep.agent.network import NetworkEvents, socket_path
from keepstep.agent.page import PageReader
from keepstep.agent.process_sessions import main_thread_stat
from keepstep.agent.processes import OwnProcesses, Processes
from keepstep.agent.stores import Stores, native_store_command
from keepstep.agent.workers import NodeWorker, Setting, Workers
from keepstep.core.agent import actions, inputs
from keepstep.core.agent import machine as core
from keepstep.core.agent.network import Limits
from keepstep.errors import KeepstepError
from keepstep.model.agent_messages import (
    AgentCommand,
    Examine,
    Examined,
    Hello,
    StartWorker,
    StoreFailed,
    StoreOpened,
    WorkerExited,
)
from keepstep.model.commands import Abort, Inspect, Offload, Release
from keepstep.model.messages import Address, Inspected, Offloaded, Restored, TlsFiles, WorkerMessage

STOP_GRACE_NS = 2_000_000_000  # for SIGTERM to the agent; Stop brings its own

EXIT_REFUSED = 2
EXIT_LAUNCHER_GONE = 1
EXIT_KEEPER_LOST = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    orchestrators: Sequence[Address]  # of which one is active
    token: str  # for the orchestrator
    job_token: str  # for blobs and state
    job: str
    node: str
    slots: int
    directory: Path
    stall_timeout_ns: int
    environ: Mapping[str, str]  # what workers inherit; no secret is in it
    bind: str = "127.0.0.1"
    tls: TlsFiles | None = None  # None: everything is on loopback
    keeper: Path | None = None  # folder of the keeper whose children the workers are
    network: Limits = field(default_factory=Limits)  # when a flapping path is a reason to leave
    labels: dict[str, str] = field(default_factory=dict)  # where this node stands
    worker_command: Sequence[str] = (sys.executable, "-m", "keepstep.worker")
    store_command: Callable[[], Sequence[str]] = native_store_command


class Agent:
    """The shell of one node: a method for each thing that happens, and for each that the machine
    has done, hence so many."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._stopping: asyncio.Task[None] | None = None
        self._images = Images(config.job_token, config.job, self._rank_in_capsule, self._ask)
        self._blobs = BlobServer(config.job_token, self._pages, config.tls, self._images)
        self._blobs_address = Address(config.bind, 0)
        self._workers: Workers
        self._processes: Processes = OwnProcesses(self._loop)
        self._examining: asyncio.Task[None] | None = None
        self._leaves_workers = False  # to the next agent
        self._machine = core.AgentMachine(
            core.MachineSetting(
                job=config.job,
                node=config.node,
                slots=config.slots,
                stall_timeout_ns=config.stall_timeout_ns,
                network=config.network,
                labels=config.labels,
            ),
            time.monotonic_ns(),
        )
        self._network = NetworkEvents(
            socket_path(config.job, config.node, config.directory),
            lambda event: self._handle(inputs.NetworkSaid(event)),
        )
        self._link = Link(
            config.orchestrators,
            hello=self._hello,
            on_accepted=self._accepted,
            on_lost=self._lost,
            on_command=self._command,
            tls=config.tls,
        )
        self._stores = Stores(
            config.bind,
            config.directory / "logs" / f"store-{config.node}.log",
            on_event=self._store_said,
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
            environ=config.environ,
            network=self._network.path if self._network.open() else None,
        )
        self._workers = Workers(
            setting, on_said=self._said, on_exited=self._exited, processes=self._processes
        )
        if isinstance(self._processes, KeptProcesses):
            for kept, process in self._processes.adopted:
                self._handle(inputs.Adopted(kept.worker, kept.slot, kept.rank, process.pid))
                self._workers.adopt(kept, process)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._handle, inputs.StopNow(STOP_GRACE_NS))
        self._watch_launcher()
        work = (self._run_link(), self._watch(), self._network.watch_ports())
        tasks = [asyncio.create_task(one) for one in work]
        try:
            return await self._done
        finally:
            for task in tasks:
                task.cancel()
            self._blobs.close()
            self._network.close()
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
        return self._machine.hello(
            time.monotonic_ns(),
            token=self._config.token,
            pid=os.getpid(),
            session=self._processes.session,
            blobs=self._blobs_address,
            workers=self._seen(),
            retained=[worker.name for worker in self._workers.retained()],
            stores=self._stores.generations(),
        )

    def _accepted(self) -> None:
        self._processes.linked(True)
        self._handle(inputs.HelloTaken())

    def _lost(self, last_word_ns: int) -> None:
        self._processes.linked(False)
        self._handle(inputs.StreamLost(last_word_ns))

    def _said(self, worker: NodeWorker, said: WorkerMessage) -> None:
        if isinstance(said, Inspected | Offloaded):
            self._images.answered(said)
            return
        if isinstance(said, Restored):
            self._workers.restored(worker, said)
        self._handle(inputs.Said(worker.name, said))

    def _rank_in_capsule(self, rank: int) -> NodeWorker | None:
        """Of two the older: the younger is what it shall become."""
        found = (w for w in self._workers.live() if w.rank == rank and w.nested)
        return next(found, None)

    def _ask(self, worker: str, command: Inspect | Offload) -> None:
        self._carry_out(actions.Relay(worker, command))

    def _exited(self, exited: WorkerExited) -> None:
        self._images.ended(exited.worker)
        self._handle(inputs.Exited(exited))

    def _store_said(self, message: StoreOpened | StoreFailed) -> None:
        self._handle(inputs.StoreSaid(message))

    async def _examine(self, number: int) -> None:
        host = await asyncio.to_thread(preflight.host)
        memory, room = preflight.free()
        self._link.offer(Examined(number=number, host=host, memory=memory, room=room))

    def _command(self, command: AgentCommand) -> None:
        if isinstance(command, Examine):  # nothing is decided by it
            self._examining = asyncio.create_task(self._examine(command.number))
            return
        self._handle(inputs.Heard(command))

    # ----------------------------------------------------------------- the machine

    def _handle(self, given: inputs.Given) -> None:
        for effect in self._machine.handle(time.monotonic_ns(), given):
            self._carry_out(effect)

    def _carry_out(self, effect: actions.AnyEffect) -> None:
        match effect:
            case actions.SayUp():
                if not self._link.offer(effect.message) and effect.keep:
                    self._machine.unsent(effect.message)
            case actions.Spawn():
                self._spawn(effect.start)
            case actions.EndWorkers():
                stopping = self._stop_everything(effect.grace_ns, effect.finished)
                self._stopping = asyncio.create_task(stopping)
            case actions.EndNode():
                if effect.why:
                    logger.critical("%s", effect.why)
                self._finish(effect.code)
            case actions.KillSession():
                self._kill_node()
            case actions.HostStore():
                self._stores.open(effect.generation)
            case actions.DropStore():
                self._stores.close(effect.generation)
            case actions.DropPage():
                self._drop(effect.worker)
            case actions.DropCopies():
                self._blobs.forget(effect.before)
            case _:
                worker = self._workers.get(effect.worker)
                if worker is not None:
                    self._act_on(worker, effect)

    def _drop(self, name: str) -> None:
        gone = self._workers.get(name)
        self._workers.forget(name)
        if gone is not None and not self._workers.had(gone.rank):
            self._blobs.vault.left(gone.rank)

    def _act_on(
        self, worker: NodeWorker, effect: actions.KillProcess | actions.Relay | actions.Raise
    ) -> None:
        match effect:
            case actions.KillProcess():
                self._workers.kill(worker)
            case actions.Relay():
                self._workers.tell(worker, effect.command)
                if isinstance(effect.command, Abort | Release):
                    self._images.go_on(worker.name, effect.command.generation)
            case actions.Raise():
                self._workers.signal(worker, effect.signal, effect.resume_after_ns)

    def _spawn(self, start: StartWorker) -> None:
        try:
            worker = self._workers.start(start)
        except (KeepstepError, OSError) as error:
            logger.error("cannot start %s: %s", start.worker, error)
            self._handle(inputs.NotSpawned(start, str(error)))
        else:
            self._handle(inputs.Spawned(start, worker.pid))

    # ----------------------------------------------------------------- watching

    def _pages(self, rank: int) -> list[PageReader]:
        return self._workers.pages(rank)

    def _seen(self) -> list[inputs.Seen]:
        seen = []
        for worker in self._workers.live():
            thread = main_thread_stat(worker.script_pid)
            seen.append(
                inputs.Seen(
                    worker.name,
                    worker.page.sample(),
                    cpu_ns=thread.cpu_ns if thread is not None else 0,
                    stopped=thread is not None and thread.stopped,
                )
            )
        return seen

    async def _watch(self) -> None:
        while True:
            wait_ns = self._machine.deadline() - time.monotonic_ns()
            await asyncio.sleep(max(wait_ns, 1_000_000) / 1e9)
            try:
                self._handle(inputs.Looked(self._seen()))
            except Exception:
                logger.exception("watching failed; going on")

    # ----------------------------------------------------------------- ending

    async def _stop_everything(self, grace_ns: int, finished: bool) -> None:
        logger.info("stopping")
        gone = False
        try:
            gone = await self._workers.stop(grace_ns, finished)
            self._end_everything()
        finally:
            effects = self._machine.handle(time.monotonic_ns(), inputs.Emptied(gone))
            for effect in effects:
                if isinstance(effect, actions.EndNode):
                    await self._link.close()  # the last words before it are to be written out
                self._carry_out(effect)

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
