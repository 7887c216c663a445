"""The network plugin between two namespaces: what it costs, and what a fault costs.

    goodput     two paths with a rate limit against one, and one path against a plain socket loop of
                the design of NCCL's own transport, at several sizes; no limit there, so that the
                processor is the bottleneck and every instruction shows
    faults      one of two paths is lost while large messages flow: the longest time without an
                arrival, the share of the bandwidth that is left, the time until all of it is back

Ratios are taken inside a round, and the order in a round is drawn anew. Both ends and the network
share this machine's processors.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from tests.network.faults import Watch
from tests.network.rig import Ended, Rig, rig, why_not

RATE_MBIT = 200
KIB = 1024
SIZES = tuple(KIB * n for n in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 16384))
BYTES_PER_RUN = 600_000_000
MESSAGES_MAX = 60_000
LARGE = 524288
BUCKET_NS = 50_000_000
BEFORE_S, DURING_S, AFTER_S = 1.0, 2.0, 2.5


def run(quick: bool, rounds: int | None = None) -> list[str]:
    if reason := why_not():
        return [f"network: skipped, {reason}"]
    rounds = rounds or (2 if quick else 9)
    begun = report.Provenance()
    raw: dict[str, Any] = {"two_paths": [], "plain": {}, "faults": {}, "tcp": _tcp()}
    for number in range(rounds):
        report.say(f"network: round {number + 1} of {rounds}")
        order = random.Random(number)
        raw["two_paths"].append(_two_paths(order))
        for size, ratio in _against_plain(order):
            raw["plain"].setdefault(str(size), []).append(ratio)
        for kind in ("link down", "silent loss"):
            raw["faults"].setdefault(kind, []).append(_fault(kind))
    summary = {
        "two_paths_ratio": report.summary(raw["two_paths"]),
        "against_plain": {size: report.summary(seen) for size, seen in raw["plain"].items()},
        "faults": {
            kind: {name: report.summary([one[name] for one in seen]) for name in seen[0]}
            for kind, seen in raw["faults"].items()
        },
    }
    report.write("network", quick, begun.close(), {"raw": raw, "summary": summary})
    return [_tables(summary)]


def _tcp() -> dict[str, str]:
    """What both sides of a ratio share, and what differs between machines."""
    settings = Path("/proc/sys/net/ipv4")
    names = ("tcp_congestion_control", "tcp_rmem", "tcp_wmem")
    return {name: " ".join((settings / name).read_text().split()) for name in names}


def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="n")


def _flow(made: Rig, size: int, messages: int, lib: str = "", **env: str) -> Ended:
    words = ("--size", str(size), "--messages", str(messages), "--verify", "0")
    sender, receiver = made.pair(*words, lib=lib, **env)
    sender.result().assert_clean()
    received = receiver.result()
    received.assert_clean()
    sender.close()
    receiver.close()
    return received


def _shuffled(order: random.Random, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    names = list(ways)
    order.shuffle(names)
    return {name: ways[name]() for name in names}


def _two_paths(order: random.Random) -> float:
    with _home() as home, rig(Path(home), rate_mbit=RATE_MBIT) as made:
        one = {"KEEPSTEP_NET_PATHS": "p0"}
        seen = _shuffled(
            order,
            {
                "one": lambda: _flow(made, LARGE, 100, **one).goodput_mbit(),
                "two": lambda: _flow(made, LARGE, 200).goodput_mbit(),
            },
        )
    return seen["two"] / seen["one"]


def _against_plain(order: random.Random) -> Iterator[tuple[int, float]]:
    one = {"KEEPSTEP_NET_PATHS": "p0"}
    with _home() as home, rig(Path(home), paths=1, rate_mbit=100_000) as made:
        for machine in made.machines:
            made.unlimited(machine, "p0")

        def rate(size: int, lib: str, **env: str) -> float:
            messages = min(MESSAGES_MAX, BYTES_PER_RUN // size)
            return _flow(made, size, messages, lib=lib, **env).goodput_mbit()

        for size in SIZES:
            ways = {"plain": partial(rate, size, "plain"), "plugin": partial(rate, size, "", **one)}
            seen = _shuffled(order, ways)
            yield size, seen["plugin"] / seen["plain"]


def _fault(kind: str) -> dict[str, float]:
    """Before, during and after the loss of one path of two."""
    with _home() as home, rig(Path(home), rate_mbit=RATE_MBIT) as made:
        stop = made.folder / "stop"
        ends = made.pair("--size", str(LARGE), "--stop", str(stop), "--verify", "0")
        watch = Watch(made, ends)
        watch.settle()
        time.sleep(BEFORE_S)
        lost_ns = time.monotonic_ns()
        _cut(made, kind, True)
        time.sleep(DURING_S)
        healed_ns = time.monotonic_ns()
        _cut(made, kind, False)
        time.sleep(AFTER_S)
        ended_ns = time.monotonic_ns()
        stop.touch()
        sender, receiver = ends
        sender.result().assert_clean()
        seen = receiver.result()
        seen.assert_clean()
    lane = seen.lane("receive")
    gaps = [length for at, length in lane["gaps"] if lost_ns - BUCKET_NS < at < lost_ns + 1e9]
    before = _rate(lane, lost_ns - int(BEFORE_S * 0.8e9), lost_ns)
    during = _rate(lane, lost_ns + int(0.8e9), healed_ns)
    back_ns = _back(lane, healed_ns, ended_ns, 0.9 * before)
    return {
        "longest_gap_ms": max(gaps, default=0) / 1e6,
        "kept": during / (before / 2),
        "full_again_ms": (back_ns - healed_ns) / 1e6,
    }


def _cut(made: Rig, kind: str, cut: bool) -> None:
    if kind == "link down":
        made.link(made.machines[0], 0, not cut)
    else:
        for machine in made.machines:
            made.drop(machine, 0, cut)


def _buckets(lane: dict[str, Any], begin_ns: int, end_ns: int) -> Iterator[tuple[int, int]]:
    counted = dict(lane["buckets"])
    for bucket in range(begin_ns // BUCKET_NS + 1, end_ns // BUCKET_NS):
        yield bucket * BUCKET_NS, counted.get(bucket, 0)


def _rate(lane: dict[str, Any], begin_ns: int, end_ns: int) -> float:
    """Bytes in a bucket, on average."""
    seen = [count for _, count in _buckets(lane, begin_ns, end_ns)]
    return sum(seen) / len(seen)


def _back(lane: dict[str, Any], healed_ns: int, ended_ns: int, wanted: float) -> int:
    """From here on half a second has the wanted rate; the end if that never comes."""
    for begin_ns, _ in _buckets(lane, healed_ns, ended_ns - 500_000_000):
        if _rate(lane, begin_ns, begin_ns + 500_000_000) >= wanted:
            return begin_ns
    return ended_ns


def _tables(summary: dict[str, Any]) -> str:
    rows: list[list[Any]] = [["two paths : one path", *_cells(summary["two_paths_ratio"])]]
    for size, seen in summary["against_plain"].items():
        rows.append([f"plugin : plain loop, {int(size) // 1024} KiB", *_cells(seen)])
    for kind, seen in summary["faults"].items():
        rows.append([f"{kind}: longest gap, ms", *_cells(seen["longest_gap_ms"])])
        rows.append([f"{kind}: bandwidth kept : half", *_cells(seen["kept"])])
        rows.append([f"{kind}: all of it again after, ms", *_cells(seen["full_again_ms"])])
    return report.table("Network plugin", ["", "p50", "min", "max"], rows)


def _cells(seen: dict[str, float]) -> list[float]:
    return [seen[name] for name in ("p50", "min", "max")]
