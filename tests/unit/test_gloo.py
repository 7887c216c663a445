"""The connections of a gloo backend are known, whatever else the process does with sockets."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.worker.groups import gloo


def test_a_backend_knows_its_listener_though_its_number_was_just_another_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads close connections meanwhile: served state, stores, the user's own."""
    server = socket.create_server(("127.0.0.1", 0))
    pairs = [socket.create_connection(server.getsockname()) for _ in range(10)]
    create = gloo.RealGloo.create_default_device

    def close_and_create(*, lazy_init: bool) -> Any:
        for sock in pairs:
            sock.close()
        return create(lazy_init=lazy_init)

    class Closing(gloo.RealGloo):
        create_default_device = staticmethod(close_and_create)

    monkeypatch.setattr(gloo, "RealGloo", Closing)
    mesh = gloo.Mesh()
    backend = gloo.connect(dist.HashStore(), 0, 1, timedelta(seconds=10), mesh)
    gloo.forget([mesh])
    assert len(mesh.incoming) == 1
    del backend
    server.close()


def test_own_listeners_are_not_taken_for_those_of_gloo() -> None:
    over = threading.Event()
    opened: set[gloo.Address] = set()

    def listen() -> None:
        while not over.is_set():
            with gloo.listen("127.0.0.1") as sock:
                opened.add(gloo.address(sock.getsockname()))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        for _ in range(50):
            mesh = gloo.Mesh()
            backend = gloo.connect(dist.HashStore(), 0, 1, timedelta(seconds=10), mesh)
            gloo.forget([mesh])
            assert len(mesh.incoming) == 1
            del backend
    finally:
        over.set()
        thread.join()
    assert opened
