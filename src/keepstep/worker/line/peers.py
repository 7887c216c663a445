"""Connections between workers, and to other nodes' agents: TLS wherever the node has a
certificate, else plain, which agents allow on loopback only.

Set once per process, from the Welcome. The sockets behave as plain ones do, but for their
shutdown(): use `blocking.shut`.
"""

from __future__ import annotations

import socket
import ssl

from keepstep.adapters.transport.tls import client_context, server_context
from keepstep.model.messages import Address, TlsFiles

_client: tuple[ssl.SSLContext, str] | None = None
_server: ssl.SSLContext | None = None


def use(files: TlsFiles | None) -> None:
    global _client, _server
    if files is None:
        _client = _server = None
    else:
        _client = (client_context(files), files.peers)
        _server = server_context(files, clients=True)


def connect(address: Address, timeout_s: float) -> socket.socket:
    """Connected, with `timeout_s` still set. Raises OSError."""
    sock = socket.create_connection((address.host, address.port), timeout_s)
    if _client is None:
        return sock
    context, name = _client
    try:
        return context.wrap_socket(sock, server_hostname=name)
    except BaseException:
        sock.close()
        raise


def accepted(sock: socket.socket) -> socket.socket:
    """An accepted socket, made ready; `greet` comes next, where waiting is allowed."""
    if _server is None:
        return sock
    return _server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def greet(sock: socket.socket) -> None:
    if isinstance(sock, ssl.SSLSocket):
        sock.do_handshake()
