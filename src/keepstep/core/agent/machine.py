"""What an agent does about what it sees and hears: pure, without processes, sockets or a clock.

    effects = machine.handle(now_ns, given)     # carry them out in this order
    machine.deadline()                          # when to hand in Looked() next

Theory of operation. The agent decides nothing about migrations. It owns facts that only the node
can have (a process ended, a rank stands still) and carries out single commands, each of them safe
to repeat: a command whose work is done already is answered again, because the first answer may
have been lost with a stream.

What is said to the orchestrator comes in two kinds. What it must not miss (a worker's words, an
exit, a store) is queued while the stream is away and follows the next Hello. What the next look
shows anyway (progress, stalls) is said now or not at all. Behind the queue every stall that was
reported and not taken back is told again.

Self-fencing: out of reach of the orchestrator *and* without progress for `stall_timeout`, the
node may have been given up and its ranks rebuilt elsewhere; ending them here makes sure that no
rank has two owners. Either condition alone is harmless: a restarting orchestrator does not stop
training, and a stall that the orchestrator can see is its own to judge. A rank that holds does not
train behind anybody's back, and its state may be the only one left: it is spared, and only the
other ranks of its node are ended. (It has given up its groups, or waits for a buddy; the latter can
go on only together with all other ranks, and then none of them has been replaced.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from keepstep.core.agent.actions import (
    AnyEffect,
    DropCopies,
    DropPage,
    DropStore,
    EndNode,
    EndWorkers,
    HostStore,
    KillProcess,
    KillSession,
    Raise,
    Relay,
    SayUp,
    Spawn,
)
from keepstep.core.agent.gather import Gather
from keepstep.core.agent.inputs import (
    Adopted,
    Emptied,
    Exited,
    Given,
    Heard,
    HelloTaken,
    Looked,
    NetworkSaid,
    NotSpawned,
    Said,
    Seen,
    Spawned,
    StopNow,
    StoreSaid,
    StreamLost,
)
from keepstep.core.agent.network import Limits, PathWatch
from keepstep.core.agent.rate import Rate
from keepstep.core.agent.stall import StallDetector, may_stand_still
from keepstep.model.agent_messages import (
    AgentCommand,
    AgentMessage,
    CloseStore,
    Forget,
    Hello,
    KillNode,
    KillWorker,
    OpenStore,
    PathsSeen,
    Progress,
    SendSignal,
    Stalled,
    StartWorker,
    Stop,
    StopDone,
    Tell,
    TellRanks,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
    WorkerState,
)
from keepstep.model.commands import Abort, Assign, Hold, Release, Swap, WorkerCommand
from keepstep.model.messages import PROTOCOL, Address
from keepstep.model.network import PathView

PROGRESS_NS = 250_000_000
PATHS_NS = 2_000_000_000
QUEUED_MAX = 10_000
SIGKILL = 9
START_FAILED = 127  # exit code told for a process that could not be started, as shells do

EXIT_DONE = 0
EXIT_FENCED = 3


class MachineSetting(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    node: str
    slots: int
    stall_timeout_ns: int
    progress_ns: int = PROGRESS_NS
    network: Limits = Limits()
    labels: dict[str, str] = {}


# ------------------------------------------------------------------ inputs


# ------------------------------------------------------------------ effects


@dataclass(slots=True)
class NodeProcess:
    name: str
    slot: int
    rank: int
    pid: int
    rate: Rate
    sent_on: bool = False  # told to train: a rank that holds from then on hangs
    stopped_for: int = -1  # generation it was told to stop for last
    doomed: bool = False  # to be killed: it is told nothing that is meant for ranks
    exited: WorkerExited | None = None


class AgentMachine:
    """One method for each input and each command: hence so many."""

    def __init__(self, setting: MachineSetting, now_ns: int) -> None:
        self._setting = setting
        self._detector = StallDetector(setting.stall_timeout_ns)
        self._network = PathWatch(setting.network)
        self._paths: list[PathView] = []  # as told last
        self._paths_at_ns = now_ns
        self._processes: dict[str, NodeProcess] = {}  # in order of their start
        self._queued: deque[AgentMessage] = deque()
        self._gather = Gather()
        self._connected = False
        self._away_since_ns = now_ns
        self._shown: list[WorkerState] = []
        self._stopping = False
        self._period_ns = min(setting.progress_ns, setting.stall_timeout_ns // 8)
        self._look_at_ns = now_ns + self._period_ns
        self._show_at_ns = now_ns
        self._effects: list[AnyEffect] = []

    # ----------------------------------------------------------------- as the shell sees it

    def handle(self, now_ns: int, given: Given) -> list[AnyEffect]:
        self._effects = []
        match given:
            case Looked():
                self._look(now_ns, given.workers)
            case Said():
                self._said(given)
            case Heard():
                self._command(given.command)
            case Exited():
                self._exited(given.exited)
            case Spawned():
                self._spawned(given.start, given.pid)
            case NotSpawned():
                self._not_spawned(given.start, given.error)
            case StoreSaid():
                self._send(given.message)
            case NetworkSaid():
                for signal in self._network.heard(now_ns, given.event):
                    self._send(signal)
            case HelloTaken():
                self._accepted()
            case StreamLost():
                if self._connected:
                    self._connected = False
                    self._away_since_ns = given.last_word_ns or now_ns
                    self._flush()
            case Adopted():
                process = NodeProcess(given.worker, given.slot, given.rank, given.pid, Rate())
                self._processes[given.worker] = process
            case StopNow():
                self._stop(given.grace_ns, False)
            case Emptied():
                self._emptied(given.all_gone)
        return self._effects

    def deadline(self) -> int:
        return self._look_at_ns

    def unsent(self, message: AgentMessage) -> None:
        """A Say failed: the stream broke and nobody has told us yet."""
        if len(self._queued) >= QUEUED_MAX:
            self._queued.popleft()
        self._queued.append(message)

    def alive(self) -> list[str]:
        return [p.name for p in self._processes.values() if p.exited is None]

    def hello(
        self,
        now_ns: int,
        *,
        token: str,
        pid: int,
        session: int,
        blobs: Address,
        workers: Sequence[Seen],
        retained: Sequence[str],
        stores: Sequence[int],
    ) -> Hello:
        """The first frame of a new stream; `retained` are dead workers whose page is still open."""
        setting = self._setting
        ranks = {p.name: p.rank for p in self._processes.values() if p.exited is not None}
        return Hello(
            protocol=PROTOCOL,
            token=token,
            job=setting.job,
            node=setting.node,
            pid=pid,
            session=session,
            blobs=blobs,
            slots=setting.slots,
            workers=self._states(now_ns, workers),
            retained=[(name, ranks[name]) for name in retained if name in ranks],
            stores=sorted(stores),
            labels=setting.labels,
        )

    # ----------------------------------------------------------------- to the orchestrator

    def _send(self, message: AgentMessage) -> None:
        """Now, or after the next Hello."""
        self._flush()
        self._put(message)

    def _put(self, message: AgentMessage) -> None:
        if self._connected:
            self._effects.append(SayUp(message))
        else:
            self.unsent(message)

    def _flush(self) -> None:
        kept = self._gather.drain()
        if kept is not None:
            self._put(kept)

    def _offer(self, message: AgentMessage) -> bool:
        """Now, or not at all."""
        if self._connected:
            self._effects.append(SayUp(message, keep=False))
        return self._connected

    def _accepted(self) -> None:
        self._flush()  # to the end of the queue
        self._connected = True
        self._shown = []
        while self._queued:
            self._send(self._queued.popleft())
        for report in self._detector.reports():
            self._offer(report)

    def _said(self, given: Said) -> None:
        process = self._processes.get(given.worker)
        rank = process.rank if process is not None else -1
        message = WorkerSaid(worker=given.worker, rank=rank, said=given.said)
        if not self._gather.keep(message):
            self._send(message)
        elif self._gather.complete(type(given.said)):
            self._flush()

    def _exited(self, exited: WorkerExited) -> None:
        self._detector.forget(exited.worker)
        self._gather.give_up(exited.worker)
        process = self._processes.get(exited.worker)
        if process is not None:
            process.exited = exited
        self._send(exited)

    # ----------------------------------------------------------------- from the orchestrator

    def _command(self, command: AgentCommand) -> None:
        match command:
            case Tell():
                self._tell(command.worker, command.command)
            case TellRanks():
                self._tell_ranks(command)
            case StartWorker():
                self._start(command)
            case KillWorker():
                self._kill(command.worker)
            case SendSignal():
                if self._is_alive(command.worker):
                    effect = Raise(command.worker, command.signal, command.resume_after_ns)
                    self._effects.append(effect)
            case OpenStore():
                self._effects.append(HostStore(command.generation))
            case CloseStore():
                self._effects.append(DropStore(command.generation))
            case Forget():
                self._forget(command.workers)
                if command.before:
                    self._effects.append(DropCopies(command.before))
            case Stop():
                self._stop(command.grace_ns, command.finished)
            case KillNode():
                self._effects.append(KillSession())
            case _:
                pass  # Accepted and Refused belong to the stream's beginning

    def _is_alive(self, worker: str) -> bool:
        process = self._processes.get(worker)
        return process is not None and process.exited is None

    def _tell_ranks(self, tell: TellRanks) -> None:
        told = [
            process.name
            for process in self._processes.values()
            if process.exited is None and process.rank >= 0 and not process.doomed
            if process.name not in tell.besides
        ]
        self._gather.expect(tell.command, told)
        for name in told:
            self._tell(name, tell.command)

    def _tell(self, worker: str, command: WorkerCommand) -> None:
        if not self._is_alive(worker):
            return
        process = self._processes[worker]
        if isinstance(command, Assign):
            process.rank = -1 if command.presumed else command.rank
        elif isinstance(command, Swap | Release):
            # The release of an old move may follow the next Abort: that holds.
            process.sent_on = command.generation >= process.stopped_for
        elif isinstance(command, Abort | Hold):
            process.sent_on, process.stopped_for = False, command.generation
        self._effects.append(Relay(worker, command))

    def _start(self, start: StartWorker) -> None:
        process = self._processes.get(start.worker)
        if process is None:
            if self._stopping:
                self._not_spawned(start, "the node is being stopped")
            else:
                self._effects.append(Spawn(start))
        elif process.exited is not None:
            self._send(process.exited)
        else:
            self._send(WorkerStarted(worker=process.name, slot=process.slot, pid=process.pid))

    def _spawned(self, start: StartWorker, pid: int) -> None:
        name = start.worker
        self._processes[name] = NodeProcess(name, start.slot, start.rank, pid, Rate())
        self._send(WorkerStarted(worker=name, slot=start.slot, pid=pid))

    def _not_spawned(self, start: StartWorker, error: str) -> None:
        tail = f"keepstep agent: cannot start this worker: {error}"
        exited = WorkerExited(worker=start.worker, rank=start.rank, code=START_FAILED, tail=tail)
        # Remembered, so that the same command, sent again, does not start what is said to be gone.
        failed = NodeProcess(start.worker, start.slot, start.rank, 0, Rate(), exited=exited)
        self._processes[start.worker] = failed
        self._send(exited)

    def _kill(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None:
            # Whoever fences waits for this answer, and it is true: there is no such process.
            tail = "keepstep agent: there is no such worker"
            self._send(WorkerExited(worker=name, rank=-1, code=-SIGKILL, tail=tail))
        elif process.exited is not None:
            self._send(process.exited)
        else:
            process.doomed = True
            self._effects.append(KillProcess(name))

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            process = self._processes.get(name)
            if process is not None and process.exited is not None:
                del self._processes[name]
                self._effects.append(DropPage(name))

    # ----------------------------------------------------------------- watching

    def _states(self, now_ns: int, workers: Sequence[Seen]) -> list[WorkerState]:
        states = []
        for seen in workers:
            process, sample = self._processes[seen.worker], seen.sample
            if sample is None:
                state = WorkerState(
                    worker=seen.worker, slot=process.slot, pid=process.pid, rank=process.rank
                )
            else:
                state = WorkerState(
                    worker=seen.worker,
                    slot=process.slot,
                    pid=process.pid,
                    rank=process.rank,
                    generation=sample.generation,
                    version=sample.version,
                    tick=sample.tick,
                    where=sample.where,
                    steps_per_s=process.rate.observe(now_ns, sample),
                    own_ns=sample.own_ns,
                    own_steps=sample.own_steps,
                )
            states.append(state)
        return states

    def _look(self, now_ns: int, workers: Sequence[Seen]) -> None:
        self._look_at_ns = now_ns + self._period_ns
        self._flush()
        workers = [self._judge_hold(seen) for seen in workers]
        for seen in workers:
            news = self._detector.observe(
                now_ns,
                seen.worker,
                self._processes[seen.worker].rank,
                seen.sample,
                cpu_ns=seen.cpu_ns,
                stopped=seen.stopped,
            )
            if news is None:
                continue
            # Stalls are told anew after every Hello; that one is over is told only here.
            if isinstance(news, Stalled):
                self._offer(news)
            else:
                self._send(news)
        for signal in self._network.look(now_ns):
            self._send(signal)
        self._show_paths(now_ns)
        if now_ns >= self._show_at_ns:
            self._show_at_ns = now_ns + self._setting.progress_ns * 9 // 10
            states = self._states(now_ns, workers)
            if states != self._shown and self._offer(Progress(workers=states)):
                self._shown = states
        if not self._connected:
            self._fence(now_ns, workers)

    def _show_paths(self, now_ns: int) -> None:
        if now_ns < self._paths_at_ns:
            return
        self._paths_at_ns = now_ns + PATHS_NS
        paths = self._network.views(now_ns)
        if paths != self._paths and self._offer(PathsSeen(paths=paths)):
            self._paths = paths

    def _judge_hold(self, seen: Seen) -> Seen:
        process, sample = self._processes[seen.worker], seen.sample
        if sample is None or not process.sent_on:
            return seen
        if not sample.hold or sample.asked_ns:
            process.sent_on = False
            return seen
        return msgspec.structs.replace(seen, sample=msgspec.structs.replace(sample, hold=False))

    def _fence(self, now_ns: int, workers: Sequence[Seen]) -> None:
        if now_ns - self._away_since_ns < self._setting.stall_timeout_ns:
            return
        holding = False
        ranks = []
        for seen in workers:
            if seen.sample is None or self._processes[seen.worker].rank < 0:
                continue
            holding = holding or seen.sample.hold
            if not seen.sample.hold and not may_stand_still(seen.sample):
                ranks.append(seen.worker)
        if not self._detector.all_stalled(ranks):
            return
        if holding:
            self._effects += [KillProcess(worker) for worker in ranks]
        else:
            why = "no orchestrator and no progress: fencing this node"
            self._effects.append(EndNode(EXIT_FENCED, why))

    # ----------------------------------------------------------------- ending

    def _stop(self, grace_ns: int, finished: bool) -> None:
        if not self._stopping:
            self._stopping = True
            self._effects.append(EndWorkers(grace_ns, finished))

    def _emptied(self, all_gone: bool) -> None:
        if all_gone:
            self._offer(StopDone())
        self._effects.append(
            EndNode(EXIT_DONE, "" if all_gone else "some workers could not be ended")
        )
