"""Bytes of a GPU on their way to a socket and back, through two pinned pieces of host memory.

While one piece travels, the next is copied between host and device, so neither waits for more than
the slower of the two, and the host holds two pieces instead of the state. Everything is done in one
stream of this connection; the other streams of the process are drained before (a rank that holds)
or synchronised by the caller (a newcomer).

Memory of the device is used for a moment: a block of small tensors put together, and the scratch of
the digest. Where there is none left the host's is used.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import torch

from keepstep.worker.device.digest import digest
from keepstep.worker.state.tensors import dense, memory

PIECE_BYTES = 4 << 20


def receive_into(sock: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        got = sock.recv_into(into[done:])
        if got == 0:
            raise ConnectionError("closed by the peer")
        done += got


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in the order of memory, in place where they are one block."""
    tensor = tensor.detach()
    if not dense(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Pieces:
    """Of one connection and its thread."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2)]
        if on_gpu:
            self._pieces = [piece.pin_memory() for piece in self._pieces]
        self._views = [memory(piece) for piece in self._pieces]
        new_stream: Any = torch.cuda.Stream  # untyped in torch
        self._stream = new_stream(device) if on_gpu else None
        self._copied: list[Any] = [None, None]  # events of the pieces' last copies

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """What is done with the device, is done in here."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def block(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their bytes one after the other; of a single one in place."""
        raws = [raw(tensor) for tensor in tensors]
        if len(raws) == 1:
            return raws[0]
        try:
            return torch.cat([one.to(self._device) for one in raws])
        except torch.OutOfMemoryError:
            return torch.cat([one.cpu() for one in raws])

    def empty(self, size: int) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return torch.empty(size, dtype=torch.uint8)

    def digest(self, block: torch.Tensor) -> bytes:
        try:
            return digest(block)
        except torch.OutOfMemoryError:
            return digest(block.cpu())

    # ------------------------------------------------------------------ copies

    def send(self, sock: socket.socket, block: torch.Tensor) -> None:
        parts = torch.split(block, PIECE_BYTES)
        self._copy(self._pieces[0][: len(parts[0])], parts[0], 0)
        for number, part in enumerate(parts):
            if number + 1 < len(parts):
                following = parts[number + 1]
                other = (number + 1) % 2
                self._copy(self._pieces[other][: len(following)], following, other)
            self._wait(number % 2)
            sock.sendall(self._views[number % 2][: len(part)])

    def receive(self, sock: socket.socket, block: torch.Tensor) -> None:
        for number, part in enumerate(torch.split(block, PIECE_BYTES)):
            which = number % 2
            self._wait(which)
            receive_into(sock, self._views[which][: len(part)])
            self._copy(part, self._pieces[which][: len(part)], which)
        for which in range(2):
            self._wait(which)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, which: int) -> None:
        target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._copied[which] = self._stream.record_event()

    def _wait(self, which: int) -> None:
        if self._copied[which] is not None:
            self._copied[which].synchronize()
