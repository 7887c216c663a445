"""How long training stands still when a rank is moved or dies.

pause = last commit before to first commit after, minus the median step, on a rank that was not
moved, by the times the training script logged itself (train/model.py). Unplanned moves include
the detection. Incidents come one after the other in a running job, each only when a spare has
parked and training has been steady for some steps; a few per job, then a fresh job.

A newcomer prepares on the same cores as the ranks (this benchmark runs on one machine), so steps
around a pause are slower too. That loss is no pause, but it is loss: it is stated beside.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil

from benchmarks import report
from benchmarks.drive import ASK_S, Commit, Keepstep, wall_offset_ns

WORLD = 2
STEADY_STEPS = 15
AFTER_STEPS = 5
# A slot whose ranks died three times is not trusted any more: fresh jobs before that.
PAIRS_PER_JOB = 3
TIMINGS = ("detect", "abort", "report", "newcomer_build", "warm_up", "copy", "rewire", "first_step")
PARTS = ("before the fault", "detect", "RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME")


class Fault:
    """One incident, from outside: what was done to whom, and when."""

    def __init__(self, job: Keepstep, kind: str, victim: int, understudies: int) -> None:
        self.job = job
        self.understudies = understudies
        self.kind = kind
        self.victim = victim
        self.witness = (victim + 1) % WORLD
        self.steady_ns = 0

    def run(self, chance: random.Random) -> dict[str, Any]:
        job = self.job
        calm = partial(job.calm, self.understudies)
        job.until(calm, "a parked spare and steady training", every_s=ASK_S)
        self.steady_ns = time.monotonic_ns()
        begin = job.step(self.witness)
        job.until(lambda: job.step(self.witness) >= begin + STEADY_STEPS, "steady steps")
        known = len(job.incidents())
        time.sleep(chance.uniform(0, self._median_step_ns() / 1e9))  # anywhere in a step
        at_ns = self._strike()

        def closed() -> dict[str, Any] | None:
            found: list[dict[str, Any]] = job.incidents()[known:]
            done = [one for one in found if one["outcome"] != "OPEN"]
            return done[0] if done else None

        incident = job.until(closed, f"the end of the {self.kind} incident", 240, ASK_S)
        end = job.step(self.witness)
        job.until(lambda: job.step(self.witness) >= end + AFTER_STEPS, "steps after it")
        return self._measure(incident, at_ns)

    def _strike(self) -> int:
        if self.kind == "unplanned":
            pid = self.job.get()["ranks"][self.victim]["pid"]
            at_ns = time.monotonic_ns()
            os.kill(pid, signal.SIGKILL)
            return at_ns
        at_ns = time.monotonic_ns()
        self.job.post("migrate", {"ranks": [self.victim], "reason": "benchmark"})
        return at_ns

    # ------------------------------------------------------------------ measuring

    def _log(self) -> list[Commit]:
        """The witness's commits since training was steady, in one process."""
        commits = self.job.commits(self.witness)
        return [c for c in commits if c.pid == commits[-1].pid and c.at_ns >= self.steady_ns]

    def _median_step_ns(self, until_ns: int | None = None) -> float:
        log = [c for c in self._log() if until_ns is None or c.at_ns <= until_ns]
        return statistics.median(b.at_ns - a.at_ns for a, b in itertools.pairwise(log))

    def _measure(self, incident: dict[str, Any], at_ns: int) -> dict[str, Any]:
        offset = wall_offset_ns()
        spans = [
            (p["phase"], start := incident["opened_at_ns"] - offset + p["start_ns"],
             start + int(p["duration_ms"] * 1e6))
            for p in incident["phases"]
        ]  # fmt: skip
        found: dict[str, Any] = {
            "kind": self.kind,
            "victim": self.victim,
            "outcome": incident["outcome"],
            "decision": incident["decision"],
            "steps_lost": incident["steps_lost"],
            "steps_recomputed": incident["steps_recomputed"],
            "attempts": incident["attempts"],
        }
        committed = [start for phase, start, _ in spans if phase == "COMMIT"]
        log = self._log()
        gap = next(
            (
                (a, b)
                for a, b in itertools.pairwise(log)
                if committed and a.at_ns <= committed[-1] < b.at_ns
            ),
            None,
        )
        if incident["outcome"] != "RESOLVED" or gap is None:
            found["reason"] = incident["reason"]
            return found
        first, last = gap[0].at_ns, gap[1].at_ns
        step = self._median_step_ns(until_ns=at_ns)
        opened = incident["opened_at_ns"] - offset
        found["median_step_ms"] = step / 1e6
        found["pause_ms"] = (last - first - step) / 1e6
        found["pause_ms_reported"] = incident["pause_ms"]
        found["request_to_resumed_ms"] = (last - at_ns) / 1e6
        found["slower_steps_ms"] = self._slower_ms(log, at_ns, gap, step)
        found["timings_ms"] = timings(incident, opened - at_ns, self.kind)
        found["parts_ms"] = parts(spans, first, last, at_ns, opened, self.kind)
        return found

    @staticmethod
    def _slower_ms(log: list[Commit], at_ns: int, gap: tuple[Commit, Commit], step: float) -> float:
        """What steps between the request and the last one seen took beyond the median."""
        steps = [(a, b) for a, b in itertools.pairwise(log) if b.at_ns > at_ns and (a, b) != gap]
        return sum(b.at_ns - a.at_ns - step for a, b in steps) / 1e6


