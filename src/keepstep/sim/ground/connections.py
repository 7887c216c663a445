"""The network between the orchestrator and the nodes, one directed link for each pair and way.

Streams are TCP: what is sent on one connection arrives in order or not at all. Loss and reordering
on the wire therefore show as delay, as a stream that breaks with messages in it, and as messages
that are sent again on the next stream. A cut link keeps what was sent until it heals; a stream
that is cut for `SILENT_NS` is given up, by each end on its own, so one end may believe in it while
the other has a new one already.

Requests (side state, copies, rendezvous) are one round trip that can fail on either way: the
far side may have done what was asked although the answer is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from keepstep.model.agent_messages import AgentCommand, AgentMessage
from keepstep.sim.ground.clock import Clock
from keepstep.sim.times import MS, SECOND

SILENT_NS = 20 * SECOND  # as adapters/transport/stream.py
ASK_TIMEOUT_NS = 5 * SECOND
ORCHESTRATOR = "orchestrator"


class Reachable(Protocol):
    """What the network reaches on a node: its agent."""

    @property
    def name(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def vanished(self) -> bool:
        """It died without a sign: nobody's connection is refused."""
        ...

    @property
    def paused(self) -> bool: ...


class AgentEnd(Reachable, Protocol):
    def receive(self, stream: Connection, command: AgentCommand) -> None: ...

    def stream_lost(self, stream: Connection) -> None: ...


class ServerEnd(Protocol):
    def receive(self, connection: Connection, message: AgentMessage) -> None: ...

    def stream_lost(self, connection: Connection) -> None: ...


class Net:
    def __init__(self, clock: Clock, jitter_ns: int) -> None:
        self.clock = clock
        self._jitter_ns = jitter_ns
        self._cut: dict[tuple[str, str], int] = {}  # link -> since when
        self._slow: dict[tuple[str, str], int] = {}  # link -> additional delay
        self.connections: list[Connection] = []
        self.messages = 0
        self.disturbed = False  # ever

    def delay(self, source: str, target: str) -> int:
        base = 200_000 + int(self.clock.random.random() * self._jitter_ns)
        if self._slow:
            base += int(self._slow.get((source, target), 0) * self.clock.random.random())
        return base

    def any_cut(self) -> bool:
        return bool(self._cut)

    def is_cut(self, source: str, target: str) -> bool:
        return bool(self._cut) and (source, target) in self._cut

    def both_ways(self, one: str, other: str) -> bool:
        if not self._cut:
            return True
        return (one, other) not in self._cut and (other, one) not in self._cut

    def cut(self, source: str, target: str) -> None:
        if (source, target) in self._cut:
            return
        self.disturbed = True
        self._cut[source, target] = self.clock.now
        if ORCHESTRATOR in (source, target):
            for end in ("agent", "orchestrator"):
                wait = SILENT_NS + self.clock.random.randrange(2 * SECOND)
                self.clock.after(wait, self._silent, source, target, self.clock.now, end)

    def heal(self, source: str, target: str) -> None:
        if self._cut.pop((source, target), None) is None:
            return
        for connection in list(self.connections):
            connection.flush()

    def heal_all(self) -> None:
        self._slow.clear()
        for link in list(self._cut):
            self.heal(*link)

    def slow(self, source: str, target: str, ns: int) -> None:
        if ns:
            self.disturbed = True
            self._slow[source, target] = ns
        else:
            self._slow.pop((source, target), None)

    def _silent(self, source: str, target: str, since: int, end: str) -> None:
        if self._cut.get((source, target)) != since:
            return
        node = target if source == ORCHESTRATOR else source
        for connection in list(self.connections):
            if connection.node.name == node and connection.born <= since:
                connection.close(end)

    def ask(
        self,
        source: str,
        target: Reachable,
        work: Callable[[], Any],
        answer: Callable[[Any], None],
        fail: Callable[[str], None],
    ) -> None:
        """One round trip to a node's agent that gives up after a while."""
        there = self.delay(source, target.name)
        back = self.delay(target.name, source)
        self.clock.after(there + back, self._asked, source, target, work, answer, fail)

    def _asked(
        self,
        source: str,
        target: Reachable,
        work: Callable[[], Any],
        answer: Callable[[Any], None],
        fail: Callable[[str], None],
    ) -> None:
        if not target.alive and self.both_ways(source, target.name) and not target.vanished:
            fail("connection refused")
            return
        arrived = target.alive and not target.paused and not self.is_cut(source, target.name)
        result = work() if arrived else None
        if not arrived or self.is_cut(target.name, source):
            self.clock.after(ASK_TIMEOUT_NS, fail, "timed out")
        else:
            answer(result)


