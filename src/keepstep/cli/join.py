"""Becoming a node of a live job: on the orchestrator's machine, or over the network.

On loopback the token of the registry is enough. Under an orchestrator that listens beyond it, a
node makes a key, has it signed (with a join token, or as an operator), and keeps what it got in
HOME/nodes/<job>.<node>; see agent.identity.
"""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec

from keepstep.agent import identity
from keepstep.cli.client import Client
from keepstep.cli.find import Reached, at_host
from keepstep.errors import UsageError
from keepstep.model.messages import Address
from keepstep.model.views import JobView
from keepstep.orchestrator.main import is_unspecified
from keepstep.orchestrator.requests import JoinedBody, JoinRequest

LOOPBACK = "127.0.0.1"


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """All that it takes to run the agent of one node, and to report its end."""

    job: str
    node: str
    urls: list[str]  # of the orchestrators, one of which is active
    streams: list[Address]
    ca: str
    token: str  # the node's own; on loopback the orchestrator's
    bind: str
    directory: Path
    stall_timeout_ns: int
    slots: int = 0  # as the job's spec says; 0: it says nothing
    identity: Path | None = None  # None: plain text on loopback

    def client(self) -> Client:
        return Client(self.urls, self.token, self.ca)


def on_loopback(there: Reached, view: JobView, node: str | None) -> Membership:
    taken = {one.node: one.state for one in view.nodes}
    if node is None:
        missing = [one.node for one in view.nodes if one.state == "disconnected" and not one.pid]
        new = (f"n{i}" for i in range(len(taken) + 1) if f"n{i}" not in taken)
        node = missing[0] if missing else next(new)
    elif taken.get(node) == "connected":
        raise UsageError(f"job {view.job} has a node {node} already", hint="omit --node")
    return Membership(
        job=view.job,
        node=node,
        urls=there.urls,
        streams=there.streams,
        ca="",
        token=there.token,
        bind=LOOPBACK,
        directory=Path(view.directory),
        stall_timeout_ns=view.stall_timeout_ns,
        slots=next((one.slots for one in view.nodes if one.node == node), 0),
    )


def by_certificate(
    home: Path,
    *,
    urls: list[str],
    ca: str,
    operator: str = "",
    token: str = "",
    job: str = "",
    node: str = "",
    place: str = "",
    bind: str = "",
) -> Membership:
    """Join with a join token, or with an operator's."""
    from keepstep.adapters.identity.authority import new_node_key

    key, request = new_node_key(node or "node")
    asked = JoinRequest(request=request, token=token, job=job, node=node, place=place)
    client = Client(urls, operator, ca)
    joined = client.post("/v1/join", asked, JoinedBody)
    stream = at_host(joined.stream, client.url)
    # One that listens everywhere cannot be found under that address.
    others = [
        peer
        for peer in joined.peers
        if peer.stream != stream and not is_unspecified(peer.stream.host)
    ]
    where = identity.folder(home, joined.job, joined.node)
    known = identity.Identity(
        job=joined.job,
        node=joined.node,
        token=joined.token,
        job_token=joined.job_token,
        orchestrator=stream,
        url=client.url,
        directory=str(_directory(home, joined)),
        stall_timeout_ns=joined.stall_timeout_ns,
        slots=joined.slots,
        other_orchestrators=[peer.stream for peer in others],
        other_urls=list(
            dict.fromkeys(
                url for url in (*urls, *(peer.url for peer in others)) if url != client.url
            )
        ),
    )
    identity.save(where, known, key=key, certificate=joined.certificate, ca=joined.ca)
    return from_identity(where, bind)


def from_identity(where: Path, bind: str = "") -> Membership:
    known = identity.load(where)
    assert known is not None, "it was saved, or looked for, by the caller"
    return Membership(
        job=known.job,
        node=known.node,
        urls=[known.url, *known.other_urls],
        streams=[known.orchestrator, *known.other_orchestrators],
        ca=identity.ca_of(where),
        token=known.token,
        bind=bind or address_towards(known.orchestrator),
        directory=Path(known.directory),
        stall_timeout_ns=known.stall_timeout_ns,
        slots=known.slots,
        identity=where,
    )


def address_towards(peer: Address) -> str:
    """The address of this machine that `peer` would see. Nothing is sent."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            peer.host, peer.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"no way to {peer.host}: {error.strerror}", hint="name an address with --bind"
        ) from error


def _directory(home: Path, joined: JoinedBody) -> Path:
    """The job's own where machines share a file system, else one of this machine's."""
    shared = Path(joined.directory)
    return shared if shared.is_dir() else home / "jobs" / joined.job
