"""Faults of a rig: how each begins and ends, and whether the plugin must have noticed it."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.network.rig import Harness, Rig, wait_until

# A silent loss shows after the kernel's first retransmission timeout; a shorter one may not.
NOTICED_S = 1.2
# Reasons that come from a clock. A reset just before may still be on its way to its notice.
BY_A_CLOCK = ("no acknowledgement", os.strerror(errno.ETIMEDOUT))


@dataclass(frozen=True)
class Fault:
    kind: str
    begin: Callable[[], None]
    end: Callable[[], None]
    hold_s: float
    noticed: bool  # a path must have been lost or suspected while it lasted


def nothing() -> None:
    pass


def draw(rig: Rig, ends: tuple[Harness, Harness], choose: random.Random) -> Fault:
    """One fault, anywhere. Paths that are untouched keep working unless the kind says all."""
    kind = choose.choice(
        ["link-down"] * 4
        + ["drop-out", "drop-in", "drop-both", "drop-short"]
        + ["reset"] * 3
        + ["flaps", "all-down", "all-drop", "slow", "stop-sender", "stop-receiver"]
    )
    return make(kind, rig, ends, choose)


def make(kind: str, rig: Rig, ends: tuple[Harness, Harness], choose: random.Random) -> Fault:
    a, b = rig.machines
    path = choose.randrange(rig.paths)
    side = choose.choice([a, b])
    short = choose.uniform(0.02, 0.4)
    every = range(rig.paths)

    def links(machine: str, paths: range | list[int], up: bool) -> None:
        for one in paths:
            rig.link(machine, one, up)

    def drops(machines: list[str], paths: range | list[int], drop: bool) -> None:
        for machine in machines:
            for one in paths:
                rig.drop(machine, one, drop)

    def flaps() -> None:
        for _ in range(4):
            rig.link(side, path, False)
            time.sleep(choose.uniform(0.01, 0.05))
            rig.link(side, path, True)
            time.sleep(choose.uniform(0.01, 0.1))

    if kind == "link-down":
        return Fault(
            kind,
            lambda: links(side, [path], False),
            lambda: links(side, [path], True),
            short,
            True,
        )
    if kind.startswith("drop"):
        at = {"drop-out": [a], "drop-in": [b], "drop-both": [a, b], "drop-short": [side]}[kind]
        long = kind != "drop-short"
        return Fault(
            kind,
            lambda: drops(at, [path], True),
            lambda: drops(at, [path], False),
            NOTICED_S if long else 0.1,
            long,
        )
    if kind == "reset":
        return Fault(kind, lambda: rig.reset(side, path), nothing, 0.0, True)
    if kind == "flaps":
        return Fault(kind, flaps, nothing, 0.0, True)
    if kind == "all-down":
        return Fault(
            kind, lambda: links(side, every, False), lambda: links(side, every, True), short, True
        )
    if kind == "all-drop":
        return Fault(
            kind,
            lambda: drops([side], every, True),
            lambda: drops([side], every, False),
            NOTICED_S,
            True,
        )
    if kind == "slow":
        device = f"p{path}"
        return Fault(
            kind,
            lambda: rig.set_rate(a, device, max(1, rig.rate_mbit // 20)),
            lambda: rig.set_rate(a, device, rig.rate_mbit),
            0.5,
            False,
        )
    stopped = ends[0 if kind == "stop-sender" else 1]
    return Fault(
        kind,
        lambda: os.kill(stopped.pid, signal.SIGSTOP),
        lambda: os.kill(stopped.pid, signal.SIGCONT),
        choose.uniform(0.3, 1.0),
        False,
    )


class Watch:
    """Counts what fired. A fault that nobody noticed, though it had to be, is an error."""

    def __init__(self, rig: Rig, ends: tuple[Harness, Harness]) -> None:
        self.rig = rig
        self.ends = ends
        self.fired: dict[str, int] = {}

    def inject(self, fault: Fault, settled: bool = True) -> None:
        """Not settled: the path may be down already, and then there is nothing to notice."""
        since = time.monotonic_ns()
        fault.begin()
        try:
            threading.Event().wait(fault.hold_s)  # the fault's length, not a wait for anything
            if fault.noticed and settled:
                wait_until(
                    lambda: bool(self.rig.heard("path-down", "path-suspect", since_ns=since)),
                    f"{fault.kind} to be noticed",
                    15,
                )
            elif fault.kind.startswith("stop") and settled:
                lost = [
                    *self.rig.heard("path-suspect", since_ns=since),
                    *(
                        e
                        for e in self.rig.heard("path-down", since_ns=since)
                        if e["reason"] in BY_A_CLOCK
                    ),
                ]
                assert not lost, f"a stopped process was taken for a dead path: {lost}"
        finally:
            fault.end()
        self.fired[fault.kind] = self.fired.get(fault.kind, 0) + 1

    def settle(self) -> None:
        """All paths of both ends are up again."""
        wait_until(self.all_up, "all paths to be up again", 30)

    def all_up(self) -> bool:
        up: dict[tuple[str, int], bool] = {}
        for event in self.rig.heard("path-up", "path-down", "path-suspect"):
            up[event["harness"], event["path"]] = event["event"] == "path-up"
        return len(up) == 2 * self.rig.paths and all(up.values())


QUICK = {"KEEPSTEP_NET_HOLD_MS": "20"}  # a flapping path comes back soon: more faults per minute


@dataclass(frozen=True)
class Soaked:
    fired: dict[str, int]
    messages: int
    bytes: int
    corrupt: int
    missing: int


def soak(made: Rig, faults: int, seed: int, *words: str, helpers: str) -> Soaked:
    """So many faults on one pair; then everything has arrived, once and right."""
    stop = made.folder / "stop"
    env = {**QUICK, "KEEPSTEP_NET_HELPERS": helpers}
    ends = made.pair("--size", "mix", "--stop", str(stop), *words, **env)
    watch = Watch(made, ends)
    choose = random.Random(seed)
    watch.settle()
    for _ in range(faults):
        # Half of the faults meet paths that have not recovered from the last one.
        settled = choose.random() < 0.5
        if settled:
            watch.settle()
        watch.inject(draw(made, ends, choose), settled)
    watch.settle()
    stop.touch()
    sender, receiver = ends
    sent, received = sender.result(), receiver.result()
    sent.assert_clean()
    received.assert_clean()
    assert sent.lane("send")["messages"] == received.lane("receive")["messages"]
    assert sender.close() == 0 and receiver.close() == 0
    lane = received.lane("receive")
    missing = abs(sent.lane("send")["messages"] - lane["messages"])
    return Soaked(watch.fired, lane["messages"], lane["bytes"], lane["corrupt"], missing)
