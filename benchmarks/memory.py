"""Memory that protection adds: in each rank, and in processes that stand beside the ranks.

The same script runs under torchrun and under Keepstep, several times in turn; a second torchrun
row is the control. RSS counts shared pages (torch's libraries) in every process; USS is what would
be free if only that process ended; PSS shares common pages out.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import psutil

from benchmarks import report
from benchmarks.drive import ASK_S, Keepstep, Launched, Torchrun

WORLD = 2
STEPS = 12
SAMPLES = 10
MIB = 2**20
KINDS = ("rss", "pss", "uss")


def role(process: psutil.Process, ranks: set[int], launcher: int) -> str:
    if process.pid in ranks:
        return "rank"
    if process.pid == launcher:
        return "launcher"
    words = " ".join(process.cmdline())
    for word, name in (("keepstep.agent", "agent"), ("keepstep-store", "store"),
                       ("keepstep.worker", "spare")):  # fmt: skip
        if word in words:
            return name
    return "other"


def sample(job: Launched) -> dict[str, dict[str, list[float]]]:
    """MiB per role; a role with several processes gives several values."""
    found: dict[str, dict[str, list[float]]] = {}
    ranks = {commit.pid for r in range(WORLD) if (commit := job.last_commit(r)) is not None}
    for process in [psutil.Process(job.process.pid), *job.descendants()]:
        try:
            name = role(process, ranks, job.process.pid)
            used = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        kept = found.setdefault(name, {kind: [] for kind in KINDS})
        for kind in KINDS:
            kept[kind].append(getattr(used, kind) / MIB)
    return found


def measure(job: Launched) -> dict[str, dict[str, float]]:
    with job:
        job.until(lambda: all(job.step(r) >= STEPS for r in range(WORLD)), f"step {STEPS}", 300)
        if isinstance(job, Keepstep):
            job.until(job.calm, "a parked spare", every_s=ASK_S)
        samples = []
        for _ in range(SAMPLES):
            samples.append(sample(job))
            time.sleep(0.2)
    result: dict[str, dict[str, float]] = {}
    for name in {name for one in samples for name in one}:
        values = [one[name] for one in samples if name in one]
        result[name] = {
            kind: statistics.median(v for one in values for v in one[kind]) for kind in KINDS
        }
    return result


def run(quick: bool, rounds: int | None = None) -> list[str]:
    provenance = report.Provenance()
    rounds = rounds or (1 if quick else 5)
    options = ["--nproc-per-node", str(WORLD), "--spares", "1", "--quiet"]
    runs: dict[str, list[dict[str, dict[str, float]]]] = {}
    for number in range(rounds):
        report.say(f"memory: round {number + 1} of {rounds}")
        for name, job in (
            ("torchrun", lambda: Torchrun(WORLD, "model.py", [])),
            ("keepstep", lambda: Keepstep(options, "model.py", [])),
            ("torchrun again", lambda: Torchrun(WORLD, "model.py", [])),
        ):
            runs.setdefault(name, []).append(measure(job()))
    summary = {
        name: {
            who: {k: statistics.median(one[who][k] for one in several if who in one) for k in KINDS}
            for who in sorted({who for one in several for who in one})
        }
        for name, several in runs.items()
    }
    base = summary["torchrun"]["rank"]
    added = {
        name: {k: summary[name]["rank"][k] - base[k] for k in KINDS}
        for name in ("keepstep", "torchrun again")
    }
    body = {
        "ranks": WORLD,
        "parameters": 6 * (2048 * 2048 + 2048),
        "rounds": rounds,
        "summary_mib": summary,
        "added_per_rank_mib": added,
        "runs_mib": runs,
    }
    path = report.write("memory", quick, provenance.close(), body)
    rows: list[list[Any]] = [
        [f"{name}: {who}", *(values[k] for k in KINDS)]
        for name, roles in summary.items()
        for who, values in roles.items()
    ]
    rows += [[f"added per rank: {n}", *(f"{v[k]:+.1f}" for k in KINDS)] for n, v in added.items()]
    names = ("memory, MiB (median)", *(kind.upper() for kind in KINDS))
    return [report.table("", names, rows), f"written: {path.name}"]
