"""REST, fed with anything: a clean answer below 500, and an orchestrator that goes on deciding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepstep.adapters.identity.authority import Authority
from keepstep.adapters.identity.tokens import Folder, Tokens
from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.model.job import InjectSpec, JobSpec
from keepstep.model.messages import PROTOCOL, Address
from keepstep.orchestrator import api
from keepstep.orchestrator import requests as bodies
from keepstep.orchestrator.join import Desk
from keepstep.runtime.driver import Driver
from tests.support.core import World, job_spec
from tests.support.fuzz import of, texts

fuzz = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SPEC = job_spec()
JOB = SPEC.job
names = st.sampled_from(["n0", "n1", "n1/0", "n0/1", "n9", JOB])
ROUTES: dict[str, Any] = {
    "/v1/jobs": JobSpec,
    f"/v1/jobs/{JOB}/migrate": bodies.MigrateRequest,
    f"/v1/jobs/{JOB}/drain": bodies.DrainRequest,
    f"/v1/jobs/{JOB}/taint": bodies.TaintRequest,
    f"/v1/jobs/{JOB}/untaint": bodies.UntaintRequest,
    f"/v1/jobs/{JOB}/inject": InjectSpec,
    f"/v1/jobs/{JOB}/nodes/n1/dead": bodies.Ok,
    "/v1/signals": bodies.SignalRequest,
    "/v1/join": bodies.JoinRequest,
}
numbers = st.integers(-3, 9) | st.integers() | st.floats()
documents = st.recursive(
    st.none() | st.booleans() | numbers | texts | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


class Nobody:
    def deliver(self, sends: Any) -> None:
        """No agent is connected: the core sends to none."""


class Api:
    """The whole of REST without a socket, on one event loop for all requests of a test."""

    def __init__(self, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._ledger = SqliteLedger(directory / "ledger.db")
        self.loop.run_until_complete(self._open(directory))

    async def _open(self, directory: Path) -> None:
        world = World(SPEC)  # its ranks train, so that requests have something to act on
        world.start()
        self.driver = Driver(world.core, self._ledger, Nobody())
        info = bodies.Info(id="x", pid=1, stream=Address("127.0.0.1", 1), protocol=PROTOCOL)
        desk = Desk(
            Authority.open(directory / "authority"),
            tokens=Tokens(Folder(directory)),
            own_token="t",
            stream=Address("", 1),
            jobs=lambda: list(world.core.jobs()),
        )
        app = api.build(self.driver, "t", lambda: info, desk)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app, raise_app_exceptions=True),
            base_url="http://test",
            headers={"authorization": "Bearer t"},
        )

    def ask(self, verb: str, path: str, **options: Any) -> httpx.Response:
        return self.loop.run_until_complete(self.client.request(verb, path, **options))

    def check(self, answer: httpx.Response) -> None:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error", "hint"} and answer.json()["error"]
        assert self.driver.running, self.driver.failed

    def close(self) -> None:
        self.driver.close()
        self._ledger.close()
        self.loop.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    it = Api(tmp_path_factory.mktemp("api"))
    yield it
    it.close()


def resembling(kind: Any) -> st.SearchStrategy[bytes]:
    """True bodies, true bodies with some fields replaced, and anything."""
    true = of(kind).map(msgspec.to_builtins)
    fields = st.sampled_from(list(kind.__struct_fields__))
    bent = st.builds(
        lambda body, changes: {**body, **changes},
        true,
        st.dictionaries(fields, documents, max_size=2),
    )
    encoded = st.one_of(true, bent, documents).map(as_json)
    return encoded | st.binary(max_size=40)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()  # writes NaN and Infinity, too: not JSON, but sent


@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@fuzz
def test_no_body_breaks_anything(path: str, data: st.DataObject, server: Api) -> None:
    body = data.draw(resembling(ROUTES[path]))
    server.check(server.ask("POST", path, content=body))


@given(job=texts, node=texts, since=texts, wait=texts)
@example(job=JOB, node="n0", since="0", wait="nan")
@example(job=JOB, node="n0", since="9" * 99, wait="-inf")
@fuzz
def test_no_path_or_query_breaks_anything(
    job: str, node: str, since: str, wait: str, server: Api
) -> None:
    for path in ("", "/incidents", f"/nodes/{quote(node, safe='')}/dead"):
        verb = "POST" if path.endswith("dead") else "GET"
        server.check(server.ask(verb, f"/v1/jobs/{quote(job, safe='')}{path}"))
    if wait.strip().lower() in ("nan", "-inf"):
        query = {"since": since, "wait_s": wait}
        server.check(server.ask("GET", f"/v1/jobs/{JOB}/watch", params=query))
    server.check(server.ask("GET", f"/v1/jobs/{quote(job, safe='')}/watch", params={"wait_s": 0}))


HOSTILE = [
    (f"/v1/jobs/{JOB}/inject", b'{"id": "a", "action": "stop", "rank": 0, "seconds": 1e308}'),
    (f"/v1/jobs/{JOB}/inject", b'{"id": "b", "action": "stop", "rank": 0, "seconds": 1e400}'),
    (f"/v1/jobs/{JOB}/taint", b'{"target": "n0", "reason": "\\ud800"}'),
    (f"/v1/jobs/{JOB}/taint", b'{"target": "n0", "reason": "\xff"}'),
    (f"/v1/jobs/{JOB}/taint", b'{"target": "n0/0", "reason": "' + b"[" * 100_000 + b'"}'),
    (f"/v1/jobs/{JOB}/cancel", b'{"exit_code": -1}'),
    ("/v1/signals", b"[" * 100_000),
    (f"/v1/jobs/{JOB}/migrate", b'{"ranks": [' + b"9" * 400 + b"]}"),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE)
def test_hostile_bodies(path: str, body: bytes, server: Api) -> None:
    server.check(server.ask("POST", path, content=body))


@pytest.mark.parametrize(
    "changes",
    [
        {"world": 2**40, "local_world": 2**40, "nodes": [{"name": "n0", "slots": 2**40}]},
        {"nodes": [{"name": "n0", "slots": 2**62}]},
        {"stall_timeout_ns": 2**63},
        {"stall_timeout_ns": -1},
        {"spares": 2**50},
        {"nodes": [{"name": "../../etc", "slots": 3}]},
        {"nodes": [{"name": "", "slots": 3}]},
        {"inject": [{"id": "i", "action": "stop", "rank": 0, "seconds": -1e308}]},
    ],
)
def test_specs_out_of_all_bounds_are_refused(changes: dict[str, Any], server: Api) -> None:
    body = {**msgspec.to_builtins(SPEC), "job": "huge", **changes}
    answer = server.ask("POST", "/v1/jobs", content=msgspec.json.encode(body))
    server.check(answer)
    assert answer.status_code == 400, answer.text
