"""The agents' side: one authenticated stream per node, turned into inputs of the core.

A stream begins with Hello. Until that is checked (token, protocol, job; between machines also
that the peer's certificate is the one of the node it claims to be) the peer may only send one
small frame, only for a short time, and may have to go for a later one (adapters.transport.pending).
From then on every frame is an AgentMessage; a malformed or
oversized one closes that stream and nothing else, and the agent connects again with an inventory.

A lost stream is not a dead node (AgentGone, not NodeDead): training does not need us. Commands to
a node without a stream are dropped, because the core issues what still matters when it joins.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from keepstep.adapters.identity.tokens import node_secret
from keepstep.adapters.transport.pending import share_of_descriptors
from keepstep.adapters.transport.reception import Reception, Visitor
from keepstep.adapters.transport.stream import READ_BUFFER_BYTES, Stream, StreamClosed
from keepstep.adapters.transport.tls import node_of, server_context
from keepstep.core.control import EVERY_NODE, Send
from keepstep.errors import KeepstepError, RemoteProtocolError, TransientError, UsageError
from keepstep.model.agent_messages import (
    Accepted,
    AgentCommand,
    AgentMessage,
    Alive,
    Examine,
    Examined,
    Hello,
    Refused,
)
from keepstep.model.job import AgentGone, AgentJoined, AgentSaid
from keepstep.model.messages import PROTOCOL, TlsFiles
from keepstep.model.wire import FRAME_BYTES_MAX, frame
from keepstep.runtime.driver import Driver

log = logging.getLogger("keepstep.server")

HELLO_BYTES_MAX = 1 << 20
EXAMINE_S_MAX = 20.0
CONNECTIONS_MAX = 1 << 15  # a job of 131,072 ranks has 16,384 agents of 8

AgentStream = Stream[AgentMessage]
NodeKey = tuple[str, str]  # job, node
PENDING_SHARE = 4  # of the descriptors: all agents of a job may come back at once


class _Accepted(asyncio.StreamReaderProtocol):
    """As start_server makes it; tells the reception of the connection's end."""

    def __init__(
        self,
        visitor: Visitor,
        run: Callable[[Visitor, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_BUFFER_BYTES, loop=loop)
        super().__init__(reader, functools.partial(run, visitor), loop=loop)
        self._visitor = visitor

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitor.leave()
        super().connection_lost(exc)


class AgentServer:
    def __init__(self, token: str, tls: TlsFiles | None = None) -> None:
        self._token = token
        self._tls = tls
        self._decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
        self._driver: Driver | None = None
        self._reception: Reception | None = None
        self._peers: dict[NodeKey, tuple[Hello, AgentStream]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._examinations = 0
        self._examined: dict[int, asyncio.Future[Examined]] = {}
        self.silence_ns_max = 0  # told to agents with Accepted

    async def start(self, listener: socket.socket, driver: Driver) -> None:
        self._driver = driver
        tls = self._tls
        self._reception = Reception(
            "agents' port",
            listener,
            lambda visitor: _Accepted(visitor, self._on_connect),
            limit=share_of_descriptors(PENDING_SHARE),
            tls=server_context(tls, clients=True) if tls is not None else None,
        )

    async def stop(self) -> None:
        if self._reception is not None:
            self._reception.close()
            await self._reception.wait_closed()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._peers.clear()

    def drop(self) -> None:
        """We do not decide any more (for now): agents must look for whoever does.

        Nobody hears of it as AgentGone: the core that knew them is given up."""
        peers, self._peers = list(self._peers.values()), {}
        for _, stream in peers:
            stream.abort()

    async def examine(self, job: str, node: str) -> Examined:
        """How a node stands to images of processes. Nothing is decided by it, so no core hears."""
        if (job, node) not in self._peers:
            raise UsageError(f"job {job} has no connected node {node!r}", hint="keepstep status")
        number = self._examinations = self._examinations + 1
        future = self._examined[number] = asyncio.get_running_loop().create_future()
        self._send(job, node, Examine(number=number))
        try:
            return await asyncio.wait_for(future, EXAMINE_S_MAX)
        except TimeoutError as error:
            raise TransientError(f"node {node} did not answer") from error
        finally:
            self._examined.pop(number, None)

    def beat(self) -> None:
        for job, node in list(self._peers):
            self._send(job, node, Alive())

    def deliver(self, sends: Iterable[Send]) -> None:
        for send in sends:
            if send.node == EVERY_NODE:
                self._send_all(send.job, send.command)
            else:
                self._send(send.job, send.node, send.command)

    def _send_all(self, job: str, command: AgentCommand) -> None:
        """Every node with a stream is connected for the core too: it hears of a lost one before
        anything else is handled, and one that joins gets its part of the outcome in `_join`."""
        framed = frame(command)
        for (peer_job, _), (_, stream) in list(self._peers.items()):
            if peer_job != job:
                continue
            try:
                stream.send_framed(framed)
            except StreamClosed as error:
                log.warning("%s: %s", job, error.message)  # its reader ends and says AgentGone

    def _send(self, job: str, node: str, command: AgentCommand) -> None:
        if (job, node) not in self._peers:
            log.debug("%s: no stream to %s for %s", job, node, type(command).__name__)
            return
        try:
            self._peers[job, node][1].send(command)
        except StreamClosed as error:
            log.warning("%s: %s", job, error.message)  # its reader ends and says AgentGone

    async def _on_connect(
        self, visitor: Visitor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stream = Stream(reader, writer, self._decoder, limit=HELLO_BYTES_MAX)
        try:
            if len(self._tasks) > CONNECTIONS_MAX:
                log.warning("refused %s: %d connections are open", stream.peer, len(self._tasks))
            elif (hello := await self._greet(stream)) is not None:
                visitor.admit()
                stream.limit = FRAME_BYTES_MAX
                await self._serve(stream, hello)
        except RemoteProtocolError as error:
            log.warning("closed the stream of %s: %s", stream.peer, error.message)
        except StreamClosed as error:
            log.info("%s", error.message)
        except asyncio.CancelledError:
            stream.abort()  # our own stop; nobody awaits this task
        except Exception:
            log.exception("closed the stream of %s after an error", stream.peer)
        finally:
            stream.close()

    async def _greet(self, stream: AgentStream) -> Hello | None:
        hello = await stream.receive()
        refused = self._judge(hello, stream.certificate)
        if refused is None:
            assert isinstance(hello, Hello)
            refused = self._join(stream, hello)
            if refused is None:
                return hello
        level = logging.DEBUG if refused.retry else logging.WARNING
        log.log(level, "refused an agent from %s: %s", stream.peer, refused.error)
        stream.send(refused)
        return None

    def _judge(self, hello: AgentMessage, certificate: Any) -> Refused | None:
        assert self._driver is not None
        if not isinstance(hello, Hello):
            return Refused(error="the first frame must be Hello")
        # The token comes first: whoever has none learns nothing about jobs and nodes.
        token, claimed = self._token, (hello.job, hello.node)
        if self._tls is not None:
            token = node_secret(token, *claimed)
            if node_of(certificate) != claimed:
                return Refused(
                    error=f"this certificate is not that of node {hello.node} of {hello.job}",
                    hint="join again with a token",
                )
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            return Refused(
                error="wrong token",
                hint="take the token from KEEPSTEP_HOME/orchestrators/<id>.json",
            )
        if self._driver.away is not None:
            return Refused(error=self._driver.away.message, retry=True)
        if hello.protocol != PROTOCOL:
            return Refused(
                error=f"protocol {hello.protocol} is not {PROTOCOL}",
                hint="agents and orchestrator must be of the same Keepstep version",
            )
        if not self._driver.core.knows(hello.job):
            return Refused(error=f"no such job: {hello.job}", hint="submit the job first")
        connected = self._peers.get((hello.job, hello.node))
        # Another agent, but of the same workers: the first one is gone, we have not noticed yet.
        same = connected is not None and connected[0].session == hello.session
        if connected is not None and connected[0].pid != hello.pid and not same:
            return Refused(
                error=f"node {hello.node} is connected already (agent pid {connected[0].pid})",
                hint="give the new node another name",
            )
        return None

    def _join(self, stream: AgentStream, hello: Hello) -> Refused | None:
        """Tell the core; it may refuse too. Accepted is the first thing the agent hears, so the
        commands that come of its joining are held back until it is sent."""
        assert self._driver is not None
        key = (hello.job, hello.node)
        old = self._peers.pop(key, None)
        if old is not None:
            old[1].abort()  # the same agent, back before we noticed that it was gone
        said = msgspec.structs.replace(hello, token="")  # tokens belong in no record
        try:
            outcome = self._driver.submit(AgentJoined(job=key[0], node=key[1], hello=said))
        except TransientError as error:
            return Refused(error=error.message, retry=True)
        except KeepstepError as error:
            return Refused(error=error.message, hint=error.hint)
        stream.send(Accepted(silence_ns_max=self.silence_ns_max))
        self._peers[key] = (hello, stream)
        for send in outcome.sends:
            if send.job == hello.job and send.node in (hello.node, EVERY_NODE):
                self._send(*key, send.command)
        return None

    async def _serve(self, stream: AgentStream, hello: Hello) -> None:
        assert self._driver is not None
        key = (hello.job, hello.node)
        try:
            while True:
                message = await stream.receive()
                if self._peers.get(key, (None, None))[1] is not stream:
                    return  # replaced: what is left in its buffer is older than the new Hello
                if isinstance(message, Examined):
                    if (future := self._examined.pop(message.number, None)) and not future.done():
                        future.set_result(message)
                    continue
                if isinstance(message, Hello):
                    raise RemoteProtocolError("a second Hello on the same stream")
                self._driver.hear(AgentSaid(job=hello.job, node=hello.node, message=message))
        finally:
            if self._peers.get(key, (None, None))[1] is stream:
                del self._peers[key]
                self._gone(hello)

    def _gone(self, hello: Hello) -> None:
        assert self._driver is not None
        if not self._driver.running:
            return
        try:
            self._driver.submit(AgentGone(job=hello.job, node=hello.node))
        except KeepstepError as error:
            log.warning("%s: node %s is gone, unheard: %s", hello.job, hello.node, error.message)
