"""The orchestrator as an object: embedded in `keepstep run`, or alone in `keepstep orchestrator`.

It lives in the caller's event loop and takes no signals, no environment and no global state, so
any asyncio program can hold one (or several, under different ids). Two things listen, both on
loopback unless told otherwise: REST for operators and the stream server for agents. Beyond
loopback both speak TLS only, under an authority of the orchestrator's own (adapters.identity):
REST asks for a token, the stream for a certificate of a node.

Restart under the same id: the ledger is replayed and ports and token are taken from the file the
killed predecessor left behind, so the agents' reconnect attempts simply succeed. A clean end
removes that file, unless jobs are still alive: then the stop is a restart in two halves.

With a shared store several orchestrators, each under an id of its own, have one ledger, one token
and one authority (kept in the store); `terms` says which of them decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from keepstep.adapters.identity.tokens import Folder, Tokens
from keepstep.adapters.store.sqlite import SqliteLedger, lock_file, lock_path
from keepstep.adapters.transport.tls import is_loopback, server_context
from keepstep.core.control import Core
from keepstep.errors import PermanentError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.messages import PROTOCOL, Address, TlsFiles
from keepstep.model.schedule import AgentStart
from keepstep.model.views import JobView
from keepstep.orchestrator import api, registry
from keepstep.orchestrator.broker import Broker
from keepstep.orchestrator.requests import Info, Peer
from keepstep.orchestrator.server import AgentServer
from keepstep.orchestrator.terms import Terms, enroll
from keepstep.orchestrator.web import Web
from keepstep.ports.election import Election
from keepstep.ports.ledger import LedgerMember, LedgerStore
from keepstep.ports.schedule import Scheduler
from keepstep.runtime.driver import Driver

if TYPE_CHECKING:  # an orchestrator on loopback does without cryptography
    from keepstep.adapters.identity.authority import Authority
    from keepstep.orchestrator.join import Desk

log = logging.getLogger("keepstep.orchestrator")

ENDED = frozenset({"done", "failed", "fell_back", "diverged", "cancelled"})
LEASE_S = 10.0
AGENT_TOKEN_NS = 600 * 10**9  # to join with; whoever has joined has a certificate


def open_store(home: Path, id: str, store: str, lease_s: float) -> LedgerStore:
    """A file of its own for each id, or the shared one at `store`."""
    if not store:
        return SqliteLedger(registry.ledger_path(home, id))
    if not store.startswith(("postgresql://", "postgres://")):
        raise UsageError(
            "--store must begin with postgresql://",
            hint="without --store the ledger is a file in KEEPSTEP_HOME/ledgers",
        )
    try:
        from keepstep.adapters.store.postgres import PostgresLedger
    except ImportError as error:
        raise UsageError(
            f"--store needs psycopg: {error}", hint="pip install 'keepstep[postgres]'"
        ) from error
    return PostgresLedger(store, lease_s=lease_s)


def check_history(store: LedgerStore, before: registry.Entry | None, jobs: list[JobView]) -> None:
    """A ledger that is whole may still be the wrong one, or an empty file in the place of it."""
    known = {view.job for view in jobs}
    unknown = [job for job in before.jobs if job not in known] if before is not None else []
    if before is not None and unknown:
        raise PermanentError(
            f"the ledger {store.name} knows nothing of job {', '.join(unknown)}, which "
            f"orchestrator {before.id} was running",
            hint="is it the right one? if those jobs are to be forgotten, remove "
            f"KEEPSTEP_HOME/orchestrators/{before.id}.json",
        )


class Orchestrator:
    def __init__(
        self,
        *,
        id: str,
        home: Path,
        store: LedgerStore,
        token: str,
        me: LedgerMember,
        embedded: bool,
        identity: OrchestratorIdentity | None = None,
        tls: TlsFiles | None = None,
        scheduler: Scheduler | None = None,
        election: Election | None = None,
    ) -> None:
        self.id = id
        self.home = home
        self.token = token
        self.stream = me.stream
        self.url = me.url
        self.embedded = embedded
        self._store = store
        self._id_lock = -1
        self._identity = identity
        self._tls = tls
        self._agents = AgentServer(token, tls)
        self.driver = Driver(Core(), store, self._agents)
        self._election = election
        self.terms = Terms(store, self.driver, self._agents, me, election=election)
        self.broker: Broker | None = None
        if scheduler is not None:
            self.broker = Broker(self.driver, scheduler, self.agent_start)
        self._brokering: asyncio.Task[None] | None = None
        self._office: asyncio.Task[None] | None = None
        self._web: Web | None = None
        self._registrar: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        home: Path,
        *,
        id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        stream_port: int = 0,
        embedded: bool = False,
        store: str = "",
        lease_s: float = LEASE_S,
        scheduler: Scheduler | None = None,
        election: Callable[[LedgerMember, str], Election] | None = None,
    ) -> Orchestrator:
        """Listen, replay the ledger (or stand by), and write HOME/orchestrators/<id>.json."""
        registry.check_id(id)
        registry.prepare_home(home)
        registry.forget_dead(home)
        with contextlib.ExitStack() as undo:  # what was begun, if the rest fails
            # The lock of the id guards the file with the token: first the lock, then the look.
            # A ledger of its own has that lock already.
            id_lock = -1
            if store:
                id_lock = lock_file(lock_path(registry.ledger_path(home, id)), f"id {id}")
                undo.callback(os.close, id_lock)
            ledger = open_store(home, id, store, lease_s)
            undo.callback(ledger.close)
            undo.callback(ledger.release)
            before = registry.read(home, id)
            if before is not None:
                port = port or int(before.url.rpartition(":")[2])
                stream_port = stream_port or before.stream.port
            rest = undo.enter_context(listen(host, port))
            stream = undo.enter_context(listen(host, stream_port))
            identity = None if is_loopback(host) else open_identity(home, id, store)
            if identity is not None:
                undo.callback(identity.close)
            scheme = "http" if identity is None else "https"
            me = LedgerMember(
                id=id,
                instance=secrets.token_hex(8),
                url=f"{scheme}://{bracketed(host)}:{rest.getsockname()[1]}",
                stream=Address(host, stream.getsockname()[1]),
            )
            shared = await enroll(ledger, me)
            elected = election(me, shared) if election is not None else None
            if elected is not None:
                undo.callback(elected.resign)
            kept = before.token if before is not None else secrets.token_urlsafe(32)
            self = cls(
                id=id,
                home=home,
                store=ledger,
                token=shared or kept,
                me=me,
                embedded=embedded,
                identity=identity,
                tls=identity.authority.serve_as(names_of(host)) if identity is not None else None,
                scheduler=scheduler,
                election=elected,
            )
            await self.terms.begin()
            if self.terms.role == "active":
                check_history(ledger, before, self.jobs())
            await self._serve(rest, stream)
            undo.pop_all()
        self._id_lock = id_lock
        log.info("orchestrator %s at %s is %s", id, self.url, self.terms.role)
        return self

    def jobs(self) -> list[JobView]:
        return list(self.driver.core.jobs())

    def live_jobs(self) -> list[JobView]:
        return [view for view in self.jobs() if view.state not in ENDED]

    async def stop(self) -> None:
        """Close everything. Agents of jobs that still live go on and try to reconnect."""
        live = self.live_jobs()
        if self.broker is not None:
            await self.broker.stop()
        for task in (self._registrar, self._office, self._brokering):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.driver.close()
        await self._agents.stop()
        if self._web is not None:
            await self._web.stop()
        self._store.release()
        self._store.close()
        if self._election is not None:
            await asyncio.to_thread(self._election.resign)
        if self._identity is not None:
            self._identity.close()
        if self.embedded or not live:
            registry.remove(self.home, self.id)
        if self._id_lock >= 0:
            os.close(self._id_lock)

    async def _serve(self, rest: socket.socket, stream: socket.socket) -> None:
        await self._agents.start(stream, self.driver)
        app = api.build(
            self.driver,
            self.token,
            self._info,
            self._desk(),
            self._agents.examine,
            self.broker.offers if self.broker is not None else None,
        )
        tls = server_context(self._tls, clients=False) if self._tls is not None else None
        self._web = Web(app, tls)
        await self._web.start(rest)
        self._write_entry()
        self._registrar = asyncio.create_task(self._keep_entry())
        self._office = asyncio.create_task(self.terms.run())
        if self.broker is not None:
            self._brokering = asyncio.create_task(self.broker.run())

    def agent_start(self, job: str, node: str) -> AgentStart:
        """On whatever machine: beyond loopback with a token for this one node."""
        spec = self.driver.core.state(job).spec
        slots = slots_of(spec, node)
        where, env = self.id, {"KEEPSTEP_HOME": str(self.home)}
        if self._identity is not None:
            where = self.url
            if is_unspecified(self.stream.host):
                where = f"https://{socket.gethostname()}:{self.url.rpartition(':')[2]}"
            env["KEEPSTEP_TOKEN"], _ = self._identity.tokens.create(
                self._identity.authority.fingerprint,
                role="join",
                now_ns=time.time_ns(),
                ttl_ns=AGENT_TOKEN_NS,
                node=node,
            )
        command = [sys.executable, "-P", "-m", "keepstep", "agent", "--orchestrator", where]
        command += ["--job", job, "--node", node, "--slots", str(slots), "--wait"]
        return AgentStart(
            job=job,
            node=node,
            command=command,
            env=env,
            directory=str(self.home),
            log=f"{spec.directory}/start-{node}.log",
        )

    def _desk(self) -> Desk | None:
        if self._identity is None:
            return None
        from keepstep.orchestrator.join import Desk

        host = "" if is_unspecified(self.stream.host) else self.stream.host
        return Desk(
            self._identity.authority,
            own_token=self.token,
            stream=Address(host, self.stream.port),
            tokens=self._identity.tokens,
            peers=self._peers,
            jobs=self.live_jobs,
            ended=lambda job: self.driver.core.knows(job) and job not in self.driver.core.live(),
            awaited=self._awaited,
        )

    def _awaited(self, job: str, place: str) -> tuple[str, int]:
        view = self.driver.core.capacity(job)
        nodes = view.start.items() if view is not None else ()
        node = next((node for node, at in nodes if at == place), "")
        return node, slots_of(self.driver.core.state(job).spec, node)

    async def _keep_entry(self) -> None:
        """The file lists live jobs; refresh it when that list changes."""
        written = self.driver.core.live()
        while True:
            await self.driver.wait_any_change()
            now = self.driver.core.live()
            if now != written:
                self._write_entry()
                written = now

    def _write_entry(self) -> None:
        pid = os.getpid()
        entry = registry.Entry(
            id=self.id,
            url=self.url,
            stream=self.stream,
            token=self.token,
            pid=pid,
            pid_started=registry.process_started(pid) or 0,
            host=socket.gethostname(),
            jobs=self.driver.core.live(),
            embedded=self.embedded,
            ca=self._identity.authority.certificate if self._identity is not None else "",
        )
        registry.write(self.home, entry)

    def _info(self) -> Info:
        away = self.driver.away
        return Info(
            id=self.id,
            pid=os.getpid(),
            stream=self.stream,
            protocol=PROTOCOL,
            role=self.terms.role,
            reason=away.message if away is not None else "",
            active=self.terms.active_url,
            peers=self._peers(),
            scheduler=self.broker.scheduler.name if self.broker is not None else "",
        )

    def _peers(self) -> list[Peer]:
        return [Peer(id=m.id, url=m.url, stream=m.stream) for m in self.terms.members]


def slots_of(spec: JobSpec, node: str) -> int:
    return next((one.slots for one in spec.nodes if one.name == node), spec.local_world)


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, proto)
    try:
        # A restart must not wait for the connections of its predecessor to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use",
                hint="choose another port, or 0 for any free one",
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class OrchestratorIdentity(NamedTuple):
    authority: Authority
    tokens: Tokens
    close: Callable[[], None]


def open_identity(home: Path, id: str, store: str) -> OrchestratorIdentity:
    """An authority of its own and files with its tokens, or those of all who share `store`."""
    from keepstep.adapters.identity.authority import Authority, folder

    path = folder(home, id)
    if not store:
        return OrchestratorIdentity(Authority.open(path), Tokens(Folder(path)), lambda: None)
    from keepstep.adapters.store.shared_identity import SharedIdentity

    shared = SharedIdentity(store)
    try:
        return OrchestratorIdentity(
            Authority.shared(path, shared.keep), Tokens(shared), shared.close
        )
    except BaseException:
        shared.close()
        raise


def names_of(host: str) -> list[str]:
    """What other clients than Keepstep's own may call this machine."""
    return [socket.gethostname()] if is_unspecified(host) else [host]


def is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
