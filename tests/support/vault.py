"""An agent that keeps a vault, and a rank that is connected to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keepstep.agent.blobs import BlobServer
from keepstep.model.messages import Address, TlsFiles
from keepstep.worker.vault import vault as client
from keepstep.worker.vault.vault import VaultLine

MB = 1 << 20
DEADLINE_S = 20.0


def going_on() -> bool:
    return False


@contextmanager
def agent(files: TlsFiles | None = None) -> Iterator[tuple[Address, BlobServer]]:
    server = BlobServer("t", lambda rank: [], files)
    address = asyncio.run(server.start("127.0.0.1"))
    try:
        yield address, server
    finally:
        server.close()


@contextmanager
def line(address: Address, generation: int = 1, rank: int = 2, **how: Any) -> Iterator[VaultLine]:
    made = VaultLine(address, "t", rank, generation, **how)
    try:
        yield made
    finally:
        made.close()


def opened(one: VaultLine, units: int = 2, reserve: int = 64 * MB, fresh: bool = False) -> int:
    return one.open(b"layout", range(units), reserve, fresh=fresh)


def wait_until(condition: Any) -> None:
    turn = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        turn.wait(0.01)
    pytest.fail("it never came")


def plain(found: client.FetchedShards) -> dict[int, Any]:
    return {
        unit: (
            base,
            [bytes(one) for one in tensors],
            {step: None if one is None else bytes(one) for step, one in log.items()},
        )
        for unit, (base, tensors, log) in found.units.items()
    }
