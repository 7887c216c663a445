"""Machines that are network namespaces, joined by several veth pairs with a rate limit each.

    machine a: p0 10.88.0.1 ──── 10.88.0.2 p0 :machine b      path 0
               p1 10.88.1.1 ──── 10.88.1.2 p1                 path 1 ...

With a switch each path is a bridge in a namespace of its own, so that a machine does not see when
the link of another one goes down. Everything is made for one test and removed after it; a small
process removes it too if the test is killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from keepstep.native import plugin
from keepstep.native.build import cache_folder, compiler, once, run_all

NATIVE = Path(__file__).parent / "native"
RATE_MBIT = 200
DEADLINE_S = 60.0
_LIBC = ctypes.CDLL(None)


def run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=check, capture_output=True, text=True, timeout=20)


@cache
def why_not() -> str:
    """Empty if namespaces, veth pairs and queueing disciplines can be made here."""
    for tool in ("ip", "tc", "ss"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing (Debian: iproute2)"
    name = f"ksn-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "name", "x0", "type", "veth", "peer", "name", "x1")
            run("tc", "-n", name, "qdisc", "replace", "dev", "x0", "root", "blackhole")
            run("tc", "-n", name, "qdisc", "replace", "dev", "x0", "root", *limit(100))
        finally:
            run("ip", "netns", "del", name)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"network namespaces do not work here: {said.strip()}"
    return ""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)


@cache
def binaries(*extra: str) -> Path:
    """Plugin, harness and unit tests, built with these flags; cached by their sources."""
    digest = hashlib.sha256(" ".join([*plugin.FLAGS, *extra]).encode())
    for source in sorted([*plugin.SOURCES.iterdir(), *NATIVE.iterdir()]):
        digest.update(source.name.encode() + source.read_bytes())

    def fill(folder: Path) -> None:
        tool, include = compiler(), f"-I{plugin.SOURCES}"
        flags = [*plugin.FLAGS, *extra, include]
        tests = [str(NATIVE / "test_failover.cpp"), str(plugin.SOURCES / "failover.cpp")]
        run_all(
            [
                [tool, *flags, str(NATIVE / "harness.cpp"), "-ldl", "-o", str(folder / "harness")],
                [tool, *flags, *tests, "-o", str(folder / "test_failover")],
            ],
            hint="g++ with its sanitizer libraries is needed",
        )
        if extra:
            plugin.build(folder, extra)

    folder = cache_folder() / f"net-tests-{digest.hexdigest()[:16]}"
    once(folder, fill)
    return folder


def library(*extra: str) -> Path:
    return (binaries(*extra) if extra else plugin.ensure()) / plugin.NCCL_NAME


def limit(rate_mbit: int) -> list[str]:
    return ["tbf", "rate", f"{rate_mbit}mbit", "burst", "64kb", "latency", "20ms"]


# ------------------------------------------------------------------------------------ harness


@dataclass
class Ended:
    begun_ns: int
    cpu_s: float
    lanes: dict[str, dict[str, Any]]
    stderr: str

    def lane(self, name: str) -> dict[str, Any]:
        return self.lanes[name]

    def goodput_mbit(self) -> float:
        """After the first arrival: how long connecting took is another question."""
        lane = self.lanes["receive"]
        arrived = lane["bytes"] - lane["first_bytes"]
        return float(arrived * 8e3 / (lane["done_at_ns"] - lane["first_at_ns"]))

    def assert_clean(self) -> None:
        for name, lane in self.lanes.items():
            wrong = {k: lane[k] for k in ("corrupt", "wrong_size", "late", "error") if lane[k]}
            assert not wrong, f"{name}: {wrong}\n{self.stderr}"
            assert lane["finished"], f"{name} did not finish: {lane['messages']} messages"


class Harness:
    """One process in one machine that sends, receives, or both."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        # The file is made before the process: what it says last is kept even if it is killed.
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=lambda: _LIBC.prctl(1, signal.SIGKILL),  # dies with the test
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", f"{line!r}\n{self.log.read_text()}"

    def result(self) -> Ended:
        """Waits for the last line; the process then holds its communicators until `close`."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"exit {self.process.wait()}\n{self.log.read_text()[-4000:]}"
        said = json.loads(line)
        lanes = {name: said[name] for name in ("receive", "send") if name in said}
        return Ended(said["begun_ns"], said["cpu_s"], lanes, self.log.read_text())

    def close(self) -> int:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout=30)


class Ear:
    """Takes a plugin's words as they come: the kernel queues ten, the rest would be old news."""

    def __init__(self, path: Path, name: str, events: list[dict[str, Any]]) -> None:
        self._name = name
        self._events = events
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while data := self._socket.recv(65536):
            self._events.append({**json.loads(data), "harness": self._name})

    def close(self) -> None:
        path = self._socket.getsockname()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", path)
        self._thread.join(timeout=10)
        self._socket.close()


