"""Accepting with a thread for each connection, of which strangers get no more than a share.

The counterpart of `reception` for servers whose connections live in threads (blob server, state
server). One more thread accepts. A connection counts as a stranger's until its thread says
`Caller.admit`; then its socket waits without a deadline, and only `close` ends it from outside.
Until then it may be dropped for a later one (see `pending`), and its thread ends with it.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable

from keepstep.adapters.transport.blocking import shut
from keepstep.adapters.transport.pending import EXHAUSTED, Pending
from keepstep.errors import RemoteProtocolError

EXHAUSTED_S = 0.1

log = logging.getLogger(__name__)


class Caller:
    """One accepted connection, in its thread. `number` counts up from 1."""

    def __init__(self, server: ThreadServer, sock: socket.socket, peer: str, number: int) -> None:
        self.sock = sock
        self.peer = peer
        self.number = number
        self._server = server

    def admit(self) -> None:
        """The peer has shown who it is; raises OSError if it was dropped before."""
        self._server.admit(self)
        self.sock.settimeout(None)

    def wrap(self, wrapped: Callable[[socket.socket], socket.socket]) -> None:
        """Put the socket into another (TLS), which is the one to be shut from then on."""
        self._server.wrap(self, wrapped)


class ThreadServer:
    """`serve` has the connection to its end; its errors end it and nothing else."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        serve: Callable[[Caller], None],
        *,
        pending_max: int,
        connections_max: int,
    ) -> None:
        self._name = name
        self._listener = listener
        self._serve = serve
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._pending: Pending[Caller] = Pending(pending_max)
        self._callers: dict[Caller, threading.Thread] = {}
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name=name, daemon=True)
        self._accepting.start()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._callers)

    def close(self, join_s: float = 0.0) -> None:
        """End every connection; wait for so long for each of their threads."""
        with self._lock:
            self._closed = True
            callers = dict(self._callers)
            for caller in callers:
                shut(caller.sock)
        shut(self._listener)
        self._listener.close()
        for thread in (self._accepting, *callers.values()) if join_s else ():
            thread.join(join_s)

    def admit(self, caller: Caller) -> None:
        with self._lock:
            if not self._pending.leave(caller):
                raise ConnectionAbortedError("dropped for a later connection")

    def wrap(self, caller: Caller, wrapped: Callable[[socket.socket], socket.socket]) -> None:
        with self._lock:  # the wrapped one is an empty shell afterwards: nobody can shut it
            caller.sock = wrapped(caller.sock)
            if self._closed or caller not in self._pending:
                shut(caller.sock)

    def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._cannot(error)
                continue
            self._let_in(Caller(self, sock, f"{peer[0]}:{peer[1]}", number), str(peer[0]))

    def _cannot(self, error: OSError) -> None:
        with self._lock:
            for caller in self._pending.pick_half() if error.errno in EXHAUSTED else ():
                shut(caller.sock)
        log.warning("%s: cannot accept: %s", self._name, error)
        time.sleep(EXHAUSTED_S)  # nothing tells when there is a descriptor again

    def _let_in(self, caller: Caller, address: str) -> None:
        with self._lock:  # sockets are shut and closed under it: numbers of closed ones come again
            known = len(self._callers) - len(self._pending)
            taken = not self._closed and known < self._connections_max
            if taken:
                gone = self._pending.enter(caller, address)
                if gone is not None:
                    shut(gone.sock)
                taken = self._begin(caller)
        if not taken:
            if not self._closed:
                log.warning("%s: refused %s: full", self._name, caller.peer)
            caller.sock.close()

    def _begin(self, caller: Caller) -> bool:
        thread = threading.Thread(target=self._run, args=(caller,), name=self._name, daemon=True)
        self._callers[caller] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            self._pending.leave(caller)
            del self._callers[caller]
            return False
        return True

    def _run(self, caller: Caller) -> None:
        try:
            self._serve(caller)
        except OSError as error:
            log.debug("%s: connection of %s ended: %s", self._name, caller.peer, error)
        except RemoteProtocolError as error:
            log.warning("%s: dropped %s: %s", self._name, caller.peer, error)
        except Exception:
            log.exception("%s: connection of %s failed", self._name, caller.peer)
        finally:
            with self._lock:
                self._pending.leave(caller)
                del self._callers[caller]
                caller.sock.close()
