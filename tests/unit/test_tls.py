"""Who is believed to be whom: certificates, tokens, and the desk where nodes join."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from pathlib import Path

import msgspec
import pytest

from keepstep.adapters.identity.authority import Authority, fingerprint, new_node_key
from keepstep.adapters.identity.tokens import Folder, Tokens, job_secret, node_secret, parse
from keepstep.adapters.transport import tls
from keepstep.adapters.transport.blocking import shut
from keepstep.adapters.transport.stream import Stream, StreamClosed, connect, serve
from keepstep.agent import identity
from keepstep.cli.client import checked
from keepstep.cli.token import seconds
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.blob_messages import BlobOk, BlobReply
from keepstep.model.messages import Address, TlsFiles
from keepstep.model.views import JobView, NodeView
from keepstep.orchestrator.absent import Gone, NotFound
from keepstep.orchestrator.join import Desk
from keepstep.orchestrator.requests import JoinedBody, JoinRequest
from keepstep.worker.line import peers

decoder: msgspec.msgpack.Decoder[BlobReply] = msgspec.msgpack.Decoder(BlobReply)
HOUR_NS = 3600 * 10**9


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.open(tmp_path / "authority")


def node(authority: Authority, where: Path, job: str, name: str) -> TlsFiles:
    key, request = new_node_key(name)
    known = identity.Identity(
        job=job,
        node=name,
        token="",
        job_token="",
        orchestrator=Address("x", 1),
        url="",
        directory="",
        stall_timeout_ns=1,
    )
    certificate = authority.sign_node(request, job, name)
    identity.save(where, known, key=key, certificate=certificate, ca=authority.certificate)
    assert identity.load(where) == known
    return identity.tls_files(where, job)


def meet(server: ssl.SSLContext, client: ssl.SSLContext | None, name: str | None) -> object:
    """What the server learns about a client that gets through and is answered."""

    async def scenario() -> object:
        seen: list[object] = []

        async def handler(stream: Stream[BlobReply]) -> None:
            seen.append(stream.certificate)
            stream.send(await stream.receive())

        listening = await serve(handler, decoder, "127.0.0.1", tls=server)
        address = Address("127.0.0.1", listening.sockets[0].getsockname()[1])
        try:
            there = (client, name or "") if client is not None else None
            stream = await connect(address, decoder, tls=there)
            stream.send(BlobOk())
            assert await stream.receive() == BlobOk()
            stream.close()
        finally:
            listening.close()
        return seen[0]

    return asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_node_reaches_the_orchestrator_and_is_known_by_its_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    server = tls.server_context(authority.serve_as(["127.0.0.1"]), clients=True)
    files = node(authority, tmp_path / "n", "job/..%", "n1")
    seen = meet(server, tls.client_context(files), tls.ORCHESTRATOR_NAME)
    assert tls.node_of(seen) == ("job/..%", "n1")
    # Other clients than ours know it by its address.
    assert meet(server, tls.client_context(files), "127.0.0.1")


def test_nobody_else_gets_through(authority: Authority, tmp_path: Path) -> None:
    ours = node(authority, tmp_path / "a", "job", "n0")
    others = node(authority, tmp_path / "b", "other", "n0")
    foreign = Authority.open(tmp_path / "foreign")
    stranger = node(foreign, tmp_path / "c", "job", "n0")
    orchestrator = tls.server_context(authority.serve_as([]), clients=True)
    a_node = tls.server_context(ours, clients=True)
    name, job = tls.ORCHESTRATOR_NAME, ours.peers
    refused: list[tuple[ssl.SSLContext, ssl.SSLContext | None, str | None]] = [
        (orchestrator, None, None),  # plain text
        (orchestrator, tls.trusting(cadata=authority.certificate), name),  # no certificate
        (orchestrator, tls.client_context(stranger), name),  # of another authority, both ways
        (a_node, tls.client_context(ours), name),  # a node that poses as the orchestrator
        (a_node, tls.client_context(others), others.peers),  # ... or as one of another job
        (tls.server_context(stranger, clients=False), tls.client_context(ours), job),
    ]
    for server, client, wanted in refused:
        with pytest.raises((StreamClosed, KeepstepError)):
            meet(server, client, wanted)
    assert tls.node_of(meet(a_node, tls.client_context(ours), job)) == ("job", "n0")


def test_workers_of_one_job_talk_and_an_end_from_another_thread_is_seen(
    authority: Authority, tmp_path: Path
) -> None:
    peers.use(node(authority, tmp_path / "a", "job", "n0"))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = Address("127.0.0.1", listener.getsockname()[1])
            served: list[socket.socket] = []

            def serve_one() -> None:
                sock = peers.accepted(listener.accept()[0])
                served.append(sock)
                peers.greet(sock)
                sock.sendall(sock.recv(100))
                with contextlib.suppress(OSError):
                    assert sock.recv(1) == b""

            thread = threading.Thread(target=serve_one)
            thread.start()
            line = peers.connect(address, 5.0)
            line.sendall(b"hello")
            assert line.recv(100) == b"hello"
            shut(served[0])
            thread.join(5)
            assert not thread.is_alive()
            with contextlib.suppress(OSError):
                assert line.recv(1) == b""
            line.close()
            served[0].close()
    finally:
        peers.use(None)


def test_the_authority_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "authority"
    first = Authority.open(path)
    first.serve_as([])
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    assert path.stat().st_mode & 0o777 == 0o700
    assert Authority.open(path).fingerprint == first.fingerprint == fingerprint(first.certificate)
    (path / "ca.key").chmod(0o644)
    with pytest.raises(UsageError, match="open to others"):
        Authority.open(path)


@pytest.mark.parametrize("request_", ["", "x", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"])
def test_a_bad_signing_request_is_refused(authority: Authority, request_: str) -> None:
    with pytest.raises(UsageError, match="signing request"):
        authority.sign_node(request_, "job", "n0")


# --------------------------------------------------------------------------- tokens


def test_tokens_are_good_for_one_thing_and_for_a_time(tmp_path: Path) -> None:
    tokens = Tokens(Folder(tmp_path))
    text, kept = tokens.create("ab" * 32, role="join", now_ns=0, ttl_ns=HOUR_NS)
    parsed = parse(text)
    assert parsed is not None and parsed.fingerprint == "ab" * 32
    assert tokens.check(text, "join", HOUR_NS - 1) == kept
    assert tokens.check(text, "join", HOUR_NS) is None
    assert tokens.check(text, "operator", 0) is None
    for wrong in (text[:-1], f"{text}x", text.replace(kept.id, "0" * 12), "ks1.x", "", "ks1.../.."):
        assert tokens.check(wrong, "join", 0) is None
    files = list((tmp_path / "tokens").iterdir())
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600]
    assert parsed.secret.encode() not in files[0].read_bytes()
    tokens.remove(kept.id)
    assert tokens.check(text, "join", 0) is None and tokens.all() == []


def test_derived_secrets_do_not_collide() -> None:
    made = {
        node_secret("own", "job", "n0"),
        node_secret("own", "job", "n1"),
        node_secret("own", "job,n", "0"),
        node_secret("other", "job", "n0"),
        job_secret("own", "job"),
        job_secret("own", "n0"),
    }
    assert len(made) == 6


@pytest.mark.parametrize(("text", "value"), [("30m", 1800), ("7d", 604800), ("1s", 1)])
def test_ttl(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "0s", "1", "-1h", "1w", "999999999d", "1.5h"])
def test_ttl_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text)


@pytest.mark.parametrize("url", ["http://10.0.0.1:80", "http://example.org", "ftp://x", "x", ""])
def test_plain_text_beyond_loopback_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(url)
    assert "https://" in caught.value.hint
    assert checked("http://127.0.0.1:80/") == "http://127.0.0.1:80"


# --------------------------------------------------------------------------- joining


def job(name: str, **states: tuple[str, int]) -> JobView:
    nodes = [
        NodeView(node=node, state=state, pid=pid, session=pid, slots=2, taints=[])
        for node, (state, pid) in states.items()
    ]
    return JobView(
        job=name,
        state="running",
        reason="",
        exit_code=None,
        generation=0,
        world=2,
        committed_step=0,
        steps_per_s=0.0,
        script="",
        directory="/d",
        node_loss_protected=False,
        protection="",
        ranks=[],
        spares=[],
        nodes=nodes,
        last_incident="",
        injects_fired=[],
        stall_timeout_ns=7,
    )


def desk(authority: Authority, *jobs: JobView) -> Desk:
    tokens = Tokens(Folder(authority.path))
    return Desk(
        authority, own_token="own", stream=Address("", 9), tokens=tokens, jobs=lambda: list(jobs)
    )


def ask(node: str = "", job: str = "") -> JoinRequest:
    return JoinRequest(request=new_node_key("x")[1], node=node, job=job)


def test_names_are_given_once(authority: Authority) -> None:
    there = desk(authority, job("j", n0=("connected", 5), n1=("disconnected", 0)))
    given = [there.join(ask(), None) for _ in range(3)]
    assert [one.node for one in given] == ["n1", "n2", "n3"]
    assert [one.slots for one in given] == [2, 0, 0]
    assert given[0].token == node_secret("own", "j", "n1")
    assert {one.job_token for one in given} == {job_secret("own", "j")}


def test_a_connected_node_is_not_taken_over(authority: Authority) -> None:
    there = desk(authority, job("j", n0=("connected", 5), n1=("disconnected", 4)))
    with pytest.raises(UsageError, match="connected already"):
        there.join(ask("n0"), None)
    assert there.join(ask("n1"), None).node == "n1"
    for bad in ("../x", "n/1", "n.1", " "):
        with pytest.raises(UsageError, match="name"):
            there.join(ask(bad), None)


def test_an_agent_that_says_its_place_is_the_node_that_is_to_be_there(authority: Authority) -> None:
    there = Desk(
        authority,
        own_token="own",
        stream=Address("", 9),
        tokens=Tokens(Folder(authority.path)),
        jobs=lambda: [job("j", n0=("disconnected", 0), n1=("disconnected", 0))],
        ended=lambda name: name == "old",
        awaited=lambda name, place: {"k1": ("n1", 2), "k7": ("n3", 4)}.get(place, ("", 0)),
    )

    def at(place: str, named: str = "j") -> JoinedBody:
        request = JoinRequest(request=new_node_key("x")[1], job=named, place=place)
        return there.join(request, None)

    assert [(at(place).node, at(place).slots) for place in ("k7", "k1")] == [("n3", 4), ("n1", 2)]
    with pytest.raises(NotFound, match="needs no agent at k9"):
        at("k9")
    with pytest.raises(Gone, match="job old has ended"):
        at("k1", "old")


def test_a_token_for_one_node_gives_no_other(authority: Authority) -> None:
    there = desk(authority, job("j", n0=("disconnected", 0)))
    fingerprint_ = authority.fingerprint
    text, _ = there.tokens.create(
        fingerprint_, role="join", now_ns=there._wall_ns(), ttl_ns=HOUR_NS, node="n7"
    )
    kept = there.may_join(text)
    assert kept is not None and not there.is_operator(text)
    with pytest.raises(UsageError, match="for node n7"):
        there.join(ask("n0"), kept)
    assert there.join(ask(), kept).node == "n7"


def test_the_job_is_the_only_one_or_the_one_that_waits_for_the_node(authority: Authority) -> None:
    one, two = job("a", n0=("connected", 1)), job("b", w9=("disconnected", 0))
    there = desk(authority, one, two)
    assert there.join(ask("w9"), None).job == "b"
    assert there.join(ask("n5", job="a"), None).job == "a"
    with pytest.raises(UsageError, match="2 jobs"):
        there.join(ask("n5"), None)
    with pytest.raises(UsageError, match="no live job"):
        desk(authority).join(ask("n5"), None)
