"""The agent's stream to the orchestrator, for as long as the agent lives.

    connect -> Hello -> Accepted -> everything as it happens
                     `-> Refused: the only way out of `run`

A broken stream is not a fault: training does not depend on it. What the orchestrator must not
miss is queued by the agent's machine and follows the next Hello, whose inventory covers what was
lost on the way.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from keepstep.adapters.transport.stream import Stream, StreamClosed, connect
from keepstep.errors import ProtocolError, RemoteProtocolError
from keepstep.model.messages import (
    Accepted,
    Address,
    AgentCommand,
    AgentMessage,
    Hello,
    Refused,
)

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 2.0
ACCEPT_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class Link:
    def __init__(
        self,
        address: Address,
        *,
        hello: Callable[[], Hello],
        on_accepted: Callable[[], None],
        on_lost: Callable[[], None],
        on_command: Callable[[AgentCommand], None],
    ) -> None:
        self._address = address
        self._hello = hello
        self._on_accepted = on_accepted
        self._on_lost = on_lost
        self._on_command = on_command
        self._decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)
        self._stream: Stream[AgentCommand] | None = None
        self._absent_because = ""

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
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                stream = await connect(self._address, self._decoder)
                try:
                    refused = await self._introduce(stream)
                    if refused is not None:
                        return refused
                    backoff_s = BACKOFF_S_MIN
                    await self._converse(stream)
                finally:
                    if self._stream is not None:
                        self._stream = None
                        self._on_lost()
                    stream.close()
            except (TimeoutError, StreamClosed, ProtocolError) as error:
                self._note_absence(str(error) or "it did not answer Hello")
            except Exception:
                logger.exception("the link failed; connecting again")
            # All agents lose a restarting orchestrator together; they need not return in step.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    def _note_absence(self, why: str) -> None:
        if why != self._absent_because:  # not once per attempt
            self._absent_because = why
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
        return None

    async def _converse(self, stream: Stream[AgentCommand]) -> None:
        self._absent_because = ""
        logger.info("accepted by the orchestrator at %s", stream.peer)
        self._stream = stream
        self._on_accepted()
        while True:
            command = await stream.receive()
            try:
                self._on_command(command)
            except Exception:
                # One command that fails here must not take the node's ranks with it.
                logger.exception("command failed: %s", type(command).__name__)
