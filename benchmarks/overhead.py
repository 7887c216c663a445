"""What protection costs when nothing goes wrong: microseconds added to a step of about 50 ms.

Measured inside one run by alternating blocks (train/alternate.py), so that clock speed, caches and
neighbours hit all variants alike. Work that Keepstep does beside the steps (agents, orchestrator,
its thread in each rank) slows protected and plain steps alike and would not show there; its CPU
time is measured too and stated beside.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.drive import Keepstep

LAYOUTS = {
    "one node": ["--nproc-per-node", "2"],
    "buddy on another local node": ["--nproc-per-node", "1", "--local-nodes", "2"],
}
WORLD = 2


def control_plane_cpu_s(job: Keepstep) -> dict[str, float]:
    """CPU seconds so far of every process of the job that is no rank."""
    ranks = {rank["pid"] for rank in job.get()["ranks"]}
    used = {"launcher and orchestrator": _cpu_s(psutil.Process(job.process.pid))}
    for process in job.descendants():
        if process.pid in ranks:
            continue
        try:
            what = "agents" if "keepstep.agent" in process.cmdline() else "others"
            used[what] = used.get(what, 0.0) + _cpu_s(process)
        except psutil.NoSuchProcess:
            continue
    return used


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(options: list[str], arguments: list[str]) -> dict[str, Any]:
    with Keepstep([*options, "--quiet"], "alternate.py", arguments) as job:

        def everywhere(what: str) -> bool:
            return all((Path(job.out) / f"rank-{r}.{what}").exists() for r in range(WORLD))

        job.until(lambda: everywhere("begun"), "the first block", 300)
        before = control_plane_cpu_s(job)
        job.until(lambda: everywhere("measured"), "the last block", 1800)
        after = control_plane_cpu_s(job)
        job.wait(600)
        ranks = job.results(WORLD)
    window_s = statistics.fmean(rank["window_s"] for rank in ranks)
    result = compare(ranks)
    result["background"] = {
        "window_s": window_s,
        "cpu_percent_of_one_core": {
            **{k: 100 * (after[k] - before.get(k, 0.0)) / window_s for k in after},
            "thread in each rank": 100
            * statistics.fmean(rank["keepstep_threads_cpu_s"] for rank in ranks)
            / window_s,
        },
    }
    result["hot_path_us"] = hot_path(ranks)
    result["witnesses_us"] = witnesses(ranks)
    trips = [t / 1e3 for rank in ranks for t in rank["fence_round_trip_ns"]]
    result["fence_round_trip_us"] = report.summary(trips)
    result["missing_probes"] = ranks[0]["missing_probes"]
    return result


def compare(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Per round, the mean over ranks; differences are formed inside a round, then summed up."""
    block = ranks[0]["block"]
    rounds = [
        {name: statistics.fmean(r[name] for r in same) / block / 1e3 for name in same[0]}
        for same in zip(*(rank["rounds"] for rank in ranks))
    ]
    plain = [(r["plain"] + r["control"]) / 2 for r in rounds]
    added = [r["protected"] - p for r, p in zip(rounds, plain)]
    control = [r["control"] - r["plain"] for r in rounds]
    step_us = statistics.median(plain)
    return {
        "ranks": len(ranks),
        "parameters": ranks[0]["parameters"],
        "parameter_tensors": ranks[0]["tensors"],
        "rounds": len(rounds),
        "steps_per_block": block,
        "plain_step_us": step_us,
        "added_us": _estimate(added, step_us),
        "control_us": _estimate(control, step_us),
        "per_round_us": [{k: round(v, 1) for k, v in r.items()} for r in rounds],
    }


def _estimate(differences: list[float], step_us: float) -> dict[str, Any]:
    low, high = report.interval(differences)
    mean_low, mean_high = report.interval(differences, statistics.fmean)
    return {
        "median": statistics.median(differences),
        "interval95": [low, high],
        "mean": statistics.fmean(differences),
        "mean_interval95": [mean_low, mean_high],
        "ratio": 1 + statistics.median(differences) / step_us,
        "ratio_interval95": [1 + low / step_us, 1 + high / step_us],
    }


def hot_path(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Median microseconds per step and probe, over all ranks; order of first appearance."""
    found: dict[str, list[float]] = {}
    for rank in ranks:
        for step in rank["profile"]:
            for path, ns in step.items():
                found.setdefault(path, []).append(ns / 1e3)
    found["step"] = found.get("step", [])
    medians = {path: statistics.median(times) for path, times in sorted(found.items()) if times}
    own = []
    for rank in ranks:
        for step in rank["profile"]:
            inside = sum(ns for path, ns in step.items() if _directly_inside(path))
            own.append((step["step"] - step.get("step/function", 0) + inside) / 1e3)
    if own:
        medians["all of Keepstep"] = statistics.median(own)
    return medians


def _directly_inside(path: str) -> bool:
    """A probe that the user's own function has called."""
    return path.startswith("step/function/") and path.count("/") == 2


def witnesses(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds per step; the mean counts what is done now and then only."""
    found = [ns / 1e3 for rank in ranks for ns in rank["witnesses_ns"]]
    return {"median": statistics.median(found), "mean": statistics.fmean(found)}


def run(quick: bool, rounds: int | None = None) -> list[str]:
    provenance = report.Provenance()
    rounds = rounds or (20 if quick else 150)
    arguments = ["--rounds", str(rounds), "--profile", str(60 if quick else 300)]
    results = {}
    for name, options in LAYOUTS.items():
        report.say(f"overhead: {name}, {rounds} rounds")
        results[name] = measure(options, arguments)
    path = report.write("overhead", quick, provenance.close(), {"layouts": results})
    return [comparison_table(results), hot_path_table(results), f"written: {path.name}"]


def comparison_table(results: dict[str, Any]) -> str:
    rows = []
    for name, result in results.items():
        for label, key in (
            ("protected", "added_us"),
            ("control (plain against plain)", "control_us"),
        ):
            one = result[key]
            low, high = one["interval95"]
            rows.append(
                [
                    f"{name}: {label}",
                    f"{result['plain_step_us'] / 1e3:.1f} ms",
                    f"{one['median']:+.0f} us",
                    f"{low:+.0f} .. {high:+.0f} us",
                    f"{100 * (one['ratio'] - 1):+.2f} %",
                    f"{one['mean']:+.0f} us",
                ]
            )
    names = ("overhead per step", "plain step", "added", "95 % interval", "ratio", "mean")
    return report.table("", names, rows)


def hot_path_table(results: dict[str, Any]) -> str:
    paths = sorted({path for r in results.values() for path in r["hot_path_us"]})
    rows: list[list[Any]] = []
    for path in paths:
        depth = path.count("/")
        name = "  " * depth + path.rpartition("/")[2]
        rows.append([name, *(r["hot_path_us"].get(path, "-") for r in results.values())])
    bare = [r["fence_round_trip_us"].get("p50", "-") for r in results.values()]
    rows.append(["bare meeting, no rank late", *bare])
    for what in ("median", "mean"):
        rows.append(
            [f"witnesses together, {what}", *(r["witnesses_us"][what] for r in results.values())]
        )
    for what in sorted({k for r in results.values() for k in _background(r)}):
        row = [f"{_background(r).get(what, 0.0):.1f} %" for r in results.values()]
        rows.append([f"background CPU, {what}", *row])
    return report.table("", ("hot path, median us per step", *results), rows)


def _background(result: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = result["background"]["cpu_percent_of_one_core"]
    return found
