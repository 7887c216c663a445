"""REST: authentication on every route, errors with hints, limits, and a truthful description."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from keepstep.model.job import JobSpec, NodeSpec, Submit
from keepstep.orchestrator.main import Orchestrator
from keepstep.orchestrator.rest import BODY_BYTES_MAX

Scenario = Callable[[httpx.AsyncClient, Orchestrator], Awaitable[None]]

SPEC = JobSpec(
    job="job-1",
    world=2,
    local_world=2,
    nodes=[NodeSpec(name="n0", slots=3)],
    spares=1,
    stall_timeout_ns=10**11,
    script=["train.py"],
    directory="/nonexistent",
)


def with_api(home: Path, scenario: Scenario) -> None:
    async def body() -> None:
        orchestrator = await Orchestrator.start(home, id="api")
        auth = {"authorization": f"Bearer {orchestrator.token}"}
        try:
            orchestrator.driver.submit(Submit(spec=SPEC))
            async with httpx.AsyncClient(
                base_url=orchestrator.url, headers=auth, trust_env=False
            ) as client:
                await scenario(client, orchestrator)
        finally:
            await orchestrator.stop()

    asyncio.run(body())


def check_error(answer: httpx.Response, status: int, word: str) -> None:
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert set(said) == {"error", "hint"} and word in said["error"], said


def test_every_route_but_health_needs_the_token(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        described = (await client.get("/v1/openapi.json")).json()
        routes = [(verb, path) for path, verbs in described["paths"].items() for verb in verbs]
        assert len(routes) >= 16
        wrong = [
            {"authorization": "Bearer wrong"},
            {"authorization": ""},
            {"authorization": "Bearer \xe9"},
        ]
        for verb, path in [*routes, ("get", "/v1/openapi.json")]:
            address = path.format(job="job-1", node="n0")
            for headers in wrong:
                coded = {k.encode(): v.encode("latin-1") for k, v in headers.items()}
                answer = await client.request(verb, address, headers=coded)
                if path == "/healthz":
                    assert answer.status_code == 200
                else:
                    check_error(answer, 401, "token")
        assert orchestrator.live_jobs()

    with_api(tmp_path, scenario)


def test_unknown_jobs_are_404_with_a_hint(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        for path in ("/v1/jobs/nobody", "/v1/jobs/nobody/incidents", "/v1/jobs/nobody/watch"):
            check_error(await client.get(path), 404, "nobody")
        bodies: dict[str, Any] = {
            "migrate": {"ranks": [0]},
            "drain": {"node": "n0"},
            "taint": {"target": "n0", "reason": "x"},
            "untaint": {"target": "n0"},
            "inject": {"id": "i", "action": "kill", "rank": 0},
            "cancel": {},
            "nodes/n0/dead": {},
        }
        for verb, body in bodies.items():
            check_error(await client.post(f"/v1/jobs/nobody/{verb}", json=body), 404, "nobody")
        signal = {"job": "nobody", "node": "n0", "kind": "ecc", "reason": "x"}
        check_error(await client.post("/v1/signals", json=signal), 404, "nobody")
        check_error(await client.get("/v1/nowhere"), 404, "Not Found")

    with_api(tmp_path, scenario)


BAD = [
    ("/v1/jobs", b"not json"),
    ("/v1/jobs", b"{}"),
    ("/v1/jobs", msgspec.json.encode(SPEC)),
    ("/v1/jobs", msgspec.json.encode(msgspec.structs.replace(SPEC, job="../x"))),
    ("/v1/jobs/job-1/migrate", b'{"ranks": "0"}'),
    ("/v1/jobs/job-1/migrate", b'{"ranks": [9]}'),
    ("/v1/jobs/job-1/migrate", b'{"ranks": [0], "surprise": 1}'),
    ("/v1/jobs/job-1/drain", b'{"node": "n9"}'),
    ("/v1/jobs/job-1/taint", b'{"target": "n9", "reason": "x"}'),
    ("/v1/jobs/job-1/taint", b'{"target": "n0"}'),
    ("/v1/jobs/job-1/untaint", b'{"target": "n9/0"}'),
    ("/v1/jobs/job-1/inject", b'{"id": "i", "action": "explode"}'),
    ("/v1/jobs/job-1/inject", b'{"id": "i", "action": "kill", "rank": 9}'),
    ("/v1/signals", b'{"job": "job-1", "kind": "ecc", "reason": "x"}'),
    ("/v1/signals", b'{"job":"job-1","kind":"ecc","reason":"x","node":"n0","rank":1}'),
    ("/v1/signals", b'{"job":"job-1","kind":"ecc","reason":"x","rank":9}'),
    ("/v1/signals", b'{"job":"job-1","kind":"e","reason":"x","node":"n0","severity":"z"}'),
]


def test_bad_input_is_400_and_changes_nothing(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        before = orchestrator.driver.change("job-1")
        for path, body in BAD:
            answer = await client.post(path, content=body)
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["error"] and set(answer.json()) == {"error", "hint"}
            assert orchestrator.driver.change("job-1") == before
        assert [view.job for view in orchestrator.jobs()] == ["job-1"]

    with_api(tmp_path, scenario)


def test_requests_are_limited_in_size(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        try:
            answer = await client.post("/v1/jobs", content=b" " * (BODY_BYTES_MAX + 1))
        except httpx.TransportError:
            pass  # closed while we were still sending: just as good
        else:
            check_error(answer, 413, "over")
        assert (await client.get("/v1/jobs")).status_code == 200

    with_api(tmp_path, scenario)


def test_views_watch_and_signals(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        assert [one["job"] for one in (await client.get("/v1/jobs")).json()] == ["job-1"]
        assert (await client.get("/v1/jobs/job-1")).json()["world"] == 2
        assert (await client.get("/v1/incidents")).json() == []
        assert (await client.get("/v1/spares")).json() == []
        (node,) = (await client.get("/v1/nodes")).json()
        assert (node["job"], node["node"], node["slots"]) == ("job-1", "n0", 3)
        starting = await client.post("/v1/jobs/job-1/drain/plan", json={"node": "n0"})
        check_error(starting, 400, "still starting")
        info = (await client.get("/v1/orchestrator")).json()
        assert info["stream"]["port"] == orchestrator.stream.port
        note = {"job": "job-1", "node": "n0", "kind": "fan", "reason": "slow", "severity": "info"}
        answer = await client.post("/v1/signals", json=note)
        assert answer.json() == {"action": "noted", "target": "n0"}
        notes = (await client.get("/v1/jobs/job-1")).json()["notes"]
        assert [note["text"] for note in notes] == ["signal fan: n0: slow"]
        first = (await client.get("/v1/jobs/job-1/watch", params={"wait_s": 0})).json()
        assert first["change"] > 0
        waiting = asyncio.create_task(
            client.get("/v1/jobs/job-1/watch", params={"since": first["change"], "wait_s": 10})
        )
        await asyncio.sleep(0.1)
        assert not waiting.done()
        cancel = {"reason": "test", "exit_code": 3}
        assert (await client.post("/v1/jobs/job-1/cancel", json=cancel)).status_code == 200
        seen = (await asyncio.wait_for(waiting, 5)).json()
        assert seen["change"] > first["change"]
        assert seen["job"]["state"] == "cancelled" and seen["job"]["exit_code"] == 3
        bad = await client.get("/v1/jobs/job-1/watch", params={"since": "soon"})
        check_error(bad, 400, "since")

    with_api(tmp_path, scenario)


def test_description_names_every_schema_it_refers_to(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
        described = (await client.get("/v1/openapi.json")).json()
        schemas = set(described["components"]["schemas"])
        assert references(described) <= schemas
        assert {"JobView", "IncidentView", "JobSpec", "SignalRequest"} <= schemas

    with_api(tmp_path, scenario)


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        found = set().union(*(references(one) for one in value.values()), set())
        if isinstance(value.get("$ref"), str):
            found.add(value["$ref"].rpartition("/")[2])
        return found
    if isinstance(value, list):
        return set().union(*(references(one) for one in value), set())
    return set()
