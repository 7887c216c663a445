"""A node: the production agent machine with simulated processes, pages, stores and a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.core.agent import actions, inputs
from keepstep.core.agent import machine as core
from keepstep.core.agent.blobs import BlobStore
from keepstep.core.agent.parity import ParityStore
from keepstep.core.agent.vault import VaultStore
from keepstep.model import messages as m
from keepstep.model.page import TICKS_KEPT
from keepstep.sim.groups import Store
from keepstep.sim.net import MS, SECOND, SILENT_NS, Connection
from keepstep.sim.process import Blob, Process, newest
from keepstep.sim.rank import Rank

if TYPE_CHECKING:
    from keepstep.sim.world import World

SIGSTOP = 19
BACKOFF_NS_MIN = 100 * MS
BACKOFF_NS_MAX = 2 * SECOND
ACCEPT_TIMEOUT_NS = 10 * SECOND


class SimNode:
    def __init__(
        self, world: World, name: str, index: int, slots: int, labels: dict[str, str]
    ) -> None:
        self.world = world
        self.name = name
        self.index = index
        self.alive = True
        self.vanished = False  # died without a sign: nobody's connection is refused
        self.paused = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.machine = core.AgentMachine(
            core.Setting(
                job=world.plan.job,
                node=name,
                slots=slots,
                stall_timeout_ns=world.plan.stall_ns,
                progress_ns=world.plan.progress_ns,
                labels=labels,
            ),
            world.now,
        )
        self.slots = slots
        self.disk = ""  # "full" or "stuck"
        self.blobs = m.Address(name, 1)
        self.processes: dict[str, Rank] = {}
        self.pages: dict[str, dict[int, Blob]] = {}  # worker -> slot -> side state
        self.copies = BlobStore()
        self.vault, self.parity = VaultStore(), ParityStore()
        self.copied_in: dict[tuple[int, int], int] = {}  # (rank, tick) -> generation
        self.stores: dict[int, Store] = {}
        self.stream: Connection | None = None
        self.accepted = False
        self.stalls: dict[str, m.Stalled] = {}  # what the agent says and has not taken back
        self.backoff_ns = BACKOFF_NS_MIN
        world.after(world.random.randrange(100 * MS), self.connect)
        world.at(self.machine.deadline(), self.look)

    # ------------------------------------------------------------------ the agent's process

    def later(self, ns: int, work: Callable[..., None], *args: Any) -> None:
        self.world.after(ns, self.run, work, *args)

    def run(self, work: Callable[..., None], *args: Any) -> None:
        """In the agent's process: not after its end, and later if it is stopped."""
        if not self.alive:
            return
        if self.paused:
            self.backlog.append((work, args))
        else:
            work(*args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            backlog, self.backlog = self.backlog, []
            for work, args in backlog:
                self.run(work, *args)

    def die(self, silently: bool) -> None:
        """The agent ends, and everything on the node with it."""
        if not self.alive:
            return
        self.alive = False
        self.vanished = silently
        for process in list(self.processes.values()):
            if process.alive:
                process.alive = False
                process.leave_group()
        for store in self.stores.values():
            store.close()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.agent_open = False
            wait = SILENT_NS if silently else 2 * MS
            self.world.after(wait, stream.close, "orchestrator")
        self.world.node_died(self, silently)

    # ------------------------------------------------------------------ stream

    def connect(self) -> None:
        self.run(self._connect)

    def _connect(self) -> None:
        if self.stream is not None:
            return
        orchestrator = self.world.orchestrator
        reachable = self.world.net.both_ways(self.name, "orchestrator")
        if not orchestrator.alive or not reachable:
            self._retry()
            return
        self.stream = stream = Connection(self.world, self, orchestrator.epoch)
        self.accepted = False
        hello = self.machine.hello(
            self.world.now,
            token="",
            pid=self.index + 100,
            session=self.index + 100,
            blobs=self.blobs,
            workers=self._seen(),
            retained=[w for w, p in self.processes.items() if not p.alive and w in self.pages],
            stores=list(self.stores),
        )
        stream.up(hello)
        self.later(ACCEPT_TIMEOUT_NS, self._give_up, stream)

    def _give_up(self, stream: Connection) -> None:
        if self.stream is stream and not self.accepted:
            stream.close("agent")

    def _retry(self) -> None:
        wait = int(self.backoff_ns * (0.5 + self.world.random.random() / 2))
        self.backoff_ns = min(2 * self.backoff_ns, BACKOFF_NS_MAX)
        self.world.after(wait, self.connect)

    def stream_lost(self, stream: Connection) -> None:
        if self.stream is stream:
            self.stream = None
            self.run(self._stream_lost)

    def _stream_lost(self) -> None:
        self.handle(inputs.Lost())
        self._retry()

    def receive(self, stream: Connection, command: m.AgentCommand) -> None:
        self.run(self._receive, stream, command)

    def _receive(self, stream: Connection, command: m.AgentCommand) -> None:
        if self.stream is not stream:
            return
        if isinstance(command, m.Accepted):
            self.accepted = True
            self.backoff_ns = BACKOFF_NS_MIN
            self.handle(inputs.Accepted())
        else:
            self.world.checker.obeyed(self, command)
            self.handle(inputs.Heard(command))

    # ------------------------------------------------------------------ machine

    def handle(self, given: inputs.Given) -> None:
        for effect in self.machine.handle(self.world.now, given):
            CARRY_OUT[type(effect)](self, effect)

    def _seen(self) -> list[inputs.Seen]:
        return [
            inputs.Seen(
                name,
                process.sample(),
                cpu_ns=self.world.now if process.hung else 0,
                stopped=process.stopped,
            )
            for name, process in self.processes.items()
            if process.alive
        ]

    def look(self) -> None:
        self.run(self._look)

    def _look(self) -> None:
        self.handle(inputs.Looked(self._seen()))
        self.world.at(self.machine.deadline(), self.look)

    def _say(self, effect: actions.Say) -> None:
        if isinstance(effect.message, m.Stalled):
            self.stalls[effect.message.worker] = effect.message
        elif isinstance(effect.message, m.Unstalled):
            self.stalls.pop(effect.message.worker, None)
        if self.stream is not None and self.accepted:
            self.stream.up(effect.message)
        elif effect.keep:
            self.machine.unsent(effect.message)

    def _spawn(self, effect: actions.Spawn) -> None:
        start = effect.start
        if self.world.spawn_fails(self, start):
            self.world.checker.prompt.refused(self, start.worker)
            self.handle(inputs.NotSpawned(start, "out of memory"))
            return
        process = Rank(self.world, self, start, self.world.next_pid())
        self.processes[start.worker] = process
        self.world.ranks[start.worker] = process
        self.world.checker.spawned(self, process)
        self.handle(inputs.Spawned(start, process.pid))

    def _kill(self, effect: actions.Kill) -> None:
        self.world.after(MS, self._killed, effect.worker)

    def _killed(self, worker: str) -> None:
        self.processes[worker].exit(-9)

    def _relay(self, effect: actions.Relay) -> None:
        self.processes[effect.worker].thread(self.processes[effect.worker].take, effect.command)

    def _raise(self, effect: actions.Raise) -> None:
        process = self.processes[effect.worker]
        if effect.signal != SIGSTOP:
            process.exit(-effect.signal)
            return
        process.stop()
        if effect.resume_after_ns:
            self.world.after(effect.resume_after_ns, process.resume)

    def _host_store(self, effect: actions.HostStore) -> None:
        if effect.generation in self.stores:
            self._store_opened(effect.generation)
            return
        failure = self.world.store_fails(self)
        if failure == "refuse":
            failed = m.StoreFailed(generation=effect.generation, error="no port in time")
            self.handle(inputs.StoreSaid(failed))
            return
        self.stores[effect.generation] = store = Store(self.world, effect.generation)
        store.open = False
        if not failure:
            wait = 20 * MS + self.world.random.randrange(100 * MS)
            self.later(wait, self._open_store, effect.generation)

    def _open_store(self, generation: int) -> None:
        if generation in self.stores:
            self.stores[generation].open = True
            self._store_opened(generation)

    def _store_opened(self, generation: int) -> None:
        if self.stores[generation].open:
            address = m.Address(self.name, 10_000 + generation)
            self.handle(inputs.StoreSaid(m.StoreOpened(generation=generation, store=address)))

    def store_died(self, generation: int) -> None:
        self.stores.pop(generation).close()
        failed = m.StoreFailed(generation=generation, error="the store ended with signal 9")
        self.run(self.handle, inputs.StoreSaid(failed))

    def _drop_store(self, effect: actions.DropStore) -> None:
        store = self.stores.pop(effect.generation, None)
        if store is not None:
            store.close()

    def _drop(self, effect: actions.Drop) -> None:
        gone = self.processes.pop(effect.worker, None)
        self.pages.pop(effect.worker, None)
        left = [process.rank for process in self.processes.values() if process.alive]
        if gone is not None and gone.rank not in left:
            self.vault.left(gone.rank)

    def keep_copy(self, rank: Process, blob: Blob) -> None:
        self.copies.put(rank.rank, blob[0], blob)  # type: ignore[arg-type]
        self.copied_in[rank.rank, blob[0]] = rank.generation

    def _drop_copies(self, effect: actions.DropCopies) -> None:
        for (rank, tick), generation in list(self.copied_in.items()):
            if generation < effect.before:
                del self.copied_in[rank, tick]
                if tick in self.copies.ticks(rank):
                    self.copies.drop(rank, tick)
        self.vault.forget_before(effect.before)
        self.parity.forget_before(effect.before)

    def _end_workers(self, effect: actions.EndWorkers) -> None:
        for process in [] if effect.finished else list(self.processes.values()):
            process.exit(-15)
        self.later(10 * MS, self._emptied, self.world.now + effect.grace_ns)

    def _emptied(self, deadline_ns: int) -> None:
        left = [process for process in self.processes.values() if process.alive]
        if not left:
            self.handle(inputs.Emptied(True))
            return
        for process in left if self.world.now >= deadline_ns else ():
            self.world.checker.prompt.forced(process)
            process.exit(-9)
        self.later(100 * MS, self._emptied, deadline_ns)

    def _end(self, effect: actions.End) -> None:
        self.world.trace(f"{self.name} ends: {effect.why}" if effect.why else f"{self.name} ends")
        if effect.code == core.EXIT_FENCED:
            self.world.checker.fenced(self)
        self.die(silently=False)

    def _kill_session(self, effect: actions.KillSession) -> None:
        self.die(silently=False)

    # ------------------------------------------------------------------ workers

    def said(self, process: Process, message: m.WorkerMessage) -> None:
        self.world.checker.said(process, message)
        self.run(self._said, process.id, message)

    def _said(self, worker: str, message: m.WorkerMessage) -> None:
        self.handle(inputs.Said(worker, message))

    def process_ended(self, process: Process, code: int, tail: str) -> None:
        self.world.checker.ended(process)
        self.later(MS, self._process_ended, process, code, tail)

    def _process_ended(self, process: Process, code: int, tail: str) -> None:
        if process.rank < 0:
            self.pages.pop(process.id, None)
        exited = m.WorkerExited(
            worker=process.id,
            rank=process.rank,
            code=code,
            tail=tail,
            version=process.version,
            tick=process.tick,
        )
        self.handle(inputs.Exited(exited))

    def publish(self, process: Process, blob: Blob) -> None:
        self.pages.setdefault(process.id, {})[blob[0] % TICKS_KEPT] = blob

    def blob(self, rank: int, tick: int) -> Blob | None:
        """As the agent's blob server: pages of all workers of the rank, then copies."""
        own = [
            blob
            for worker, slots in reversed(self.pages.items())
            if self.processes[worker].rank == rank
            for blob in slots.values()
        ]
        copy = self.copies.get(rank, tick)
        found = newest(own, tick)
        if found is not None and (copy is None or found[0] >= copy[0]):
            return found
        return copy[1] if copy is not None else None  # type: ignore[return-value]


CARRY_OUT: dict[type[actions.AnyEffect], Callable[[SimNode, Any], None]] = {
    actions.Say: SimNode._say,
    actions.Spawn: SimNode._spawn,
    actions.Kill: SimNode._kill,
    actions.Relay: SimNode._relay,
    actions.Raise: SimNode._raise,
    actions.HostStore: SimNode._host_store,
    actions.DropStore: SimNode._drop_store,
    actions.Drop: SimNode._drop,
    actions.DropCopies: SimNode._drop_copies,
    actions.EndWorkers: SimNode._end_workers,
    actions.End: SimNode._end,
    actions.KillSession: SimNode._kill_session,
}
