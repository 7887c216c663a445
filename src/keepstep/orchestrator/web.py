"""The REST server: uvicorn's HTTP behind a reception of our own.

uvicorn waits for the head of a request for ever, and a peer needs no token to make it wait. So
connections are accepted here (`adapters.transport.reception`): until a request has shown a right
token, a connection has one deadline for all it does, /healthz and keep-alive included, and may be
dropped for a later one. The guard of the routes (api.py) says so through the request's scope. From
then on uvicorn alone decides about the connection: a watch may take its minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepstep.adapters.transport.pending import share_of_descriptors
from keepstep.adapters.transport.reception import Reception, Visitor
from keepstep.errors import UsageError

STOP_S_MAX = 3
HEAD_BYTES_MAX = 16 << 10
KEEP_ALIVE_S = 5
PENDING_SHARE = 8  # of the descriptors
ADMIT = "keepstep.admit"  # in a request's scope: to be called once its token is found right

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


def admit(scope: MutableMapping[str, Any]) -> None:
    """The peer of this request is known. Does nothing under another server than this one."""
    if ADMIT in scope:
        scope[ADMIT]()


class _Protocol(H11Protocol):
    visitor: Visitor

    def connection_lost(self, exc: Exception | None) -> None:
        self.visitor.leave()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def meet(self, visitor: Visitor) -> asyncio.Protocol:
        protocol = _Protocol(self.config, self.server_state, self.lifespan.state)
        protocol.visitor = visitor
        app = protocol.app

        async def with_visitor(scope: Any, receive: Receive, send: Send) -> None:
            scope[ADMIT] = visitor.admit
            await app(scope, receive, send)

        protocol.app = with_visitor
        return protocol


class Web:
    def __init__(self, app: FastAPI, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        config = uvicorn.Config(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=STOP_S_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            ws="none",
            server_header=False,
        )
        config.load()
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.reception: Reception | None = None

    async def start(self, listener: socket.socket) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[]))  # it accepts nothing
        while not self._server.started:
            if self._task.done():
                await self._task  # raises what stopped it
                raise UsageError("the REST server did not start")
            await asyncio.sleep(0.005)
        self.reception = Reception(
            "REST",
            listener,
            self._server.meet,
            limit=share_of_descriptors(PENDING_SHARE),
            tls=self._tls,
        )

    async def stop(self) -> None:
        """Requests that are being answered get STOP_S_MAX."""
        if self.reception is not None:
            self.reception.close()
            await self.reception.wait_closed()
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)