class Connection:
    """One stream between an agent and the orchestrator, with an end of its own at each."""

    def __init__(self, net: Net, job: str, node: AgentEnd, server: ServerEnd, epoch: int) -> None:
        self.net = net
        self.job = job
        self.node = node
        self.server = server
        self.epoch = epoch  # of the orchestrator's process
        self.born = net.clock.now
        self.agent_open = True
        self.server_open = True
        self._up_at = self._down_at = 0
        # Sent and not arrived. Each has one arrival ahead of it, or is kept by a cut link: whenever
        # one is due the oldest comes, so that nothing overtakes what was kept.
        self._up: deque[AgentMessage] = deque()
        self._down: deque[AgentCommand] = deque()
        self._up_kept = self._down_kept = 0
        net.connections.append(self)

    def up(self, message: AgentMessage) -> None:
        if self.agent_open:
            self._up.append(message)
            self._send_up(self.net.delay(self.node.name, ORCHESTRATOR))

    def _send_up(self, ns: int) -> None:
        self._up_at = max(self._up_at + 1, self.net.clock.now + ns)
        self.net.clock.at(self._up_at, self._arrive_up)

    def down(self, command: AgentCommand) -> None:
        if self.server_open:
            self._down.append(command)
            self._send_down()

    def _send_down(self) -> None:
        ns = self.net.delay(ORCHESTRATOR, self.node.name)
        self._down_at = max(self._down_at + 1, self.net.clock.now + ns)
        self.net.clock.at(self._down_at, self._arrive_down)

    def _arrive_up(self) -> None:
        if self._up_kept or self.net.is_cut(self.node.name, ORCHESTRATOR):
            self._up_kept += 1
            return
        message = self._up.popleft()
        if self.server_open:
            self.net.messages += 1
            self.server.receive(self, message)

    def _arrive_down(self) -> None:
        if self._down_kept or self.net.is_cut(ORCHESTRATOR, self.node.name):
            self._down_kept += 1
            return
        command = self._down.popleft()
        if self.agent_open:
            self.net.messages += 1
            self.node.receive(self, command)

    def flush(self) -> None:
        """A link healed: what it kept arrives now, in order."""
        net, name = self.net, self.node.name
        if self._up_kept and not net.is_cut(name, ORCHESTRATOR):
            kept, self._up_kept = self._up_kept, 0
            for _ in range(kept):
                # Sent before its sender gave the stream up: it is still on its way.
                self._send_up(net.delay(name, ORCHESTRATOR) if self.agent_open else MS)
        if self._down_kept and not net.is_cut(ORCHESTRATOR, name):
            kept, self._down_kept = self._down_kept, 0
            for _ in range(kept):
                if self.server_open:
                    self._send_down()
                else:
                    self._down.popleft()
        if self.agent_open != self.server_open:
            # One end has given up already; the next probe of the other tells it.
            end = "agent" if self.agent_open else "orchestrator"
            self.net.clock.after(self.net.clock.random.randrange(5 * SECOND), self.close, end)

    def close(self, end: str) -> None:
        """One end closes; the other learns of it if the link lets it. A closed end loses what it
        had not been given yet."""
        net, name = self.net, self.node.name
        if end == "agent" and self.agent_open:
            self.agent_open = False
            self.node.stream_lost(self)
            if self.server_open and not net.is_cut(name, ORCHESTRATOR):
                # Behind what was sent before: FIN keeps the order, RST may overtake it.
                clock = net.clock
                wait = max(self._up_at - clock.now, 0) if clock.random.random() < 0.5 else 0
                delay = wait + net.delay(name, ORCHESTRATOR)
                self.net.clock.after(delay, self.close, "orchestrator")
        elif end == "orchestrator" and self.server_open:
            self.server_open = False
            self.server.stream_lost(self)
            if self.agent_open and not net.is_cut(ORCHESTRATOR, name):
                self.net.clock.after(net.delay(ORCHESTRATOR, name), self.close, "agent")
        if not self.agent_open and not self.server_open and self in net.connections:
            net.connections.remove(self)
