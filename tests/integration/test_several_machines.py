"""A job on several machines (network namespaces): joining, a kill, and nothing in the clear."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.model.views import JobView
from tests.support.job import results
from tests.support.machines import (
    DEADLINE_S,
    STALL_S,
    STEPS,
    Cluster,
    Lab,
    Machine,
    laboratory,
    why_not,
)
from tests.support.scripts import SCRIPT
from tests.support.torchrun import differences, run_plain


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with laboratory(tmp_path, 3) as it:
        yield it


def identical(out: Path, world: int, tmp_path: Path, steps: list[str]) -> None:

    expected = run_plain(tmp_path / "plain", world, steps)
    assert differences(results(out, world), expected) == []


@pytest.mark.timeout(280)
def test_a_job_on_two_machines_outlives_a_rank_and_shows_nothing(lab: Lab, tmp_path: Path) -> None:
    cluster = Cluster(lab, jobs_at=tmp_path / "out")
    slow = tmp_path / "slow"
    first, second = cluster.others
    cluster.agent(first, "n0")  # before there is a job: they wait
    agent = cluster.agent(second, "n1", "--adopt")
    run = cluster.job("--nnodes", "2", "--nproc-per-node", "2", "--spares", "1", slow=slow)
    view = cluster.until_step(3)
    lab.until(lambda: [s for s in cluster.status().spares if s.state == "parked"], "a spare")
    homes = {seat.rank: seat.node for seat in view.ranks}
    assert homes == {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    restart_agent(cluster, agent, "n1")
    os.kill(view.ranks[1].pid, signal.SIGKILL)
    lab.until(lambda: any(i.outcome == "RESOLVED" for i in cluster.incidents()), "recovery")
    moved = cluster.head.run("migrate", "--rank", "2", "--json", "--job", "job")
    assert moved.returncode == 0, moved.stderr + lab.logs()
    notes = [note for m in cluster.others for note in m.home.glob("nodes/*/node.json")]
    known = [json.loads(note.read_text()) for note in notes]
    assert {note.stat().st_mode & 0o777 for n in notes for note in n.parent.iterdir()} == {0o600}
    slow.unlink()
    cluster.end(run)
    lab.until(lambda: not any(m.pids() for m in cluster.others), "the agents to end", 20)
    assert not any(note.exists() for note in notes)  # keys of what is no more
    seen = cluster.incidents()
    assert [i.outcome for i in seen] == ["RESOLVED", "RESOLVED"]
    assert sum(i.steps_lost for i in seen) == 0
    identical(cluster.out, 4, tmp_path, STEPS)
    nothing_in_the_clear(cluster, [one[name] for one in known for name in ("token", "job_token")])


def restart_agent(cluster: Cluster, agent: subprocess.Popen[str], node: str) -> None:
    """Killed, and started again without a token: its ranks live, and it has its certificate."""

    def pids() -> dict[str, int]:
        return {n.node: n.pid for n in cluster.status().nodes if n.state == "connected"}

    before = pids()
    agent.kill()
    agent.wait()
    words = ("agent", "--orchestrator", cluster.url, "--node", node, "--adopt")
    cluster.others[1].start("agent-again", *words)
    cluster.lab.until(lambda: pids().get(node, before[node]) != before[node], "the new agent")


def nothing_in_the_clear(cluster: Cluster, node_secrets: list[str]) -> None:
    sniffed = cluster.lab.sniffer.seen()
    # The sniffer works: gloo's rendezvous is torch's own and plain.
    assert b"keepstep/listen" in sniffed
    secrets = [cluster.entry["token"], cluster.operator, cluster.join.read_text()]
    secrets += [secret.rpartition(".")[2] for secret in secrets]
    secrets += node_secrets
    assert len(secrets) == 10
    words = ["StartWorker", "WorkerSaid", "Progress", "BlobPut", "BlobGet", "Opened", "Fetched"]
    words += ["authorization", "GET /v1", "POST /v1", "committed_step", str(SCRIPT)]
    for word in secrets + words:
        assert word.encode() not in sniffed, word


@pytest.mark.timeout(120)
def test_what_is_not_allowed_is_refused(lab: Lab, tmp_path: Path) -> None:
    cluster = Cluster(lab, jobs_at=tmp_path / "out")
    outside = cluster.others[0]
    plain = cluster.url.replace("https:", "http:")
    port = int(cluster.url.rpartition(":")[2])
    join = cluster.join.read_text()
    other_ca = re.sub(r"^ks1\.[0-9a-f]{64}", "ks1." + "0" * 64, join)
    expired = cluster.token("--ttl", "1s")
    tries = [
        (["agent", "--orchestrator", plain], join, "not encrypted"),
        (["agent", "--orchestrator", cluster.url], "", "no token"),
        (["agent", "--orchestrator", cluster.url], cluster.entry["token"], "whom to believe"),
        (["agent", "--orchestrator", cluster.url], other_ca, "not the orchestrator"),
        (["agent", "--orchestrator", cluster.url], join, "no live job"),
        (["agent", "--orchestrator", cluster.url], join[:-1] + "!", "wrong or has expired"),
        (["run", "--orchestrator", plain, str(SCRIPT)], cluster.operator, "not encrypted"),
        (["run", "--orchestrator", cluster.url, str(SCRIPT)], join, "token missing or wrong"),
        (["agent", "--orchestrator", cluster.url], expired, "wrong or has expired"),
    ]
    for words, token, said in tries:
        done = outside.run(*words, KEEPSTEP_TOKEN=token)
        assert done.returncode == 2, (words, done.stderr)
        assert said in done.stderr and "hint: " in done.stderr, (words, done.stderr)
    # Without TLS nobody is talked to, on either port.
    probe = (
        "import socket, sys\n"
        "for port in map(int, sys.argv[2:]):\n"
        "    sock = socket.create_connection((sys.argv[1], port), 5)\n"
        "    sock.sendall(b'GET /v1/jobs HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "    sock.settimeout(5)\n"
        "    assert not sock.recv(100).startswith(b'HTTP'), port\n"
    )
    ports = [str(port), str(cluster.entry["stream"]["port"])]
    words = outside.command("-c", probe, cluster.head.address, *ports)
    subprocess.run(words, check=True, timeout=30)


@pytest.mark.timeout(150)
def test_a_launcher_joins_its_own_nodes(lab: Lab, tmp_path: Path) -> None:
    """`keepstep run` without --nnodes under an orchestrator of another machine."""
    cluster = Cluster(lab, jobs_at=tmp_path / "out")
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('here is rank', os.environ['RANK'])\n")
    machine = cluster.others[0]
    words = ("run", "--orchestrator", cluster.url, "--local-nodes", "2", str(script))
    done = machine.run(*words, KEEPSTEP_TOKEN=cluster.operator)
    assert done.returncode == 0, done.stderr + lab.logs()
    assert sorted(line[-6:] for line in done.stdout.splitlines()) == ["rank 0", "rank 1"]
    assert machine.pids() == [] and list(machine.home.glob("nodes/*")) == []
    assert b"here is rank" not in lab.sniffer.seen()


@pytest.mark.timeout(280)
def test_two_orchestrators_share_an_authority_and_operators_are_elsewhere(
    lab: Lab, tmp_path: Path, postgres: Any
) -> None:
    """The active one is killed: nodes, tokens and operators go on with the other."""
    pair = Pair(lab, postgres.beyond(postgres.store()), tmp_path)
    for machine in lab.machines[:2]:
        assert not list(machine.home.glob("authorities/*/ca.key"))
    listed = pair.first.run("token", "list", "--json", KEEPSTEP_STORE=pair.store)
    assert sorted(one["role"] for one in json.loads(listed.stdout)) == ["join", "operator"]
    pair.agent("n0", pair.urls[0])
    pair.agent("n1", pair.urls[1])  # a standby, and it says so
    slow, out = tmp_path / "slow", tmp_path / "out"
    slow.touch()
    out.mkdir()
    run = pair.job("--out", str(out), *STEPS, "--slow", str(slow))

    def step() -> int:
        seen = pair.jobs(at=pair.urls[1])
        return seen[0].committed_step if seen else 0

    lab.until(lambda: step() >= 3, "the first steps")
    pair.running[0].kill()
    pair.running[0].wait()
    lab.until(lambda: pair.connected() == ["n0", "n1"], "both nodes at the other one")
    pair.agent("n2", ",".join(pair.urls))
    lab.until(lambda: pair.connected() == ["n0", "n1", "n2"], "a node that joins the other one")
    lab.until(lambda: [s for s in pair.operate("spares") if s["state"] == "parked"], "a spare")
    moved = pair.operate("migrate", "--rank", "1")
    assert moved["outcome"] == "RESOLVED", moved
    assert "no live job x" in pair.operate("drain", "n1", "--job", "x")
    slow.unlink()
    assert run.wait(DEADLINE_S) == 0, lab.logs()
    pair.running[1].terminate()
    pair.running[1].wait()
    assert "no orchestrator answers" in pair.operate("status")
    after = pair.third.run("status", "--json", KEEPSTEP_STORE=pair.store)
    assert [(one["job"], one["state"]) for one in json.loads(after.stdout)] == [("job", "done")]
    after = pair.third.run("incidents", "--json", "--store", pair.store)
    assert [one["outcome"] for one in json.loads(after.stdout)] == ["RESOLVED"]
    assert b"PRIVATE KEY" not in lab.sniffer.seen()


class Pair:
    """Two orchestrators on one store; everything else is on the third machine."""

    def __init__(self, lab: Lab, store: str, folder: Path) -> None:
        self.store = store
        self.first, self.second, self.third = lab.machines
        self.running: list[subprocess.Popen[str]] = []
        self.urls: list[str] = []
        for machine, id in ((self.first, "a"), (self.second, "b")):
            words = ("orchestrator", "--id", id, "--host", machine.address, "--lease", "3")
            self.running.append(machine.start("orchestrator", *words, KEEPSTEP_STORE=store))
            entry = machine.home / "orchestrators" / f"{id}.json"
            lab.until(entry.exists, f"orchestrator {id}")
            self.urls.append(json.loads(entry.read_text())["url"])
        # A token is made beside either of them, and good at both.
        self.join = self._token(self.first, folder / "join")
        self.operator = self._token(self.second, folder / "operator", "--operator")

    def _token(self, machine: Machine, file: Path, *words: str) -> Path:
        made = machine.run("token", "create", *words, KEEPSTEP_STORE=self.store)
        assert made.returncode == 0, made.stderr
        file.write_text(made.stdout)
        return file

    def agent(self, node: str, urls: str) -> None:
        words = ("agent", "--orchestrator", urls, "--node", node, "--wait")
        self.third.start(f"agent-{node}", *words, "--token-file", str(self.join))

    def job(self, *arguments: str) -> subprocess.Popen[str]:
        words = ["run", "--orchestrator", ",".join(self.urls), "--job-id", "job", "--nnodes", "2"]
        words += ["--nproc-per-node", "1", "--spares", "1", "--stall-timeout", STALL_S]
        words += [str(SCRIPT), *arguments]
        return self.third.start("run", *words, KEEPSTEP_TOKEN=self.operator.read_text().strip())

    def operate(self, *words: str, at: str = "") -> Any:
        """The JSON that a command prints, or its error."""
        where = ("--orchestrator", at or ",".join(self.urls), "--token-file", str(self.operator))
        done = self.third.run(*words, *where, "--json")
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    def jobs(self, at: str = "") -> list[JobView]:
        """As `status` shows them; none if it was refused."""
        seen = self.operate("status", at=at)
        return msgspec.convert(seen, list[JobView]) if isinstance(seen, list) else []

    def connected(self) -> list[str]:
        seen = self.jobs()
        nodes = seen[0].nodes if seen else []
        return [one.node for one in nodes if one.state == "connected"]
