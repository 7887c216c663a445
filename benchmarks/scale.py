"""How far one orchestrator goes: the core alone with simulated agents in one process, then the
real orchestrator with simulated agents on real streams."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from benchmarks import report, sockets
from benchmarks.agents import DELAY_NS, SLOTS, Cluster

RANKS = {64: 20, 1024: 20, 16384: 20, 131072: 20}  # ranks -> kills, and as many taints
AGENTS = {129: 5, 1025: 5, 2049: 3}  # with the spares' node -> likewise
BEATS = 2000
NOT_OURS = (type, types.ModuleType, types.FunctionType, types.MethodType)


def held_bytes(root: object) -> int:
    """Size of everything that is reachable from `root`, without code."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, NOT_OURS):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return total


def measure_core(ranks: int, moves: int) -> dict[str, Any]:
    chance = random.Random(ranks)
    cluster = Cluster(ranks)
    cluster.start()
    start_cpu_s = cluster.cpu_ns / 1e9
    beats = cluster.heartbeats(chance.choices(list(cluster.nodes.values()), k=BEATS))
    victims = chance.sample(range(ranks), 2 * moves + 2)
    kills = [cluster.kill(victims.pop()) for _ in range(moves)]
    taints = [cluster.taint(victims.pop()) for _ in range(moves)]
    cluster.charge = True
    charged = {"kill": cluster.kill(victims.pop()), "taint": cluster.taint(victims.pop())}
    return {
        "ranks": ranks,
        "agents": len(cluster.nodes),
        "held_mib": held_bytes(cluster.core) / 2**20,
        "start_cpu_s": start_cpu_s,
        "beat_cpu_us": report.summary(beats),
        "kills": [asdict(move) for move in kills],
        "taints": [asdict(move) for move in taints],
        "charged": {name: asdict(move) for name, move in charged.items()},
    }


def measure_sockets(agents: int, seconds: float, moves: int) -> dict[str, Any]:
    return asyncio.run(sockets.measure(agents, seconds, moves))


def run(quick: bool, rounds: int | None = None) -> list[str]:
    provenance = report.Provenance()
    sizes = {64: 3, 1024: 2} if quick else RANKS
    counts = {17: 2} if quick else AGENTS
    tasks: list[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]] = [
        ("sockets", measure_sockets, (agents, 3.0 if quick else 10.0, rounds or moves))
        for agents, moves in counts.items()
    ]
    tasks += [("core", measure_core, (ranks, rounds or moves)) for ranks, moves in sizes.items()]
    found: dict[str, list[dict[str, Any]]] = {"core": [], "sockets": []}
    for kind, measure, arguments in tasks:
        # A fresh process each: what a larger job leaves behind is not the next one's.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found[kind].append(pool.submit(measure, *arguments).result())
        # Each time: the largest size takes long, and may be given up.
        result = {"delay_ms": DELAY_NS / 1e6, "slots": SLOTS, **found}
        report.write("scale", quick, provenance.close(), result)
        report.say(f"scale: {kind} {arguments[0]} done")
    return [_signals(found["core"]), _moves(found["core"]), _sockets(found["sockets"])]


def _signals(core: list[dict[str, Any]]) -> str:
    rows = []
    for one in core:
        beat = one["beat_cpu_us"]
        signals = [
            report.summary([m["signal_cpu_ms"] for m in one[k]]) for k in ("kills", "taints")
        ]
        load = beat["mean"] * one["agents"] / 1e6
        rows.append(
            [one["ranks"], one["agents"], one["held_mib"], beat["p50"], beat["p99"], 100 * load]
            + [value for s in signals for value in (s["p50"], s["p99"])]
        )
    return report.table(
        "Core in one process, CPU time (signal: until the plan and its first commands)",
        ["ranks", "agents", "MiB", "beat p50 us", "p99", "beats, % of a core",
         "kill p50 ms", "p99", "taint p50 ms", "p99"],
        rows,
    )  # fmt: skip


def _moves(core: list[dict[str, Any]]) -> str:
    rows = []
    for one in core:
        for kind, name in (("kills", "kill"), ("taints", "taint")):
            move = one[kind][0]
            messages = move["inputs"] + move["commands"]
            cpu_us = report.summary([m["cpu_s"] / one["ranks"] * 1e6 for m in one[kind]])
            pauses = move["pause_ms"], one["charged"][name]["pause_ms"]
            each = messages / one["ranks"]
            rows.append([f"{one['ranks']} {name}", messages, each, cpu_us["p50"], *pauses])
    return report.table(
        "One migration of one rank, virtual time, state transfer and construction excluded",
        ["ranks", "messages", "per rank", "CPU us per rank", "pause ms", "with the core's CPU"],
        rows,
    )


def _sockets(real: list[dict[str, Any]]) -> str:
    rows = []
    for one in real:
        plans = [report.summary([m["plan_ms"] for m in one[k]]) for k in ("kills", "taints")]
        swapped = report.summary([m["swapped_ms"] for m in one["kills"]])
        rows.append(
            [one["agents"], one["ranks"], one["rss_mib"], one["beats_per_s"]]
            + [100 * one["core_share"], one["beat_cpu_us"]]
            + [value for plan in plans for value in (plan["p50"], plan["max"])]
            + [swapped["p50"]]
        )
    return report.table(
        "Real orchestrator, real streams (plan: signal sent to first command received)",
        ["agents", "ranks", "RSS MiB", "beats/s", "% of a core", "us a beat", "kill plan ms", "max",
         "taint plan ms", "max", "kill to last swap ms"],
        rows,
    )  # fmt: skip
