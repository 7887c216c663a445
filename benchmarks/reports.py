"""Which committed reports are older than the code under them: make reports

A report names the commit it was made on. It is true of a later one if nothing under it has changed
since: the parts of Keepstep that it exercises, and the tests or the benchmark that made it. Listed
are all reports, first those that must be made again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"

_WORKER = ("src/keepstep/worker", "src/keepstep/native", "src/keepstep/model")
_JOB = ("src/keepstep",)
_HARNESS = tuple(f"tests/support/{name}.py" for name in ("job", "plain", "torchrun", "verdict"))
# The first prefix that fits.
UNDER: dict[str, tuple[str, ...]] = {
    "chaos": (*_JOB, "tests/chaos", *_HARNESS),
    "zoo": (*_JOB, "tests/zoo", "tests/support/zoo.py", *_HARNESS),
    "mutants": (*_JOB, "tests/zoo", "tests/support/zoo.py", *_HARNESS),
    "gpu-overhead": (*_WORKER, "benchmarks/gpu.py", "benchmarks/overhead.py"),
    "gpu-net": ("src/keepstep/native", "tests/gpu"),
    "gpu": (*_JOB, "tests/gpu", *_HARNESS),
    "net": ("src/keepstep/native", "tests/network", "benchmarks/network.py"),
    "sim": ("src/keepstep/core", "src/keepstep/model", "src/keepstep/sim"),
    "suite-schedulers": (
        "src/keepstep/adapters",
        "src/keepstep/orchestrator",
        "tests/schedulers",
    ),
    "schedulers": ("src/keepstep/adapters", "src/keepstep/orchestrator"),
    "suite-transparent": (
        "src/keepstep/agent",
        "src/keepstep/worker/transparent",
        "tests/transparent",
        "tests/support/moving.py",
    ),
    "transparent": ("src/keepstep/agent", "src/keepstep/worker/transparent"),
    "": _JOB,
}


class Report(NamedTuple):
    name: str
    commits: list[str]
    changed: list[str] | None  # files, since the oldest of the commits; None: it cannot be told

    @property
    def line(self) -> str:
        made = ", ".join(self.commits) or "no commit"
        if self.changed is None:
            return f"unknown  {self.name}  ({made})"
        if not self.changed:
            return f"true     {self.name}  ({made})"
        return f"older    {self.name}  ({made}; {len(self.changed)} files have changed since)"


def _git(root: Path, *words: str) -> str | None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=root)
    return done.stdout if done.returncode == 0 else None


def under(name: str) -> tuple[str, ...]:
    return next(paths for prefix, paths in UNDER.items() if name.startswith(prefix))


def look(path: Path, root: Path) -> Report:
    data: Any = json.loads(path.read_text())
    said = str(data.get("commit") or data.get("source") or "") if isinstance(data, dict) else ""
    commits = re.findall(r"\b[0-9a-f]{7,40}\b", said)
    changed: set[str] = set()
    for commit in commits:
        found = _git(root, "diff", "--name-only", commit, "HEAD", "--", *under(path.name))
        if found is None:
            return Report(path.name, commits, None)
        changed |= set(found.split())
    if not commits or "dirty" in said:
        return Report(path.name, commits, None)
    return Report(path.name, commits, sorted(changed))


def main(results: Path = RESULTS, root: Path = RESULTS.parents[1]) -> int:
    reports = [look(path, root) for path in sorted(results.glob("*.json"))]
    for report in sorted(reports, key=lambda r: (r.changed == [], r.changed is None)):
        print(report.line)
    old = sum(report.changed != [] for report in reports)
    print(f"{len(reports) - old} of {len(reports)} reports are true of this commit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