def timings(incident: dict[str, Any], detect_ns: int, kind: str) -> dict[str, float]:
    """As measured where they happen; several run at the same time, so they do not add up."""
    told = dict(incident["timings_ms"])
    if kind == "unplanned":
        told["detect"] = detect_ns / 1e6  # the signal was sent -> the incident is open
    return {name: told[name] for name in TIMINGS if name in told}


def parts(
    spans: list[tuple[str, int, int]], first: int, last: int, at_ns: int, opened: int, kind: str
) -> dict[str, float]:
    """The gap between the two commits, cut into consecutive pieces that do add up."""
    pieces = list(spans)
    if kind == "unplanned":
        pieces += [("before the fault", first, at_ns), ("detect", max(first, at_ns), opened)]
    found = dict.fromkeys(PARTS, 0.0)
    for name, start, end in pieces:
        inside = min(end, last) - max(start, first)
        if inside > 0 and name in found:
            found[name] += inside / 1e6
    found["other"] = max(0.0, (last - first) / 1e6 - sum(found.values()))
    return found


# ------------------------------------------------------------------------------------ plans


def campaign(script: str, planned: int, unplanned: int, seed: int) -> list[dict[str, Any]]:
    _, build_s, understudies, more = SCRIPTS[script]
    chance = random.Random(seed)
    found: list[dict[str, Any]] = []
    left = {"planned": planned, "unplanned": unplanned}
    while any(left.values()):
        arguments = ["--build-s", str(build_s), *more]
        options = ["--nproc-per-node", str(WORLD), "--spares", "1", "--quiet"]
        options += ["--understudies", str(understudies)]
        with Keepstep(options, "model.py", arguments, ONE_GPU) as job:
            for kind in ["planned", "unplanned"] * PAIRS_PER_JOB:
                if not left[kind]:
                    continue
                left[kind] -= 1
                one = Fault(job, kind, chance.randrange(WORLD), understudies).run(chance)
                found.append(one)
                pause = f"{one['pause_ms']:.0f} ms" if "pause_ms" in one else one["outcome"]
                report.say(f"  {kind}, rank {one['victim']}: {pause}")
                if one["outcome"] != "RESOLVED":
                    break  # a job in an unknown state measures nothing
    return found


def condense(found: list[dict[str, Any]]) -> dict[str, Any]:
    good = [one for one in found if "pause_ms" in one]
    result: dict[str, Any] = {
        "incidents": len(found),
        "not_resolved": len(found) - len(good),
        "steps_lost": sum(one["steps_lost"] for one in found),
        "steps_recomputed": sum(one["steps_recomputed"] for one in found),
    }
    if not good:
        return result
    names = ("pause_ms", "pause_ms_reported", "median_step_ms", "slower_steps_ms")
    for name in (*names, "request_to_resumed_ms"):
        result[name] = report.summary([one[name] for one in good])
    gap = statistics.fmean(sum(one["parts_ms"].values()) for one in good)
    result["timings_ms_p50"] = {
        name: statistics.median(
            one["timings_ms"][name] for one in good if name in one["timings_ms"]
        )
        for name in TIMINGS
        if any(name in one["timings_ms"] for one in good)
    }
    result["share_of_gap"] = {
        name: statistics.fmean(one["parts_ms"].get(name, 0.0) for one in good) / gap
        for name in (*PARTS, "other")
    }
    return result


