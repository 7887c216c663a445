"""`--suite-report FILE`: what was run, where, and how each test ended. Of suites whose long runs
are not repeated by every `make test`, such files are kept under benchmarks/results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path

import pytest


class Suite:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        self._load = os.getloadavg()
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._outcomes[name] = f"{report.outcome}: {why}" if why else report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
        )
        kinds = [outcome.partition(":")[0] for outcome in self._outcomes.values()]
        summary = {
            "date": time.strftime("%Y-%m-%d", time.gmtime(self._began)),
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
            f"{platform.release()}",
            "python": platform.python_version(),
            "load": {"before": self._load[0], "after": os.getloadavg()[0]},
            "minutes": round((time.time() - self._began) / 60, 1),
            "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "exit_status": int(exitstatus),
            "tests": {
                name: [outcome, round(self._seconds[name], 1)]
                for name, outcome in sorted(self._outcomes.items())
            },
        }
        self._path.write_text(json.dumps(summary, indent=1) + "\n")
