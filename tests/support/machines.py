"""Machines that are network namespaces: each with an address of its own, all at one switch.

    root namespace: untouched
    switch: a bridge `sw` with one veth per machine; everything between machines passes it
    machine i: eth0 with 10.87.0.<i + 1>, and a loopback of its own

A `Sniffer` in the switch's namespace keeps every byte that crosses it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from keepstep.model.views import IncidentView, JobView
from tests.support.scripts import SCRIPT

PYTHON = sys.executable
DEADLINE_S = 120.0

SNIFF = r"""
import socket, sys
everything = 3  # ETH_P_ALL
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(everything))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing may be missed
with open(sys.argv[1], "wb", buffering=0) as file:
    print("listening", flush=True)
    while True:
        file.write(sock.recv(1 << 18))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str:
    """Empty if namespaces can be made here."""
    if shutil.which("ip") is None:
        return "the command `ip` is missing (Debian: iproute2)"
    name = f"ks-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "name", "left", "type", "veth", "peer", "name", "right")
        finally:
            ip("netns", "del", name)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"`ip netns` does not work here: {said.strip()}"
    return ""


class Machine:
    def __init__(self, namespace: str, address: str, home: Path) -> None:
        self.namespace = namespace
        self.address = address
        self.home = home
        self.started: list[subprocess.Popen[str]] = []

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, PYTHON, *words]

    def environment(self, **more: str) -> dict[str, str]:
        dropped = ("RANK", "WORLD_SIZE", "KEEPSTEP_TOKEN", "GLOO_SOCKET_IFNAME")
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        return {**env, "KEEPSTEP_HOME": str(self.home), "OMP_NUM_THREADS": "1", **more}

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`keepstep WORDS` to its end."""
        return subprocess.run(
            self.command("-m", "keepstep", *words),
            env=self.environment(**env),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    def start(self, name: str, *words: str, **env: str) -> subprocess.Popen[str]:
        """`keepstep WORDS` beside us; its output is in HOME/<name>.log."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("w") as log:
            process = subprocess.Popen(
                self.command("-m", "keepstep", *words),
                env=self.environment(**env),
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def pids(self) -> list[int]:
        """Whatever runs in this machine's network."""
        words = ["ip", "netns", "pids", self.namespace]
        return [int(pid) for pid in subprocess.check_output(words, text=True).split()]


class Sniffer:
    def __init__(self, namespace: str, file: Path) -> None:
        self._file = file
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, PYTHON, "-c", SNIFF, str(file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listening\n"

    def seen(self) -> bytes:
        return self._file.read_bytes()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Lab:
    def __init__(self, machines: list[Machine], sniffer: Sniffer) -> None:
        self.machines = machines
        self.sniffer = sniffer

    def until(self, condition: Callable[[], Any], what: str, seconds: float = DEADLINE_S) -> Any:
        end = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > end:
                raise AssertionError(f"waited for {what}\n{self.logs()}")
            time.sleep(0.05)
        return value

    def logs(self) -> str:
        texts = []
        for machine in self.machines:
            for path in sorted(machine.home.rglob("*.log")):
                texts.append(f"== {path}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)


@contextmanager
def laboratory(base: Path, count: int) -> Iterator[Lab]:
    tag = f"ks{secrets.token_hex(2)}"
    switch = f"{tag}-sw"
    names = [f"{tag}-{i}" for i in range(count)]
    made: list[str] = []
    machines: list[Machine] = []
    sniffer: Sniffer | None = None
    try:
        ip("netns", "add", switch)
        made.append(switch)
        ip("-n", switch, "link", "add", "name", "sw", "type", "bridge")
        ip("-n", switch, "link", "set", "sw", "up")
        for i, name in enumerate(names):
            ip("netns", "add", name)
            made.append(name)
            address = f"10.87.0.{i + 1}"
            ip("-n", switch, "link", "add", "name", f"port{i}", "type", "veth",
               "peer", "name", "eth0", "netns", name)  # fmt: skip
            ip("-n", switch, "link", "set", f"port{i}", "master", "sw", "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            machines.append(Machine(name, address, base / f"machine-{i}"))
        sniffer = Sniffer(switch, base / "sniffed")
        yield Lab(machines, sniffer)
    finally:
        for machine in machines:
            for process in machine.started:
                if process.poll() is None:
                    process.kill()
                process.wait()
            for pid in machine.pids():  # in namespaces that only this test has
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if sniffer is not None:
            sniffer.close()
        for name in made:
            ip("netns", "del", name)


STEPS = ["--epochs", "2", "--steps-per-epoch", "100"]
STALL_S = "40"


class Cluster:
    """An orchestrator on the first machine, and what it takes to use it from the others."""

    def __init__(self, lab: Lab, *, jobs_at: Path) -> None:
        self.lab = lab
        self.head, *self.others = lab.machines
        self.out = jobs_at
        words = ("orchestrator", "--id", "main", "--host", self.head.address)
        self.orchestrator = self.head.start("orchestrator", *words)
        entry = self.head.home / "orchestrators" / "main.json"
        lab.until(entry.exists, "the orchestrator")
        self.entry = json.loads(entry.read_text())
        self.url = self.entry["url"]
        self.operator = self.token("--operator")
        self.join = self.head.home / "join-token"
        self.join.write_text(self.token())

    def token(self, *words: str) -> str:
        done = self.head.run("token", "create", "--json", *words)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["token"])

    def job(self, *words: str, steps: list[str] = STEPS, slow: Path | None = None) -> Any:
        self.out.mkdir(parents=True, exist_ok=True)
        options = ["--out", str(self.out), *steps]
        if slow is not None:
            slow.touch()
            options += ["--slow", str(slow)]
        run = ("run", "--orchestrator", self.url, "--stall-timeout", STALL_S, "--job-id", "job")
        return self.head.start(
            "run", *run, *words, str(SCRIPT), *options, KEEPSTEP_TOKEN=self.operator
        )

    def agent(self, machine: Machine, node: str, *words: str) -> Any:
        where = ("--orchestrator", self.url, "--token-file", str(self.join))
        return machine.start(f"agent-{node}", "agent", *where, "--node", node, "--wait", *words)

    def look(self) -> JobView | None:
        done = self.head.run("status", "--json", "--job", "job")
        views = msgspec.json.decode(done.stdout, type=list[JobView]) if done.stdout else []
        return views[0] if done.returncode == 0 and views else None

    def status(self) -> JobView:
        view = self.look()
        assert view is not None, self.lab.logs()
        return view

    def incidents(self) -> list[IncidentView]:
        done = self.head.run("incidents", "--json", "--job", "job")
        return msgspec.json.decode(done.stdout or "[]", type=list[IncidentView])

    def until_step(self, step: int) -> JobView:
        def reached() -> JobView | None:
            view = self.look()
            return view if view is not None and view.committed_step >= step else None

        view: JobView = self.lab.until(reached, f"step {step}")
        return view

    def end(self, process: subprocess.Popen[str]) -> None:
        code = process.wait(DEADLINE_S)
        assert code == 0, self.lab.logs()
