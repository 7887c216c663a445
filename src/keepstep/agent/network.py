"""Where the node's processes say how their network is: the plugin's datagrams, and RDMA ports.

The socket has a name that follows from job, node and folder, so that processes which outlive an
agent find the next one there. It lies in a folder that only this user can enter; a datagram that is
not understood is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.model.network import PathEvent
from keepstep.net.rdma import Port, ports

DATAGRAM_MAX = 65536
PER_TURN = 200  # of a process that talks without end; the loop has other work
PORTS_S = 1.0

logger = logging.getLogger(__name__)


def socket_path(job: str, node: str, directory: Path) -> Path:
    # A job's own folder may be too deep: a socket's name has 107 bytes.
    digest = hashlib.sha256(f"{directory}\0{job}\0{node}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"keepstep-{os.getuid()}" / f"net-{digest}.sock"


def remove_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others' are there
        path.parent.rmdir()


class NetworkEvents:
    def __init__(self, path: Path, on_event: Callable[[PathEvent], None]) -> None:
        self.path = path
        self._on_event = on_event
        self._socket: socket.socket | None = None
        self._decoder = msgspec.json.Decoder(PathEvent)
        self._states: dict[str, Port] = {}

    def open(self) -> bool:
        """False, and a line in the log: the job runs without words of its network."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            try:
                self._bind(made)
            except FileNotFoundError:  # the last socket in the folder was just removed with it
                self._bind(made)
        except OSError as error:
            made.close()
            logger.warning("no words of the network plugin: %s: %s", self.path, error)
            return False
        self._socket = made
        asyncio.get_running_loop().add_reader(made.fileno(), self._read)
        return True

    def _bind(self, made: socket.socket) -> None:
        _private(self.path.parent)
        self.path.unlink(missing_ok=True)
        made.bind(str(self.path))

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            remove_socket(self.path)

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(PER_TURN):
                data = self._socket.recv(DATAGRAM_MAX)
                with contextlib.suppress(msgspec.DecodeError):
                    self._on_event(self._decoder.decode(data))

    async def watch_ports(self) -> None:
        """InfiniBand and RoCE ports have no plugin of ours; their state is in /sys."""
        while await asyncio.to_thread(ports):
            self.compare(await asyncio.to_thread(ports))
            await asyncio.sleep(PORTS_S)

    def compare(self, seen: list[Port]) -> None:
        for port in seen:
            before = self._states.get(port.name)
            self._states[port.name] = port
            if before is not None and before.active != port.active:
                kind = "link-up" if port.active else "link-down"
                self._on_event(PathEvent(event=kind, pid=os.getpid(), interface=port.name))
        # A word each second: a port that stays down is not forgotten as a process would be.
        for port in seen:
            self._on_event(PathEvent(event="port", pid=os.getpid(), interface=port.name))


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user")
