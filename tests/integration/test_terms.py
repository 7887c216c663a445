"""Several orchestrators on one store: who is active, what a standby says, a store that is away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepstep.agent.link import Link
from keepstep.cli.client import Client
from keepstep.cli.find import external
from keepstep.cli.main import invoke
from keepstep.errors import (
    KeepstepError,
    NotActive,
    PermanentError,
    StoreUnavailable,
    TransientError,
    UsageError,
)
from keepstep.model.agent_messages import Hello
from keepstep.model.job import Cancel, JobSpec, NodeSpec, Submit, Taint
from keepstep.model.messages import PROTOCOL, Address
from keepstep.model.views import JobView
from keepstep.orchestrator import registry
from keepstep.orchestrator.main import Orchestrator
from keepstep.orchestrator.requests import Info, Ok, TaintRequest

LEASE_S = 1.5


def spec(job: str = "job-1") -> JobSpec:
    return JobSpec(
        job=job,
        world=1,
        local_world=1,
        nodes=[NodeSpec(name="n0", slots=1)],
        spares=0,
        stall_timeout_ns=10**11,
        script=["train.py"],
        directory="/nonexistent",
    )


def hello(token: str) -> Hello:
    return Hello(
        protocol=PROTOCOL,
        token=token,
        job="job-1",
        node="n0",
        pid=os.getpid(),
        session=1,
        blobs=Address("127.0.0.1", 1),
        slots=1,
    )


async def until(condition: Callable[[], Any], what: str, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        await asyncio.sleep(0.01)


class Joined:
    """An agent's link, and what it says about itself."""

    def __init__(self, cluster: Cluster) -> None:
        token = cluster.running[0].token
        self.connected = False
        self.last_word_ns = 0
        self._cluster = cluster
        self.link = Link(
            [one.stream for one in cluster.running],
            hello=lambda: hello(token),
            on_accepted=self._accepted,
            on_lost=self._lost,
            on_command=lambda command: None,
        )

    def _accepted(self) -> None:
        self.connected = True
        self._cluster.connected += 1

    def _lost(self, last_word_ns: int) -> None:
        self.connected, self.last_word_ns = False, last_word_ns


