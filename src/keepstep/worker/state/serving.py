"""The source's side of a copy: a held rank serves its state to a newcomer (transfer.py pulls it).

One connection per source and stream:

    Open(token, tick)      -> Opened(meta, layout, pid, probe, addresses)   or Refused
    Fetch(names, device)   -> Fetched(sizes), raw bytes, Digests
    Check(names, device)   -> Digests

`device`: the newcomer has these tensors on a GPU. They come as one block with one digest, which
each end computes on its device (digest.py, pieces.py). Others are hashed one by one (xxh3_128).

Until Open has shown the token a peer gets a few bytes, a short time and a bounded number of threads
(adapters.transport.threads).
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import socket
import threading
import time
from typing import Any

import msgspec
import torch
import xxhash

from keepstep.adapters.transport.blocking import Frames
from keepstep.adapters.transport.pending import SHOWN_S_MAX
from keepstep.adapters.transport.threads import Caller, ThreadServer
from keepstep.errors import RemoteProtocolError
from keepstep.model import wire
from keepstep.model.messages import Address, Message
from keepstep.worker.device import vm
from keepstep.worker.groups import gloo
from keepstep.worker.line import peers
from keepstep.worker.state.export import Exported
from keepstep.worker.state.pieces import Pieces, raw, receive_into
from keepstep.worker.state.tensors import dense, describe, memory, on_cpu

SILENCE_S = 15.0
STRANGERS_MAX = 32
CONNECTIONS_MAX = 1024
OPEN_BYTES_MAX = 4096


class Open(Message, frozen=True):
    token: str
    tick: int


class Fetch(Message, frozen=True):
    names: list[str]
    device: bool = False


class ServedCheck(Message, frozen=True):
    names: list[str]
    device: bool = False


class Opened(Message, frozen=True):
    meta: bytes
    layouts: dict[str, bytes]  # class -> digest of names, dtypes, shapes and strides in it
    pid: int
    probe: bytes
    probe_at: int
    addresses: dict[str, int]  # of tensors that can be read where they are


class FetchedState(Message, frozen=True):
    sizes: list[int]


class Digests(Message, frozen=True):
    digests: list[bytes]


class TransferRefused(Message, frozen=True):
    error: str


Request = Open | Fetch | ServedCheck

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
replies = msgspec.msgpack.Decoder(Opened | FetchedState | Digests | TransferRefused)


def send(sock: socket.socket, message: Message) -> None:
    sock.sendall(wire.frame(message))


def read_frame(sock: socket.socket, decoder: Any, limit: int = wire.FRAME_BYTES_MAX) -> Any:
    header = bytearray(wire.HEADER.size)
    receive_into(sock, memoryview(header))
    body = bytearray(wire.body_length(bytes(header), limit))
    receive_into(sock, memoryview(body))
    return wire.decode(decoder, bytes(body))


def _layouts(export: Exported) -> dict[str, bytes]:
    """Ranks that have a class in common must agree about all of it, but for registered objects."""
    digests: dict[str, Any] = {}
    for name, tensor in export.tensors.items():
        digest = digests.setdefault(export.classes[name], xxhash.xxh3_128())
        if not of_one_source(name):
            digest.update(f"{name} {describe(tensor)}\n".encode())
    return {name: digest.digest() for name, digest in digests.items()}


def of_one_source(name: str) -> bool:
    """Fits only the meta it came with."""
    return name.startswith(("object/", "grad/")) or "/group/" in name


# ---------------------------------------------------------------------------------------- source


class StateServer:
    """Serves one export while the rank holds still. Memory is only read."""

    def __init__(self, bind_host: str, token: str, export: Exported, tick: int) -> None:
        self._token, self._tick, self._export = token, tick, export
        self._ready = {
            name: tensor.detach()
            for name, tensor in export.tensors.items()
            if tensor.device.type == "cpu" and dense(tensor)
        }
        self._layouts = _layouts(export)
        self._probe = ctypes.create_string_buffer(os.urandom(16), 16)
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        listener = gloo.listen(bind_host)
        self.address = Address(bind_host, listener.getsockname()[1])
        vm.let_others_read(True)
        self._server = ThreadServer(
            "keepstep-state",
            listener,
            self._serve,
            pending_max=STRANGERS_MAX,
            connections_max=CONNECTIONS_MAX,
        )

    def _serve(self, caller: Caller) -> None:
        with contextlib.suppress(OSError, RemoteProtocolError):
            deadline = time.monotonic() + SHOWN_S_MAX
            caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.sock.settimeout(SHOWN_S_MAX)
            caller.wrap(peers.accepted)
            peers.greet(caller.sock)
            frames = Frames(caller.sock, _requests)
            first = frames.receive_first(deadline, lambda _: False, OPEN_BYTES_MAX)
            if not self._open(caller, first):
                return
            pieces: dict[torch.device, Pieces] = {}
            while True:
                self._answer(caller.sock, frames.receive(), pieces)

    def _answer(
        self, sock: socket.socket, request: Request, pieces: dict[torch.device, Pieces]
    ) -> None:
        if isinstance(request, Open):
            raise RemoteProtocolError("a second Open on the same connection")
        unknown = set(request.names) - self._export.tensors.keys()
        if unknown:
            send(sock, TransferRefused(error=f"unknown tensors {sorted(unknown)[:3]}"))
            raise RemoteProtocolError("unknown tensors")
        if request.device and request.names:
            self._serve_device(sock, request, pieces)
            return
        if isinstance(request, Fetch):
            self._send_tensors(sock, request.names)
        send(sock, Digests(digests=[self._digest(name) for name in request.names]))

    def _open(self, caller: Caller, request: Request) -> bool:
        right = isinstance(request, Open) and hmac.compare_digest(
            request.token.encode(), self._token.encode()
        )
        if not isinstance(request, Open) or not right:
            send(caller.sock, TransferRefused(error="wrong token"))
            return False
        caller.admit()
        caller.sock.settimeout(SILENCE_S * 4)  # a client that waits for another source is silent
        if request.tick != self._tick:
            send(caller.sock, TransferRefused(error=f"holds tick {self._tick}, not {request.tick}"))
            return False
        addresses = {name: tensor.data_ptr() for name, tensor in self._ready.items()}
        opened = Opened(
            meta=self._export.meta,
            layouts=self._layouts,
            pid=os.getpid(),
            probe=self._probe.raw,
            probe_at=ctypes.addressof(self._probe),
            addresses=addresses,
        )
        send(caller.sock, opened)
        return True

    def _tensor(self, name: str) -> torch.Tensor:
        ready = self._ready.get(name)
        if ready is None:  # on a GPU, or not one block: copied when asked for
            ready = self._ready[name] = on_cpu(self._export.tensors[name])
        return ready

    def _digest(self, name: str) -> bytes:
        if name not in self._digests:
            self._digests[name] = xxhash.xxh3_128_digest(memory(self._tensor(name)))
        return self._digests[name]

    def _send_tensors(self, sock: socket.socket, names: list[str]) -> None:
        views = [memory(self._tensor(name)) for name in names]
        send(sock, FetchedState(sizes=[len(view) for view in views]))
        packed = bytearray()
        for view in views:
            if len(view) < 64 << 10:
                packed += view
                continue
            sock.sendall(packed)
            packed = bytearray()
            sock.sendall(view)
        sock.sendall(packed)

    def _serve_device(
        self, sock: socket.socket, request: Fetch | ServedCheck, known: dict[torch.device, Pieces]
    ) -> None:
        tensors = [self._export.tensors[name] for name in request.names]
        device = tensors[0].device
        pieces = known[device] = known.get(device) or Pieces(device)
        with pieces.turn():
            if isinstance(request, ServedCheck):
                digests = [pieces.digest(raw(tensor)) for tensor in tensors]
            else:
                send(sock, FetchedState(sizes=[tensor.nbytes for tensor in tensors]))
                block = pieces.block(tensors)
                digests = [pieces.digest(block)]  # first: what changes on the way is found
                pieces.send(sock, block)
        send(sock, Digests(digests=digests))

    def close(self) -> None:
        """Afterwards nothing here looks at the tensors any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._server.close(SILENCE_S)
        vm.let_others_read(False)
        self._ready.clear()
