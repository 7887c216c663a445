"""A node: what its agent starts, stops, hosts, keeps and says.

`CARRY_OUT` has a method for each effect of the production machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.core.agent import actions, inputs
from keepstep.core.agent import machine as core
from keepstep.model import agent_messages
from keepstep.model import messages as m
from keepstep.sim.ground.connections import SILENT_NS
from keepstep.sim.ground.groups import SimStore
from keepstep.sim.rank.rank import Rank
from keepstep.sim.times import MS
from keepstep.sim.world.agent import NodeSurroundings, SimAgent

SIGSTOP = 19


class SimNode(SimAgent):
    def __init__(
        self, world: NodeSurroundings, name: str, index: int, slots: int, labels: dict[str, str]
    ) -> None:
        super().__init__(world, name, index, slots, labels)
        self.disk = ""  # "full" or "stuck"
        self.stalls: dict[
            str, agent_messages.Stalled
        ] = {}  # what the agent says and has not taken back

    def carry_out(self, effect: actions.AnyEffect) -> None:
        CARRY_OUT[type(effect)](self, effect)

    def die(self, silently: bool) -> None:
        """The agent ends, and everything on the node with it."""
        if not self.alive:
            return
        self.alive = False
        self.vanished = silently
        for process in list(self.processes.values()):
            process.vanish()
        for store in self.stores.values():
            store.close()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.agent_open = False
            wait = SILENT_NS if silently else 2 * MS
            self.world.after(wait, stream.close, "orchestrator")
        if not silently:
            self.world.node_died(self.name)

    # ------------------------------------------------------------------ processes

    def _say(self, effect: actions.SayUp) -> None:
        if isinstance(effect.message, agent_messages.Stalled):
            self.stalls[effect.message.worker] = effect.message
        elif isinstance(effect.message, agent_messages.Unstalled):
            self.stalls.pop(effect.message.worker, None)
        if self.stream is not None and self.accepted:
            self.stream.up(effect.message)
        elif effect.keep:
            self.machine.unsent(effect.message)

    def _spawn(self, effect: actions.Spawn) -> None:
        start = effect.start
        if self.world.ills.spawn_fails():
            self.world.rules.refused(self.name, start.worker)
            self.handle(inputs.NotSpawned(start, "out of memory"))
            return
        process = Rank(self.world, self, start, self.world.next_pid())
        self.processes[start.worker] = process
        self.world.ranks[start.worker] = process
        self.world.rules.spawned(process.id)
        self.handle(inputs.Spawned(start, process.pid))

    def _kill(self, effect: actions.KillProcess) -> None:
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
            self.world.rules.forced(process.id)
            process.exit(-9)
        self.later(100 * MS, self._emptied, deadline_ns)

    def _end(self, effect: actions.EndNode) -> None:
        self.world.trace(f"{self.name} ends: {effect.why}" if effect.why else f"{self.name} ends")
        if effect.code == core.EXIT_FENCED:
            self.world.rules.fenced(self.name)
        self.die(silently=False)

    def _kill_session(self, effect: actions.KillSession) -> None:
        self.die(silently=False)

    # ------------------------------------------------------------------ stores and copies

    def _host_store(self, effect: actions.HostStore) -> None:
        if effect.generation in self.stores:
            self._store_opened(effect.generation)
            return
        failure = self.world.ills.store_fails()
        if failure == "refuse":
            failed = agent_messages.StoreFailed(
                generation=effect.generation, error="no port in time"
            )
            self.handle(inputs.StoreSaid(failed))
            return
        ranks = self.world.plan.ranks
        self.stores[effect.generation] = store = SimStore(self.world.net, effect.generation, ranks)
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
            self.handle(
                inputs.StoreSaid(agent_messages.StoreOpened(generation=generation, store=address))
            )

    def store_died(self, generation: int) -> None:
        self.stores.pop(generation).close()
        failed = agent_messages.StoreFailed(
            generation=generation, error="the store ended with signal 9"
        )
        self.run(self.handle, inputs.StoreSaid(failed))

    def _drop_store(self, effect: actions.DropStore) -> None:
        store = self.stores.pop(effect.generation, None)
        if store is not None:
            store.close()

    def _drop(self, effect: actions.DropPage) -> None:
        gone = self.processes.pop(effect.worker, None)
        self.memory.drop(effect.worker)
        had = [process.rank for process in self.processes.values()]
        if gone is not None and gone.rank not in had:
            self.memory.vault.left(gone.rank)

    def _drop_copies(self, effect: actions.DropCopies) -> None:
        self.memory.drop_copies(effect.before)

    # ------------------------------------------------------------------ what workers tell

    def said(self, worker: str, message: m.WorkerMessage) -> None:
        self.world.rules.said(worker, message)
        self.run(self._said, worker, message)

    def _said(self, worker: str, message: m.WorkerMessage) -> None:
        self.handle(inputs.Said(worker, message))

    def process_ended(self, worker: str, code: int, tail: str) -> None:
        self.later(MS, self._process_ended, self.processes[worker], code, tail)

    def _process_ended(self, process: Rank, code: int, tail: str) -> None:
        if process.rank < 0:
            self.memory.drop(process.id)
        exited = agent_messages.WorkerExited(
            worker=process.id,
            rank=process.rank,
            code=code,
            tail=tail,
            version=process.version,
            tick=process.tick,
        )
        self.handle(inputs.Exited(exited))


CARRY_OUT: dict[type[actions.AnyEffect], Callable[[SimNode, Any], None]] = {
    actions.SayUp: SimNode._say,
    actions.Spawn: SimNode._spawn,
    actions.KillProcess: SimNode._kill,
    actions.Relay: SimNode._relay,
    actions.Raise: SimNode._raise,
    actions.HostStore: SimNode._host_store,
    actions.DropStore: SimNode._drop_store,
    actions.DropPage: SimNode._drop,
    actions.DropCopies: SimNode._drop_copies,
    actions.EndWorkers: SimNode._end_workers,
    actions.EndNode: SimNode._end,
    actions.KillSession: SimNode._kill_session,
}
