"""Statistics, tables and result files; each result carries what is needed to judge it."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
BOOTSTRAPS = 4000


# --------------------------------------------------------------------------------- statistics


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: always a value that was seen. The 99th of fewer than 100 is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def interval(
    values: Sequence[float], of: Callable[[Sequence[float]], float] = statistics.median
) -> tuple[float, float]:
    """95 % bootstrap interval; the seed is fixed so that a result file can be checked again."""
    chance = random.Random(0)
    found = sorted(of(chance.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return found[int(0.025 * BOOTSTRAPS)], found[int(0.975 * BOOTSTRAPS) - 1]


def summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "mean": statistics.fmean(values),
        "min": min(values),
        "max": max(values),
    }


# --------------------------------------------------------------------------------- provenance


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def source_state() -> str:
    """The commit, and whether the tree had changes that no commit tells."""
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        changes = subprocess.run(
            ["git", "status", "--porcelain", "src"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return "unknown"
    return f"{commit}{' with changes' if changes else ''}" if commit else "unknown"


class Provenance:
    """Begun before a measurement and closed after it, to tell how busy the machine was with
    other work: whoever reads a figure must know whether the machine was quiet."""

    def __init__(self) -> None:
        self.began = time.time()
        self._load = os.getloadavg()

    def close(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        versions = {name: metadata.version(name) for name in ("torch", "numpy", "msgspec")}
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "duration_s": round(time.time() - self.began, 1),
            "command": "python -m benchmarks " + shlex.join(sys.argv[1:]),
            "machine": {
                "cpu": cpu_model(),
                "cores": psutil.cpu_count(),
                "memory_gib": round(memory.total / 2**30, 1),
                "system": f"{platform.system()} {platform.release()}",
                "load_before": [round(x, 2) for x in self._load],
                "load_after": [round(x, 2) for x in os.getloadavg()],
            },
            "versions": {"python": platform.python_version(), **versions},
            "source": source_state(),
        }


def quiet_enough(load: Sequence[float]) -> bool:
    return load[0] < 0.3 * (psutil.cpu_count() or 1)


# --------------------------------------------------------------------------------- output


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(title: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [list(map(str, names)), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = [title]
    for row in cells:
        first = row[0].ljust(widths[0])
        lines.append("  ".join([first, *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


def write(name: str, quick: bool, provenance: dict[str, Any], result: dict[str, Any]) -> Path:
    """Quick results are for trying things out: they never overwrite a published figure."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-quick' if quick else ''}.json"
    body = {"benchmark": name, "quick": quick, **provenance, **result}
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path