class Cluster:
    """Orchestrators in this event loop, and agents' links to all of them."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        self.url = url
        self.running: list[Orchestrator] = []
        self._links: list[tuple[Link, asyncio.Task[Any]]] = []
        self.connected = 0  # how often
        self.lease_s = LEASE_S

    async def start(self, id: str, **more: Any) -> Orchestrator:
        made = await Orchestrator.start(
            self.home, id=id, store=self.url, lease_s=self.lease_s, **more
        )  # fmt: skip
        self.running.append(made)
        return made

    def link(self) -> Joined:
        joined = Joined(self)
        self._links.append((joined.link, asyncio.create_task(joined.link.run())))
        return joined

    async def vanish(self, one: Orchestrator) -> None:
        """As kill -9 would, as far as others can see: no goodbye to the store."""
        one._store.release = lambda: None  # type: ignore[method-assign]
        self.running.remove(one)
        await one.stop()

    async def end(self) -> None:
        for _, task in self._links:
            task.cancel()
            assert not task.done() or task.cancelled(), task
        for one in self.running:
            await one.stop()


@pytest.fixture
def within(postgres: Any, tmp_path: Path) -> Callable[[Callable[[Cluster], Awaitable[None]]], None]:
    def run(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
        async def body() -> None:
            cluster = Cluster(tmp_path, postgres.store())
            try:
                await scenario(cluster)
            finally:
                await cluster.end()

        asyncio.run(body())

    return run


Within = Callable[[Callable[[Cluster], Awaitable[None]]], None]


async def ask(one: Orchestrator, path: str) -> httpx.Response:
    auth = {"authorization": f"Bearer {one.token}"}
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(one.url + path, headers=auth)


# --------------------------------------------------------------------------- two orchestrators


def test_second_orchestrator_stands_by_and_says_who_is_active(within: Within) -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = await cluster.start("a"), await cluster.start("b")
        a.driver.submit(Submit(spec=spec()))
        assert (a.terms.role, b.terms.role) == ("active", "standby")
        assert a.token == b.token, "agents and operators need one token for both"
        for path in ("/v1/jobs", "/v1/jobs/job-1", "/v1/incidents", "/v1/spares"):
            answer = await ask(b, path)
            said = answer.json()
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert said["standby"] and said["active"] == a.url and a.url in said["error"]
        assert (await ask(b, "/healthz")).json() == {"ok": True}
        await until(lambda: len(a.terms.members) == 2, "both are known")
        info = (await ask(b, "/v1/orchestrator")).json()
        assert (info["role"], info["active"]) == ("standby", a.url)
        info = (await ask(a, "/v1/orchestrator")).json()
        assert info["role"] == "active" and [peer["id"] for peer in info["peers"]] == ["a", "b"]
        with pytest.raises(NotActive):
            b.driver.submit(Submit(spec=spec("other")))

    within(scenario)


def test_clients_find_the_active_one_through_the_standby(within: Within) -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = await cluster.start("a"), await cluster.start("b")
        a.driver.submit(Submit(spec=spec()))
        await until(lambda: len(a.terms.members) == 2 and a.jobs(), "both, and the job, are known")

        def operate() -> None:
            client = Client(b.url, b.token)
            assert [view.job for view in client.get("/v1/jobs", list[JobView])] == ["job-1"]
            taint = TaintRequest(target="n0", reason="hot")
            assert client.post("/v1/jobs/job-1/taint", taint, Ok).ok
            dead = "http://127.0.0.1:1"
            reach = external(cluster.home, f"{dead},{a.url}", b.token)
            assert reach.urls == [a.url, dead, b.url] and len(reach.streams) == 2
            assert Client(reach.urls, reach.token).get("/v1/orchestrator", Info).id == "a"
            with pytest.raises(TransientError):
                external(cluster.home, dead, b.token)
            with pytest.raises(UsageError, match="nobody"):
                external(cluster.home, "a,nobody", "")

        await asyncio.to_thread(operate)
        assert a.jobs()[0].nodes[0].taints == ["hot"]

    within(scenario)


def test_operators_elsewhere_name_the_orchestrator_and_later_the_store(
    within: Within, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"

    async def operate(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(keepstep, elsewhere, *words, **env)

    async def scenario(cluster: Cluster) -> None:
        one = await cluster.start("a")
        one.driver.submit(Submit(spec=spec()))
        token = tmp_path / "token"
        token.write_text(one.token)
        there = ("--orchestrator", one.url, "--token-file", str(token))
        seen = await operate("status", "--json", *there)
        assert [view["job"] for view in json.loads(seen.stdout)] == ["job-1"], seen.stderr
        done = await operate("taint", "n0", "--reason", "smoke", *there)
        assert done.returncode == 0, done.stderr
        assert one.jobs()[0].nodes[0].taints
        assert (await operate("spares", "--json", "--job", "job-1", *there)).stdout == "[]\n"
        for words, said in (
            (there[:2], "no token"),
            ((*there, "--job", "other"), "no live job other"),
            ((), "--orchestrator asks elsewhere"),
        ):
            wrong = await operate("untaint", "n0", *words)
            assert wrong.returncode == 2 and said in wrong.stderr, wrong.stderr
        one.driver.submit(Cancel(job="job-1", reason="enough", exit_code=3))
        await cluster.vanish(one)
        gone = await operate("status", "--json", *there)
        assert gone.returncode == 3 and "no orchestrator answers" in gone.stderr
        for words in ((), there, ("--job", "job-1"), ("--all",)):
            after = await operate("status", "--json", "--store", cluster.url, *words)
            views = json.loads(after.stdout)
            assert [(view["job"], view["state"]) for view in views] == [("job-1", "cancelled")]

    within(scenario)


def test_standby_takes_over_with_everything_and_agents_follow(within: Within) -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = await cluster.start("a"), await cluster.start("b")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "the agent finds the active one")
        a.driver.submit(Taint(job="job-1", target="n0", reason="hot"))
        await cluster.vanish(a)
        since = time.monotonic()
        await until(lambda: b.terms.role == "active", "take-over")
        assert time.monotonic() - since > 0.4 * LEASE_S
        await until(lambda: link.connected, "the agent follows")
        (view,) = b.jobs()
        assert view.nodes[0].taints == ["hot"] and view.nodes[0].state == "connected"
        a = await cluster.start("a")  # the killed one comes back
        assert (a.terms.role, b.terms.role) == ("standby", "active")

    within(scenario)


def test_clean_stop_hands_over_at_once(within: Within) -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.lease_s = 60.0
        a, b = await cluster.start("a"), await cluster.start("b")
        a.driver.submit(Submit(spec=spec()))
        cluster.running.remove(a)
        await a.stop()
        await until(lambda: b.terms.role == "active", "take-over", 20.0)
        assert [view.job for view in b.jobs()] == ["job-1"]

    within(scenario)


def test_active_one_that_was_robbed_steps_down_and_keeps_no_agent(within: Within) -> None:
    """Its clock stood still, say. It notices with the next record, not with the next renewal."""

    async def scenario(cluster: Cluster) -> None:
        a, b = await cluster.start("a"), await cluster.start("b")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        await asyncio.to_thread(rob, cluster.url, b)
        with pytest.raises(NotActive):
            a.driver.submit(Submit(spec=spec("job-2")))
        await until(lambda: (a.terms.role, b.terms.role) == ("standby", "active"), "roles")
        await until(lambda: link.connected, "the agent follows")
        assert a.jobs() == [] and [view.job for view in b.jobs()] == ["job-1"]
        assert b.jobs()[0].nodes[0].state == "connected"

    within(scenario)


def rob(url: str, thief: Orchestrator) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE keepstep_head SET expires_at = now() - interval '1 hour'")
    thief._store.acquire()


def test_same_id_twice_is_one_clear_error(within: Within, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        with pytest.raises(UsageError, match="in use") as caught:
            await cluster.start("a")  # here
        assert "--id" in caught.value.hint
        elsewhere = Cluster(tmp_path / "elsewhere", cluster.url)
        with pytest.raises(UsageError, match="runs already, at http") as caught:
            await elsewhere.start("a")  # on another machine
        assert "--id" in caught.value.hint
        assert a.terms.role == "active" and a.driver.running
        a.driver.submit(Submit(spec=spec()))

    within(scenario)


# --------------------------------------------------------------------------- the store is away


@pytest.mark.parametrize("how", ["down", "frozen"])
def test_store_away_suspends_and_comes_back_without_loss(
    within: Within, postgres: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        (postgres.stop if how == "down" else postgres.freeze)()
        try:
            # Whatever is asked now is not obeyed, and that is said; reading goes on.
            with pytest.raises(TransientError, match=r"cannot be reached|does not answer"):
                a.driver.submit(Taint(job="job-1", target="n0", reason="lost"))
            await until(lambda: not a._agents._peers, "agents are not kept", 5.0)
            await until(lambda: not link.connected, "they notice")
            assert a.terms.role == "suspended"
            (view,) = (await ask(a, "/v1/jobs")).json()
            assert "migrations wait" in view["control"] and "training goes on" in view["control"]
            assert (await ask(a, "/v1/orchestrator")).json()["role"] == "suspended"
            monkeypatch.setenv("KEEPSTEP_HOME", str(cluster.home))
            assert await asyncio.to_thread(invoke, ["status", "--json"]) == 0
            assert await asyncio.to_thread(invoke, ["taint", "n0", "--reason", "x"]) == 3
            await asyncio.sleep(1.5 * LEASE_S)  # longer than the lease: it is not lost for that
        finally:
            await asyncio.to_thread(postgres.start if how == "down" else postgres.thaw)
        await until(lambda: a.terms.role == "active", "active again")
        await until(lambda: link.connected, "the agent comes back")
        a.driver.submit(Taint(job="job-1", target="n0", reason="kept"))
        taints = a.jobs()[0].nodes[0].taints
        # Frozen: the first one may have reached the server. Down: it can not.
        assert taints in ([["kept"]] if how == "down" else [["kept"], ["lost", "kept"]])
        from keepstep.adapters.store import postgres as adapter

        assert (await asyncio.to_thread(adapter.verify, cluster.url)).ok

    within(scenario)


def test_append_of_unknown_outcome_is_settled_with_a_fresh_core(within: Within) -> None:
    """The store answers again at once; the agents must introduce themselves to the new core."""

    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        real = a._store.append

        def lose_the_answer(records: Any) -> None:
            real(records)
            a._store.append = real  # type: ignore[method-assign]
            raise StoreUnavailable("the answer was lost")

        a._store.append = lose_the_answer  # type: ignore[method-assign]
        core = a.driver.core
        with pytest.raises(StoreUnavailable):
            a.driver.submit(Taint(job="job-1", target="n0", reason="hot"))
        await until(lambda: a.terms.role == "active" and a.driver.core is not core, "replayed")
        await until(lambda: cluster.connected == 2, "joined again")
        assert a.jobs()[0].nodes[0].taints == ["hot"], "it was written"
        await until(lambda: a.jobs()[0].nodes[0].state == "connected", "known to the core")

    within(scenario)


@pytest.mark.parametrize("how", ["down", "frozen"])
def test_store_away_and_nothing_to_write_suspends_when_the_lease_is_over(
    within: Within, postgres: Any, how: str
) -> None:
    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        (postgres.stop if how == "down" else postgres.freeze)()
        try:
            since = time.monotonic()
            await until(lambda: a.terms.role == "suspended", "suspended")
            assert time.monotonic() - since <= LEASE_S + 2.0
            assert not a.driver.running and not a._agents._peers
            await until(lambda: not link.connected, "agents are cut off")
        finally:
            await asyncio.to_thread(postgres.start if how == "down" else postgres.thaw)
        await until(lambda: a.terms.role == "active" and link.connected, "goes on")

    within(scenario)


def test_connection_that_breaks_between_two_records_is_not_noticed(within: Within) -> None:
    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        core = a.driver.core
        await asyncio.to_thread(break_connections, cluster.url)
        a.driver.submit(Taint(job="job-1", target="n0", reason="hot"))
        assert a.driver.core is core and link.connected

    within(scenario)


def break_connections(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def test_sqlite_ledger_without_room_suspends_and_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        one = await Orchestrator.start(tmp_path, id="x")
        try:
            one.driver.submit(Submit(spec=spec()))
            path = registry.ledger_path(tmp_path, "x")
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                with pytest.raises(TransientError, match="locked"):
                    one.driver.submit(Taint(job="job-1", target="n0", reason="lost"))
                assert one.terms.role == "suspended" and not one.driver.failed.done()
                db.execute("ROLLBACK")
            await until(lambda: one.terms.role == "active", "active again")
            assert one.jobs()[0].nodes[0].taints == []
            one.driver.submit(Taint(job="job-1", target="n0", reason="kept"))
        finally:
            await one.stop()

    asyncio.run(body())


# --------------------------------------------------------------------------- the agent's side


def test_agent_leaves_an_orchestrator_that_fell_silent(within: Within) -> None:
    """A stopped process keeps its connections; only its silence tells."""

    async def scenario(cluster: Cluster) -> None:
        a = await cluster.start("a")
        a.driver.submit(Submit(spec=spec()))
        link = cluster.link()
        await until(lambda: link.connected, "joined")
        await asyncio.sleep(2 * LEASE_S)
        assert link.connected and cluster.connected == 1, "renewals are heard"
        a._agents.beat = lambda: None  # type: ignore[method-assign]
        await until(lambda: not link.connected, "left")
        silence_ns = time.monotonic_ns() - link.last_word_ns
        assert silence_ns >= 0.9 * LEASE_S * 1e9, "away since the last word"

    within(scenario)


# --------------------------------------------------------------------------- bad input


def keepstep(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep", *words],
        env={**os.environ, "KEEPSTEP_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--store", "mysql://x/y"], 2, "postgresql://"),
        (["--store", "postgresql://u:pass-word@[x"], 2, "not an address"),
        (["--store", "postgresql://u:pass-word@127.0.0.1:1/x"], 3, "cannot be reached"),
        (["--store", "postgresql://127.0.0.1:1/x", "--lease", "0.1"], 2, "--lease"),
        (["--store", "postgresql://127.0.0.1:1/x", "--lease", "nan"], 2, "--lease"),
    ],
)
def test_bad_stores_are_clear_errors(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    pytest.importorskip("psycopg")
    done = keepstep(tmp_path, "orchestrator", "--id", "a", *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and "hint: " in done.stderr and "pass-word" not in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "orchestrators").glob("*")) == []


def test_ledger_that_knows_nothing_of_the_jobs_is_refused(tmp_path: Path, postgres: Any) -> None:
    """A truncated file is an empty database to SQLite; another store is simply the wrong one."""

    async def body() -> None:
        one = await Orchestrator.start(tmp_path, id="x")
        one.driver.submit(Submit(spec=spec()))
        await asyncio.sleep(0.1)
        one._write_entry()
        await one.stop()
        path = registry.ledger_path(tmp_path, "x")
        whole = path.read_bytes()
        path.write_bytes(b"")
        for more in ({}, {"store": postgres.store(), "lease_s": LEASE_S}):
            with pytest.raises(PermanentError, match="knows nothing of job job-1") as caught:
                await Orchestrator.start(tmp_path, id="x", **more)
            assert caught.value.hint
        for rest in path.parent.glob("x.db-*"):
            rest.unlink()
        path.write_bytes(whole)
        one = await Orchestrator.start(tmp_path, id="x")
        assert [view.job for view in one.jobs()] == ["job-1"]
        await one.stop()

    asyncio.run(body())


def test_ledger_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    from keepstep.adapters.store.sqlite import SqliteLedger
    from keepstep.model.records import JobSubmitted, WorkerEnded

    registry.prepare_home(tmp_path)
    ledger = SqliteLedger(registry.ledger_path(tmp_path, "x"))
    ledger.append([JobSubmitted(job="j", at_ns=1, spec=spec("j"))])
    ledger.append([WorkerEnded(job="j", at_ns=2, worker="j.w9", rank=0, code=0, why="")])
    ledger.close()
    done = keepstep(tmp_path, "orchestrator", "--id", "x")
    assert done.returncode == 3 and "record 2" in done.stderr and "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_of_a_shared_ledger(tmp_path: Path, postgres: Any) -> None:
    url = postgres.store()
    password = url.split(":")[2].split("@")[0]

    async def body() -> None:
        one = await Orchestrator.start(tmp_path, id="x", store=url, lease_s=LEASE_S)
        one.driver.submit(Submit(spec=spec()))
        await one.stop()

    asyncio.run(body())
    done = keepstep(tmp_path, "ledger", "verify", url)
    assert done.returncode == 0 and "ok, 1 records" in done.stdout
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DELETE FROM keepstep_records")
    done = keepstep(tmp_path, "ledger", "verify", url)
    assert done.returncode == 1 and "end is missing" in done.stdout
    assert password not in done.stdout + done.stderr
    done = keepstep(tmp_path, "orchestrator", "--id", "x", KEEPSTEP_STORE=url)
    assert done.returncode == 3 and "broken at record 1" in done.stderr
    assert password not in done.stderr


# --------------------------------------------------------------------------- real processes


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def test_stopped_process_is_replaced_and_steps_down_when_it_wakes(
    tmp_path: Path, postgres: Any, processes: list[subprocess.Popen[bytes]]
) -> None:
    url = postgres.store()
    for id in "ab":
        command = [sys.executable, "-m", "keepstep", "orchestrator", "--id", id, "--lease", "1.5"]
        env = {**os.environ, "KEEPSTEP_HOME": str(tmp_path), "KEEPSTEP_STORE": url}
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
        wait(lambda id=id: role(tmp_path, id) != "", "started")
    assert (role(tmp_path, "a"), role(tmp_path, "b")) == ("active", "standby")
    processes[0].send_signal(signal.SIGSTOP)
    wait(lambda: role(tmp_path, "b") == "active", "take-over")
    processes[0].send_signal(signal.SIGCONT)
    wait(lambda: role(tmp_path, "a") == "standby", "stepped down")
    assert role(tmp_path, "b") == "active"
    processes[1].terminate()
    assert processes[1].wait(10) == 0
    wait(lambda: role(tmp_path, "a") == "active", "back in office")


def role(home: Path, id: str) -> str:
    entry = registry.read(home, id)
    if entry is None:
        return ""
    try:
        return Client(entry.url, entry.token).get("/v1/orchestrator", Info).role
    except KeepstepError:
        return ""


def wait(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.02)
