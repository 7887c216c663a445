"""What protection costs on a GPU: fence and publishing, for transformers of three sizes.

Ratios inside one run by alternating blocks (train/gpu_alternate.py); the *control* is one plain
series against the other. Needs one GPU.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks import report
from benchmarks.drive import Keepstep

SIZES = ("130M", "370M", "1.3B")
OPTIONS = ["--local-nodes", "2", "--nproc-per-node", "1", "--redundancy", "off", "--quiet"]


def measure(size: str, rounds: int) -> dict[str, Any]:
    arguments = ["--size", size, "--rounds", str(rounds)]
    with Keepstep(OPTIONS, "gpu_alternate.py", arguments) as job:
        job.wait(600)
        first = job.results(2)[0]
    per_step = [{k: v / first["block"] / 1e6 for k, v in r.items()} for r in first["rounds"]]
    plain = [(r["plain"] + r["control"]) / 2 for r in per_step]
    ratios = [r["protected"] / p for r, p in zip(per_step, plain)]
    control = [r["control"] / r["plain"] for r in per_step]
    return {
        "parameters": first["parameters"],
        "device": first["device"],
        "peak_bytes": first["peak_bytes"],
        "plain_step_ms": statistics.median(plain),
        "ratio": {**report.summary(ratios), "interval95": report.interval(ratios)},
        "control": {**report.summary(control), "interval95": report.interval(control)},
        "per_round_ms": per_step,
    }


def run(quick: bool, rounds: int | None = None) -> list[str]:
    if not torch.cuda.is_available():
        return ["gpu: skipped, there is no GPU on this machine"]
    provenance = report.Provenance()
    rounds = rounds or (6 if quick else 30)
    results = {}
    for size in SIZES:
        report.say(f"gpu: {size}, {rounds} rounds")
        results[size] = measure(size, rounds)
    path = report.write("gpu-overhead", quick, provenance.close(), {"sizes": results})
    rows = [
        (
            size,
            f"{r['plain_step_ms']:.1f}",
            f"{r['ratio']['p50']:.4f}",
            "{:.4f} .. {:.4f}".format(*r["ratio"]["interval95"]),
            f"{r['control']['p50']:.4f}",
            "{:.4f} .. {:.4f}".format(*r["control"]["interval95"]),
        )
        for size, r in results.items()
    ]
    names = ("parameters", "plain step ms", "protected / plain", "95 %", "plain / plain", "95 %")
    return [report.table("GPU: cost of a protected step", names, rows), f"written: {path.name}"]