def campaigns(script: str, count: int, parallel: int) -> list[dict[str, Any]]:
    """`count` incidents of each kind, in `parallel` jobs side by side (four cores each)."""
    shares = [count // parallel + (i < count % parallel) for i in range(parallel)]
    seeds = itertools.count(int(SCRIPTS[script][1]) + 1)
    with ThreadPoolExecutor(parallel) as pool:
        jobs = [pool.submit(campaign, script, n, n, next(seeds)) for n in shares if n]
        return [one for job in jobs for one in job.result()]


# title, seconds of construction, understudies beside the spare, arguments of the script
SCRIPTS: dict[str, tuple[str, float, int, list[str]]] = {
    "quick": ("quick script", 0.0, 0, []),
    "construction": ("20 s construction", 20.0, 0, []),
    "understudies": ("20 s construction, understudies", 20.0, WORLD, []),
    "gpu": ("1 GB of state, one GPU, NCCL", 0.0, 0, ["--device", "cuda", "--layers", "20"]),
}
# Two ranks on one GPU talk as if they were on two machines; without a GPU nobody looks at these.
ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
FILES = {
    "quick": "pause",
    "construction": "pause-construction",
    "understudies": "pause-understudies",
    "gpu": "pause-gpu",
}


def run(
    quick: bool, repeats: int | None = None, script: str = "all", parallel: int = 1
) -> list[str]:
    texts: list[str] = []
    everywhere = [name for name in SCRIPTS if name != "gpu"]
    for name in everywhere if script == "all" else [script]:
        texts += _run_script(name, quick, repeats or (3 if quick else 30), parallel)
    return texts


def _run_script(name: str, quick: bool, count: int, parallel: int) -> list[str]:
    provenance = report.Provenance()
    title, _, understudies, more = SCRIPTS[name]
    layers = int(more[more.index("--layers") + 1]) if "--layers" in more else 6
    report.say(f"pause: {title}, {count} of each kind, {parallel} job(s) at a time")
    found = campaigns(name, count, parallel)
    results = {
        f"{kind}, {title}": condense([x for x in found if x["kind"] == kind])
        for kind in ("planned", "unplanned")
    }
    note = (
        "p99 is by nearest rank: of fewer than 100 incidents it is the largest. A spare parks "
        "at the script's first question about its rank, which in this script comes before "
        "construction: an unplanned pause therefore contains the construction, a planned one not. "
        "Understudies are built as presumed ranks ahead of time, and take that live without it."
    )
    body = {
        "ranks": WORLD,
        "parameters": layers * (2048 * 2048 + 2048),
        "optimizer": "AdamW, fused",
        "understudies": understudies,
        "cores": psutil.cpu_count(),
        "jobs_at_a_time": parallel,
        "note": note,
        "repetitions": count,
        "summary": results,
        "incidents": found,
    }
    path = report.write(FILES[name], quick, provenance.close(), body)
    return [pause_table(results), timing_table(results), share_table(results),
            f"written: {path.name}"]  # fmt: skip


def pause_table(results: dict[str, Any]) -> str:
    rows: list[list[Any]] = []
    for name, one in results.items():
        if "pause_ms" not in one:
            rows.append([name, one["incidents"], one["not_resolved"], *["-"] * 7])
            continue
        rows.append(
            [
                name,
                one["incidents"],
                one["not_resolved"],
                one["pause_ms"]["p50"],
                one["pause_ms"]["p99"],
                one["pause_ms_reported"]["p50"],
                one["median_step_ms"]["p50"],
                one["slower_steps_ms"]["p50"],
                one["steps_lost"],
                one["steps_recomputed"],
            ]
        )
    names = ("pause, ms", "n", "failed", "p50", "p99", "p50 as reported", "step",
             "slower steps around", "lost", "recomputed")  # fmt: skip
    return report.table("", names, rows)


def timing_table(results: dict[str, Any]) -> str:
    rows = [
        [name, *(one.get("timings_ms_p50", {}).get(t, "-") for t in TIMINGS)]
        for name, one in results.items()
    ]
    return report.table("", ("what took how long, p50 ms (they overlap)", *TIMINGS), rows)


def share_table(results: dict[str, Any]) -> str:
    names = (*PARTS, "other")
    rows = [
        [name, *(f"{100 * one['share_of_gap'][p]:.0f} %" for p in names)]
        for name, one in results.items()
        if "share_of_gap" in one
    ]
    return report.table("", ("share of the gap between the commits", *names), rows)
