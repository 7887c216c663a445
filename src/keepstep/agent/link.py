"""The agent's stream to the orchestrator, for as long as the agent lives.

    connect -> Hello -> Accepted -> everything as it happens
                     |-> Refused(retry): it is not the active orchestrator; the next address
                     `-> Refused: the only way out of `run`

There may be several orchestrators, of which one is active; addresses are tried in turn. One that
is active by a lease promises to be heard regularly. Its silence means that it may have lost the
lease without knowing, so the link is given up, and counted as away *since the last word*.

A broken stream is not a fault: training does not depend on it. What the orchestrator must not
miss is queued by the agent's machine and follows the next Hello, whose inventory covers what was
lost on the way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from keepstep.adapters.transport.stream import Stream, StreamClosed, connect
from keepstep.adapters.transport.tls import ORCHESTRATOR_NAME, client_context
from keepstep.errors import ProtocolError, RemoteProtocolError
from keepstep.model.agent_messages import (
    Accepted,
    AgentCommand,
    AgentMessage,
    Alive,
    Hello,
    Refused,
)
from keepstep.model.messages import Address, TlsFiles

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
ACCEPT_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Link:
    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        hello: Callable[[], Hello],
        on_accepted: Callable[[], None],
        on_lost: Callable[[int], None],  # with the time of its last word
        on_command: Callable[[AgentCommand], None],
        tls: TlsFiles | None = None,
    ) -> None:
        self._addresses = addresses
        self._tls = (client_context(tls), ORCHESTRATOR_NAME) if tls is not None else None
        self._hello = hello
        self._on_accepted = on_accepted
        self._on_lost = on_lost
        self._on_command = on_command
        self._decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
        self._stream: Stream[AgentCommand] | None = None
        self._heard_ns = time.monotonic_ns()
        self._silence_ns_max = 0
        self._absent_because: set[str] = set()

    def offer(self, message: AgentMessage) -> bool:
        """Now, or not at all."""
        if self._stream is None:
            return False
        try:
            self._stream.send(message)
        except StreamClosed:
            return False
        return True

    async def run(self) -> Refused:
        backoff_s, turn = BACKOFF_S_MIN, 0
        while True:
            address = self._addresses[turn % len(self._addresses)]
            try:
                stream = await connect(address, self._decoder, tls=self._tls)
                try:
                    refused = await self._introduce(stream)
                    if refused is not None and not refused.retry:
                        return refused
                    if refused is not None:
                        raise StreamClosed(refused.error)
                    backoff_s = BACKOFF_S_MIN
                    await self._converse(stream)
                finally:
                    if self._stream is not None:
                        self._stream = None
                        self._on_lost(self._last_word_ns())
                    stream.close()
            except (TimeoutError, StreamClosed, ProtocolError) as error:
                self._note_absence(str(error) or "it did not answer Hello")
            except Exception:
                logger.exception("the link failed; connecting again")
            # All agents lose a restarting orchestrator together; they need not return in step.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            turn += 1
            if turn % len(self._addresses) == 0:
                backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    def _note_absence(self, why: str) -> None:
        if why not in self._absent_because:  # not once per attempt
            self._absent_because.add(why)
            logger.info("no orchestrator: %s", why)

    async def close(self) -> None:
        """Write out what was sent, for a short while."""
        if self._stream is not None:
            stream = self._stream
            stream.close()
            await stream.wait_closed()

    async def _introduce(self, stream: Stream[AgentCommand]) -> Refused | None:
        stream.send(self._hello())
        answer = await asyncio.wait_for(stream.receive(), ACCEPT_TIMEOUT_S)
        if isinstance(answer, Refused):
            return answer
        if not isinstance(answer, Accepted):
            raise RemoteProtocolError(f"{type(answer).__name__} instead of an answer to Hello")
        self._heard_ns = time.monotonic_ns()
        self._silence_ns_max = answer.silence_ns_max
        return None

    async def _converse(self, stream: Stream[AgentCommand]) -> None:
        self._absent_because.clear()
        logger.info("accepted by the orchestrator at %s", stream.peer)
        self._stream = stream
        self._on_accepted()
        while True:
            command = await self._hear(stream)
            if isinstance(command, Alive):
                continue
            try:
                self._on_command(command)
            except Exception:
                # One command that fails here must not take the node's ranks with it.
                logger.exception("command failed: %s", type(command).__name__)

    def _last_word_ns(self) -> int:
        # Without a lease long silences are normal: then only the broken stream counts.
        return self._heard_ns if self._silence_ns_max else time.monotonic_ns()

    async def _hear(self, stream: Stream[AgentCommand]) -> AgentCommand:
        limit_s = self._silence_ns_max / 1e9 if self._silence_ns_max else None
        try:
            async with asyncio.timeout(limit_s):
                command = await stream.receive()
        except TimeoutError:
            stream.abort()
            raise StreamClosed(f"{stream.peer} was silent for {limit_s:g} s") from None
        self._heard_ns = time.monotonic_ns()
        return command