# ---------------------------------------------------------------------------------------- rig


@dataclass
class Rig:
    machines: list[str]
    paths: int
    folder: Path
    v6: bool = False
    rate_mbit: int = RATE_MBIT
    switch: str = ""  # its namespace
    started: list[Harness] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    sockets: dict[str, Ear] = field(default_factory=dict)

    # ------------------------------------------------------------------------- making it

    def build(self) -> None:
        for name in self.namespaces():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for name in self.machines:
            keep = "net.ipv6.conf.all.keep_addr_on_down=1"
            run("ip", "netns", "exec", name, "sysctl", "-qw", keep)
        for path in range(self.paths):
            if self.switch:
                run("ip", "-n", self.switch, "link", "add", "name", f"b{path}", "type", "bridge")
                run("ip", "-n", self.switch, "link", "set", f"b{path}", "up")
            else:
                self._cable(self.machines[0], f"p{path}", self.machines[1], f"p{path}")
            for host, machine in enumerate(self.machines, start=1):
                if self.switch:
                    port = f"m{host}p{path}"
                    self._cable(machine, f"p{path}", self.switch, port)
                    run("ip", "-n", self.switch, "link", "set", port, "master", f"b{path}", "up")
                address = self.address(path, host) + ("/64" if self.v6 else "/24")
                extra = ["nodad"] if self.v6 else []
                run("ip", "-n", machine, "addr", "add", address, "dev", f"p{path}", *extra)
                run("ip", "-n", machine, "link", "set", f"p{path}", "up")
                self.set_rate(machine, f"p{path}", self.rate_mbit)

    def add_v6(self) -> None:
        """Second addresses: fd99:<path>::<host>."""
        for host, machine in enumerate(self.machines, start=1):
            for path in range(self.paths):
                address = f"fd99:{path}::{host}/64"
                run("ip", "-n", machine, "addr", "add", address, "dev", f"p{path}", "nodad")

    def namespaces(self) -> list[str]:
        return [*self.machines, self.switch] if self.switch else self.machines

    def _cable(self, left: str, device: str, right: str, other: str) -> None:
        run(
            *("ip", "link", "add", "name", device, "netns", left, "type", "veth"),
            *("peer", "name", other, "netns", right),
        )

    def address(self, path: int, host: int) -> str:
        return f"fd88:{path}::{host}" if self.v6 else f"10.88.{path}.{host}"

    def set_rate(self, machine: str, device: str, rate_mbit: int) -> None:
        self._queue(machine, device, *limit(rate_mbit))

    def unlimited(self, machine: str, device: str) -> None:
        run("tc", "-n", machine, "qdisc", "del", "dev", device, "root")

    def _queue(self, machine: str, device: str, *discipline: str) -> None:
        run("tc", "-n", machine, "qdisc", "replace", "dev", device, "root", *discipline)

    # ------------------------------------------------------------------------- processes

    def start(
        self, machine: str, *words: str, lib: str = "", extra: tuple[str, ...] = (), **env: str
    ) -> Harness:
        name = f"h{len(self.started)}"
        agent = self.folder / f"{name}.sock"
        self.sockets[name] = Ear(agent, name, self.events)
        host = self.machines.index(machine) + 1
        paths = ",".join(self.address(path, host) for path in range(self.paths))
        environment = {
            **os.environ,
            "KEEPSTEP_NET_PATHS": paths,
            "KEEPSTEP_NET_AGENT": str(agent),
            **env,
        }
        command = [
            *("ip", "netns", "exec", machine, "nice", "-n", "5", str(binaries(*extra) / "harness")),
            *("--lib", lib or str(library(*extra)), *words),
        ]
        harness = Harness(command, environment, self.folder / f"{name}.log")
        self.started.append(harness)
        return harness

    def pair(
        self, *words: str, extra: tuple[str, ...] = (), lib: str = "", **env: str
    ) -> tuple[Harness, Harness]:
        """A receiver in the second machine, a sender in the first; connected."""
        handle = self.folder / f"handle{len(self.started)}"
        a, b = self.machines[:2]
        more = ("--address", self.address(0, 2)) if lib == "plain" else ()
        receiver = self.start(
            b, "--listen", str(handle), *words, *more, extra=extra, lib=lib, **env
        )
        sender = self.start(a, "--connect", str(handle), *words, extra=extra, lib=lib, **env)
        receiver.ready()
        sender.ready()
        return sender, receiver

    def hear(self) -> list[dict[str, Any]]:
        """All events so far; those with "event" = "stats" are there too."""
        return list(self.events)

    def heard(self, *kinds: str, since_ns: int = 0) -> list[dict[str, Any]]:
        return [e for e in self.hear() if e["event"] in kinds and e["at_ns"] >= since_ns]

    # ---------------------------------------------------------------------------- faults

    def link(self, machine: str, path: int, up: bool) -> None:
        run("ip", "-n", machine, "link", "set", f"p{path}", "up" if up else "down")
        if up:
            self.set_rate(machine, f"p{path}", self.rate_mbit)

    def drop(self, machine: str, path: int, drop: bool) -> None:
        """Whatever this machine sends over the path vanishes."""
        if drop:
            self._queue(machine, f"p{path}", "blackhole")
        else:
            self.set_rate(machine, f"p{path}", self.rate_mbit)

    def reset(self, machine: str, path: int) -> None:
        peer = self.address(path, 2 - self.machines.index(machine))
        run("ip", "netns", "exec", machine, "ss", "-K", "dst", f"[{peer}]" if self.v6 else peer)

    def story(self) -> str:
        """What the plugins said, for a test that failed."""
        told = [e for e in self.hear() if e["event"] != "stats"][-40:]
        return "\n".join(json.dumps(event) for event in told)

    def teardown(self) -> None:
        for harness in self.started:
            harness.process.kill()
            harness.process.wait()
        for listener in self.sockets.values():
            listener.close()
        for name in self.namespaces():
            run("ip", "netns", "del", name, check=False)


@contextlib.contextmanager
def rig(
    folder: Path,
    *,
    machines: int = 2,
    paths: int = 2,
    v6: bool = False,
    rate_mbit: int = RATE_MBIT,
    switched: bool = False,
) -> Iterator[Rig]:
    token = secrets.token_hex(3)
    names = [f"ksn-{token}-{letter}" for letter in "abc"[:machines]]
    switch = f"ksn-{token}-s" if switched or machines > 2 else ""
    made = Rig(names, paths, folder, v6=v6, rate_mbit=rate_mbit, switch=switch)
    remove = "; ".join(f"ip netns del {name}" for name in made.namespaces())
    # If this process is killed, its end of the pipe closes and the namespaces go.
    janitor = subprocess.Popen(
        ["sh", "-c", f"cat > /dev/null; {remove}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        made.build()
        yield made
    except AssertionError as error:
        error.add_note(made.story())
        raise
    finally:
        made.teardown()
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(timeout=20)
